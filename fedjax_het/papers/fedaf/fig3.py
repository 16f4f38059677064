"""FedAF's Figure 3: the learning curves of Table 1, from the same runs.

python experiments/fedaf/fig3.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/fig3.py --preset paper   a GPU's work

Makes the runs of Table 1 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.table1 import TABLE1
from fedjax_het.papers.table import make_curves_writer, make_table_program

PAPER = replace(TABLE1.presets["paper"], datasets=("cifar10", "cifar100", "fashion_mnist"))
FIG3 = replace(
    TABLE1,
    title="FedAF, Figure 3: learning curves.",
    presets={**TABLE1.presets, "paper": PAPER},
)

main = make_table_program(FIG3, make_curves_writer("fig3"))
