"""FSL's two scenarios, and what the table and the figures of each share.

Scenario 1 has few clients and a server with examples drawn from all training data; its settings are
those of the protocol. Scenario 2 has many clients, and a server with the data of a few of them, or
with images from elsewhere. All results go to one folder, so that no run is made twice.
"""

from dataclasses import replace
from typing import Any

from fedjax_het.analysis import parse_row, plot_metric_vs_setting
from fedjax_het.papers.fsl.server_examples import GLYPH_SIZES
from fedjax_het.papers.table import DatasetOverride, Preset, TableDeclaration

SERVER_DATA_METHODS = ("fsl", "fsl_p", "data_sharing")  # methods that use the server's examples
CLIENTS_BY_DATASET = {"emnist_45": 45}  # of scenario 1; 10 of other data
# Scenario 2: the clients that give the server data, and how much each; where else it has images of.
SERVER_DATA_CLIENTS = {"cifar10": (10, 50), "emnist_45": (9, 50), "digits": (5, 10)}
EXTERNAL_SOURCES = {"cifar10": "stl10"}  # glyphs for other data
SHARED_CLASSES = 9  # of STL-10 with CIFAR-10


def parse_scenario1_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """`n0`: how many examples the server has; `S`: how many clients take part in a round."""
    method, variant = parse_row(row)
    if "n0" in variant:
        variant["server_options"] = {"size": variant.pop("n0")}
    if "S" in variant:
        variant["participation"] = variant.pop("S") / CLIENTS_BY_DATASET.get(dataset, 10)
    return method, variant


def parse_scenario2_row(row: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """`fsl`: its server has data of a few clients; `fslsyn`: images from elsewhere. `n0`: how many
    (of STL-10, as many as the classes share equally)."""
    method, variant = parse_row(row)
    num_examples = variant.pop("n0", None)
    if method == "fslsyn":
        source = EXTERNAL_SOURCES.get(dataset, "glyphs")
        options = {} if num_examples is None else {"per_class": num_examples // SHARED_CLASSES}
        if source == "glyphs" and dataset in GLYPH_SIZES:
            options = {**options, "sizes": GLYPH_SIZES[dataset]}
        return "fsl", {"server_data": source, "server_options": options, **variant}
    if method in SERVER_DATA_METHODS or "pretrain_epochs" in variant:
        num_clients, examples_per_client = SERVER_DATA_CLIENTS.get(dataset, (10, 50))
        options = {
            "clients": num_clients,
            "per_client": examples_per_client
            if num_examples is None
            else num_examples // num_clients,
        }
        variant = {"server_data": "clients", "server_options": options, **variant}
    return method, variant


def pretraining_settings(epochs: int) -> dict[str, dict[str, Any]]:
    """Settings by method: FL starts from a random model all the same."""
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
    """The same with these rows, or those of each data set."""
    if not isinstance(rows, dict):
        return replace(preset, rows=rows)
    overrides = preset.dataset_overrides
    new_overrides = {
        name: replace(overrides.get(name, DatasetOverride()), rows=dataset_rows)
        for name, dataset_rows in rows.items()
    }
    return replace(preset, dataset_overrides={**overrides, **new_overrides})


def plot_metrics_vs_gamma(results, *line_settings: str):
    """Accuracy and rise time against gamma, data sharing at 0; `lines`: settings with lines."""
    panels = ["dataset", "classes"]
    return plot_metric_vs_setting(
        results,
        x="hp.gamma",
        by=[*panels, *line_settings],
        panels=panels,
        metrics=("window_accuracy", "rise_time"),
        missing_value=0.0,
    )


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
# Of scenario 2: no method has settings of its own, and CIFAR-10 alone is tried on a CPU.
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
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1)  # only .01 and .05 are named in the paper
COMPARED_METHODS = ("fsl", "fslsyn", "feddyn", "scaffold")
