"""FSL's Figure 1: accuracy by labels per client, of FL, data sharing and FSL at several gamma.

python experiments/fsl/fig1.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig1.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig1.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FSL and data sharing start from a model that the server has pretrained, FL from a random one (in
preset cpu all do). The smallest gamma is N n_0 / n, at which FSL has the objective of data sharing.
Figure 6 is the same without pretraining.
"""

from dataclasses import replace

from fedjax_het.analysis import plot_learning_curves
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.papers.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, with_rows
from fedjax_het.papers.table import make_figure_writer, make_table_program

GROUPING = ("dataset", "classes", "algorithm", "hp.gamma")


def make_rows(smallest: float) -> tuple[str, ...]:
    gammas = (smallest, 0.5, 1.0, 1.5, 2.0)
    return ("fedavg", "data_sharing", *(f"fsl(gamma={gamma})" for gamma in gammas))


FIG1 = replace(
    SCENARIO1,
    title="FSL, Figure 1: test accuracy by labels per client.",
    presets={
        "quick": with_rows(QUICK, make_rows(0.35)),
        "cpu": CPU,
        "paper": with_rows(PAPER, {"emnist_45": make_rows(0.09375), "cifar10": make_rows(0.1)}),
    },
)


def plot_curves(results, curves):
    panels = ["dataset", "classes"]
    by = [name for name in GROUPING if name in results]
    return plot_learning_curves(results, curves, by=by, panels=panels, window=WINDOW)


main = make_table_program(
    FIG1, make_figure_writer("fig1", plot_curves, by=GROUPING, metric="window_accuracy")
)
