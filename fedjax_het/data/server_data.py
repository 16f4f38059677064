"""Which examples the server learns from: FSL's D_0 (arXiv 2210.02614), from one of several sources.

D_0 is a list of positions in the training images followed by the source's own images, its pool.
The pool is the same for all seeds; which training examples the server has is drawn with the seed.
Those of the source "held_out" are withheld from the clients: `withheld_examples` is asked before
the others are split among them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedjax_het.common.errors import ConfigError, is_whole, require, require_name
from fedjax_het.data.dataset import Dataset, checked_server_examples
from fedjax_het.data.dealing import equal_counts, shuffled_classes
from fedjax_het.data.glyphs import FIGURE, glyph_images, open_font
from fedjax_het.data.partition import Partition
from fedjax_het.data.stl10 import shared_class_images

# A stream of its own, so that D_0 does not depend on how many draws a partition took.
_SERVER_STREAM = 0x5E12
_WITHHELD_STREAM = 0x5E13

Pool = tuple[np.ndarray, np.ndarray]  # images like those of training, int32 labels


class ServerSource(NamedTuple):
    """Where the server's examples come from. `options` are what it takes, with their defaults.

    A source has a `pool`, all of which is D_0, or it draws from the training examples: from those
    that clients hold, or, `withheld`, from those that none does.
    """

    description: str
    options: dict
    check: Callable  # (**options) -> options that can be written as JSON; or `ConfigError`
    pool: Callable | None = None  # (dataset, data_dir, cache_dir, **options) -> Pool
    draw: Callable | None = None  # (rng, dataset, partition, **options) -> positions
    withheld: Callable | None = None  # (num_train, num_classes, **options) -> how many


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
        alone = ", which no client holds," if SERVER_SOURCES[self.source].withheld else ""
        text = (
            f"the server holds {self.num_examples:,} examples ({self.source}){alone} of "
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

    def examples(self, dataset: Dataset, pool: Pool | None) -> Pool:
        """(images [n_0, H, W, C], labels [n_0]) of D_0."""
        images, labels = pool or (None, None)
        return self._chosen(dataset.train_images, images), self._chosen(
            dataset.train_labels, labels
        )

    def _chosen(self, of_training: np.ndarray, of_pool: np.ndarray | None) -> np.ndarray:
        split = len(of_training)
        if of_pool is None:
            return of_training[self.indices]
        own = self.indices < split
        return np.concatenate([of_training[self.indices[own]], of_pool[self.indices[~own] - split]])

    def summary(self, dataset: Dataset, partition: Partition, pool: Pool | None) -> ServerSummary:
        """What D_0 is, and how far its classes are from those that the clients hold."""
        labels = self._chosen(dataset.train_labels, pool[1] if pool else None)
        held = np.bincount(labels, minlength=dataset.num_classes)
        clients = partition.label_counts(dataset.train_labels, dataset.num_classes).sum(0)
        font = open_font(self.options["font"]) if self.source == "glyphs" else None
        return ServerSummary(
            source=self.source,
            description=SERVER_SOURCES[self.source].description,
            num_examples=len(labels),
            num_classes=dataset.num_classes,
            num_present=int((held > 0).sum()),
            class_min=int(held.min()),
            class_max=int(held.max()),
            class_distance=total_variation(held, clients),
            font=font and font.name,
            font_version=font and font.version,
        )


def total_variation(counts: np.ndarray, other_counts: np.ndarray) -> float:
    """Half the sum of the absolute differences of two histograms' shares: 0 if equal, at most 1."""
    p, q = counts / counts.sum(), other_counts / other_counts.sum()
    return float(np.abs(p - q).sum() / 2)


def check_server_options(source: str, options: dict | None = None) -> dict:
    """All options of one of `SERVER_SOURCES`, defaults filled in, as can be written as JSON.

    Needs no data. Raises `ConfigError` for a source or option that does not exist, a value that
    cannot be used whatever the data, and a font that is missing.
    """
    require_name("server_data", source, SERVER_SOURCES)
    options, defaults = options or {}, SERVER_SOURCES[source].options
    for name in options:
        if name not in defaults:
            takes = f"it takes {', '.join(defaults)}" if defaults else "it takes none"
            raise ConfigError(f"server_data {source!r} has no option {name!r} ({takes})")
    return SERVER_SOURCES[source].check(**{**defaults, **options})


