"""FSL's Figure 11: the learning curves of Figure 5 on EMNIST, from the same runs.

python experiments/fsl/fig11.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig11.py --preset paper   EMNIST: a GPU's work
"""

from fedjax_het.papers.fsl.fig5 import GROUPING
from fedjax_het.papers.fsl.fig10 import make_curves_experiment, plot_curves
from fedjax_het.papers.table import make_figure_writer, make_table_program

FIG11 = make_curves_experiment("emnist_45", "fig11")

main = make_table_program(
    FIG11, make_figure_writer("fig11", plot_curves, by=GROUPING, metric="window_accuracy")
)
