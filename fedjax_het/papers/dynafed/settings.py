"""Rows, presets and settings of methods that DynaFed's tables and figures share."""

from functools import partial

from fedjax_het.analysis.comparison import format_row
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import Preset, TableDeclaration

# Controls of the matching of trajectories: the same rounds on data that are not matched.
CONTROLS = ("dynafed(synthetic='untrained')", "dynafed(synthetic='real')")
CODE_ROW = "dynafed(preset='code')"  # the settings of the public code, with its own controls
CODE_CONTROLS = tuple(
    f"dynafed(preset='code', synthetic={data!r})" for data in ("untrained", "real")
)
CONTROL_OF = dict.fromkeys(CONTROLS, "dynafed") | dict.fromkeys(CODE_CONTROLS, CODE_ROW)
ROWS = tuple(dict.fromkeys(load_reported_values("dynafed", "table1")["method"]))
NOTE = "The paper does not say whether its ± is over seeds or over the last five rounds."
FOLDER = "table1"
# The paper does not state the size of the server's data of FedDF, FedBE and ABAVG: about 100 in
# other papers of the authors. That would be too many of the digits.
SETTINGS = {"server_options": {"size": 100}}
# The paper does not state the settings of FedDF and FedBE either. With these settings both stay
# near FedAvg, as in its tables. Twenty epochs on 100 images at the rates of FedDF's code, or
# FedBE's mean KL, end far below it at alpha 0.01 (experiments/RESULTS.md).
METHOD_SETTINGS = {
    "feddf": {"options": {"preset": "fedaux"}},
    "fedbe": {"options": {"preset": "code"}},
}
EXPERIMENT = partial(
    TableDeclaration,
    paper="dynafed",
    settings=SETTINGS,
    main_method="dynafed",
    control_rows=CONTROL_OF,
    row_display_names={
        row: f"{format_row(method)} control: {images}"
        for (row, method), images in zip(
            CONTROL_OF.items(), 2 * ("untrained", "real images"), strict=True
        )
    },
    real_data_rows={"dynafed": CONTROLS[1]},
    baseline_row="fedavg",
)
QUICK = Preset(
    datasets=("digits",),
    models=("mlp",),
    alphas=(0.01, 0.04, 0.16),
    seeds=(0, 1),
    rows=(*ROWS, *CONTROLS),
    settings={
        "num_clients": 20,
        "local_epochs": 5,
        "rounds": 40,
        "server_options": {"size": 50},
    },
    method_settings={**METHOD_SETTINGS, "dynafed": {"options": {"num_iterations": 200}}},
)
PAPER = Preset(
    datasets=("cifar10",),
    models=("convnet",),
    alphas=(0.01, 0.04, 0.16),
    seeds=(0, 1, 2),
    rows=(*ROWS, *CONTROLS),
    method_settings=METHOD_SETTINGS,
)
# The paper's protocol in everything but the network's width (32 of 128), and the main rows.
CPU = Preset(
    datasets=("fashion_mnist",),
    models=("convnet",),
    alphas=(0.01, 0.16),
    seeds=(0, 1),
    rows=("fedavg", "scaffold", "fedmix", "dynafed", CODE_ROW, *CONTROLS, *CODE_CONTROLS),
    model_settings={"convnet": {"width": 32}},
    description="width 32",
)
PRESETS = {"quick": QUICK, "cpu": CPU, "paper": PAPER}
