"""Server examples: FSL's D_0 (arXiv 2210.02614), taken from one of several sources.

D_0 is a list of positions in the training examples followed by the source's own, its pool.
The pool is equal for all seeds; the training examples of the server are drawn with the seed. Some
sources withhold their examples from the clients: `draw_withheld_examples` draws these before the
remaining examples are divided among the clients.
"""

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_het.data.dataset import Dataset, validate_server_examples
from fedjax_het.data.partition import Partition
from fedjax_het.data.sampling import DataStream, make_data_rng
from fedjax_het.data.server_sources import SERVER_SOURCES, LabeledImages
from fedjax_het.data.validation import InputValidator, Seed, require_positions
from fedjax_het.tasks import TASKS
from fedjax_het.utils.config import NonNegativeInt, validate, validate_arguments
from fedjax_het.utils.errors import make_value_error, require
from fedjax_het.utils.input_kinds import take_rows
from fedjax_het.utils.registry import call_with_supported

_log = logging.getLogger("fedjax_het")


@dataclass(frozen=True)
class ServerSummary:
    """Statistics of the server's examples; `str` of it is one line.

    Attributes:
      source: name of the source, one of `SERVER_SOURCES`.
      description: description of the source.
      num_examples: number of examples, n_0.
      num_classes: number of classes of the data set.
      num_present: number of classes with at least one example.
      class_min: number of examples of the rarest of all classes.
      class_max: number of examples of the most frequent class.
      class_distance: total variation distance, in [0, 1], between the class proportions of D_0 and
        of the examples that clients hold.
      font: name of the font of drawn glyphs, or None.
      font_version: version of the font, or None.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, make_partition
      >>> from fedjax_het.data import make_server_data
      >>> inputs, labels = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = make_partition("iid", labels, 3, num_clients=4, seed=0)
      >>> server = make_server_data("iid", dataset, partition, 0, {"size": 6})
      >>> print(server.summarize(dataset, partition, None))
      the server holds 6 examples (iid) of 3 of 3 classes, 2 to 2 each; ... 0.000
    """

    source: str
    description: str
    num_examples: int
    num_classes: int
    num_present: int
    class_min: int
    class_max: int
    class_distance: float
    font: str | None = None
    font_version: str | None = None

    def __str__(self) -> str:
        source = SERVER_SOURCES.get(self.source)
        exclusive_clause = ", which no client holds," if source and source.withheld else ""
        text = (
            f"the server holds {self.num_examples:,} examples ({self.source}){exclusive_clause} of "
            f"{self.num_present} of {self.num_classes} classes, {self.class_min} to "
            f"{self.class_max} each; total variation distance to the clients' classes "
            f"{self.class_distance:.3f}"
        )
        return f"{text}; font {self.font}, version {self.font_version}" if self.font else text


@dataclass(frozen=True, eq=False)
class ServerData:
    """Examples D_0 from which the server learns, as `make_server_data` returns them.

    Attributes:
      source: name of the source, one of `SERVER_SOURCES`.
      options: all options of the source including defaults, values that JSON can store.
      seed: seed of the draw.
      indices: int32 `[n_0]`, ascending: positions in the training examples followed by the pool.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, make_partition
      >>> from fedjax_het.data import make_server_data
      >>> inputs, labels = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = make_partition("iid", labels, 3, num_clients=4, seed=0)
      >>> server = make_server_data("iid", dataset, partition, 0, {"size": 6})
      >>> server_inputs, server_labels = server.get_examples(dataset, None)
      >>> server_inputs.shape, np.bincount(server_labels)
      ((6, 4, 4, 1), array([2, 2, 2]))
    """

    source: str
    options: dict
    seed: int
    indices: np.ndarray

    def get_examples(self, dataset: Dataset, pool: LabeledImages | None) -> LabeledImages:
        """Return the inputs and labels of D_0.

        Args:
          dataset: the data set.
          pool: inputs and labels of the source, see `make_server_pool`, or None.

        Returns:
          `(inputs, labels)`: `[n_0, ...]` and int32 `[n_0]`.
        """
        if pool is not None:
            return pool
        inputs = take_rows(dataset.train_inputs, self.indices)
        return inputs, dataset.train_labels[self.indices]

    def summarize(
        self, dataset: Dataset, partition: Partition, pool: LabeledImages | None
    ) -> ServerSummary:
        """Compute the statistics of D_0, with the distance of its classes from the clients'.

        Args:
          dataset: the data set.
          partition: the training examples of each client.
          pool: inputs and labels of the source, see `make_server_pool`, or None.

        Returns:
          The statistics; `str` of them is one line.
        """
        labels = dataset.get_classes(self.get_examples(dataset, pool)[1])
        class_counts = np.bincount(labels, minlength=dataset.num_classes)
        client_counts = partition.label_counts(dataset.train_classes, dataset.num_classes)
        source = SERVER_SOURCES.require(self.source)
        font = source.font(**self.options) if source.font else None
        return ServerSummary(
            source=self.source,
            description=source.description,
            num_examples=len(labels),
            num_classes=dataset.num_classes,
            num_present=int((class_counts > 0).sum()),
            class_min=int(class_counts.min()),
            class_max=int(class_counts.max()),
            class_distance=compute_total_variation(class_counts, client_counts.sum(0)),
            font=font and font.name,
            font_version=font and font.version,
        )


