"""The data sets that settings can name."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fedjax_het.data.dataset import Dataset, dataset_from_arrays, validate_dataset
from fedjax_het.data.normalization import get_normalization_constants
from fedjax_het.data.sources import domainnet
from fedjax_het.data.sources.cinic10 import read_cinic10
from fedjax_het.data.sources.digits import read_digits
from fedjax_het.data.sources.emnist import select_first_45_classes
from fedjax_het.data.sources.tfds import TfdsSource, decode_splits, load_prepared
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.introspection import (
    REQUIRED,
    call_with_supported,
    get_keyword_parameters,
    get_summary_line,
)
from fedjax_het.utils.registry import Registry
from fedjax_het.utils.validation import validate_arguments

ArrayReader = Callable[
    ..., tuple[dict[str, np.ndarray], dict]
]  # (data_dir, cache_dir) -> arrays, meta


class DatasetSpec(NamedTuple):
    """A data set that can be named.

    load: returns its `Dataset`. `normalisation`, `data_dir` and `cache_dir`, those of
        `load_dataset`, are passed where its signature has them.
    source: where tensorflow-datasets keeps it, for `python -m fedjax_het.data.prepare`; None where
        there is nothing to prepare.
    """

    name: str
    load: Callable[..., Dataset]
    description: str = ""
    source: TfdsSource | None = None


def _make_dataset_spec(
    name: str, read: ArrayReader, description: str, source: TfdsSource | None = None
) -> DatasetSpec:
    """A set of the package's own: what `read` gives, normalised as the papers do."""

    def load(*, normalisation=None, data_dir=None, cache_dir=None) -> Dataset:
        arrays, meta = read(data_dir, cache_dir)
        mean, std = get_normalization_constants(name, normalisation, arrays["train_images"])
        return dataset_from_arrays(
            **arrays,
            name=name,
            num_classes=len(meta["class_names"]),
            mean=mean,
            std=std,
            class_names=meta["class_names"],
            domain_names=meta.get("domain_names", ()),
            note=meta.get("note", ""),
        )

    return DatasetSpec(name, load, description, source)


def _make_tfds_spec(
    source: TfdsSource,
    description: str,
    *,
    name: str | None = None,
    transform: Callable | None = None,
) -> DatasetSpec:
    """A set of tensorflow-datasets, or the `part(arrays, meta) -> (arrays, meta)` of one."""

    def read(data_dir, cache_dir):
        arrays, meta = load_prepared(source, partial(decode_splits, source), data_dir, cache_dir)
        return (arrays, meta) if transform is None else transform(arrays, meta)

    return _make_dataset_spec(name or source.name, read, description, source)


# EMNIST's merged labels: lower-case letters that look unlike their capitals keep a class.
_EMNIST_BALANCED_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
_EMNIST_BYCLASS_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_EMNIST_BALANCED = TfdsSource(
    "emnist_balanced", "emnist", ("balanced",), True, tuple(_EMNIST_BALANCED_CLASSES)
)
_EMNIST_BYCLASS = TfdsSource(
    "emnist_byclass", "emnist", ("byclass",), True, tuple(_EMNIST_BYCLASS_CLASSES)
)

DATASETS: Registry[DatasetSpec] = Registry(
    "data set",
    (
        _make_dataset_spec(
            "digits",
            read_digits,
            "scikit-learn's digits: 1,797 grey 8x8 images, 10 classes; needs no download",
        ),
        _make_tfds_spec(
            TfdsSource("mnist", "mnist"), "MNIST: 60,000 + 10,000 grey 28x28 images, 10 classes"
        ),
        _make_tfds_spec(
            TfdsSource("fashion_mnist", "fashion_mnist"),
            "Fashion-MNIST: 60,000 + 10,000 grey 28x28 images, 10 classes",
        ),
        _make_tfds_spec(
            TfdsSource("cifar10", "cifar10"),
            "CIFAR-10: 50,000 + 10,000 colour 32x32 images, 10 classes",
        ),
        _make_tfds_spec(
            TfdsSource("cifar100", "cifar100"),
            "CIFAR-100: 50,000 + 10,000 colour 32x32 images, 100 classes",
        ),
        _make_dataset_spec(
            "cinic10",
            read_cinic10,
            "CINIC-10: 90,000 + 90,000 colour 32x32 images, 10 classes; an image folder",
        ),
        _make_tfds_spec(
            _EMNIST_BALANCED, "EMNIST Balanced: 112,800 + 18,800 grey 28x28 images, 47 classes"
        ),
        _make_tfds_spec(
            _EMNIST_BALANCED,
            "EMNIST Balanced without r and t, for FSL: 108,000 + 10,000 images, 45 classes",
            name="emnist_45",
            transform=select_first_45_classes,
        ),
        _make_tfds_spec(
            _EMNIST_BYCLASS, "EMNIST ByClass: 697,932 + 116,323 grey 28x28 images, 62 classes"
        ),
        _make_dataset_spec(
            "domainnet",
            domainnet.read_domainnet,
            "DomainNet, FedBN's ten classes: about 22,500 colour images at 64x64, 6 domains",
            domainnet.SOURCE,
        ),
        _make_tfds_spec(
            TfdsSource("stl10", "stl10"),
            "STL-10, the labelled part: 5,000 + 8,000 colour 96x96 images, 10 classes",
        ),
    ),
    argument="dataset",
)


