"""FSL's two scenarios: presets and rows that its table and figures share.

Scenario 1 has few clients and a server with examples drawn from all training data; its settings are
the protocol's. Scenario 2 has many clients, and a server with the data of a few of them, or with
images from elsewhere. All results are in one folder, so that no run is made twice.
"""

from dataclasses import replace
from typing import Any

from fedjax_het.analysis import parse_row
from fedjax_het.papers.table import DatasetOverride, Preset, TableDeclaration

SERVER_DATA_METHODS = ("fsl", "fsl_p", "data_sharing")  # methods that use the server's examples
CLIENTS_BY_DATASET = {"emnist_45": 45}  # in scenario 1; 10 for other data
# Scenario 2: number of clients that give the server data, and of examples that each of them gives.
SERVER_DATA_CLIENTS = {"cifar10": (10, 50), "emnist_45": (9, 50), "digits": (5, 10)}
EXTERNAL_SOURCES = {"cifar10": "stl10"}  # images from elsewhere; glyphs for other data
# Sizes in points at which glyphs fill the images like their own digits; others have the paper's.
GLYPH_SIZES = {"digits": (200, 220, 240)}
SHARED_CLASSES = 9  # of STL-10 with CIFAR-10


def parse_scenario1_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row of scenario 1.

    Args:
      row: the row; its settings may be `n0`, the number of the server's examples, and `S`, the
        number of clients per round.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.
    """
    method, variant = parse_row(row)
    if "n0" in variant:
        variant["server_options"] = {"size": variant.pop("n0")}
    if "S" in variant:
        variant["participation"] = variant.pop("S") / CLIENTS_BY_DATASET.get(dataset, 10)
    return method, variant


def parse_scenario2_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Read a row of scenario 2.

    Args:
      row: the row. The server of `fsl` has data of a few clients; the server of `fslsyn` has images
        from another source. Setting `n0` is their number, rounded down to equal numbers per class
        of STL-10.
      dataset: name of the data set.

    Returns:
      The method's name, and the settings by name.
    """
    method, variant = parse_row(row)
    size = variant.pop("n0", None)
    if method == "fslsyn":
        source = EXTERNAL_SOURCES.get(dataset, "glyphs")
        options = {} if size is None else {"per_class": size // SHARED_CLASSES}
        if source == "glyphs" and dataset in GLYPH_SIZES:
            options = {**options, "sizes": GLYPH_SIZES[dataset]}
        return "fsl", {"server_data": source, "server_options": options, **variant}
    if method in SERVER_DATA_METHODS or "pretrain_epochs" in variant:
        clients, per_client = SERVER_DATA_CLIENTS.get(dataset, (10, 50))
        per_client = per_client if size is None else size // clients
        options = {"clients": clients, "per_client": per_client}
        variant = {"server_data": "clients", "server_options": options, **variant}
    return method, variant


def pretraining_settings(epochs: int) -> dict[str, dict[str, Any]]:
    """Return settings by method; FL starts from a random model for any number of epochs."""
    return {method: {"pretrain_epochs": epochs} for method in SERVER_DATA_METHODS}


# The digits: ten clients have 144 each, or fewer.
QUICK = Preset(
    datasets=("digits",),
    models=("mlp",),
    classes=(1, 2, 10),
    seeds=(0, 1, 2),
    settings={
        "batch_size": 10,
        "rounds": 60,
        "server_options": {"size": 50},
        "hp": {"local_lr": 0.05},
    },
    method_settings=pretraining_settings(50),
)
# With the paper's network a round of scenario 1 takes 5 to 10 seconds on 2 cores (CIFAR-10).
CPU = Preset(
    datasets=("fashion_mnist", "cifar10"),
    models=("fsl_cnn",),
    seeds=(0, 1, 2),
    dataset_overrides={
        "fashion_mnist": DatasetOverride(models=("mlp",), classes=(1, 2), settings={"rounds": 200}),
        "cifar10": DatasetOverride(classes=(2,), seeds=(0,), settings={"rounds": 60}),
    },
    rows=("fedavg", "data_sharing", *(f"fsl(gamma={g})" for g in (0.5, 1.0, 1.5))),
    settings={"server_options": {"size": 500}},
    method_settings=pretraining_settings(0),
    description="200 and 60 rounds, without pretraining",
)
PAPER = Preset(
    datasets=("emnist_45", "cifar10"),
    models=("fsl_cnn",),
    seeds=(0, 1, 2),
    dataset_overrides={
        "emnist_45": DatasetOverride(classes=(1, 5, 45)),
        "cifar10": DatasetOverride(classes=(2, 5, 10)),
    },
)


def with_rows(preset: Preset, rows: tuple[str, ...] | dict[str, tuple[str, ...]]) -> Preset:
    """Return a preset with other rows.

    Args:
      preset: the preset.
      rows: rows of all data sets, or by data set.

    Returns:
      The preset.
    """
    if not isinstance(rows, dict):
        return replace(preset, rows=rows)
    overrides = {
        name: replace(preset.get_dataset_override(name), rows=dataset_rows)
        for name, dataset_rows in rows.items()
    }
    return replace(preset, dataset_overrides={**preset.dataset_overrides, **overrides})


SCENARIO1 = TableDeclaration(
    name="fsl-fig1",
    results_folder="fsl",
    paper="fsl",
    item="fig1",
    title="FSL",
    presets={"quick": QUICK, "cpu": CPU, "paper": PAPER},
    has_reported_values=False,
    row_parser=parse_scenario1_row,
)
# In scenario 2 methods have no own settings, and preset cpu has CIFAR-10 only.
QUICK_SCENARIO2 = replace(QUICK, settings={"batch_size": 10, "rounds": 60}, method_settings={})
# All 1,000 rounds of Scenario 2, tested in every fifth: a test takes as long as three.
CPU_SCENARIO2 = replace(
    CPU,
    datasets=("cifar10",),
    classes=(2,),
    seeds=(0, 1),
    dataset_overrides={},
    settings={"eval_every": 5},
    method_settings={},
    description="without STL-10; tested in every fifth round, so that means of 20 are of 100 rounds",
)
SCENARIO2 = replace(
    SCENARIO1,
    presets={"quick": QUICK_SCENARIO2, "cpu": CPU_SCENARIO2, "paper": PAPER},
    settings={"pretrain_epochs": 0},
    dataset_settings={
        "cifar10": {"num_clients": 1000, "participation": 10 / 1000, "batch_size": 10},
        "emnist_45": {"num_clients": 450, "participation": 5 / 450, "batch_size": 50},
    },
    row_parser=parse_scenario2_row,
)
