"""FedAF's Table 4: without its condensation across clients, without its soft labels, without both.

python experiments/fedaf/table4.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table4.py --preset cpu     Fashion-MNIST at .02, width 16: hours
python experiments/fedaf/table4.py --preset paper   CIFAR-10: a GPU's work

`fedaf(lambda_loc=0)` is the paper's "w/o CDC", `fedaf(lambda_glob=0)` its "w/o LGKM".
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.settings import EXPERIMENT, PRESETS, add_control_rows
from fedjax_het.papers.table import make_table_program

QUICK, CPU, PAPER = (PRESETS[name] for name in ("quick", "cpu", "paper"))

TABLE4 = EXPERIMENT(
    name="fedaf-table4",
    results_folder="fedaf",
    item="table4",
    title="FedAF, Table 4: best test accuracy without parts of the method.",
    note="fedaf(lambda_loc=0) is without the condensation loss across clients (CDC), "
    "fedaf(lambda_glob=0) without the matching of soft labels (LGKM).",
    presets={
        "quick": add_control_rows(QUICK, "table4"),
        "cpu": add_control_rows(CPU, "table4"),
        "paper": add_control_rows(replace(PAPER, datasets=("cifar10",)), "table4"),
    },
)

main = make_table_program(TABLE4)
