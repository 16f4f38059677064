"""FSL's Figure 7: FSL, its non-incremental form and data sharing, by labels and clients a round.

python experiments/fsl/fig7.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig7.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig7.py --preset paper   EMNIST and CIFAR-10: a GPU's work

gamma is 1. On CIFAR-10 the server has 200 images, fewer than elsewhere in the paper.
"""

from dataclasses import replace

from experiments.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report import plot_learning_curves
from fedjax_het.report.paper_table import Own, program, write_drawing

PANELS = ("dataset", "participation", "classes")
BY = (*PANELS, "algorithm")


def rows(*sampled: int, more: str = "") -> tuple[str, ...]:
    methods = ("data_sharing", "fsl", "fsl_p")
    return tuple(f"{method}(S={S}{more})" for S in sampled for method in methods)


# The numbers of clients a round are chosen here: the figure's are not known.
FIG7 = replace(
    SCENARIO1,
    name="fsl-fig7",
    item="fig7",
    title="FSL, Figure 7: FSL, FSL-p and data sharing.",
    presets={
        "quick": replace(QUICK, rows=rows(2, 4)),
        "cpu": replace(CPU, rows=rows(4)),
        "paper": replace(
            PAPER,
            of_dataset={
                "emnist_45": Own(classes=(1, 5, 45), rows=rows(5, 10)),
                "cifar10": Own(classes=(2, 5, 10), rows=rows(2, 4, more=", n0=200")),
            },
        ),
    },
)


def draw(results, curves):
    return plot_learning_curves(results, curves, by=BY, panels=PANELS, window=WINDOW)


main = program(FIG7, write_drawing("fig7", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
