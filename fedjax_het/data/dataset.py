"""A data set in memory, and the checks that stand between a user's arrays and a federation."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fedjax_het.data.validation import (
    has_16_bit_pixels,
    require_labels_below,
    require_same_format,
    resolve_num_classes,
    validate_channel_constants,
    validate_domains,
    validate_images,
    validate_labels,
    validate_names,
    validate_std,
)
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.npz import digest_arrays
from fedjax_het.utils.validation import validate_arguments


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
    origin: what `load_dataset` loaded it as: (name, normalisation). None of any other, and of what
        is made of one: a part of a data set, or one with other constants, does not go by its name.
    checked: whether its arrays were: a run checks those of one that was put together by hand.

    The arrays are read-only. Build one with `load_dataset`, `load_image_folder` or
    `dataset_from_arrays`, which check them.
    """

    CONSTRUCTORS: ClassVar[str] = "load_dataset, load_image_folder or dataset_from_arrays give"

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
    # `dataclasses.replace` takes neither over.
    origin: tuple[str, str | None] | None = field(default=None, init=False, repr=False)
    is_validated: bool = field(default=False, init=False, repr=False)

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


@validate_arguments
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
    class_names: str | Sequence[str] = (),
    note: str = "",
    train_domains=None,
    test_domains=None,
    domain_names: Sequence[str] = (),
    server_images=None,
    server_labels=None,
) -> Dataset:
    """Make a `Dataset` of the user's own arrays.

    Images are [N, H, W, C]: integers in 0..255 (kept as uint8), finite floats in [0, 1] or already
    standardised (kept as float32), or uint16 of which some pixel is above 255: those are of 16 bits
    and become floats in [0, 1], 65535 being 1. Labels are integers in [0, num_classes);
    `num_classes` defaults to the largest label plus one, if at least a tenth of so many classes (or
    of more than a hundred) have examples. `mean` and `std` default to those of the training images,
    per channel. For images of several domains, `train_domains` and `test_domains`
    give each one's, integers in [0, number of domains); `domain_names` default to these numbers.
    Every domain needs test images, so that its accuracy is a number.

    `server_images` and `server_labels` are what a server learns from under `server_data="user"`:
    at least one image, of the type and shape of the training images.

    Arrays of the final type are not copied: do not change them afterwards.
    Raises `ConfigError` naming the argument, its value and what is expected.
    """
    is_16_bit = has_16_bit_pixels((train_images, test_images, server_images))
    train_images = validate_images("train_images", train_images, is_16_bit=is_16_bit)
    test_images = validate_images("test_images", test_images, is_16_bit=is_16_bit)
    require_same_format("test_images", test_images, train_images)
    train_labels = validate_labels("train_labels", train_labels, "train_images", train_images)
    test_labels = validate_labels("test_labels", test_labels, "test_images", test_images)
    labels = {"train_labels": train_labels, "test_labels": test_labels}
    num_classes = resolve_num_classes(num_classes, labels)
    if not isinstance(class_names, str):  # of which every letter is a class's
        class_names = validate_names("class_names", class_names)
    class_names = tuple(class_names)
    expected = f"{num_classes} names, one for each class, or none"
    require(len(class_names) in (0, num_classes), "class_names", class_names[:10], expected)

    if mean is None or std is None:
        train_mean, train_std = compute_channel_statistics(train_images)
        mean = train_mean if mean is None else mean
        std = train_std if std is None else std
    mean = validate_channel_constants("mean", mean, train_images.shape[-1])
    std = validate_std(std, train_images.shape[-1])
    train_domains, test_domains, domain_names = validate_domains(
        {"train_domains": train_domains, "test_domains": test_domains},
        domain_names,
        (train_images, test_images),
    )
    server_images, server_labels = validate_server_examples(
        server_images, server_labels, train_images, num_classes, is_16_bit=is_16_bit
    )

    arrays = (train_images, train_labels, test_images, test_labels, train_domains, test_domains)
    for array in (*arrays, server_images, server_labels):
        if array is not None:
            array.setflags(write=False)
    dataset = Dataset(
        name=name,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        num_classes=num_classes,
        mean=mean,
        std=std,
        class_names=class_names,
        note=note,
        train_domains=train_domains,
        test_domains=test_domains,
        domain_names=domain_names,
        server_images=server_images,
        server_labels=server_labels,
    )
    object.__setattr__(dataset, "is_validated", True)
    return dataset


def validate_dataset(dataset: Any) -> Dataset:
    """A data set that is passed to a run, its arrays checked if it was put together by hand.
    ConfigError, also for anything else."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"dataset = a {type(dataset).__name__}: expected a Dataset, as {Dataset.CONSTRUCTORS}"
        )
    if dataset.is_validated:
        return dataset
    field_values = {f.name: getattr(dataset, f.name) for f in dataclasses.fields(dataset) if f.init}
    return dataset_from_arrays(**field_values)


def validate_server_examples(
    server_images: Any,
    server_labels: Any,
    train_images: np.ndarray,
    num_classes: int,
    *,
    is_16_bit: bool = False,
) -> tuple[Any, Any]:
    """-> (server_images, server_labels), both None where neither is given."""
    if server_images is None and server_labels is None:
        return None, None
    for argument, values in (("server_images", server_images), ("server_labels", server_labels)):
        require(values is not None, argument, values, "an array, as the other of the two is given")
    server_images = validate_images("server_images", server_images, is_16_bit=is_16_bit)
    require_same_format("server_images", server_images, train_images)
    server_labels = validate_labels("server_labels", server_labels, "server_images", server_images)
    require_labels_below("server_labels", server_labels, num_classes)
    return server_images, server_labels


def compute_channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
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
