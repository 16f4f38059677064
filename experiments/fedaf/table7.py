"""FedAF's Table 7: what a client sends each round, from the partitions alone.

python experiments/fedaf/table7.py          seconds; needs no data set and trains nothing

Partitions need label counts only, see `partitions.py`.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from experiments.fedaf.partitions import (
    CLIENTS,
    PRESETS,
    SOURCES,
    balanced_labels,
    paper_partition,
    source_of,
)
from fedjax_het import report
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.records import Count, Whole, at_least
from fedjax_het.report.programs import record_program
from fedjax_het.report.render import Section, number_text
from fedjax_het.report.reported import reported_values
from fedjax_het.report.write import publish

MEGABYTE = 2**20
PAPER_PARAMETERS = {"convnet": 381_450, "resnet18": 11_181_642}  # for every data set
TITLE = "FedAF, Table 7: megabytes that a client sends in a round."


@dataclass
class Arguments:
    """The command line."""

    preset: str = "paper"
    """quick or paper, which are the same here: seconds, and no data."""
    ipc: Count = 50
    """Condensed images per class; a client condenses the classes that it has as many images of."""
    seeds: tuple[Whole, ...] = (0, 1, 2)
    """Partitions that a cell is the mean of."""
    partitions: Annotated[int, at_least(2)] = 100
    """Partitions that show how far such a mean may fall from the one over many."""
    output_dir: str = "results/fedaf-table7"
    """Folder of the table."""
    list: bool = False
    """Print the cells; compute nothing."""


def label_counts(dataset: str, alpha: float, seed: int) -> np.ndarray:
    """[clients, classes] of the paper's partition."""
    split = paper_partition(dataset, alpha, seed)
    labels = balanced_labels(dataset)
    return split.label_counts(labels, source_of(dataset).num_classes)


def upload_bytes(
    counts: np.ndarray, image_shape: tuple[int, ...], ipc: int, *, bytes_per_value: int
) -> float:
    """Mean over clients of what FedAF sends up: `ipc` images of every class that the client has
    as many images of, and two matrices of classes by classes in float32 (V_k and R_k)."""
    condensed = (counts >= ipc).sum(axis=1)
    images = condensed * ipc * math.prod(image_shape) * bytes_per_value
    return float(images.mean()) + 2 * counts.shape[1] ** 2 * 4


def model_bytes(model: str, dataset: str) -> int:
    """What FedAvg sends up here: parameters and batch-norm statistics in float32."""
    import jax

    from fedjax_het.nn import make_model

    source = source_of(dataset)
    require_name("model", model, PAPER_PARAMETERS)
    options = {"convnet": {"norm": "batch"}, "resnet18": {"stem": "imagenet"}}[model]
    network = make_model(model, source.image_shape, source.num_classes, **options)
    variables = jax.eval_shape(network.init, jax.random.key(0))
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(variables))


def make_rows(arguments: Arguments) -> list[dict]:
    """A record per reported cell, in megabytes of 2^20 bytes.

    `counted`: as the paper counts, of these seeds. `many`, `deviation`: mean over many partitions,
    and the standard deviation of a mean over as many as there are seeds. `true`: images in float32,
    as they are trained and sent here; of FedAvg, this package's networks.
    """
    reported = reported_values("fedaf", "table7")
    rows = []
    for cell in reported.itertuples(index=False):
        row = {
            "dataset": cell.dataset,
            "alpha": cell.level,
            "method": cell.method,
            "model": cell.model,
            "reported": cell.mean,
        }
        if cell.method == "fedaf":
            shape = source_of(cell.dataset).image_shape
            chosen = [label_counts(cell.dataset, cell.level, seed) for seed in arguments.seeds]
            many = [
                label_counts(cell.dataset, cell.level, seed) for seed in range(arguments.partitions)
            ]

            def megabytes(splits, bytes_per_value, shape=shape):
                size = {"ipc": arguments.ipc, "bytes_per_value": bytes_per_value}
                return [upload_bytes(counts, shape, **size) / MEGABYTE for counts in splits]

            spread = np.std(megabytes(many, 1), ddof=1) / math.sqrt(len(chosen))
            row |= {
                "counted": np.mean(megabytes(chosen, 1)),
                "many": np.mean(megabytes(many, 1)),
                "deviation": spread,
                "true": np.mean(megabytes(chosen, 4)),
            }
        else:
            row |= {
                "counted": 4 * PAPER_PARAMETERS[cell.model] / MEGABYTE,
                "many": math.nan,
                "deviation": math.nan,
                "true": model_bytes(cell.model, cell.dataset) / MEGABYTE,
            }
        row["difference_percent"] = 100 * (row["counted"] / row["reported"] - 1)
        row["deviations"] = (row["reported"] - row["many"]) / row["deviation"]
        rows.append(row)
    return rows


