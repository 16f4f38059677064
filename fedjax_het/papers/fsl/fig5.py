"""FSL's Figure 5: accuracy over local learning rate and labels per client, many clients.

python experiments/fsl/fig5.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig5.py --preset cpu     CIFAR-10, 1,000 clients of two labels: hours
python experiments/fsl/fig5.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FSL whose server has the data of a few clients, FSL whose server has images from elsewhere (drawn
glyphs, STL-10), FedDyn and SCAFFOLD. gamma is 1, FedDyn's alpha .01. Figures 10 and 11 are the
learning curves of the same runs.
"""

from dataclasses import replace
from itertools import product

from fedjax_het.analysis import plot_heat_map
from fedjax_het.papers.fsl.scenarios import (
    COMPARED_METHODS,
    CPU_SCENARIO2,
    LEARNING_RATES,
    PAPER,
    QUICK_SCENARIO2,
    SCENARIO2,
)
from fedjax_het.papers.table import DatasetOverride, make_figure_writer, make_table_program

GROUPING = ("dataset", "classes", "hp.local_lr", "algorithm", "server_data")


def make_rows(methods: tuple[str, ...], rates: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{method}(local_lr={rate})" for method, rate in product(methods, rates))


# The learning rates, apart from .01 and .05, and the numbers of labels are chosen here: the
# figure's are not known.
FIG5 = replace(
    SCENARIO2,
    name="fsl-fig5",
    item="fig5",
    title="FSL, Figure 5: test accuracy over local learning rate and labels per client.",
    presets={
        "quick": replace(QUICK_SCENARIO2, rows=make_rows(COMPARED_METHODS, (0.02, 0.05, 0.1))),
        "cpu": replace(
            CPU_SCENARIO2,
            rows=make_rows(("fsl", "feddyn", "scaffold", "fedavg"), (0.02, 0.05, 0.1)),
            seeds=(0,),
        ),
        "paper": replace(
            PAPER,
            rows=make_rows(COMPARED_METHODS, LEARNING_RATES),
            dataset_overrides={
                "emnist_45": DatasetOverride(classes=(1, 2, 5, 10)),
                "cifar10": DatasetOverride(classes=(1, 2, 5, 10)),
            },
        ),
    },
)


def plot_accuracy_grid(results, curves):
    panels = ["dataset", "algorithm", "server_data"]
    by = [name for name in panels if name in results]
    return plot_heat_map(results, x="classes", y="hp.local_lr", by=by, metric="window_accuracy")


main = make_table_program(
    FIG5, make_figure_writer("fig5", plot_accuracy_grid, by=GROUPING, metric="window_accuracy")
)
