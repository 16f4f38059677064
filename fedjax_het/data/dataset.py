"""A data set in memory, and the checks that stand between a user's arrays and a federation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedjax_het.common.errors import ConfigError, is_whole, require
from fedjax_het.data.npz import digest_arrays

# Images that were standardised before they came here stay well within this; images in 0..255
# that were turned to floats do not.
MAX_FLOAT_PIXEL = 20.0


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images for training and test, held on the host.

    train_images, test_images: [N, H, W, C], uint8; or float32, for a user's own float arrays.
    train_labels, test_labels: [N] int32 in [0, num_classes).
    mean, std: per channel, of images scaled to [0, 1] (float images: of the values as they are).
        A model sees `(x / 255 - mean) / std` for uint8 and `(x - mean) / std` for floats.
        Other constants: `dataclasses.replace(dataset, mean=..., std=...)`.
    note: what a reader of results must know, e.g. that the images were re-encoded with loss.
    train_domains, test_domains: [N] int32, positions in `domain_names`: where an image is from, in
        sets of several domains (clipart, photographs, ...); None in others.
    server_images, server_labels: examples of the server's own, for `server_data="user"`; like those
        of training. None where the user gave none.

    The arrays are read-only. Build one with `load_dataset`, `load_image_folder` or
    `dataset_from_arrays`, which check them.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    note: str = ""
    train_domains: np.ndarray | None = None
    test_domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()
    server_images: np.ndarray | None = None
    server_labels: np.ndarray | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return tuple(self.train_images.shape[1:])

    def digest(self) -> str:
        """SHA-256 (hex) of images, labels, class count, mean and std, domains, the server's own
        examples; computed once.

        About 1 s per GB of images on first use. Names and note do not enter.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        arrays: dict[str, Any] = {
            "train_images": self.train_images,
            "train_labels": self.train_labels,
            "test_images": self.test_images,
            "test_labels": self.test_labels,
        }
        constants: dict[str, Any] = {
            "num_classes": self.num_classes,
            "mean": self.mean,
            "std": self.std,
        }
        if self.domain_names:  # else the digest is what it was before there were domains
            arrays |= {"train_domains": self.train_domains, "test_domains": self.test_domains}
            constants["num_domains"] = len(self.domain_names)
        if self.server_images is not None:
            arrays |= {"server_images": self.server_images, "server_labels": self.server_labels}
        return digest_arrays(arrays, constants)

    def __repr__(self) -> str:
        domains = f", {len(self.domain_names)} domains" if self.domain_names else ""
        return (
            f"Dataset({self.name!r}: {len(self.train_labels):,} train and {len(self.test_labels):,}"
            f" test images {self.input_shape}, {self.num_classes} classes{domains})"
        )


