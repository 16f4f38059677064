"""Registry of the data sets that the setting `dataset` names, and readers of two of them."""

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.data.adult import ADULT
from fedjax_het.data.ag_news import AG_NEWS
from fedjax_het.data.author_files import AuthorDataset
from fedjax_het.data.covertype import COVERTYPE
from fedjax_het.data.cylinder_bell_funnel import read_cylinder_bell_funnel
from fedjax_het.data.dataset import Dataset, dataset_from_arrays, validate_dataset
from fedjax_het.data.har import HAR, HAR_FEATURES
from fedjax_het.data.heart_disease import HEART_DISEASE
from fedjax_het.data.image_folder import read_cinic10
from fedjax_het.data.normalization import get_normalization_constants
from fedjax_het.data.pamap2 import PAMAP2
from fedjax_het.data.sampling import allocate_equal_counts, shuffle_by_class, take_quota
from fedjax_het.data.sklearn_tables import read_breast_cancer, read_diabetes
from fedjax_het.data.sources import (
    SOURCES,
    is_location,
    parse_location,
    read_location,
    read_published,
)
from fedjax_het.data.sources.domainnet import DOMAINNET
from fedjax_het.data.sources.source import FILE_ORDER, PublishedDataset
from fedjax_het.data.sources.splits import divide_examples
from fedjax_het.data.speakers import read_speakers
from fedjax_het.data.tcga_brca import TCGA_BRCA
from fedjax_het.data.writers import add_writers
from fedjax_het.utils.config import validate, validate_arguments
from fedjax_het.utils.errors import (
    ConfigError,
    describe_error,
    display_name,
    display_names,
    require,
)
from fedjax_het.utils.former_names import accept_former_arguments
from fedjax_het.utils.registry import (
    REQUIRED,
    Registry,
    call_with_supported,
    format_entry,
    get_keyword_parameters,
    get_summary_line,
)

# Facts of a source that become arguments of `dataset_from_arrays`.
_FACTS = (
    *("class_names", "domain_names", "note", "source", "order", "task", "num_tokens"),
    *("feature_names", "token_names", "channels"),
)
# (data_dir, cache_dir) -> (arrays, meta)
ArrayReader = Callable[..., tuple[dict[str, np.ndarray], dict]]


class DatasetSpec(NamedTuple):
    """Description of a data set that can be loaded by name.

    Attributes:
      name: name of the data set in settings.
      load: function that returns the `Dataset`. `normalization`, `data_dir` and `cache_dir` of
        `load_dataset` are passed if its signature has them.
      description: one line for `fedjax-het list`.
      published: names of the data set where it is published, for `python -m
        fedjax_het.data.prepare`. None if there is nothing to prepare.
      defaults: default settings of runs in all protocols, such as a network for other inputs than
        images.
      num_users: number of users with training examples, which are the clients of the partition
        `natural`; None if only the files show it, or without users.

    Example:
      >>> from fedjax_het.data import DATASETS
      >>> DATASETS["cifar10"].description
      'CIFAR-10: 50,000 + 10,000 color 32x32 images, 10 classes'
    """

    name: str
    load: Callable[..., Dataset]
    description: str = ""
    published: PublishedDataset | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})
    num_users: int | None = None

    def __repr__(self) -> str:
        return format_entry(self)


def _make_dataset_spec(
    name: str,
    read: ArrayReader,
    description: str,
    published: PublishedDataset | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    num_users: int | None = None,
) -> DatasetSpec:
    """Describe a data set of the package: the arrays of `read`, normalized as in the papers."""

    def load(*, normalization=None, data_dir=None, cache_dir=None) -> Dataset:
        return _make_dataset(name, *read(data_dir, cache_dir), normalization)

    return DatasetSpec(name, load, description, published, defaults, num_users)


def _make_author_spec(dataset: AuthorDataset) -> DatasetSpec:
    """Describe a data set that is read from the files of its authors."""
    return _make_dataset_spec(
        dataset.name, dataset.load, dataset.description, defaults=dataset.defaults
    )


def _make_dataset(
    name: str, arrays: dict[str, np.ndarray], meta: dict[str, Any], normalization: str | None
) -> Dataset:
    """Return the data set of a source's content, with normalization constants."""
    inputs = arrays["train_inputs"]
    # Other inputs are converted below, and then have statistics, unless their reader states others.
    constants: tuple[Any, Any] = (meta.get("mean"), meta.get("std"))
    if normalization not in (None, "dataset") or getattr(inputs, "ndim", 0) == 4:
        constants = get_normalization_constants(name, normalization, inputs)
    facts = {fact: meta[fact] for fact in _FACTS if fact in meta}
    return dataset_from_arrays(
        **{**arrays, **facts, "name": name}, mean=constants[0], std=constants[1]
    )


