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

from experiments.dynafed.settings import CPU, EXPERIMENT, FOLDER, NOTE, PAPER, QUICK, ROWS
from experiments.fedaf.table1 import QUICK as QUICK_OF_FEDAF
from fedjax_het.algorithms import METHODS
from fedjax_het.report.paper_table import program

NOTE_OF_QUICK = (
    "feddm and fedaf have the settings of FedAF's quick tables: a client condenses a class of "
    "which it has ten images, in 60 steps of the papers' 1,000. That is for clients that are far "
    "apart: at alpha 0.16 neither is above fedavg."
)
# Of methods with one global model that is tested on all test images.
GLOBAL = tuple(
    name for name, entry in METHODS.items() if entry.global_model and entry.scored[0] == "global"
)
MORE = tuple(name for name in GLOBAL if name not in ROWS)

TABLE1 = EXPERIMENT(
    name=FOLDER,
    item="table1",
    title="DynaFed, Table 1: test accuracy of the global model.",
    note=NOTE,
    presets={
        "quick": replace(
            QUICK,
            more_rows=MORE,
            note=NOTE_OF_QUICK,
            note_about=("feddm", "fedaf"),
            method_settings={
                **QUICK.method_settings,
                **QUICK_OF_FEDAF["method_settings"],
            },
        ),
        "cpu": replace(CPU, datasets=("fashion_mnist", "cifar10")),
        "paper": replace(
            PAPER,
            datasets=("fashion_mnist", "cifar10", "cinic10"),
            more_rows=MORE,
        ),
    },
)

main = program(TABLE1)

if __name__ == "__main__":
    raise SystemExit(main())
