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

from experiments.fsl.scenarios import CPU2, PAPER, QUICK2, RATES, RIVALS, SCENARIO2
from fedjax_het.report import plot_heat_map
from fedjax_het.report.paper_table import Own, program, write_drawing

BY = ("dataset", "classes", "hp.local_lr", "algorithm", "server_data")


def rows(methods: tuple[str, ...], rates: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{method}(local_lr={rate})" for method, rate in product(methods, rates))


# The learning rates, apart from .01 and .05, and the numbers of labels are chosen here: the
# figure's are not known.
FIG5 = replace(
    SCENARIO2,
    name="fsl-fig5",
    item="fig5",
    title="FSL, Figure 5: test accuracy over local learning rate and labels per client.",
    presets={
        "quick": replace(QUICK2, rows=rows(RIVALS, (0.02, 0.05, 0.1))),
        "cpu": replace(
            CPU2,
            rows=rows(("fsl", "feddyn", "scaffold", "fedavg"), (0.02, 0.05, 0.1)),
            seeds=(0,),
        ),
        "paper": replace(
            PAPER,
            rows=rows(RIVALS, RATES),
            of_dataset={
                "emnist_45": Own(classes=(1, 2, 5, 10)),
                "cifar10": Own(classes=(1, 2, 5, 10)),
            },
        ),
    },
)


def draw(results, curves):
    panels = ["dataset", "algorithm", "server_data"]
    by = [name for name in panels if name in results]
    return plot_heat_map(results, x="classes", y="hp.local_lr", by=by, measure="window_accuracy")


main = program(FIG5, write_drawing("fig5", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
