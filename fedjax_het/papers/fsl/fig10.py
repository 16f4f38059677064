"""FSL's Figure 10: the learning curves of Figure 5 on CIFAR-10, from the same runs.

python experiments/fsl/fig10.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig10.py --preset cpu     CIFAR-10, fewer rounds: hours
python experiments/fsl/fig10.py --preset paper   CIFAR-10: a GPU's work
"""

from dataclasses import replace

from fedjax_het.analysis import plot_learning_curves
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.papers.fsl.fig5 import FIG5, GROUPING
from fedjax_het.papers.table import TableDeclaration, make_figure_writer, make_table_program

PANELS = ("hp.local_lr", "classes")


def make_curves_experiment(dataset: str, item: str) -> TableDeclaration:
    """Of Figure 5's runs those of one data set; the presets on other data stay as they are."""
    paper = replace(FIG5.presets["paper"], datasets=(dataset,))
    return replace(
        FIG5,
        name=f"fsl-{item}",
        item=item,
        title=f"FSL, Figure {item.removeprefix('fig')}: learning curves of Figure 5.",
        presets={**FIG5.presets, "paper": paper},
    )


def plot_curves(results, curves):
    by = [name for name in (*PANELS, "algorithm", "server_data") if name in results]
    return plot_learning_curves(results, curves, by=by, panels=PANELS, window=WINDOW)


FIG10 = make_curves_experiment("cifar10", "fig10")

main = make_table_program(
    FIG10, make_figure_writer("fig10", plot_curves, by=GROUPING, metric="window_accuracy")
)
