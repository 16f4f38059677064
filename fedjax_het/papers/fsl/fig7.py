"""FSL's Figure 7: FSL, its non-incremental form and data sharing, by labels and clients a round.

python experiments/fsl/fig7.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig7.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig7.py --preset paper   EMNIST and CIFAR-10: a GPU's work

gamma is 1. On CIFAR-10 the server has 200 images, fewer than elsewhere in the paper.
"""

from dataclasses import replace

from fedjax_het.analysis import plot_learning_curves
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.papers.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1
from fedjax_het.papers.table import DatasetOverride, make_figure_writer, make_table_program

PANELS = ("dataset", "participation", "classes")
GROUPING = (*PANELS, "algorithm")


def make_rows(*cohort_sizes: int, extra_settings: str = "") -> tuple[str, ...]:
    methods = ("data_sharing", "fsl", "fsl_p")
    return tuple(f"{method}(S={S}{extra_settings})" for S in cohort_sizes for method in methods)


# The numbers of clients a round are chosen here: the figure's are not known.
FIG7 = replace(
    SCENARIO1,
    name="fsl-fig7",
    item="fig7",
    title="FSL, Figure 7: FSL, FSL-p and data sharing.",
    presets={
        "quick": replace(QUICK, rows=make_rows(2, 4)),
        "cpu": replace(CPU, rows=make_rows(4)),
        "paper": replace(
            PAPER,
            dataset_overrides={
                "emnist_45": DatasetOverride(classes=(1, 5, 45), rows=make_rows(5, 10)),
                "cifar10": DatasetOverride(
                    classes=(2, 5, 10), rows=make_rows(2, 4, extra_settings=", n0=200")
                ),
            },
        ),
    },
)


def plot_curves(results, curves):
    return plot_learning_curves(results, curves, by=GROUPING, panels=PANELS, window=WINDOW)


main = make_table_program(
    FIG7, make_figure_writer("fig7", plot_curves, by=GROUPING, metric="window_accuracy")
)
