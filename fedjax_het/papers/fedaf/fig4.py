"""FedAF's Figure 4: the learning curves of Table 2, from the same runs.

python experiments/fedaf/fig4.py                  six domains of the embedded digits, minutes
python experiments/fedaf/fig4.py --preset paper   DomainNet: a GPU's work

Makes the runs of Table 2 that are missing; `--show` draws those that are there.
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.table2 import TABLE2
from fedjax_het.papers.table import make_curves_writer, make_table_program

FIG4 = replace(TABLE2, title="FedAF, Figure 4: learning curves by domain.")

main = make_table_program(FIG4, make_curves_writer("fig4"))
