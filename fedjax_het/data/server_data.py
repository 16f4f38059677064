"""Which examples the server learns from: FSL's D_0 (arXiv 2210.02614), from one of several sources.

D_0 is a list of positions in the training images followed by the source's own images, its pool.
The pool is the same for all seeds; which training examples the server has is drawn with the seed.
Some sources withhold theirs from the clients: `draw_withheld_examples` is asked before the others are
split among them.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_het.data.dataset import Dataset, validate_server_examples
from fedjax_het.data.partition import Partition
from fedjax_het.data.server_sources import SERVER_SOURCES, LabeledImages
from fedjax_het.data.validation import Seed
from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require
from fedjax_het.utils.introspection import call_with_supported
from fedjax_het.utils.validation import validate_arguments

# A stream of its own, so that D_0 does not depend on how many draws a partition took.
_SERVER_STREAM = 0x5E12
_WITHHELD_STREAM = 0x5E13


@dataclass(frozen=True)
class ServerSummary:
    """The server's examples in numbers; `str` of it is one line.

    class_min, class_max: examples of the rarest and the most frequent of all classes.
    class_distance: total variation distance, in [0, 1], between the class shares of D_0 and those
        of the examples that clients hold.
    font, font_version: of drawn glyphs.
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
    """The server's examples D_0, as `server_examples` gives them.

    indices: int32 [n_0], ascending: positions in the training images followed by the pool.
    options: all that the source takes, defaults too; can be written as JSON.
    """

    source: str
    options: dict
    seed: int
    indices: np.ndarray

    def get_examples(self, dataset: Dataset, pool: LabeledImages | None) -> LabeledImages:
        """(images [n_0, H, W, C], labels [n_0]) of D_0."""
        images, labels = pool or (None, None)
        return self._select_rows(dataset.train_images, images), self._select_rows(
            dataset.train_labels, labels
        )

    def _select_rows(self, training: np.ndarray, pool: np.ndarray | None) -> np.ndarray:
        """The server's rows of an array of the training examples and one of the pool."""
        num_train = len(training)
        if pool is None:
            return training[self.indices]
        is_train = self.indices < num_train
        rows = [training[self.indices[is_train]], pool[self.indices[~is_train] - num_train]]
        return np.concatenate(rows)

    def summarize(
        self, dataset: Dataset, partition: Partition, pool: LabeledImages | None
    ) -> ServerSummary:
        """What D_0 is, and how far its classes are from those that the clients hold."""
        labels = self._select_rows(dataset.train_labels, pool[1] if pool else None)
        class_counts = np.bincount(labels, minlength=dataset.num_classes)
        client_class_counts = partition.label_counts(dataset.train_labels, dataset.num_classes).sum(
            0
        )
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
            class_distance=compute_total_variation(class_counts, client_class_counts),
            font=font and font.name,
            font_version=font and font.version,
        )


def compute_total_variation(counts: np.ndarray, other_counts: np.ndarray) -> float:
    """Half the sum of the absolute differences of two histograms' shares: 0 if equal, at most 1."""
    p, q = counts / counts.sum(), other_counts / other_counts.sum()
    return float(np.abs(p - q).sum() / 2)


@validate_arguments
def resolve_server_options(source: str, options: dict[str, Any] | None = None) -> dict:
    """All options of one of `SERVER_SOURCES`, defaults filled in, as can be written as JSON.

    Needs no data. Raises `ConfigError` for a source or option that does not exist, a value that
    cannot be used whatever the data, and a font that is missing.
    """
    server_source = SERVER_SOURCES.require(source)
    user_options = server_source.validate_options(options or {})
    all_options = server_source.validate_options(server_source.options | user_options)
    if server_source.check is not None:
        return server_source.check(**all_options)
    try:
        return json.loads(json.dumps(all_options))
    except (TypeError, ValueError) as error:
        expected = "expected values that can be written as JSON"
        raise ConfigError(f"server_options = {all_options!r}: {expected} ({error})") from error


