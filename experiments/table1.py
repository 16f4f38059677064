"""DynaFed's Table 1: methods against heterogeneity, on three data sets of ten classes.

    python experiments/table1.py                  the embedded digits, minutes on 2 cores
    python experiments/table1.py --preset paper   80 clients, 200 rounds, ConvNet 128: a GPU's work

Every method that trains one global model is a row: the paper's nine, then those that it does not
have, under the same protocol. `--help` lists the filters.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main

SHARED = run_path(str(Path(__file__).with_name("dynafed") / "settings.py"))
QUICK, PAPER = SHARED["QUICK"], SHARED["PAPER"]
MORE_ROWS = (
    *("feddyn", "moon", "fedbn", "fednova", "fedavgm", "fedadam", "fedyogi", "feddc", "naivemix"),
    *("fsl", "fsl_p", "data_sharing", "feddm", "fedaf"),
)
ROWS = (*SHARED["ROWS"], *MORE_ROWS)

TABLE1 = SHARED["EXPERIMENT"](
    name=SHARED["FOLDER"],
    item="table1",
    title="DynaFed, Table 1: test accuracy of the global model.",
    note=SHARED["NOTE"],
    presets={
        "quick": replace(
            QUICK,
            rows=ROWS,
            method_settings={
                **QUICK.method_settings,
                **{
                    method: {"options": {"ipc": 5, "steps": 10, "server_epochs": 20}}
                    for method in ("feddm", "fedaf")
                },
            },
        ),
        "paper": replace(PAPER, datasets=("fashion_mnist", "cifar10", "cinic10"), rows=ROWS),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE1))