def dataset_from_arrays(
    train_images,
    train_labels,
    test_images,
    test_labels,
    *,
    name: str = "user",
    num_classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    class_names: Sequence[str] = (),
    note: str = "",
    train_domains=None,
    test_domains=None,
    domain_names: Sequence[str] = (),
    server_images=None,
    server_labels=None,
) -> Dataset:
    """Make a `Dataset` of the user's own arrays.

    Images are [N, H, W, C]: integers in 0..255 (kept as uint8), or finite floats in [0, 1] or
    already standardised (kept as float32). Labels are integers in [0, num_classes);
    `num_classes` defaults to the largest label plus one. `mean` and `std` default to those of the
    training images, per channel. For images of several domains, `train_domains` and `test_domains`
    give each one's, integers in [0, number of domains); `domain_names` default to these numbers.
    Every domain needs test images, so that its accuracy is a number.

    `server_images` and `server_labels` are what a server learns from under `server_data="user"`:
    at least one image, of the type and shape of the training images.

    Arrays of the final type are not copied: do not change them afterwards.
    Raises `ConfigError` naming the argument, its value and what is expected.
    """
    train_images = _checked_images("train_images", train_images)
    test_images = _checked_images("test_images", test_images)
    _require_alike("test_images", test_images, train_images)
    train_labels = _checked_labels("train_labels", train_labels, "train_images", train_images)
    test_labels = _checked_labels("test_labels", test_labels, "test_images", test_images)

    largest = int(max(train_labels.max(), test_labels.max()))
    if num_classes is None:
        num_classes = largest + 1
    require(is_whole(num_classes, 2), "num_classes", num_classes, "an integer >= 2")
    for argument, labels in (("train_labels", train_labels), ("test_labels", test_labels)):
        if labels.max() >= num_classes:
            raise _label_beyond(argument, labels, num_classes)
    class_names = tuple(str(class_name) for class_name in class_names)
    require(
        len(class_names) in (0, num_classes),
        "class_names",
        class_names,
        f"{num_classes} names, one for each class, or none",
    )

    if mean is None or std is None:
        measured_mean, measured_std = channel_statistics(train_images)
        mean = measured_mean if mean is None else mean
        std = measured_std if std is None else std
    channels = train_images.shape[-1]
    mean = _checked_constants("mean", mean, channels)
    std = _checked_constants("std", std, channels)
    require(min(std) > 0, "std", std, "positive numbers")

    train_domains, test_domains, domain_names = _checked_domains(
        train_domains, test_domains, domain_names, train_images, test_images
    )

    server_images, server_labels = checked_server_examples(
        server_images, server_labels, train_images, num_classes
    )

    arrays = (train_images, train_labels, test_images, test_labels, train_domains, test_domains)
    for array in (*arrays, server_images, server_labels):
        if array is not None:
            array.setflags(write=False)
    return Dataset(
        name=name,
        train_images=train_images,
        train_labels=train_labels.astype(np.int32, copy=False),
        test_images=test_images,
        test_labels=test_labels.astype(np.int32, copy=False),
        num_classes=int(num_classes),
        mean=mean,
        std=std,
        class_names=class_names,
        note=note,
        train_domains=train_domains,
        test_domains=test_domains,
        domain_names=tuple(domain_names),
        server_images=server_images,
        server_labels=server_labels,
    )


