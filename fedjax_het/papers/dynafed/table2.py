"""DynaFed's Table 2: a hundred classes.

python experiments/dynafed/table2.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/table2.py --preset paper   CIFAR-100: a GPU's work

The digits have ten classes: their preset shows that the table works, at one more alpha than that of
Table 1. DynaFed has 1,500 synthetic samples of CIFAR-100, as in its public code; the paper says 150
and does not except this data set.
"""

from dataclasses import replace

from fedjax_het.papers.dynafed.settings import EXPERIMENT, FOLDER, NOTE, PAPER, QUICK
from fedjax_het.papers.table import make_table_program

ALPHAS = (0.01, 0.04, 0.08, 0.16)

TABLE2 = EXPERIMENT(
    name="dynafed-table2",
    results_folder=FOLDER,
    item="table2",
    title="DynaFed, Table 2: test accuracy of the global model, a hundred classes.",
    note=NOTE,
    presets={
        "quick": replace(QUICK, alphas=ALPHAS),
        "paper": replace(PAPER, datasets=("cifar100",), alphas=ALPHAS),
    },
)

main = make_table_program(TABLE2)
