"""Where the server's examples come from: what settings can name, and users add."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.data.dataset_registry import load_dataset
from fedjax_het.data.glyphs import FIGURE_POINTS, Font, open_font, render_glyphs
from fedjax_het.data.quota_sampling import allocate_equal_counts, shuffle_by_class
from fedjax_het.data.sources.stl10 import select_shared_class_images
from fedjax_het.utils.config import Bounds, PositiveInt
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.introspection import (
    get_keyword_parameters,
    get_summary_line,
    validate_keyword_arguments,
)
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.validation import validate_arguments

LabeledImages = tuple[np.ndarray, np.ndarray]  # images like those of training, int32 labels

_Points = Annotated[float, Bounds(1, 2 * FIGURE_POINTS)]
_Degrees = Annotated[float, Bounds(-360, 360)]

# What the functions are given where their signatures have it; all else they take is an option.
_RUN_ARGUMENTS = (
    *("rng", "dataset", "partition", "data_dir", "cache_dir"),
    *("num_train", "num_classes"),
)


class ServerSource(NamedTuple):
    """Where the server's examples come from.

    A source has a `pool`, all of which is D_0, or it draws from the training examples: from those
    that clients hold, or, `withheld`, from those that none does. Functions are called by name, with
    what their signatures have of what is listed; all else there are the source's options.

    draw: `(rng, dataset, partition, **options) -> positions` in the training set; `rng` is a NumPy
        Generator of the seed.
    pool: `(dataset, data_dir, cache_dir, **options) -> (images, labels)`.
    withheld: `(num_train, num_classes, **options) -> how many` examples are drawn at random before
        the rest is split among clients; `draw` finds them as those that `partition` leaves out.
    check: `(**options) -> options`, all with values that can be written as JSON; or `ConfigError`.
    font: `(**options) -> Font` of drawn glyphs, for the summary.
    """

    name: str
    description: str = ""
    draw: Callable[..., Any] | None = None
    pool: Callable[..., LabeledImages] | None = None
    withheld: Callable[..., int] | None = None
    check: Callable[..., dict[str, Any]] | None = None
    font: Callable[..., Font] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What it takes, by its function's signature, with defaults or `REQUIRED`."""
        function = self.draw or self.pool
        return {} if function is None else get_keyword_parameters(function, exclude=_RUN_ARGUMENTS)

    def validate_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options that it takes, as their annotations have them. Raises ConfigError."""
        owner = f"server_data {self.name!r}"
        return validate_keyword_arguments(
            owner, options, self.draw or self.pool, self.options, "option"
        )


# --- training examples, of all clients or of a few


def _draw_iid(rng, dataset, partition, *, size: PositiveInt | None = None):
    """As equally many of each class as the clients' examples allow."""
    class_counts = partition.label_counts(dataset.train_labels, dataset.num_classes).sum(0)
    examples = np.unique(partition.indices)
    labels = dataset.train_labels[examples]
    limits = np.bincount(labels, minlength=dataset.num_classes)
    if size is None:
        size = max(len(examples) // 100, int((class_counts > 0).sum()))
    require(
        0 < size <= len(examples),
        "size",
        size,
        f"an integer from 1 to {len(examples)}, the examples that the clients hold",
    )
    counts = allocate_equal_counts(rng, limits, size)
    pools = shuffle_by_class(rng, labels, dataset.num_classes)
    class_selections = [members[:count] for members, count in zip(pools, counts, strict=True)]
    return examples[np.concatenate(class_selections)]


def _draw_from_clients(
    rng, dataset, partition, *, clients: PositiveInt = 10, per_client: PositiveInt = 50
):
    partition.label_counts(dataset.train_labels, dataset.num_classes)  # it is of this data set
    eligible = np.flatnonzero(partition.sizes >= per_client)
    require(
        clients <= len(eligible),
        "clients",
        clients,
        f"at most {len(eligible)}: so many of the {partition.num_clients} clients hold per_client = "
        f"{per_client} examples",
    )
    client_ids = rng.choice(eligible, clients, replace=False)
    return np.concatenate(
        [rng.choice(partition.client_indices(k), per_client, replace=False) for k in client_ids]
    )


# --- training examples that no client has


def _count_held_out(num_train, num_classes, *, size=None):
    return max(num_train // 100, num_classes) if size is None else size


def _draw_held_out(rng, dataset, partition, *, size: PositiveInt | None = None):
    """All that were withheld; of a partition that leaves more examples to nobody, so many."""
    num_train = len(dataset.train_labels)
    partition.label_counts(dataset.train_labels, dataset.num_classes)  # it is of this data set
    unassigned = np.setdiff1d(np.arange(num_train), partition.indices)
    size = _count_held_out(num_train, dataset.num_classes, size=size)
    require(
        size <= len(unassigned),
        "size",
        size,
        f"at most {len(unassigned)}, the examples that no client holds",
    )
    return rng.choice(unassigned, size, replace=False)


# --- examples from elsewhere


def _validate_glyph_options(*, font, sizes, rotations):
    for name, values in (("sizes", sizes), ("rotations", rotations)):
        require(len(values) > 0, name, values, "a list of numbers, at least one")
    open_font(font)
    return {"font": font, "sizes": sizes, "rotations": rotations}


def _make_glyph_pool(
    dataset,
    *,
    font: str | None = None,
    sizes: tuple[_Points, ...] = (100, 110, 120),
    rotations: tuple[_Degrees, ...] = (-20, -10, 0, 10, 20),
):
    height, width, channels = dataset.input_shape
    _require_uint8(dataset)
    require(channels == 1, "input_shape", dataset.input_shape, "one channel, for drawn glyphs")
    face = open_font(font)
    return render_glyphs(
        dataset.class_names, height, width, font=face, sizes=sizes, rotations=rotations
    )


def _make_stl10_pool(dataset, data_dir, cache_dir, *, per_class: PositiveInt = 56):
    _require_uint8(dataset)
    require(dataset.input_shape[-1] == 3, "input_shape", dataset.input_shape, "three channels")
    stl10 = load_dataset("stl10", data_dir=data_dir, cache_dir=cache_dir)
    return select_shared_class_images(stl10, dataset, per_class)


def _require_uint8(dataset: Dataset) -> None:
    """Images from elsewhere are 0..255; where a user's floats have 0 and 1 is not known."""
    dtype = dataset.train_images.dtype
    require(dtype == np.uint8, "dtype of train_images", str(dtype), "uint8, for images from afar")


def _get_user_pool(dataset):
    has_server_examples = dataset.server_images is not None or dataset.server_labels is not None
    require(
        has_server_examples,
        "server_data",
        "user",
        "a data set with server_images and server_labels (see dataset_from_arrays)",
    )
    return dataset.server_images, dataset.server_labels


SERVER_SOURCES: Registry[ServerSource] = Registry(
    "source",
    (
        ServerSource(
            "iid",
            "training examples that clients hold, as equally many of each class as can be (size "
            "n_0; default 1 % of them)",
            draw=_draw_iid,
        ),
        ServerSource(
            "held_out",
            "training examples drawn at random before the rest is split, so that no client holds "
            "them (size n_0; default 1 % of all)",
            draw=_draw_held_out,
            withheld=_count_held_out,
        ),
        ServerSource(
            "clients",
            "per_client training examples of each of a few clients, drawn once (FSL's scenario 2a)",
            draw=_draw_from_clients,
        ),
        ServerSource(
            "glyphs",
            "letters and digits drawn from a script font at several sizes and rotations (FSLsyn)",
            pool=_make_glyph_pool,
            check=_validate_glyph_options,
            font=lambda *, font, **_: open_font(font),
        ),
        ServerSource(
            "stl10",
            "images of STL-10 of the classes that it shares with the data set (FSLsyn, for "
            "CIFAR-10)",
            pool=_make_stl10_pool,
        ),
        ServerSource(
            "user", "the data set's own server_images and server_labels", pool=_get_user_pool
        ),
    ),
    argument="server_data",
)


@validate_arguments
def register_server_source(
    name: str,
    description: str = "",
    *,
    draw: Callable[..., Any] | None = None,
    pool: Callable[..., LabeledImages] | None = None,
    withheld: Callable[..., int] | None = None,
    check: Callable[..., dict[str, Any]] | None = None,
) -> None:
    """Make a source of the server's examples known to runs, sweeps and reports, as long as this
    process lasts.

        def first(dataset, partition, *, size=100):
            return partition.indices[:size]

        register_server_source("first", draw=first)
        RunSpec("fsl", server_data="first", server_options={"size": 50})

    draw or pool, withheld, check: see `ServerSource`. What they return is checked.
    description: for `fedjax-het list`; by default the first line of the docstring.

    Raises: ConfigError for a name of the package's own or no word, unless it is one of draw and
      pool that is given, and for `withheld` with a pool.
    """
    if (draw is None) == (pool is None):
        raise ConfigError(f"server_data {name!r}: expected draw or pool, one of the two")
    if withheld is not None and draw is None:
        raise ConfigError(f"server_data {name!r}: withheld is for sources that draw")
    text = description or get_summary_line(draw or pool)
    SERVER_SOURCES.add(ServerSource(name, text, draw, pool, withheld, check))
