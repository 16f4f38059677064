"""DynaFed's Figure 2: the learning curves of Tables 1 and 2 at the two smallest alphas.

python experiments/dynafed/fig2.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig2.py --preset paper   four data sets: a GPU's work

Makes the runs of these tables that are missing, in their folder; `--show` draws those that are
there.
"""

from dataclasses import replace

import pandas as pd

from fedjax_het.papers.dynafed.table2 import TABLE2
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_curves_writer, make_table_program

DATASETS = ("fashion_mnist", "cifar10", "cinic10", "cifar100")
ALPHAS = (0.01, 0.04)
FIG2 = replace(
    TABLE2,
    name="dynafed-fig2",
    title="DynaFed, Figure 2: learning curves.",
    presets={
        "quick": replace(TABLE2.presets["quick"], alphas=ALPHAS),
        "paper": replace(TABLE2.presets["paper"], datasets=DATASETS, alphas=ALPHAS),
    },
)


def write_outputs(table_run: TableRun) -> list[str]:
    reported = pd.concat([load_reported_values("dynafed", item) for item in ("table1", "table2")])
    return make_curves_writer("fig2")(table_run._replace(reported=reported))


main = make_table_program(FIG2, write_outputs)