def as_table(rows: list[dict], arguments: Arguments) -> report.TextTable:
    sections = []
    for dataset in SOURCES:
        own = [row for row in rows if row["dataset"] == dataset]
        texts = []
        for row in sorted(own, key=lambda row: (row["method"], row["model"], row["alpha"])):
            fedaf = row["method"] == "fedaf"
            if not fedaf and row["alpha"] > min(other["alpha"] for other in own):
                continue  # a model's size knows no alpha
            texts.append(
                {
                    "Method": "fedaf" if fedaf else f"fedavg, {row['model']}",
                    "alpha": f"{row['alpha']:g}" if fedaf else "all",
                    "Reported": f"{row['reported']:.2f}",
                    "Counted": f"{row['counted']:.3f}",
                    "Difference": number_text(row["difference_percent"], "+.1f") + " %",
                    "Many": f"{row['many']:.3f} ± {row['deviation']:.3f}" if fedaf else "",
                    "Deviations": number_text(row["deviations"], "+.1f") if fedaf else "",
                    "True": f"{row['true']:.3f}",
                }
            )
        sections.append(Section(tuple(texts), title=dataset, labels={"Data": dataset}))
    ipc, seeds, count = arguments.ipc, len(arguments.seeds), arguments.partitions
    notes = (
        f"Megabytes of 2^20 bytes. Partition dirichlet_capped, {CLIENTS} clients, balanced labels "
        "in place of the data sets': nothing is read or trained. Seeds "
        f"{', '.join(map(str, arguments.seeds))}.",
        f"Counted: as the paper counts. fedaf: {ipc} images of 8 bits a value for every class that "
        f"a client has at least {ipc} of, and V_k and R_k, matrices of classes by classes in "
        "float32. fedavg: 381,450 (ConvNet) and 11,181,642 (ResNet-18) float32 parameters on every "
        "data set. The paper does not say which classes are condensed.",
        "Difference: counted − reported, in percent of the reported value, which has two digits: "
        "rounding alone is up to 8 % of 0.06 and 6 % of 0.09.",
        f"Many: mean over {count} partitions ± the standard deviation of means over {seeds} of "
        "them. Deviations: reported − that mean, in these standard deviations.",
        "True: images in float32, in which they are trained; fedavg: this package's networks with "
        "batch norm, whose parameters depend on the data set, and their running statistics.",
    )
    names, values = ("Method", "alpha"), ("Reported", "Counted", "Difference")
    return report.TextTable(
        TITLE, names, (*values, "Many", "Deviations", "True"), tuple(sections), notes
    )


def run(arguments: Arguments) -> int:
    require_name("preset", arguments.preset, PRESETS)
    require(len(arguments.seeds) > 0, "seeds", arguments.seeds, "at least one seed")
    if arguments.list:
        for cell in reported_values("fedaf", "table7").itertuples(index=False):
            print(f"{cell.dataset}, alpha {cell.level:g}: {cell.method}, {cell.model}")
        return 0
    import pandas as pd

    rows = make_rows(arguments)
    table = as_table(rows, arguments)
    directory = make_output_directory(arguments.output_dir)
    names = publish(directory, "table", table, pd.DataFrame(rows))
    print(f"Written to {directory}: {', '.join(names)}.")
    return 0


main = record_program(Arguments, run, TITLE)


if __name__ == "__main__":
    raise SystemExit(main())