def compute_total_variation(counts: np.ndarray, other_counts: np.ndarray) -> float:
    """Compute the total variation distance of two histograms, each scaled to sum 1.

    Args:
      counts: numbers `[C]`, with a positive sum.
      other_counts: numbers `[C]`, with a positive sum.

    Returns:
      Half the sum of the absolute differences, from 0 for equal proportions to 1.
    """
    p, q = counts / counts.sum(), other_counts / other_counts.sum()
    return float(np.abs(p - q).sum() / 2)


@validate_arguments
def resolve_server_options(source: str, options: dict[str, Any] | None = None) -> dict:
    """Check the options of a source of server examples and set the defaults.

    Needs no data.

    Args:
      source: one of `SERVER_SOURCES`.
      options: values by name.

    Returns:
      All options of the source by name, values that JSON can store.

    Raises:
      ConfigError: if the source or an option is unknown, if a value is invalid for any data, or if
        a font is missing.

    Example:
      >>> from fedjax_het.data import resolve_server_options
      >>> resolve_server_options("clients", {"clients": 3})
      {'clients': 3, 'per_client': 50}
    """
    server_source = SERVER_SOURCES.require(source)
    user_options = server_source.validate_options(options or {})
    all_options = server_source.validate_options(server_source.options | user_options)
    if server_source.check is not None:
        return server_source.check(**all_options)
    try:
        return json.loads(json.dumps(all_options))
    except (TypeError, ValueError) as error:
        expected = f"values that can be written as JSON ({error})"
        raise make_value_error("server_options", all_options, expected) from error