@validate_arguments
def make_server_pool(
    source: str,
    dataset: Dataset,
    options: dict[str, Any] | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> LabeledImages | None:
    """The images that the source brings, and their labels; None where it takes the clients'.

    Images are like those of training in shape and type. The same for all seeds. `data_dir` and
    `cache_dir` are `load_dataset`'s, for STL-10. Raises `ConfigError` where the source does not
    suit the data set.
    """
    options = resolve_server_options(source, options)
    make = SERVER_SOURCES[source].pool
    if make is None:
        return None
    available_arguments = {"dataset": dataset, "data_dir": data_dir, "cache_dir": cache_dir}
    source_pool = call_with_supported(make, available_arguments, **options)
    if not (isinstance(source_pool, tuple) and len(source_pool) == 2):
        kind = type(source_pool).__name__
        raise ConfigError(
            f"the pool of server_data {source!r} is a {kind}: expected (images, labels)"
        )
    images, labels = validate_server_examples(
        *source_pool, dataset.train_images, dataset.num_classes
    )
    for array in (images, labels):
        array.setflags(write=False)
    return images, labels


@validate_arguments
def draw_withheld_examples(
    source: str | None, dataset: Dataset, seed: Seed, options: dict[str, Any] | None = None
) -> np.ndarray:
    """Positions, ascending, of the training examples that are no client's to hold.

    None of them unless the source withholds some; those are drawn uniformly, whatever their labels,
    which the methods that want such examples do not know. Raises `ConfigError` where nothing would
    be left.
    """
    count = None if source is None else SERVER_SOURCES.require(source).withheld
    if source is None or count is None:
        return np.zeros(0, np.int64)
    options = resolve_server_options(source, options)
    require(is_integer_at_least(seed, 0), "seed", seed, "an integer >= 0")
    num_train = len(dataset.train_labels)
    available_arguments = {"num_train": num_train, "num_classes": dataset.num_classes}
    size = call_with_supported(count, available_arguments | options)
    require(
        is_integer_at_least(size, 0), f"withheld of server_data {source!r}", size, "an integer >= 0"
    )
    require(size < num_train, "size", size, f"at most {num_train - 1}, to leave clients something")
    stream = np.random.SeedSequence(int(seed), spawn_key=(_WITHHELD_STREAM,))
    return np.sort(np.random.default_rng(stream).choice(num_train, size, replace=False))


@validate_arguments
def make_server_data(
    source: str,
    dataset: Dataset,
    partition: Partition,
    seed: Seed,
    options: dict[str, Any] | None = None,
    pool: LabeledImages | None = None,
) -> ServerData:
    """The server's examples D_0: all of `pool`, or training examples drawn with the seed.

    What the server has of the clients' examples stays with them too (the paper's footnote 1 takes
    data sets as multisets), unless the source withholds it. The same arguments give the same
    examples, independent of other uses of the seed. Raises `ConfigError` where the clients hold too
    few, or leave too few.
    """
    options = resolve_server_options(source, options)
    require(is_integer_at_least(seed, 0), "seed", seed, "an integer >= 0")
    num_train, draw = len(dataset.train_labels), SERVER_SOURCES[source].draw
    if draw is None:
        if pool is None or len(pool[1]) == 0:
            raise ConfigError(f"pool = {pool!r}: expected that of make_server_pool")
        indices = num_train + np.arange(len(pool[1]))
    else:
        stream = np.random.SeedSequence(int(seed), spawn_key=(_SERVER_STREAM,))
        available_arguments = {
            "rng": np.random.default_rng(stream),
            "dataset": dataset,
            "partition": partition,
        }
        indices = np.sort(
            _validate_positions(
                source, call_with_supported(draw, available_arguments, **options), num_train
            )
        )
    indices = indices.astype(np.int32)
    indices.setflags(write=False)
    return ServerData(source=source, options=options, seed=int(seed), indices=indices)


def _validate_positions(source: str, values, num_train: int) -> np.ndarray:
    """What a source drew, as positions in the training set. ConfigError."""
    positions, description = np.asarray(values), f"what server_data {source!r} draws"
    ok = positions.ndim == 1 and np.issubdtype(positions.dtype, np.integer) and len(positions) > 0
    require(
        bool(ok), description, f"{positions.dtype} {positions.shape}", "integers of rank 1, some"
    )
    is_outside = (positions < 0) | (positions >= num_train)
    if is_outside.any():
        value = int(positions[int(is_outside.argmax())])
        raise ConfigError(f"{description} has {value}: expected positions in [0, {num_train})")
    return positions
