"""FSL's Figure 10: the learning curves of Figure 5 on CIFAR-10, from the same runs.

python experiments/fsl/fig10.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig10.py --preset cpu     CIFAR-10, fewer rounds: hours
python experiments/fsl/fig10.py --preset paper   CIFAR-10: a GPU's work
"""

from dataclasses import replace

from experiments.fsl.fig5 import BY, FIG5
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report import plot_learning_curves
from fedjax_het.report.paper_table import Experiment, program, write_drawing

PANELS = ("hp.local_lr", "classes")


def curves_of(dataset: str, item: str) -> Experiment:
    """Of Figure 5's runs those of one data set; the presets on other data stay as they are."""
    paper = replace(FIG5.presets["paper"], datasets=(dataset,))
    return replace(
        FIG5,
        name=f"fsl-{item}",
        item=item,
        title=f"FSL, Figure {item.removeprefix('fig')}: learning curves of Figure 5.",
        presets={**FIG5.presets, "paper": paper},
    )


def draw(results, curves):
    by = [name for name in (*PANELS, "algorithm", "server_data") if name in results]
    return plot_learning_curves(results, curves, by=by, panels=PANELS, window=WINDOW)


FIG10 = curves_of("cifar10", "fig10")

main = program(FIG10, write_drawing("fig10", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
