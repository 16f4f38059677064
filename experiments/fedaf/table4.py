"""FedAF's Table 4: without its condensation across clients, without its soft labels, without both.

python experiments/fedaf/table4.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table4.py --preset paper   CIFAR-10: a GPU's work

`fedaf(lambda_loc=0)` is the paper's "w/o CDC", `fedaf(lambda_glob=0)` its "w/o LGKM".
"""

from pathlib import Path
from runpy import run_path

from fedjax_het.experiment import Experiment, Preset, main

TABLE1 = run_path(str(Path(__file__).with_name("table1.py")))

TABLE4 = Experiment(
    name="fedaf-table4",
    folder="fedaf",
    paper="fedaf",
    item="table4",
    title="FedAF, Table 4: best test accuracy without parts of the method.",
    note="fedaf(lambda_loc=0) is without the condensation loss across clients (CDC), "
    "fedaf(lambda_glob=0) without the matching of soft labels (LGKM).",
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("convnet",),
            alphas=TABLE1["ALPHAS"],
            seeds=(0, 1),
            **TABLE1["QUICK"],
        ),
        "paper": Preset(
            datasets=("cifar10",),
            models=("convnet",),
            alphas=TABLE1["ALPHAS"],
            seeds=(0, 1, 2),
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE4))
