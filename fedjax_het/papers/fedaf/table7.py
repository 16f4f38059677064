"""FedAF's Table 7: upload of a client in a round, computed from the partitions alone.

python experiments/fedaf/table7.py          seconds; needs no data set and trains nothing

Partitions need label counts only, see `fedaf.partitions`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedjax_het import analysis
from fedjax_het.analysis.render import TableSection, format_number
from fedjax_het.papers.fedaf.partitions import (
    DATASET_SHAPES,
    NUM_CLIENTS,
    PRESETS,
    get_dataset_shape,
    make_balanced_labels,
    make_paper_partition,
)
from fedjax_het.papers.programs import make_config_program
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table.table_run import write_table_files
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import Bounds, NonNegativeInt, PositiveInt
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import make_output_directory

BYTES_PER_MEGABYTE = 2**20
PAPER_PARAMETER_COUNTS = {"convnet": 381_450, "resnet18": 11_181_642}  # for every data set
TITLE = "FedAF, Table 7: megabytes that a client sends in a round."


@dataclass
class Arguments:
    """The command line."""

    preset: str = "paper"
    """Size of the table: quick or paper, which are equal here (seconds, without data)."""
    ipc: PositiveInt = 50
    """Condensed images per class; a client condenses each class of which it has `ipc` images."""
    seeds: tuple[NonNegativeInt, ...] = (0, 1, 2)
    """Seeds of the partitions whose mean is in a cell."""
    partitions: Annotated[int, Bounds(2)] = 100
    """Number of partitions for the deviation of such a mean."""
    output_dir: Path = Path("results/fedaf-table7")
    """Folder of the table."""
    wide: bool = False
    """Print all columns and notes of the table on a narrow terminal, too."""
    list: bool = False
    """Print the cells; compute nothing."""


def count_labels(dataset: str, alpha: float, seed: int) -> np.ndarray:
    """Count the labels of the paper's partition.

    Args:
      dataset: name of the data set.
      alpha: Dirichlet concentration.
      seed: seed of the partition.

    Returns:
      Counts, int `[K, C]`.
    """
    partition = make_paper_partition(dataset, alpha, seed)
    labels = make_balanced_labels(dataset)
    return partition.label_counts(labels, get_dataset_shape(dataset).num_classes)


def mean_upload_bytes(
    counts: np.ndarray, image_shape: tuple[int, ...], ipc: int, *, bytes_per_value: int
) -> float:
    """Compute the mean upload of FedAF's clients.

    A client sends `ipc` images of every class with at least `ipc` examples. It also sends two
    matrices `[C, C]` in float32 (V_k and R_k).

    Args:
      counts: label counts `[K, C]`.
      image_shape: shape of an image.
      ipc: condensed images per class.
      bytes_per_value: bytes of a pixel's channel.

    Returns:
      Bytes.
    """
    num_condensed_classes = (counts >= ipc).sum(axis=1)
    image_bytes = num_condensed_classes * ipc * math.prod(image_shape) * bytes_per_value
    return float(image_bytes.mean()) + 2 * counts.shape[1] ** 2 * 4


def model_bytes(model: str, dataset: str) -> int:
    """Compute FedAvg's upload in this package: parameters and batch-norm statistics in float32.

    Args:
      model: name of the network.
      dataset: name of the data set.

    Returns:
      Bytes.

    Raises:
      ConfigError: if the paper has not the network or data set.
    """
    import jax

    from fedjax_het.nn import make_model

    shape = get_dataset_shape(dataset)
    require_name("model", model, PAPER_PARAMETER_COUNTS)
    options: dict[str, Any] = {"convnet": {"norm": "batch"}, "resnet18": {"stem": "imagenet"}}[
        model
    ]
    network = make_model(model, shape.image_shape, shape.num_classes, **options)
    variables = jax.eval_shape(network.init, make_key(0))
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(variables))


def make_rows(arguments: Arguments) -> list[dict]:
    """Make a record per reported cell, in megabytes of 2^20 bytes.

    Args:
      arguments: the command line.

    Returns:
      Records with these values in addition to the values of the cell: `counted` as in the paper,
      with these seeds; `many`, the mean over many partitions, and `deviation`, the standard
      deviation of a mean over one partition per seed; `true`, with images in float32, as they are
      trained and sent here, and for FedAvg with this package's networks.
    """
    rows = []
    for cell in load_reported_values("fedaf", "table7").itertuples(index=False):
        row = {"dataset": cell.dataset, "alpha": cell.level, "method": cell.method}
        row |= {"model": cell.model, "reported": cell.mean}
        if cell.method == "fedaf":
            shape = get_dataset_shape(cell.dataset).image_shape
            counts = {
                seed: count_labels(cell.dataset, cell.level, seed)
                for seed in {*arguments.seeds, *range(arguments.partitions)}
            }

            def list_uploads(seeds, bytes_per_value, counts=counts, shape=shape):
                options = {"ipc": arguments.ipc, "bytes_per_value": bytes_per_value}
                return [
                    mean_upload_bytes(counts[seed], shape, **options) / BYTES_PER_MEGABYTE
                    for seed in seeds
                ]

            many = list_uploads(range(arguments.partitions), 1)
            row |= {
                "counted": np.mean(list_uploads(arguments.seeds, 1)),
                "many": np.mean(many),
                "deviation": np.std(many, ddof=1) / math.sqrt(len(arguments.seeds)),
                "true": np.mean(list_uploads(arguments.seeds, 4)),
            }
        else:
            row |= {
                "counted": 4 * PAPER_PARAMETER_COUNTS[cell.model] / BYTES_PER_MEGABYTE,
                "many": math.nan,
                "deviation": math.nan,
                "true": model_bytes(cell.model, cell.dataset) / BYTES_PER_MEGABYTE,
            }
        row["difference_percent"] = 100 * (row["counted"] / row["reported"] - 1)
        row["deviations"] = (row["reported"] - row["many"]) / row["deviation"]
        rows.append(row)
    return rows


def make_text_table(rows: list[dict], arguments: Arguments) -> analysis.TextTable:
    """Format the records of `make_rows`.

    Args:
      rows: the records.
      arguments: the command line.

    Returns:
      A section per data set.
    """
    ipc, seeds, count = arguments.ipc, len(arguments.seeds), arguments.partitions
    sections = []
    for dataset in DATASET_SHAPES:
        own_rows = [row for row in rows if row["dataset"] == dataset]
        first_alpha = min(row["alpha"] for row in own_rows)
        texts = []
        for row in sorted(own_rows, key=lambda row: (row["method"], row["model"], row["alpha"])):
            is_fedaf = row["method"] == "fedaf"
            if not is_fedaf and row["alpha"] > first_alpha:
                continue  # the size of a model does not depend on alpha
            texts.append(
                {
                    "Method": "FedAF" if is_fedaf else f"FedAvg, {row['model']}",
                    "alpha": f"{row['alpha']:g}" if is_fedaf else "all",
                    "Reported": f"{row['reported']:.2f}",
                    "Counted": f"{row['counted']:.3f}",
                    "Difference": format_number(row["difference_percent"], "+.1f") + " %",
                    f"Mean of {count}": f"{row['many']:.3f} ± {row['deviation']:.3f}"
                    if is_fedaf
                    else "",
                    "z": format_number(row["deviations"], "+.1f") if is_fedaf else "",
                    "As float32": f"{row['true']:.3f}",
                }
            )
        sections.append(TableSection(texts, dataset, {"Data": dataset}))
    notes = (
        f"Megabytes of 2^20 bytes. Partition dirichlet_capped, {NUM_CLIENTS} clients, balanced labels "
        "in place of the data sets': nothing is read or trained. Seeds "
        f"{', '.join(map(str, arguments.seeds))}.",
        f"Counted: as the paper counts. FedAF: {ipc} images of 8 bits a value for every class that "
        f"a client has at least {ipc} of, and V_k and R_k, matrices of classes by classes in "
        "float32. FedAvg: 381,450 (ConvNet) and 11,181,642 (ResNet-18) float32 parameters on every "
        "data set. The paper does not say which classes are condensed.",
        "Difference: counted − reported, in percent of the reported value. Reported values have "
        "two digits: rounding alone is up to 8 % of 0.06 and 6 % of 0.09.",
        f"Mean of {count}: over {count} partitions ± the standard deviation of means over {seeds} of "
        "them.",
        f"z: (reported − mean of {count}) / standard deviation. Chance in the partitions explains a "
        "value within ±2.",
        "As float32: images in float32, the type of their training. FedAvg: this package's networks with "
        "batch norm, whose parameters depend on the data set, and their running statistics.",
    )
    minor_columns = ("As float32", "z", f"Mean of {count}")
    return analysis.TextTable(TITLE, ["Method", "alpha"], sections, notes, minor_columns)


def make_table(arguments: Arguments) -> int:
    """Compute and write the table, and print its files."""
    require_name("preset", arguments.preset, PRESETS)
    require(len(arguments.seeds) > 0, "seeds", arguments.seeds, "at least one seed")
    if arguments.list:
        for cell in load_reported_values("fedaf", "table7").itertuples(index=False):
            print(f"{cell.dataset}, alpha {cell.level:g}: {cell.method}, {cell.model}")
        return 0
    import pandas as pd

    rows = make_rows(arguments)
    directory = make_output_directory(arguments.output_dir)
    table = make_text_table(rows, arguments)
    names = write_table_files(directory, "table", table, pd.DataFrame(rows), wide=arguments.wide)
    print(f"Written to {directory}: {', '.join(names)}.")
    return 0


main = make_config_program(Arguments, make_table, TITLE)
