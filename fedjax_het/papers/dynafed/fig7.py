"""DynaFed's Figure 7: the learning curves of Table 6, from the same runs.

python experiments/dynafed/fig7.py                  the embedded digits, a minute on 2 cores
python experiments/dynafed/fig7.py --preset paper   CIFAR-10: a GPU's work

Makes the runs of Table 6 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace

from fedjax_het.papers.dynafed.table6 import TABLE6
from fedjax_het.papers.table import make_curves_writer, make_table_program

FIG7 = replace(TABLE6, title="DynaFed, Figure 7: learning curves, a fifth of the clients a round.")

main = make_table_program(FIG7, make_curves_writer("fig7"))