def checked_server_examples(server_images, server_labels, train_images, num_classes):
    """-> (server_images, server_labels), both None where neither is given."""
    if server_images is None and server_labels is None:
        return None, None
    for argument, given in (("server_images", server_images), ("server_labels", server_labels)):
        require(given is not None, argument, given, "an array, as the other of the two is given")
    server_images = _checked_images("server_images", server_images)
    _require_alike("server_images", server_images, train_images)
    server_labels = _checked_labels("server_labels", server_labels, "server_images", server_images)
    if server_labels.max() >= num_classes:
        raise _label_beyond("server_labels", server_labels, num_classes)
    return server_images, server_labels


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of [N, H, W, C] images (uint8: scaled to [0, 1]).

    Exact for uint8, which is counted level by level. A constant channel gets a deviation of 1.
    """
    means, deviations = [], []
    for channel in range(images.shape[-1]):
        values = images[..., channel]
        if images.dtype == np.uint8:
            counts, levels = np.bincount(values.ravel(), minlength=256), np.arange(256) / 255
            mean = np.average(levels, weights=counts)
            deviation = np.sqrt(np.average((levels - mean) ** 2, weights=counts))
        else:
            mean, deviation = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        means.append(float(mean))
        deviations.append(float(deviation) if deviation > 1e-8 else 1.0)
    return tuple(means), tuple(deviations)


def _checked_images(argument: str, images) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim != 4:
        raise ConfigError(
            f"shape of {argument} = {images.shape}: expected [N, H, W, C] "
            "(grey images need a last axis of 1)"
        )
    require(images.size > 0, f"shape of {argument}", images.shape, "at least one image and pixel")
    if images.dtype == np.uint8:
        # A view, so that making it read-only leaves the user's own array as it was.
        return np.ascontiguousarray(images).view()
    if np.issubdtype(images.dtype, np.integer):
        low, high = int(images.min()), int(images.max())
        require(
            low >= 0 and high <= 255, f"range of {argument}", (low, high), "0..255 for integers"
        )
        return images.astype(np.uint8)
    require(
        np.issubdtype(images.dtype, np.floating),
        f"dtype of {argument}",
        str(images.dtype),
        "uint8, or floats",
    )
    lowest, highest = float(images.min()), float(images.max())  # NaN, if there is one, wins both
    if not np.isfinite([lowest, highest]).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(images))[0])
        raise ConfigError(f"{argument}[{bad}] = {images[bad]}: expected finite numbers")
    require(
        lowest >= -MAX_FLOAT_PIXEL and highest <= MAX_FLOAT_PIXEL,
        f"range of {argument}",
        (lowest, highest),
        "floats in [0, 1] or standardised ones (pass images in 0..255 as uint8)",
    )
    return np.ascontiguousarray(images, dtype=np.float32).view()


def _require_alike(argument: str, images: np.ndarray, train_images: np.ndarray) -> None:
    pairs = {
        "shape": (images.shape[1:], train_images.shape[1:]),
        "dtype": (images.dtype, train_images.dtype),
    }
    for what, (ours, theirs) in pairs.items():
        require(ours == theirs, f"{what} of {argument}", str(ours), f"that of training, {theirs}")


def _label_beyond(argument: str, labels: np.ndarray, num_classes: int) -> ConfigError:
    return ConfigError(
        f"{argument}[{int(labels.argmax())}] = {int(labels.max())}: "
        f"expected a label in [0, {num_classes})"
    )


def _checked_domains(train_domains, test_domains, domain_names, train_images, test_images):
    """-> (train_domains, test_domains, domain_names); (None, None, ()) of a set without domains."""
    domain_names = tuple(str(name) for name in domain_names)
    given = {"train_domains": train_domains, "test_domains": test_domains}
    absent = [argument for argument, domains in given.items() if domains is None]
    if len(absent) == 2:
        require(not domain_names, "domain_names", domain_names, "none without train_domains")
        return None, None, ()
    require(not absent, (absent or [""])[0], None, "an array, as the other split has domains")
    train_domains, test_domains = (
        _checked_labels(argument, domains, argument.replace("domains", "images"), images, "domain")
        for (argument, domains), images in zip(
            given.items(), (train_images, test_images), strict=True
        )
    )
    largest = int(max(train_domains.max(), test_domains.max()))
    domain_names = domain_names or tuple(str(domain) for domain in range(largest + 1))
    # Measures are named after domains, and their mean over these is of `domains`.
    distinct = len(set(domain_names)) == len(domain_names) and not {"", "domains"} & {*domain_names}
    require(
        distinct and len(domain_names) > largest,
        "domain_names",
        domain_names,
        f"a different name, not 'domains', for each of at least {largest + 1} domains",
    )
    sizes = np.bincount(test_domains, minlength=len(domain_names))
    if sizes.min() == 0:
        name = domain_names[int(sizes.argmin())]
        raise ConfigError(f"test_domains: no test image of domain {name!r}: expected at least one")
    return train_domains, test_domains, domain_names


def _checked_labels(
    argument: str, labels, images_argument: str, images, kind: str = "label"
) -> np.ndarray:
    labels = np.asarray(labels)
    require(labels.ndim == 1, f"shape of {argument}", labels.shape, f"[N], a {kind} for each image")
    if len(labels) != len(images):
        raise ConfigError(
            f"len({argument}) = {len(labels)}: expected len({images_argument}) = {len(images)}"
        )
    require(
        np.issubdtype(labels.dtype, np.integer),
        f"dtype of {argument}",
        str(labels.dtype),
        "integers",
    )
    if labels.min() < 0 or labels.max() > np.iinfo(np.int32).max:
        bad = int(labels.argmin()) if labels.min() < 0 else int(labels.argmax())
        raise ConfigError(f"{argument}[{bad}] = {int(labels[bad])}: expected a {kind} >= 0")
    return np.ascontiguousarray(labels, dtype=np.int32).view()


def _checked_constants(argument: str, values, channels: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    require(
        len(numbers) == channels and bool(np.isfinite(numbers).all()),
        argument,
        values,
        f"{channels} finite numbers, one for each channel",
    )
    return numbers