@validate_arguments
def load_dataset(
    name: str,
    *,
    normalisation: str | None = None,
    data_dir: str | os.PathLike | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Load one of `DATASETS`. The package's own are decoded once, then read from the cache in well
    under a second.

    normalisation: whose constants, one of `fedjax_het.data.NORMALISATIONS`; by default DynaFed's
        where it has them (it gives Fashion-MNIST those of MNIST), else the training set's own; of a
        user's set, what its function gives.
    data_dir: where the data are. For `cinic10`, the folder of train/ and test/ (default:
        $CINIC10_DIR). Otherwise a folder of tensorflow-datasets prepared in array_record format
        (default: $TFDS_DATA_DIR), read without TensorFlow; where none is named or there, a decoded
        set in the cache serves, which may be a copy of another machine's. `digits` is embedded.
    cache_dir: see `fedjax_het.data.array_cache.dataset_cache_folder`.

    What is loaded goes by its name in results (`Dataset.origin`), unless it is changed.

    Raises `ConfigError` for an unknown name or preset, for data that are missing or cannot be read
    (it says what to set or run), and for a user's function that returns no `Dataset`.
    """
    load = DATASETS.require(name).load
    available_arguments = {
        "normalisation": normalisation,
        "data_dir": data_dir,
        "cache_dir": cache_dir,
    }
    required_parameters = [
        parameter
        for parameter, default in get_keyword_parameters(load).items()
        if default is REQUIRED
    ]
    if unsupported := [
        parameter for parameter in required_parameters if parameter not in available_arguments
    ]:
        raise ConfigError(
            f"dataset = {name!r}: its function needs {', '.join(unsupported)}: expected one that takes "
            f"nothing but {', '.join(available_arguments)}"
        )
    dataset = call_with_supported(load, available_arguments)
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise ConfigError(
            f"dataset = {name!r}: its function returns a {kind}: expected a Dataset, as of "
            "dataset_from_arrays"
        )
    if normalisation is not None and "normalisation" not in get_keyword_parameters(load):
        mean, std = get_normalization_constants(name, normalisation, dataset.train_images)
        dataset = dataclasses.replace(dataset, mean=mean, std=std)
    if dataset.name != name:
        dataset = dataclasses.replace(dataset, name=name)
    dataset = validate_dataset(dataset)
    object.__setattr__(dataset, "origin", (name, normalisation))
    return dataset


@validate_arguments
def register_dataset(name: str, load: Callable[..., Dataset], description: str = "") -> None:
    """Make a data set of one's own known to runs, sweeps and reports, as long as this process
    lasts.

        def scans(data_dir): return load_image_folder(Path(data_dir) / "scans")

        register_dataset("scans", scans)
        RunSpec("fedavg", "scans")

    load: returns a `Dataset`, which then has this name. `normalisation`, `data_dir` and `cache_dir`
        are passed where its signature has them; where it takes no `normalisation`, that setting
        replaces the mean and deviation of what it returns.
    description: for `fedjax-het list`; by default the first line of the docstring.

    Raises: ConfigError for a name of the package's own or no word, or for what is no function.
    """
    require(callable(load), "load", load, "a function that returns a Dataset")
    DATASETS.add(DatasetSpec(name, load, description or get_summary_line(load)))