def _make_published_spec(
    name: str,
    description: str,
    published: PublishedDataset | None = None,
    transform: Callable | None = None,
) -> DatasetSpec:
    """Describe a data set that others publish, or the part of it that `transform` selects.

    `transform(arrays, meta)` returns `(arrays, meta)`.
    """
    published_dataset = published or PublishedDataset(name, name)

    def read(data_dir, cache_dir):
        arrays, meta = read_published(published_dataset, data_dir, cache_dir)
        return (arrays, meta) if transform is None else transform(arrays, meta)

    return _make_dataset_spec(name, read, description, published_dataset)


# Never changed: another value would be another benchmark.
_DIGITS_TEST_FRACTION = 0.2
_EMNIST_45_CLASSES, _EMNIST_45_TEST_IMAGES, _EMNIST_45_SEED = 45, 10_000, 45
_POOLED_SEED, _POOLED_TEST_FRACTION, _TWENTIETH_SEED = 75, 0.25, 20
_TENTH_SEED = 10
# EMNIST Balanced merges letters whose two cases look alike; the other lower-case letters remain.
_BALANCED_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
_BYCLASS_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_EMNIST_BALANCED = PublishedDataset(
    "emnist_balanced", "emnist", ("balanced",), True, _BALANCED_CLASSES
)
_EMNIST_BYCLASS = PublishedDataset("emnist_byclass", "emnist", ("byclass",), True, _BYCLASS_CLASSES)


