"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form.

python experiments/fsl/fig8.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig8.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig8.py --preset paper   EMNIST and CIFAR-10: a GPU's work

As in the paper, data sharing is shown at gamma = 0.
"""

from dataclasses import replace
from itertools import product

from fedjax_het.papers.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, plot_metrics_vs_gamma
from fedjax_het.papers.table import DatasetOverride, make_figure_writer, make_table_program

GROUPING = ("dataset", "classes", "algorithm", "hp.gamma")
LARGE_GAMMAS = (0.5, 1.0, 1.5, 2.0)


def make_rows(*gammas: float) -> tuple[str, ...]:
    method_rows = [
        f"{method}(gamma={gamma})" for method, gamma in product(("fsl", "fsl_p"), gammas)
    ]
    return ("data_sharing", *method_rows)


FIG8 = replace(
    SCENARIO1,
    name="fsl-fig8",
    item="fig8",
    title="FSL, Figure 8: FSL, FSL-p and data sharing against gamma.",
    presets={
        "quick": replace(QUICK, classes=(2,), rows=make_rows(0.35, *LARGE_GAMMAS)),
        "cpu": replace(CPU, rows=make_rows(0.5, 1.0, 1.5)),
        "paper": replace(
            PAPER,
            dataset_overrides={
                "emnist_45": DatasetOverride(classes=(5,), rows=make_rows(0.09375, *LARGE_GAMMAS)),
                "cifar10": DatasetOverride(classes=(2,), rows=make_rows(0.1, *LARGE_GAMMAS)),
            },
        ),
    },
)


def plot_gamma_curves(results, curves):
    return plot_metrics_vs_gamma(results, "algorithm")


main = make_table_program(
    FIG8, make_figure_writer("fig8", plot_gamma_curves, by=GROUPING, metric="window_accuracy")
)
