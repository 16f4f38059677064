"""Registry of the sources of server examples that the setting `server_data` names."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.data.dataset_registry import load_dataset
from fedjax_het.data.glyphs import FIGURE_POINTS, Font, open_font, render_glyphs
from fedjax_het.data.sampling import allocate_equal_counts, shuffle_by_class, take_quota
from fedjax_het.utils.config import Bounds, PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.input_kinds import IMAGE_KINDS, require_input_kind
from fedjax_het.utils.registry import (
    Registry,
    format_entry,
    get_keyword_parameters,
    get_summary_line,
    validate_keyword_arguments,
)

# Inputs in the format of the training inputs, int32 labels.
LabeledImages = tuple[np.ndarray, np.ndarray]

_Points = Annotated[float, Bounds(1, 2 * FIGURE_POINTS)]
_Degrees = Annotated[float, Bounds(-360, 360)]

# Arguments that a source's functions receive if their signatures have them; others are options.
_RUN_ARGUMENTS = (
    *("rng", "dataset", "partition", "withheld", "data_dir", "cache_dir"),
    *("num_train", "num_classes"),
)


class ServerSource(NamedTuple):
    """Description of a source of the examples D_0 from which the server learns.

    A source has a `pool`, all of which is D_0, or it has `draw`, which selects training examples.
    It selects from the clients' examples or, with `withheld`, from the examples that were withheld
    before the split.
    Functions receive, by name, the listed arguments that their signatures have. All other arguments
    are options of the source.

    Attributes:
      name: name of the source in settings.
      description: one line for `fedjax-het list`.
      draw: function `(rng, dataset, partition, withheld, **options) -> positions` in the training
        set. `rng` is a NumPy Generator of the seed, and `withheld` contains the positions of the
        withheld examples.
      pool: function `(dataset, data_dir, cache_dir, **options) -> (inputs, labels)`.
      withheld: function `(num_train, num_classes, **options) -> count`, the number of examples
        drawn at random before the remaining ones are divided among clients. `draw` may return
        only these examples.
      check: function `(**options) -> options` that returns values that JSON can store or raises
        `ConfigError`.
      font: function `(**options) -> Font` of drawn glyphs, for the summary.

    Example:
      >>> from fedjax_het.data import SERVER_SOURCES
      >>> SERVER_SOURCES["clients"].options
      {'clients': 10, 'per_client': 50}
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
        """Options of the source's function by name, with their default or `REQUIRED`."""
        function: Any = self.draw or self.pool
        return get_keyword_parameters(function, exclude=_RUN_ARGUMENTS)

    def validate_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check options against the annotations of the source's function.

        Args:
          options: values by name.

        Returns:
          The values in the types of the annotations.

        Raises:
          ConfigError: if a name is unknown, a required option is missing, or a value is invalid.
        """
        owner, function = f"server_data {self.name!r}", self.draw or self.pool
        return validate_keyword_arguments(
            *(owner, options, function, self.options, "option"), available=_RUN_ARGUMENTS
        )

    def __repr__(self) -> str:
        return format_entry(self)


# --- training examples of clients


def _draw_iid(rng, dataset, partition, *, size: PositiveInt | None = None):
    """Draw size examples of the clients, with equal class counts if possible (default: 1 %).

    Args:
      rng: generator of random numbers.
      dataset: the data set.
      partition: the clients' examples.
      size: number of examples. Default: 1 % of the clients' examples, at least one per class.
    """
    class_counts = partition.label_counts(dataset.train_classes, dataset.num_classes).sum(0)
    examples = np.unique(partition.indices)
    labels = dataset.train_classes[examples]
    limits = np.bincount(labels, minlength=dataset.num_classes)
    if size is None:
        size = max(len(examples) // 100, int((class_counts > 0).sum()))
    expected = f"an integer from 1 to {len(examples)}, the examples that the clients hold"
    require(0 < size <= len(examples), "size", size, expected)
    counts = allocate_equal_counts(rng, limits, size)
    pools = shuffle_by_class(rng, labels, dataset.num_classes)
    return examples[take_quota(pools, np.stack([counts, limits - counts], axis=1))[0]]


def _draw_from_clients(
    rng, dataset, partition, *, clients: PositiveInt = 10, per_client: PositiveInt = 50
):
    """Draw per_client examples of each of a few clients, once (FSL's scenario 2a).

    Args:
      rng: generator of random numbers.
      dataset: the data set.
      partition: the clients' examples.
      clients: number of clients.
      per_client: number of examples of each of these clients.
    """
    partition.label_counts(dataset.train_classes, dataset.num_classes)  # it is of this data set
    eligible = np.flatnonzero(partition.sizes >= per_client)
    expected = f"at most {len(eligible)}, the clients with at least {per_client} examples"
    require(clients <= len(eligible), "clients", clients, expected)
    client_ids = rng.choice(eligible, clients, replace=False)
    return np.concatenate(
        [rng.choice(partition.client_indices(k), per_client, replace=False) for k in client_ids]
    )


# --- training examples that no client holds


def _count_held_out(num_train, num_classes, *, size=None):
    return max(num_train // 100, num_classes) if size is None else size


def _draw_held_out(withheld, *, size: PositiveInt | None = None):
    """Draw size examples that no client holds, withheld before the split (default: 1 %).

    Args:
      withheld: the examples that were withheld before the split.
      size: number of examples. Default: 1 % of the training examples, at least one per class.
    """
    return withheld


# --- images that are not training examples


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
    """Draw letters and digits of a script font at several sizes and rotations (FSLsyn).

    Args:
      dataset: the data set.
      font: file of a TrueType or OpenType font. Default: the built-in script font.
      sizes: sizes of the letters in points.
      rotations: rotations in degrees.
    """
    _require_uint8_images(dataset)
    height, width, channels = dataset.input_shape
    require(channels == 1, "input_shape", dataset.input_shape, "one channel, for drawn glyphs")
    names, face = dataset.class_names, open_font(font)
    return render_glyphs(names, height, width, font=face, sizes=sizes, rotations=rotations)


def _make_stl10_pool(dataset, data_dir, cache_dir, *, per_class: PositiveInt = 56):
    """Take STL-10 images of the classes that the data set also has (FSLsyn, for CIFAR-10).

    Args:
      dataset: the data set.
      data_dir: see `load_dataset`.
      cache_dir: see `load_dataset`.
      per_class: number of images of each class.
    """
    _require_uint8_images(dataset)
    require(dataset.input_shape[-1] == 3, "input_shape", dataset.input_shape, "three channels")
    stl10 = load_dataset("stl10", data_dir=data_dir, cache_dir=cache_dir)
    return select_shared_class_images(stl10, dataset, per_class)


# Names in STL-10 that differ from the names in CIFAR-10.
_CLASS_SYNONYMS = {"car": "automobile"}


def select_shared_class_images(
    stl10: Dataset, dataset: Dataset, per_class: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select the first `per_class` training images of every class that both data sets have.

    Classes are matched by name (STL-10's car is an automobile), and labels are the labels of
    `dataset`. With CIFAR-10 there are nine shared classes: CIFAR-10 has no monkey, STL-10 no frog.
    Images are shrunk to the size of `dataset` by the rounded mean over blocks of pixels (3x3 from
    96 to 32). The paper does not describe the resizing. The stored order of STL-10 is random, so
    the first images are a random choice. A larger `per_class` contains all images of a smaller
    `per_class`.

    Args:
      stl10: STL-10.
      dataset: the data set whose classes and image size are used.
      per_class: number of images of each class.

    Returns:
      `(images, labels)`: uint8 `[n, H, W, 3]` and int32 `[n]`, ordered by class.

    Raises:
      ConfigError: if the data sets share no class, if the sizes do not divide, or if a class has
        fewer images.
    """
    names = [_CLASS_SYNONYMS.get(name, name) for name in stl10.class_names]
    shared_names = [name for name in dataset.class_names if name in names]
    expected = "names of STL-10 classes, like the names of CIFAR-10"
    require(len(shared_names) > 0, "class_names", dataset.class_names, expected)
    images, labels = [], []
    for name in shared_names:
        members = np.flatnonzero(stl10.train_labels == names.index(name))
        expected = f"at most {len(members)}, the number of training images of {name!r} in STL-10"
        require(per_class <= len(members), "per_class", per_class, expected)
        images.append(stl10.train_inputs[members[:per_class]])
        labels += [dataset.class_names.index(name)] * per_class
    height, width, _ = dataset.input_shape
    return block_mean(np.concatenate(images), height, width), np.array(labels, np.int32)


def block_mean(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Shrink images by the mean of each block of pixels, rounded (halves up).

    Args:
      images: uint8 `[N, H, W, C]`.
      height: height of the result, which divides H.
      width: width of the result, which divides W.

    Returns:
      Images, uint8 `[N, height, width, C]`.

    Raises:
      ConfigError: if the sizes do not divide.
    """
    count, full_height, full_width, channels = images.shape
    if full_height % height or full_width % width:
        raise ConfigError(
            f"images of {height}x{width}: expected sides that divide {full_height}x{full_width}"
        )
    block_height, block_width = full_height // height, full_width // width
    blocks = images.reshape(count, height, block_height, width, block_width, channels)
    sums, area = blocks.sum((2, 4), dtype=np.int64), block_height * block_width
    return ((2 * sums + area) // (2 * area)).astype(np.uint8)


def _require_uint8_images(dataset: Dataset) -> None:
    """Require uint8 images.

    External images have the range 0..255; the values of black and white in a user's floats are
    unknown.
    """
    owner = "a source of images for the server"
    require_input_kind(owner, dataset.input_shape, dataset.num_tokens, IMAGE_KINDS)
    dtype = dataset.train_inputs.dtype
    expected = "uint8, the format of the source's images"
    require(dtype == np.uint8, "dtype of train_inputs", str(dtype), expected)


def _get_user_pool(dataset):
    """Take the data set's own server_inputs and server_labels."""
    expected = "a data set with server_inputs and server_labels (see dataset_from_arrays)"
    has_examples = dataset.server_inputs is not None or dataset.server_labels is not None
    require(has_examples, "server_data", "user", expected)
    return dataset.server_inputs, dataset.server_labels


def _describe(name: str, **functions: Any) -> ServerSource:
    """Describe a source of the package by the docstring of its `draw` or `pool`."""
    return ServerSource(
        name, get_summary_line(functions.get("draw", functions.get("pool"))), **functions
    )


SERVER_SOURCES: Registry[ServerSource] = Registry(
    "source",
    (
        _describe("iid", draw=_draw_iid),
        _describe("held_out", draw=_draw_held_out, withheld=_count_held_out),
        _describe("clients", draw=_draw_from_clients),
        _describe(
            "glyphs",
            pool=_make_glyph_pool,
            check=_validate_glyph_options,
            font=lambda *, font, **_: open_font(font),
        ),
        _describe("stl10", pool=_make_stl10_pool),
        _describe("user", pool=_get_user_pool),
    ),
    argument="server_data",
)
"""Sources of server examples by name, including entries that users registered.

Example:
  >>> from fedjax_het.data import SERVER_SOURCES
  >>> "held_out" in SERVER_SOURCES
  True
"""


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
    """Register a source of server examples for runs, sweeps and reports, until the process ends.

    Return values of the functions are checked at every call. `ServerSource` documents the
    functions.

    Args:
      name: name of the source in settings.
      description: one line for `fedjax-het list`. Default: the first line of the docstring of the
        function.
      draw: function that draws training examples. Exactly one of `draw` and `pool` is required.
      pool: function that returns the source's own inputs and labels.
      withheld: function that returns the number of examples to withhold from clients, only with
        `draw`.
      check: function that checks the options and returns them.

    Raises:
      ConfigError: if the name belongs to a source of the package or is not an identifier. Also if
        both or neither of `draw` and `pool` are passed, or if `withheld` is combined with `pool`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, register_server_source
      >>> from fedjax_het.data import make_server_data, partition_from_clients
      >>> def first(dataset, partition, *, size=4):
      ...     return partition.indices[:size]
      >>> register_server_source("first", draw=first)
      >>> inputs, labels = np.zeros((8, 4, 4, 1), np.uint8), np.arange(8) % 2
      >>> dataset = dataset_from_arrays(inputs, labels, inputs, labels)
      >>> partition = partition_from_clients([[5, 6, 7], [0, 1]])
      >>> make_server_data("first", dataset, partition, 0, {"size": 2}).indices
      array([5, 6], dtype=int32)
    """
    if (draw is None) == (pool is None):
        raise ConfigError(f"server_data {name!r}: expected exactly one of draw and pool")
    if withheld is not None and draw is None:
        raise ConfigError(f"server_data {name!r}: expected withheld only together with draw")
    text = description or get_summary_line(draw or pool)
    SERVER_SOURCES.add(ServerSource(name, text, draw, pool, withheld, check))
