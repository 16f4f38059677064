"""DynaFed's Table 2: a hundred classes.

python experiments/dynafed/table2.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/table2.py --preset paper   CIFAR-100: a GPU's work

The digits have ten classes: their preset shows that the table works, at one more alpha than that of
Table 1. DynaFed has 1,500 synthetic samples of CIFAR-100, as in its public code; the paper says 150
and does not except this data set.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main

SHARED = run_path(str(Path(__file__).with_name("settings.py")))
ALPHAS = (0.01, 0.04, 0.08, 0.16)

TABLE2 = SHARED["EXPERIMENT"](
    name="dynafed-table2",
    folder=SHARED["FOLDER"],
    item="table2",
    title="DynaFed, Table 2: test accuracy of the global model, a hundred classes.",
    note=SHARED["NOTE"],
    presets={
        "quick": replace(SHARED["QUICK"], alphas=ALPHAS),
        "paper": replace(SHARED["PAPER"], datasets=("cifar100",), alphas=ALPHAS),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE2))
