"""Distances of FedAF's collaboration term, and uploads of 8 bits, in accuracy.

python experiments/fedaf/ablations.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/ablations.py --preset short   the digits, MLP, five seeds; minutes

The paper has no values for this table. It calls the term of Eq. 10 "a distance metric", takes the
sliced Wasserstein distance, and counts images as 8 bits without rounding them. The control
`fedaf(lambda_loc=0)` has no such term. Table 1's weight of the term, 0.001, has no effect. Each
distance has the best of the weights 0.1, 10 and 1000 with seed 7.
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.settings import CONTROLS, EXPERIMENT, MLP, PRESETS
from fedjax_het.papers.table import make_table_program

WEIGHTS = {"swd": 10, "mmd": 0.1, "cosine": 0.1, "l2": 0.1}
ROWS = (
    "fedaf",
    "fedaf(lambda_loc=0)",
    *(f"fedaf(distance={name!r}, lambda_loc={weight})" for name, weight in WEIGHTS.items()),
    *(f"fedaf(upload_bits={bits})" for bits in (8, 4, 2)),
    *CONTROLS["fedaf"],
    "feddm",
    "feddm(upload_bits=8)",
)
ABLATIONS = EXPERIMENT(
    name="fedaf-ablations",
    results_folder="fedaf",
    item="ablations",
    title="FedAF, distances of the collaboration term and bits of uploads.",
    has_reported_values=False,
    presets={
        "quick": replace(PRESETS["quick"], alphas=(0.1,), rows=ROWS),
        "short": replace(MLP, rows=ROWS),
    },
)
main = make_table_program(ABLATIONS)