@validate_arguments
def make_server_pool(
    source: str,
    dataset: Dataset,
    options: dict[str, Any] | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> LabeledImages | None:
    """Load or draw the examples that a source brings in addition to the training examples.

    The pool is equal for all seeds.

    Args:
      source: one of `SERVER_SOURCES`.
      dataset: the data set; inputs of the pool have the shape and dtype of its training inputs.
      options: options of the source by name.
      data_dir: folder of source data for STL-10, see `load_dataset`.
      cache_dir: folder of decoded data sets for STL-10, see `load_dataset`.

    Returns:
      `(inputs, labels)`: read-only arrays `[M, ...]` and int32 `[M]`; None if the source uses
      training examples.

    Raises:
      ConfigError: if the source does not suit the data set.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays
      >>> from fedjax_het.data import make_server_pool
      >>> inputs, labels = np.zeros((4, 28, 28, 1), np.uint8), np.arange(4) % 2
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels, class_names="AB")
      >>> glyphs, glyph_labels = make_server_pool("glyphs", dataset, {"rotations": [0]})
      >>> glyphs.shape, glyph_labels
      ((6, 28, 28, 1), array([0, 0, 0, 1, 1, 1], dtype=int32))
    """
    options = resolve_server_options(source, options)
    make_pool = SERVER_SOURCES[source].pool
    if make_pool is None:
        return None
    available_arguments = {"dataset": dataset, "data_dir": data_dir, "cache_dir": cache_dir}
    pool = call_with_supported(make_pool, available_arguments, **options)
    if not (isinstance(pool, tuple) and len(pool) == 2):
        description = f"pool of server_data {source!r}"
        raise make_value_error(description, pool, "(inputs, labels)")
    inputs, labels = validate_server_examples(
        *(*pool, dataset.train_inputs),
        validator=InputValidator(dataset.num_tokens),
        num_classes=dataset.num_classes,
        task_kind=TASKS[dataset.task].make,
    )
    for array in (inputs, labels):
        array.setflags(write=False)
    return inputs, labels


@validate_arguments
def draw_withheld_examples(
    source: str | None, dataset: Dataset, seed: Seed, options: dict[str, Any] | None = None
) -> np.ndarray:
    """Draw the training examples that are withheld from all clients.

    Examples are drawn uniformly, whatever their labels: the methods that need such examples do not
    know the labels.

    Args:
      source: one of `SERVER_SOURCES`, or None.
      dataset: the data set.
      seed: seed of the draw, >= 0.
      options: options of the source by name.

    Returns:
      Positions in the training set, int64, ascending; empty unless the source withholds examples.

    Raises:
      ConfigError: if no example would be left for the clients.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays
      >>> from fedjax_het.data import draw_withheld_examples
      >>> inputs, labels = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> len(draw_withheld_examples("held_out", dataset, 0, {"size": 5}))
      5
    """
    count_withheld = None if source is None else SERVER_SOURCES.require(source).withheld
    if source is None or count_withheld is None:
        return np.zeros(0, np.int64)
    options = resolve_server_options(source, options)
    num_train = len(dataset.train_labels)
    available_arguments = {"num_train": num_train, "num_classes": dataset.num_classes}
    size = call_with_supported(count_withheld, available_arguments | options)
    size = validate(f"withheld of server_data {source!r}", size, NonNegativeInt)
    expected = f"at most {num_train - 1}, so that examples are left for clients"
    require(size < num_train, "size", size, expected)
    rng = make_data_rng(seed, DataStream.WITHHELD_EXAMPLES)
    return np.sort(rng.choice(num_train, size, replace=False))


@validate_arguments
def make_server_data(
    source: str,
    dataset: Dataset,
    partition: Partition,
    seed: Seed,
    options: dict[str, Any] | None = None,
    pool: LabeledImages | None = None,
) -> ServerData:
    """Choose the server's examples D_0: the whole pool, or training examples drawn with the seed.

    Clients keep the examples that the server also holds (the paper's footnote 1 treats data sets as
    multisets), unless the source withholds them. A source that withholds examples returns examples
    of `draw_withheld_examples`. If the partition was made without this source and contains some of
    them, equally many examples that no client holds are drawn instead. Equal arguments give equal
    examples, independent of other uses of the seed.

    Args:
      source: one of `SERVER_SOURCES`.
      dataset: the data set.
      partition: the training examples of each client.
      seed: seed of the draw, >= 0.
      options: options of the source by name.
      pool: inputs and labels of the source, see `make_server_pool`; None for a source that draws
        training examples.

    Returns:
      The examples D_0.

    Raises:
      ConfigError: if the clients hold, or leave, too few examples, or if a source that withholds
        examples returns others.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, make_partition
      >>> from fedjax_het.data import make_server_data
      >>> inputs, labels = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = make_partition("iid", labels, 3, num_clients=4, seed=0)
      >>> options = {"clients": 2, "per_client": 5}
      >>> make_server_data("clients", dataset, partition, 0, options).indices.shape
      (10,)
    """
    options = resolve_server_options(source, options)
    num_train, draw = len(dataset.train_labels), SERVER_SOURCES[source].draw
    if draw is None:
        if pool is None or len(pool[1]) == 0:
            raise make_value_error("pool", pool, "the pool that make_server_pool returns")
        indices = num_train + np.arange(len(pool[1]))
    else:
        rng = make_data_rng(seed, DataStream.SERVER_EXAMPLES)
        withheld = _find_withheld_examples(source, dataset, partition, seed, options)
        available_arguments = {"rng": rng, "dataset": dataset, "partition": partition}
        available_arguments["withheld"] = withheld
        positions = call_with_supported(draw, available_arguments, **options)
        description = f"return value of draw of server_data {source!r}"
        indices = np.sort(require_positions(description, positions, num_train))
        require(len(indices) > 0, description, [], "at least one position")
        if SERVER_SOURCES[source].withheld is not None:
            others = np.setdiff1d(indices, withheld)
            expected = f"only the {len(withheld)} withheld examples, the argument `withheld`"
            require(len(others) == 0, description, f"{len(others)} other examples", expected)
    indices = indices.astype(np.int32)
    indices.setflags(write=False)
    return ServerData(source=source, options=options, seed=seed, indices=indices)


def _find_withheld_examples(
    source: str, dataset: Dataset, partition: Partition, seed: int, options: dict[str, Any]
) -> np.ndarray:
    """Return the positions of the withheld examples, none of which a client holds.

    A user's partition may contain examples of `draw_withheld_examples`: the same number of other
    examples is then drawn.
    """
    withheld = draw_withheld_examples(source, dataset, seed, options)
    if not np.isin(withheld, partition.indices).any():
        return withheld
    unassigned = np.setdiff1d(np.arange(len(dataset.train_labels)), partition.indices)
    expected = f"at most {len(unassigned)}, the examples that no client holds"
    require(len(withheld) <= len(unassigned), "size", len(withheld), expected)
    _log.warning(
        "server_data %s: clients hold withheld examples; the server receives %d other examples "
        "that no client holds, whose labels may differ from the clients'",
        *(source, len(withheld)),
    )
    rng = make_data_rng(seed, DataStream.SERVER_EXAMPLES)
    return np.sort(rng.choice(unassigned, len(withheld), replace=False))
