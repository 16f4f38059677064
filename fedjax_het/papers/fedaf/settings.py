"""Settings that FedAF's tables and figures share: presets, control rows and tuning."""

from dataclasses import replace
from functools import partial
from typing import Any

from fedjax_het.analysis.overview import get_method_title
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import Preset, TableDeclaration

ALPHAS = (0.02, 0.05, 0.1)
# Controls of condensation: the method with its initial images, which are means of a few real
# images, and with equally many random real images.
CONTROLS = {
    method: (f"{method}(image_lr=0, steps=1)", f"{method}(init='real', image_lr=0, steps=1)")
    for method in ("feddm", "fedaf")
}


def condensing_method_settings(**settings: Any) -> dict[str, dict[str, Any]]:
    """Return the settings for FedDM and FedAF, whose clients condense, by method.

    Args:
      **settings: fields of `RunSpec`, the same for both methods.

    Returns:
      Settings by method.
    """
    return {method: settings for method in ("feddm", "fedaf")}


# Five clients leave each about 290 of the 1,438 digits, and of 8x8 pixels; so a small network, few
# steps and small batches do.
QUICK: dict[str, Any] = {
    "settings": {"num_clients": 5, "local_epochs": 5, "rounds": 5},
    "model_settings": {"convnet": {"width": 16, "depth": 2}},
    "method_settings": condensing_method_settings(
        batch_size=64, options={"ipc": 10, "steps": 60, "server_epochs": 60}
    ),
}

# Two fifths of the paper's images, a fifth of the steps on them, and about half of the server's.
# FedDM's ball is as wide as for the paper's network, which has 40 times the parameters.
SHORT_CONDENSATION: dict[str, Any] = {
    "batch_size": 128,
    "options": {"ipc": 20, "steps": 200, "server_epochs": 200, "server_batch_size": 64},
}

# Presets of Tables 1 and 3 to 6, which have their own rows.
PRESETS = {
    "quick": Preset(
        datasets=("digits",),
        models=("convnet",),
        alphas=(0.02, 0.1),
        seeds=(0,),
        **QUICK,
    ),
    "cpu": Preset(
        datasets=("fashion_mnist",),
        models=("convnet",),
        alphas=(0.02,),
        seeds=(0,),
        settings={"width": 16},
        description="width 16",
    ),
    "short": Preset(
        datasets=("fashion_mnist",),
        models=("convnet",),
        alphas=(0.02, 0.1),
        seeds=(0,),
        settings={"rounds": 8, "width": 16},
        method_settings=condensing_method_settings(**SHORT_CONDENSATION),
    ),
    "paper": Preset(
        datasets=("fashion_mnist", "cifar10", "cifar100"),
        models=("convnet",),
        alphas=ALPHAS,
        seeds=(0, 1, 2),
    ),
}
# Ablations over five seeds, in minutes.
MLP = Preset(
    datasets=("digits",),
    models=("mlp",),
    alphas=(0.1,),
    seeds=(1, 2, 3, 4, 5),
    settings={"num_clients": 5, "rounds": 3},
    description="the embedded digits, MLP",
    method_settings=condensing_method_settings(
        batch_size=64,
        options={"ipc": 10, "steps": 50, "server_epochs": 50, "server_batch_size": 64},
        hp={"image_lr": 2.0, "server_lr": 0.01},
    ),
)


def add_control_rows(preset: Preset, item: str) -> Preset:
    """Return the preset with its rows, or the rows of the paper's table, and FedAF's control rows.

    Args:
      preset: preset of a table.
      item: table of the paper whose rows a preset without rows has, for example `table3`.

    Returns:
      The preset.
    """
    rows = preset.rows or tuple(dict.fromkeys(load_reported_values("fedaf", item)["method"]))
    return replace(preset, rows=(*rows, *CONTROLS["fedaf"]))


EXPERIMENT = partial(
    TableDeclaration,
    paper="fedaf",
    main_method="fedaf",
    control_rows={row: method for method, rows in CONTROLS.items() for row in rows},
    row_display_names={
        row: f"{get_method_title(method)} control: {images}"
        for method, rows in CONTROLS.items()
        for row, images in zip(rows, ("uncondensed", "real images"), strict=True)
    },
    real_data_rows={method: rows[1] for method, rows in CONTROLS.items()},
)
