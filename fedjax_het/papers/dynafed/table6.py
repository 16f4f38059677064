"""DynaFed's Table 6: a fifth of the clients in each round.

python experiments/dynafed/table6.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/table6.py --preset paper   CIFAR-10, 16 of 80 clients: a GPU's work

Its learning curves are the paper's Figure 7 (`fig7.py`).
"""

from dataclasses import replace

from fedjax_het.papers.dynafed.settings import EXPERIMENT, NOTE, PAPER, QUICK, SETTINGS
from fedjax_het.papers.table import make_table_program

TABLE6 = EXPERIMENT(
    name="dynafed-table6",
    item="table6",
    title="DynaFed, Table 6: test accuracy of the global model, a fifth of the clients a round.",
    note=NOTE,
    settings={**SETTINGS, "participation": 0.2},
    presets={"quick": replace(QUICK, alphas=(0.01, 0.04), seeds=(0,)), "paper": PAPER},
)

main = make_table_program(TABLE6)
