"""FedAF's Table 5: how much of the global model the re-sampled model keeps (gamma), in 10 rounds.

python experiments/fedaf/table5.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table5.py --preset cpu     Fashion-MNIST at .02, width 16, 4 rounds: hours
python experiments/fedaf/table5.py --preset paper   CIFAR-10: a GPU's work
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.settings import EXPERIMENT, PRESETS, add_control_rows
from fedjax_het.papers.table import make_table_program

QUICK, CPU, PAPER = (PRESETS[name] for name in ("quick", "cpu", "paper"))

TABLE5 = EXPERIMENT(
    name="fedaf-table5",
    results_folder="fedaf",
    item="table5",
    title="FedAF, Table 5: best test accuracy by the re-sampling coefficient gamma.",
    settings={"rounds": 10},
    note="The paper gives no deviations here and does not say how many seeds its values are of.",
    presets={
        "quick": add_control_rows(replace(QUICK, alphas=(0.1,)), "table5"),
        "cpu": add_control_rows(replace(CPU, settings={**CPU.settings, "rounds": 4}), "table5"),
        "paper": add_control_rows(replace(PAPER, datasets=("cifar10",), alphas=(0.1,)), "table5"),
    },
)

main = make_table_program(TABLE5)
