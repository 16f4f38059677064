"""FSL's Figure 8: accuracy and rise time against gamma, of FSL and its non-incremental form.

python experiments/fsl/fig8.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig8.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig8.py --preset paper   EMNIST and CIFAR-10: a GPU's work

As in the paper, data sharing is shown at gamma = 0.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import Own, main, write_drawing

SHARED = run_path(str(Path(__file__).with_name("scenarios.py")))
BY = ("dataset", "classes", "algorithm", "hp.gamma")
LARGE = (0.5, 1.0, 1.5, 2.0)


def rows(*gammas: float) -> tuple[str, ...]:
    both = [f"{method}(gamma={gamma})" for method, gamma in product(("fsl", "fsl_p"), gammas)]
    return ("data_sharing", *both)


FIG8 = replace(
    SHARED["SCENARIO1"],
    name="fsl-fig8",
    item="fig8",
    title="FSL, Figure 8: FSL, FSL-p and data sharing against gamma.",
    presets={
        "quick": replace(SHARED["QUICK"], classes=(2,), rows=rows(0.35, *LARGE)),
        "cpu": replace(SHARED["CPU"], rows=rows(0.5, 1.0, 1.5)),
        "paper": replace(
            SHARED["PAPER"],
            of_dataset={
                "emnist_45": Own(classes=(5,), rows=rows(0.09375, *LARGE)),
                "cifar10": Own(classes=(2,), rows=rows(0.1, *LARGE)),
            },
        ),
    },
)


def draw(results, curves):
    return SHARED["draw_against_gamma"](results, "algorithm")


if __name__ == "__main__":
    write = write_drawing("fig8", draw, by=BY, measure="window_accuracy")
    raise SystemExit(main(FIG8, write=write))