def read_digits(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read the 1,797 gray 8x8 images in a fixed, stratified split.

    The split has 1,438 training and 359 test images. Values 0..16 become uint8 0..255 (times
    255/16, rounded). A fifth of each class, rounded, is drawn for the test split. Both splits keep
    scikit-learn's order.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: images and labels of both splits by name, and class names.
    """
    rows = _read_digits_table()
    images = np.rint(rows[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int32)

    arrays = divide_examples({"inputs": images, "labels": labels}, _DIGITS_TEST_FRACTION)
    facts = {"source": "scikit-learn", "order": FILE_ORDER}
    return arrays, {"class_names": [str(digit) for digit in range(10)], **facts}


def _read_digits_table() -> np.ndarray:
    """Return the pixels and the label of each digit, float64 `[1797, 65]`.

    scikit-learn's file is read without the import of scikit-learn, which takes a second.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # of a version with another layout

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def select_first_45_classes(
    arrays: dict[str, np.ndarray], meta: dict
) -> tuple[dict[str, np.ndarray], dict]:
    """Remove the last two classes of EMNIST Balanced, r and t, and draw 10,000 of the test images.

    FSL (arXiv 2210.02614) uses 45 classes of 2,400 training images each, but does not name the two
    of 47 classes that it omits. It uses 10,000 of the 18,000 test images of 45 classes, but does
    not name them. Here a subset with 222 or 223 images of each class is drawn once, with a fixed
    seed. All test images are used if there are fewer. Images keep their order.

    Args:
      arrays: images and labels of both splits of EMNIST Balanced by name.
      meta: facts of the data set by name, with class names.

    Returns:
      `(arrays, meta)` of the 45 classes.
    """
    rng = np.random.default_rng(_EMNIST_45_SEED)
    pools = shuffle_by_class(rng, arrays["test_labels"], _EMNIST_45_CLASSES)
    sizes = np.array([len(pool) for pool in pools])
    counts = allocate_equal_counts(rng, sizes, min(_EMNIST_45_TEST_IMAGES, int(sizes.sum())))
    test_positions = np.sort(take_quota(pools, np.stack([counts, sizes - counts], axis=1))[0])
    train_positions = np.flatnonzero(arrays["train_labels"] < _EMNIST_45_CLASSES)
    positions = {"train": train_positions, "test": test_positions}
    selected = {name: array[positions[name.split("_")[0]]] for name, array in arrays.items()}
    return selected, {**meta, "class_names": meta["class_names"][:_EMNIST_45_CLASSES]}


def divide_pooled_splits(
    arrays: dict[str, np.ndarray], meta: dict
) -> tuple[dict[str, np.ndarray], dict]:
    """Pool both splits, and draw a quarter of each class as the new test split.

    PFLlib pools both splits, divides all examples among the clients, and then divides each client's
    examples into 75 % for training and 25 % for tests, at random. Here the pool is divided first,
    class by class, with a fixed seed. `make_proportional_tests` then divides the test split among
    the clients in proportion to their training examples. Both orders give each client 25 % of its
    examples as tests.

    Args:
      arrays: images and labels of both splits by name.
      meta: facts of the data set by name, with class names.

    Returns:
      `(arrays, meta)` with the new splits. Images keep their order, training images first.
    """
    pooled = {
        part: np.concatenate([arrays[f"train_{part}"], arrays[f"test_{part}"]])
        for part in ("inputs", "labels")
    }
    rng = np.random.default_rng(_POOLED_SEED)
    is_test = np.zeros(len(pooled["labels"]), bool)
    for members in shuffle_by_class(rng, pooled["labels"], len(meta["class_names"])):
        is_test[members[: round(_POOLED_TEST_FRACTION * len(members))]] = True
    train = {f"train_{part}": array[~is_test] for part, array in pooled.items()}
    return train | {f"test_{part}": array[is_test] for part, array in pooled.items()}, meta


def select_twentieth(
    arrays: dict[str, np.ndarray], meta: dict
) -> tuple[dict[str, np.ndarray], dict]:
    """Pool and divide both splits, and draw a twentieth of each class of both, rounded up.

    Args:
      arrays: images and labels of both splits by name.
      meta: facts of the data set by name, with class names.

    Returns:
      `(arrays, meta)` of the smaller splits. Images keep their order.
    """
    arrays, meta = divide_pooled_splits(arrays, meta)
    return _draw_fraction(arrays, ("train", "test"), 20, _TWENTIETH_SEED), meta


def select_tenth(arrays: dict[str, np.ndarray], meta: dict) -> tuple[dict[str, np.ndarray], dict]:
    """Draw a tenth of each class of the training split, rounded up; the test split is unchanged.

    Args:
      arrays: images and labels of both splits by name.
      meta: facts of the data set by name, with class names.

    Returns:
      `(arrays, meta)` with the smaller training split. Images keep their order.
    """
    return arrays | _draw_fraction(arrays, ("train",), 10, _TENTH_SEED), meta


def _draw_fraction(
    arrays: dict[str, np.ndarray], splits: tuple[str, ...], divisor: int, seed: int
) -> dict[str, np.ndarray]:
    """Draw 1 / divisor of the examples of each class of some splits, rounded up."""
    rng = np.random.default_rng(seed)
    selected: dict[str, np.ndarray] = {}
    for split in splits:
        labels = arrays[f"{split}_labels"]
        pools = shuffle_by_class(rng, labels, int(labels.max()) + 1)
        rows = np.sort(np.concatenate([pool[: -(-len(pool) // divisor)] for pool in pools]))
        selected |= {
            f"{split}_{part}": arrays[f"{split}_{part}"][rows] for part in ("inputs", "labels")
        }
    return selected


DATASETS: Registry[DatasetSpec] = Registry(
    "data set",
    (
        _make_dataset_spec(
            "digits",
            read_digits,
            "scikit-learn's digits: 1,797 gray 8x8 images, 10 classes; needs no download",
        ),
        _make_dataset_spec(
            "digits_by_writer",
            lambda data_dir, cache_dir: add_writers(*read_digits()),
            "the digits in the styles of 30 artificial writers, as users; needs no download",
            num_users=30,
        ),
        _make_dataset_spec(
            "speakers",
            read_speakers,
            "lines of 20 speakers of Shakespeare's plays, next characters; needs no download",
            defaults={"model": "gru", "partition": "natural"},
            num_users=20,
        ),
        _make_dataset_spec(
            "breast_cancer",
            read_breast_cancer,
            "scikit-learn's table of cell nuclei: 455 + 114 examples, 2 classes; needs no download",
            defaults={"model": "mlp"},
        ),
        _make_dataset_spec(
            "diabetes",
            read_diabetes,
            "scikit-learn's table of diabetes: 354 + 88 examples, regression; needs no download",
            defaults={"model": "mlp", "partition": "iid"},
        ),
        _make_dataset_spec(
            "cylinder_bell_funnel",
            read_cylinder_bell_funnel,
            "artificial series of 20 devices: 1,200 + 300 examples, 3 classes; needs no download",
            defaults={"model": "cnn1d", "partition": "natural"},
            num_users=20,
        ),
        _make_published_spec("mnist", "MNIST: 60,000 + 10,000 gray 28x28 images, 10 classes"),
        _make_published_spec(
            "fashion_mnist", "Fashion-MNIST: 60,000 + 10,000 gray 28x28 images, 10 classes"
        ),
        _make_published_spec(
            "fashion_mnist_pooled",
            "Fashion-MNIST, both splits pooled and divided anew, for PFLlib: 52,500 + 17,500 images",
            PublishedDataset("fashion_mnist", "fashion_mnist"),
            divide_pooled_splits,
        ),
        _make_published_spec(
            "fashion_mnist_twentieth",
            "a twentieth of fashion_mnist_pooled, for runs on two cores: 2,630 + 880 images",
            PublishedDataset("fashion_mnist", "fashion_mnist"),
            select_twentieth,
        ),
        _make_published_spec("cifar10", "CIFAR-10: 50,000 + 10,000 color 32x32 images, 10 classes"),
        *(
            _make_published_spec(
                f"{name}_tenth",
                f"a tenth of the training images of {name}, and all test images: {sizes} images",
                PublishedDataset(name, name),
                select_tenth,
            )
            for name, sizes in (
                *(("mnist", "6,005 + 10,000"), ("fashion_mnist", "6,000 + 10,000")),
                ("cifar10", "5,000 + 10,000"),
            )
        ),
        _make_published_spec(
            "cifar100", "CIFAR-100: 50,000 + 10,000 color 32x32 images, 100 classes"
        ),
        _make_dataset_spec(
            "cinic10",
            read_cinic10,
            "CINIC-10: 90,000 + 90,000 color 32x32 images, 10 classes; an image folder",
        ),
        _make_published_spec(
            "emnist_balanced",
            "EMNIST Balanced: 112,800 + 18,800 gray 28x28 images, 47 classes",
            _EMNIST_BALANCED,
        ),
        _make_published_spec(
            "emnist_45",
            "EMNIST Balanced without r and t, for FSL: 108,000 + 10,000 images, 45 classes",
            _EMNIST_BALANCED,
            select_first_45_classes,
        ),
        _make_published_spec(
            "emnist_byclass",
            "EMNIST ByClass: 697,932 + 116,323 gray 28x28 images, 62 classes",
            _EMNIST_BYCLASS,
        ),
        _make_published_spec(
            "domainnet",
            "DomainNet, FedBN's ten classes: about 22,500 color images at 64x64, 6 domains",
            DOMAINNET,
        ),
        _make_published_spec(
            "stl10", "STL-10, the labeled part: 5,000 + 8,000 color 96x96 images, 10 classes"
        ),
        *map(
            _make_author_spec,
            (HAR, HAR_FEATURES, PAMAP2, ADULT, COVERTYPE, AG_NEWS, HEART_DISEASE, TCGA_BRCA),
        ),
    ),
    argument="dataset",
)
"""Data sets by name, including entries that users registered.

Example:
  >>> from fedjax_het.data import DATASETS
  >>> "cifar10" in DATASETS
  True
"""


def require_dataset_name(name: str) -> None:
    """Raise an error unless a name is one of `DATASETS`, or `FORMAT:LOCATION` with a known format.

    Args:
      name: value of the setting `dataset`.

    Raises:
      ConfigError: if the name is unknown.
    """
    if is_location(name):
        parse_location(name)
    elif name not in DATASETS and os.path.exists(name):
        formats = ", ".join(key for key, source in SOURCES.items() if source.read is not None)
        raise ConfigError(
            f"{display_name('dataset')} = {name!r} is a path: expected FORMAT:{name} with one of the "
            f"formats {formats}"
        )
    else:
        DATASETS.require(name)


def is_read_by_package(name: str) -> bool:
    """Return whether a function of the package, not of the user, loads a data set.

    Args:
      name: value of the setting `dataset`.

    Returns:
      True for the data sets of the package, and for `FORMAT:LOCATION`.
    """
    return name in DATASETS.built_in or is_location(name)


def _make_loader(name: str) -> Callable[..., Dataset]:
    """Return the function that loads data of the form `FORMAT:LOCATION`."""

    def load(*, data_dir=None, cache_dir=None) -> Dataset:
        try:
            arrays, meta = read_location(name, data_dir, cache_dir)
            facts = {fact: meta[fact] for fact in _FACTS if fact in meta}
            with display_names(meta.get("argument_names", {})):
                return dataset_from_arrays(**{**arrays, **facts}, name=name)
        except ConfigError as error:
            raise ConfigError(f"{display_name('dataset')} = {name!r}: {error}") from error

    return load


# Accepted names of the argument of a data set's function; the second name is from version 0.6.
_NORMALIZATION_ARGUMENTS = ("normalization", "normalisation")


@accept_former_arguments("load_dataset", {"normalisation": "normalization"})
@validate_arguments
def load_dataset(
    name: str,
    *,
    normalization: str | None = None,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Load a data set by its name, or any data in a known format by their location.

    The package's own data sets are decoded once and read from the cache in well under a second
    afterwards. Results identify the returned object by its name (`Dataset.origin`), unless it is
    changed.

    Args:
      name: one of `DATASETS`; or `FORMAT:LOCATION`, such as "npz:scans.npz", with a format of
        `fedjax_het.data.sources.SOURCES`. Options of the format follow, as in
        "npz:scans.npz?channels=first".
      normalization: source of the normalization constants, one of `fedjax_het.data.NORMALIZATIONS`.
        Default: DynaFed's constants where they exist (DynaFed uses MNIST's constants for
        Fashion-MNIST), otherwise the statistics of the training set. A user's data set has the
        constants that its function sets.
      data_dir: folder of the source data. For `cinic10`, the folder of train/ and test/ (default:
        $CINIC10_DIR). For `FORMAT:LOCATION`, the folder of relative locations (default: the current
        folder). Otherwise a folder with the files that the data set's authors publish, or with a
        copy that tensorflow-datasets prepared (default: $TFDS_DATA_DIR), read without TensorFlow.
        If no folder is named or found, a decoded copy in the cache is used, which may come from
        another machine. `digits` needs no folder.
      cache_dir: folder of decoded data sets, see
        `fedjax_het.data.array_cache.dataset_cache_folder`.

    Returns:
      The data set, with checked arrays.

    Raises:
      ConfigError: if the name or the normalization is unknown, or if a user's function does not
        return a `Dataset`. Also if the source data are missing or cannot be read; the message names
        the variable to set or the command to run.

    Example:
      >>> from fedjax_het import load_dataset
      >>> load_dataset("digits")
      Dataset('digits': 1,438 train and 359 test images (8, 8, 1), 10 classes)
    """
    require_dataset_name(name)
    load = _make_loader(name) if is_location(name) else DATASETS[name].load
    available_arguments = dict.fromkeys(_NORMALIZATION_ARGUMENTS, normalization)
    available_arguments |= {"data_dir": data_dir, "cache_dir": cache_dir}
    parameters = get_keyword_parameters(load)
    required_parameters = {p for p, default in parameters.items() if default is REQUIRED}
    unsupported = ", ".join(sorted(required_parameters - available_arguments.keys()))
    expected = "expected no required arguments except normalization, data_dir, cache_dir"
    if unsupported:
        raise ConfigError(
            f"{display_name('dataset')} = {name!r}: its function requires {unsupported}: {expected}"
        )
    try:
        dataset = call_with_supported(load, available_arguments)
    except ConfigError:
        raise
    except Exception as error:
        if is_read_by_package(name):
            raise
        reason = describe_error(error)
        raise ConfigError(
            f"{display_name('dataset')} = {name!r}: its function fails ({reason})"
        ) from error
    dataset = validate(f"return value of data set {name!r}", dataset, Dataset)
    if normalization is not None and parameters.keys().isdisjoint(_NORMALIZATION_ARGUMENTS):
        mean, std = get_normalization_constants(name, normalization, dataset.train_inputs)
        dataset = dataclasses.replace(dataset, mean=mean, std=std)
    if dataset.name != name:
        dataset = dataclasses.replace(dataset, name=name)
    dataset = validate_dataset(dataset)
    object.__setattr__(dataset, "origin", (name, normalization))
    return dataset


@validate_arguments
def register_dataset(name: str, load: Callable[..., Dataset], description: str = "") -> None:
    """Register a data set of the user for runs, sweeps and reports, until the process ends.

    Args:
      name: name of the data set in settings; `load_dataset` renames the returned data set to it.
      load: function that returns a `Dataset`. `normalization`, `data_dir` and `cache_dir` are
        passed if its signature has them. If it does not accept `normalization`, that setting
        replaces the mean and deviation of the returned data set.
      description: one line for `fedjax-het list`. Default: the first line of the docstring of
        `load`.

    Raises:
      ConfigError: if the name belongs to a data set of the package or is not an identifier, or if
        `load` is not a function.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import dataset_from_arrays, load_dataset, register_dataset
      >>> def load_blank():
      ...     images, labels = np.zeros((6, 8, 8, 1), np.uint8), np.arange(6) % 2
      ...     return dataset_from_arrays(images, labels, images, labels)
      >>> register_dataset("blank", load_blank)
      >>> load_dataset("blank")
      Dataset('blank': 6 train and 6 test images (8, 8, 1), 2 classes)
    """
    require(callable(load), "load", load, "a function that returns a Dataset")
    DATASETS.add(DatasetSpec(name, load, description or get_summary_line(load)))
