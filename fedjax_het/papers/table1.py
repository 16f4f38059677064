"""DynaFed's Table 1: methods against heterogeneity, on three data sets of ten classes.

    python experiments/table1.py                  the embedded digits, minutes on 2 cores
    python experiments/table1.py --methods all    every method that trains one global model
    python experiments/table1.py --preset cpu     Fashion-MNIST, width 32: FedAvg 10 minutes a run,
                                                  DynaFed two hours
    python experiments/table1.py --preset paper   80 clients, 200 rounds, ConvNet 128: a GPU's work

Rows are the paper's nine methods; those that it does not have, under the same protocol, come where
they are asked for: `--methods all`, or by name. `--help` lists the filters.
"""

from dataclasses import replace

from fedjax_het.algorithms import METHODS
from fedjax_het.papers.dynafed.settings import CPU, EXPERIMENT, FOLDER, NOTE, PAPER, QUICK, ROWS
from fedjax_het.papers.fedaf.settings import QUICK as QUICK_OF_FEDAF
from fedjax_het.papers.table import make_table_program

QUICK_NOTE = (
    "feddm and fedaf have the settings of FedAF's quick tables: a client condenses a class of "
    "which it has ten images, in 60 steps of the papers' 1,000. That is for clients that are far "
    "apart: at alpha 0.16 neither is above fedavg."
)
# Of methods with one global model that is tested on all test images.
GLOBAL_METHODS = tuple(
    name
    for name, entry in METHODS.items()
    if entry.has_global_model and entry.evaluated_models[0] == "global"
)
EXTRA_METHODS = tuple(name for name in GLOBAL_METHODS if name not in ROWS)

TABLE1 = EXPERIMENT(
    name=FOLDER,
    item="table1",
    title="DynaFed, Table 1: test accuracy of the global model.",
    note=NOTE,
    presets={
        "quick": replace(
            QUICK,
            optional_rows=EXTRA_METHODS,
            note=QUICK_NOTE,
            note_methods=("feddm", "fedaf"),
            method_settings={
                **QUICK.method_settings,
                **QUICK_OF_FEDAF["method_settings"],
            },
        ),
        "cpu": replace(CPU, datasets=("fashion_mnist", "cifar10")),
        "paper": replace(
            PAPER,
            datasets=("fashion_mnist", "cifar10", "cinic10"),
            optional_rows=EXTRA_METHODS,
        ),
    },
)

main = make_table_program(TABLE1)
