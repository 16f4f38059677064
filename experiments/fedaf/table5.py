"""FedAF's Table 5: how much of the global model the re-sampled model keeps (gamma), in 10 rounds.

python experiments/fedaf/table5.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table5.py --preset paper   CIFAR-10: a GPU's work
"""

from pathlib import Path
from runpy import run_path

from fedjax_het.experiment import Experiment, Preset, main

TABLE1 = run_path(str(Path(__file__).with_name("table1.py")))

TABLE5 = Experiment(
    name="fedaf-table5",
    folder="fedaf",
    paper="fedaf",
    item="table5",
    title="FedAF, Table 5: best test accuracy by the re-sampling coefficient gamma.",
    settings={"rounds": 10},
    note="The paper gives no deviations here and does not say how many seeds its values are of.",
    presets={
        "quick": Preset(
            datasets=("digits",),
            models=("convnet",),
            alphas=(0.1,),
            seeds=(0, 1),
            **TABLE1["QUICK"],
        ),
        "paper": Preset(
            datasets=("cifar10",),
            models=("convnet",),
            alphas=(0.1,),
            seeds=(0, 1, 2),
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(TABLE5))