def server_pool(
    source: str,
    dataset: Dataset,
    options: dict | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Pool | None:
    """The images that the source brings, and their labels; None where it takes the clients'.

    Images are like those of training in shape and type. The same for all seeds. `data_dir` and
    `cache_dir` are `load_dataset`'s, for STL-10. Raises `ConfigError` where the source does not
    suit the data set.
    """
    options = check_server_options(source, options)
    make = SERVER_SOURCES[source].pool
    if make is None:
        return None
    images, labels = make(dataset, data_dir, cache_dir, **options)
    for array in (images, labels):
        array.setflags(write=False)
    return images, labels


def withheld_examples(
    source: str | None, dataset: Dataset, seed: int, options: dict | None = None
) -> np.ndarray:
    """Positions, ascending, of the training examples that are no client's to hold.

    None of them unless the source withholds some; those are drawn uniformly, whatever their labels,
    which the methods that want such examples do not know. Raises `ConfigError` where nothing would
    be left.
    """
    count = SERVER_SOURCES[source].withheld if source is not None else None
    if count is None:
        return np.zeros(0, np.int64)
    options = check_server_options(source, options)
    require(is_whole(seed, 0), "seed", seed, "an integer >= 0")
    num_train = len(dataset.train_labels)
    size = count(num_train, dataset.num_classes, **options)
    require(size < num_train, "size", size, f"at most {num_train - 1}, to leave clients something")
    stream = np.random.SeedSequence(int(seed), spawn_key=(_WITHHELD_STREAM,))
    return np.sort(np.random.default_rng(stream).choice(num_train, size, replace=False))


def server_examples(
    source: str,
    dataset: Dataset,
    partition: Partition,
    seed: int,
    options: dict | None = None,
    pool: Pool | None = None,
) -> ServerData:
    """The server's examples D_0: all of `pool`, or training examples drawn with the seed.

    What the server has of the clients' examples stays with them too (the paper's footnote 1 takes
    data sets as multisets); "held_out" has none of theirs. The same arguments give the same
    examples, independent of other uses of the seed. Raises `ConfigError` where the clients hold too
    few, or leave too few.
    """
    options = check_server_options(source, options)
    require(is_whole(seed, 0), "seed", seed, "an integer >= 0")
    num_train, draw = len(dataset.train_labels), SERVER_SOURCES[source].draw
    if draw is None:
        require(pool is not None and len(pool[1]) > 0, "pool", pool, "that of server_pool")
        indices = num_train + np.arange(len(pool[1]))
    else:
        stream = np.random.SeedSequence(int(seed), spawn_key=(_SERVER_STREAM,))
        indices = np.sort(draw(np.random.default_rng(stream), dataset, partition, **options))
    indices = indices.astype(np.int32)
    indices.setflags(write=False)
    return ServerData(source=source, options=options, seed=int(seed), indices=indices)


# --- training examples, of all clients or of a few


def _check_size(*, size):
    require(size is None or is_whole(size, 1), "size", size, "an integer >= 1, or None")
    return {"size": None if size is None else int(size)}


def _draw_iid(rng, dataset, partition, *, size):
    """As equally many of each class as the clients' examples allow."""
    held = partition.label_counts(dataset.train_labels, dataset.num_classes).sum(0)
    examples = np.unique(partition.indices)
    labels = dataset.train_labels[examples]
    limits = np.bincount(labels, minlength=dataset.num_classes)
    if size is None:
        size = max(len(examples) // 100, int((held > 0).sum()))
    require(
        0 < size <= len(examples),
        "size",
        size,
        f"an integer from 1 to {len(examples)}, the examples that the clients hold",
    )
    counts = equal_counts(rng, limits, size)
    pools = shuffled_classes(rng, labels, dataset.num_classes)
    chosen = [members[:count] for members, count in zip(pools, counts, strict=True)]
    return examples[np.concatenate(chosen)]


def _check_clients(*, clients, per_client):
    require(is_whole(clients, 1), "clients", clients, "an integer >= 1")
    require(is_whole(per_client, 1), "per_client", per_client, "an integer >= 1")
    return {"clients": int(clients), "per_client": int(per_client)}


def _draw_from_clients(rng, dataset, partition, *, clients, per_client):
    partition.label_counts(dataset.train_labels, dataset.num_classes)  # it is of this data set
    able = np.flatnonzero(partition.sizes >= per_client)
    require(
        clients <= len(able),
        "clients",
        clients,
        f"at most {len(able)}: so many of the {partition.num_clients} clients hold per_client = "
        f"{per_client} examples",
    )
    chosen = rng.choice(able, clients, replace=False)
    return np.concatenate(
        [rng.choice(partition.client(k), per_client, replace=False) for k in chosen]
    )


# --- training examples that no client has


def _held_out_size(num_train, num_classes, *, size):
    return max(num_train // 100, num_classes) if size is None else size


def _draw_held_out(rng, dataset, partition, *, size):
    """All that were withheld; of a partition that leaves more examples to nobody, so many."""
    num_train = len(dataset.train_labels)
    partition.label_counts(dataset.train_labels, dataset.num_classes)  # it is of this data set
    free = np.setdiff1d(np.arange(num_train), partition.indices)
    size = _held_out_size(num_train, dataset.num_classes, size=size)
    require(
        size <= len(free), "size", size, f"at most {len(free)}, the examples that no client holds"
    )
    return rng.choice(free, size, replace=False)


# --- examples from elsewhere


def _check_glyphs(*, font, sizes, rotations):
    font = None if font is None else os.fspath(font)
    open_font(font)
    most = 2 * FIGURE
    return {
        "font": font,
        "sizes": _numbers("sizes", sizes, 1, most, f"numbers of points from 1 to {most}"),
        "rotations": _numbers("rotations", rotations, -360, 360, "degrees from -360 to 360"),
    }


def _numbers(argument: str, values, low: float, high: float, what: str) -> list[float]:
    try:
        numbers = [] if isinstance(values, str) else [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    ok = len(numbers) > 0 and all(low <= number <= high for number in numbers)
    require(ok, argument, values, f"a list of {what}, at least one")
    return numbers


def _glyph_pool(dataset, data_dir, cache_dir, *, font, sizes, rotations):
    height, width, channels = dataset.input_shape
    _require_bytes(dataset)
    require(channels == 1, "input_shape", dataset.input_shape, "one channel, for drawn glyphs")
    face = open_font(font)
    return glyph_images(
        dataset.class_names, height, width, font=face, sizes=sizes, rotations=rotations
    )


def _check_stl10(*, per_class):
    require(is_whole(per_class, 1), "per_class", per_class, "an integer >= 1")
    return {"per_class": int(per_class)}


def _stl10_pool(dataset, data_dir, cache_dir, *, per_class):
    from fedjax_het.data.datasets import load_dataset

    _require_bytes(dataset)
    require(dataset.input_shape[-1] == 3, "input_shape", dataset.input_shape, "three channels")
    stl10 = load_dataset("stl10", data_dir=data_dir, cache_dir=cache_dir)
    return shared_class_images(stl10, dataset, per_class)


def _require_bytes(dataset: Dataset) -> None:
    """Images from elsewhere are 0..255; where a user's floats have 0 and 1 is not known."""
    dtype = dataset.train_images.dtype
    require(dtype == np.uint8, "dtype of train_images", str(dtype), "uint8, for images from afar")


def _check_user():
    return {}


def _user_pool(dataset, data_dir, cache_dir):
    given = dataset.server_images is not None or dataset.server_labels is not None
    require(
        given,
        "server_data",
        "user",
        "a data set with server_images and server_labels (see dataset_from_arrays)",
    )
    # Once more, for a data set whose fields were replaced.
    return checked_server_examples(
        dataset.server_images, dataset.server_labels, dataset.train_images, dataset.num_classes
    )


SERVER_SOURCES = {
    "iid": ServerSource(
        "training examples that clients hold, as equally many of each class as can be (size n_0; "
        "default 1 % of them)",
        {"size": None},
        check=_check_size,
        draw=_draw_iid,
    ),
    "held_out": ServerSource(
        "training examples drawn at random before the rest is split, so that no client holds them "
        "(size n_0; default 1 % of all)",
        {"size": None},
        check=_check_size,
        draw=_draw_held_out,
        withheld=_held_out_size,
    ),
    "clients": ServerSource(
        "per_client training examples of each of a few clients, drawn once (FSL's scenario 2a)",
        {"clients": 10, "per_client": 50},
        check=_check_clients,
        draw=_draw_from_clients,
    ),
    "glyphs": ServerSource(
        "letters and digits drawn from a script font at several sizes and rotations (FSLsyn)",
        {"font": None, "sizes": (100, 110, 120), "rotations": (-20, -10, 0, 10, 20)},
        check=_check_glyphs,
        pool=_glyph_pool,
    ),
    "stl10": ServerSource(
        "images of STL-10 of the classes that it shares with the data set (FSLsyn, for CIFAR-10)",
        {"per_class": 56},
        check=_check_stl10,
        pool=_stl10_pool,
    ),
    "user": ServerSource(
        "the data set's own server_images and server_labels",
        {},
        check=_check_user,
        pool=_user_pool,
    ),
}
