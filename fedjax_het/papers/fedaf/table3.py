"""FedAF's Table 3: how many condensed images per class (IPC).

python experiments/fedaf/table3.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table3.py --preset paper   CIFAR-10: a GPU's work

Classes that a client has fewer images of than the IPC are not condensed: a larger IPC drops more.
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.settings import EXPERIMENT, PRESETS, add_control_rows
from fedjax_het.papers.table import make_table_program

QUICK, PAPER = PRESETS["quick"], PRESETS["paper"]
IPCS = ("fedaf(ipc=2)", "fedaf(ipc=5)", "fedaf(ipc=10)", "fedaf(ipc=20)")

TABLE3 = EXPERIMENT(
    name="fedaf-table3",
    results_folder="fedaf",
    item="table3",
    title="FedAF, Table 3: best test accuracy by condensed images per class.",
    real_data_rows={},  # of the default number of images alone
    presets={
        "quick": add_control_rows(replace(QUICK, rows=IPCS), "table3"),
        "paper": add_control_rows(replace(PAPER, datasets=("cifar10",)), "table3"),
    },
)

main = make_table_program(TABLE3)
