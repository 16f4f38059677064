"""FSL's Figure 10: the learning curves of Figure 5 on CIFAR-10, from the same runs.

python experiments/fsl/fig10.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig10.py --preset cpu     CIFAR-10, fewer rounds: hours
python experiments/fsl/fig10.py --preset paper   CIFAR-10: a GPU's work
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report import plot_learning_curves
from fedjax_het.report.paper_table import Experiment, main, write_drawing

FIG5 = run_path(str(Path(__file__).with_name("fig5.py")))
PANELS = ("hp.local_lr", "classes")


def curves_of(dataset: str, item: str) -> Experiment:
    """Of Figure 5's runs those of one data set; the presets on other data stay as they are."""
    of_paper = replace(FIG5["FIG5"].presets["paper"], datasets=(dataset,))
    return replace(
        FIG5["FIG5"],
        name=f"fsl-{item}",
        item=item,
        title=f"FSL, Figure {item.removeprefix('fig')}: learning curves of Figure 5.",
        presets={**FIG5["FIG5"].presets, "paper": of_paper},
    )


def draw(results, curves):
    by = [name for name in (*PANELS, "algorithm", "server_data") if name in results]
    return plot_learning_curves(results, curves, by=by, panels=PANELS, window=WINDOW)


FIG10 = curves_of("cifar10", "fig10")

if __name__ == "__main__":
    write = write_drawing("fig10", draw, by=FIG5["BY"], measure="window_accuracy")
    raise SystemExit(main(FIG10, write=write))
