"""FSL's Figure 6: Figure 1 without pretraining.

python experiments/fsl/fig6.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig6.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig6.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FL's runs are those of Figure 1, as is all of preset cpu.
"""

from dataclasses import replace

from experiments.fsl.fig1 import BY, FIG1, draw
from experiments.fsl.scenarios import pretrained
from fedjax_het.report.paper_table import program, write_drawing

FIG6 = replace(
    FIG1,
    name="fsl-fig6",
    item="fig6",
    title="FSL, Figure 6: test accuracy by labels per client, without pretraining.",
    settings={"pretrain_epochs": 0},
    presets={
        name: replace(preset, method_settings=pretrained(0))
        for name, preset in FIG1.presets.items()
    },
)

main = program(FIG6, write_drawing("fig6", draw, by=BY, measure="window_accuracy"))

if __name__ == "__main__":
    raise SystemExit(main())
