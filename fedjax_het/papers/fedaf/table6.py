"""FedAF's Table 6: ResNet-18 on CIFAR-10.

python experiments/fedaf/table6.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/table6.py --preset paper   CIFAR-10: a GPU's work

The paper's parameter count is that of the stem for large images (7x7, stride 2, max pool), which
leaves 8x8 of CIFAR-10's 32x32 pixels. Of the digits' 8x8 it would leave 2x2: the quick preset has
the stem for small images, an eighth of the filters, a single alpha, and two of the methods, since
each row compiles a program of 18 layers.
"""

from dataclasses import replace

from fedjax_het.papers.fedaf.settings import (
    EXPERIMENT,
    PRESETS,
    add_control_rows,
    condensing_method_settings,
)
from fedjax_het.papers.table import Preset, make_table_program

TABLE6 = EXPERIMENT(
    name="fedaf-table6",
    results_folder="fedaf",
    item="table6",
    title="FedAF, Table 6: best test accuracy of ResNet-18.",
    presets={
        "quick": add_control_rows(
            Preset(
                datasets=("digits",),
                models=("resnet18",),
                alphas=(0.1,),
                seeds=(0,),
                rows=("fedavg", "fedaf"),
                optional_rows=("fedprox", "fedbn", "moon", "feddyn", "fedgen", "feddm"),
                settings={"num_clients": 5, "local_epochs": 5, "rounds": 4},
                model_settings={"resnet18": {"stem": "cifar", "width": 8}},
                method_settings=condensing_method_settings(
                    batch_size=64, options={"ipc": 10, "steps": 25, "server_epochs": 50}
                ),
                note="A client condenses a class of the digits in 25 steps of the paper's 1,000; "
                "with as many random real images fedaf is below fedavg, too: what is sent is too "
                "little, however it is matched.",
            ),
            "table6",
        ),
        "paper": add_control_rows(
            replace(PRESETS["paper"], datasets=("cifar10",), models=("resnet18",)), "table6"
        ),
    },
)

main = make_table_program(TABLE6)
