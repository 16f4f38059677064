"""FSL's Figure 6: Figure 1 without pretraining.

python experiments/fsl/fig6.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig6.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig6.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FL's runs are those of Figure 1, as is all of preset cpu.
"""

from dataclasses import replace

from fedjax_het.papers.fsl.fig1 import FIG1, GROUPING, plot_curves
from fedjax_het.papers.fsl.scenarios import pretraining_settings
from fedjax_het.papers.table import make_figure_writer, make_table_program

FIG6 = replace(
    FIG1,
    name="fsl-fig6",
    item="fig6",
    title="FSL, Figure 6: test accuracy by labels per client, without pretraining.",
    settings={"pretrain_epochs": 0},
    presets={
        name: replace(preset, method_settings=pretraining_settings(0))
        for name, preset in FIG1.presets.items()
    },
)

main = make_table_program(
    FIG6, make_figure_writer("fig6", plot_curves, by=GROUPING, metric="window_accuracy")
)
