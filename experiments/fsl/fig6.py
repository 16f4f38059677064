"""FSL's Figure 6: Figure 1 without pretraining.

python experiments/fsl/fig6.py                  the embedded digits, a minute on 2 cores
python experiments/fsl/fig6.py --preset cpu     Fashion-MNIST and CIFAR-10, fewer rounds: hours
python experiments/fsl/fig6.py --preset paper   EMNIST and CIFAR-10: a GPU's work

FL's runs are those of Figure 1, as is all of preset cpu.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from fedjax_het.report.paper_table import main, write_drawing

SHARED = run_path(str(Path(__file__).with_name("scenarios.py")))
FIG1 = run_path(str(Path(__file__).with_name("fig1.py")))
FIG6 = replace(
    FIG1["FIG1"],
    name="fsl-fig6",
    item="fig6",
    title="FSL, Figure 6: test accuracy by labels per client, without pretraining.",
    settings={"pretrain_epochs": 0},
    presets={
        name: replace(preset, method_settings=SHARED["pretrained"](0))
        for name, preset in FIG1["FIG1"].presets.items()
    },
)

if __name__ == "__main__":
    write = write_drawing("fig6", FIG1["draw"], by=FIG1["BY"], measure="window_accuracy")
    raise SystemExit(main(FIG6, write=write))
