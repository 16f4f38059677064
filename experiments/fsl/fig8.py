"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form.

python experiments/fsl/fig8.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig8.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig8.py --preset paper   EMNIST and CIFAR-10: a GPU's work

As in the paper, data sharing is shown at gamma = 0.
"""

from dataclasses import replace
from itertools import product

from experiments.fsl.scenarios import CPU, PAPER, QUICK, SCENARIO1, draw_against_gamma
from fedjax_het.report.paper_table import Own, program, write_drawing

BY = ("dataset", "classes", "algorithm", "hp.gamma")
LARGE = (0.5, 1.0, 1.5, 2.0)


def rows(*gammas: float) -> tuple[str, ...]:
    both = [f"{method}(gamma={gamma})" for method, gamma in product(("fsl", "fsl_p"), gammas)]
    return ("data_sharing", *both)


FIG8 = replace(
    SCENARIO1,
    name="fsl-fig8",
    item="fig8",
    title="FSL, Figure 8: FSL, FSL-p and data sharing against gamma.",
    presets={
        "quick": replace(QUICK, classes=(2,), rows=rows(0.35, *LARGE)),
        "cpu": replace(CPU, rows=rows(0.5, 1.0, 1.5)),
        "paper": replace(
            PAPER,
            of_dataset={
                "emnist_45": Own(classes=(5,), rows=rows(0.09375, *LARGE)),
                "cifar10": Own(classes=(2,), rows=rows(0.1, *LARGE)),
            },
        ),
    },
)


def draw(results, curves):
    return draw_against_gamma(results, "algorithm")


main = program(FIG8, write_drawing("fig8", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
