"""The idx files of MNIST, Fashion-MNIST and EMNIST: plain, compressed, or in EMNIST's zip."""

import gzip
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.source import (
    FILE_ORDER,
    READ_ERRORS,
    Content,
    PublishedDataset,
    Source,
    read_file,
    require_folder,
    require_labels,
    without_cache,
)
from fedjax_het.utils.errors import ConfigError

# Folders within the user's folder: torchvision and the authors' archives make them.
_FOLDERS = {
    "mnist": ("", "MNIST/raw", "mnist", "raw"),
    "fashion_mnist": ("", "FashionMNIST/raw", "fashion_mnist", "fashion-mnist", "raw"),
    "emnist": ("", "EMNIST/raw", "emnist", "gzip", "raw"),
}
_ZIP_FILES = ("gzip.zip", "emnist.zip", "emnist-gzip.zip")
_CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
# The files of both have the same names; the first training labels tell them apart.
_FIRST_LABELS = {
    "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5],
    "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9],
}
_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 8  # code of the type in the magic number


def find_idx(dataset: PublishedDataset, root: Path) -> Callable[[Any], Content] | None:
    """Find the idx files of MNIST, Fashion-MNIST or a part of EMNIST.

    Args:
      dataset: the data set.
      root: folder of the files, or a folder that contains it, as torchvision makes it.

    Returns:
      A function `(cache_dir) -> content`, or None.
    """
    if dataset.builder not in _FOLDERS:
        return None
    is_emnist = dataset.builder == "emnist"
    prefix, test = (f"emnist-{dataset.configs[0]}-", "test") if is_emnist else ("", "t10k")
    splits = {"train": f"{prefix}train", "test": f"{prefix}{test}"}
    for folder in (root / name for name in _FOLDERS[dataset.builder]):
        archives = [folder / name for name in _ZIP_FILES] if is_emnist else []
        for place in (folder, *filter(Path.is_file, archives)):
            if _find_file(place, f"{splits['train']}-images", 3) is not None:
                return without_cache(_read, dataset, place, splits)
    return None


def read_idx_folder(location: str, cache_dir: Any = None) -> Content:
    """Read images and labels from idx files that have the names of MNIST's, such as KMNIST's.

    Args:
      location: folder of train-images-idx3-ubyte, train-labels-idx1-ubyte, and these with `t10k` or
        `test` in place of `train`; plain or with the suffix .gz, and with any beginning of the
        names.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`.

    Raises:
      ConfigError: if a file is missing or damaged.
    """
    folder, arrays = Path(location), dict[str, np.ndarray]()
    require_folder(folder)
    for split, words in (("train", ("train",)), ("test", ("t10k", "test"))):
        paths = []
        for kind, rank in (("images", 3), ("labels", 1)):
            patterns = [f"*{word}-{kind}?idx{rank}-ubyte*" for word in words]
            found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
            if len(found) != 1:
                names = ", ".join(path.name for path in found) or "none"
                raise ConfigError(f"{folder}: expected one file {patterns[0]}, found {names}")
            paths += found
        images, labels = _read_split(*paths)
        arrays |= {f"{split}_inputs": images, f"{split}_labels": labels.astype(np.int32)}
    return arrays, {"source": "idx", "order": FILE_ORDER}


def _find_file(place: Path, name: str, rank: int) -> Any:
    """Return the path of a file in a folder or a zip archive; None if there is none."""
    if place.is_file():
        try:
            folder: Any = zipfile.Path(place)
        except (zipfile.BadZipFile, OSError) as error:
            raise ConfigError(f"{place} cannot be read as a zip archive ({error})") from error
        folders = [folder, folder / "gzip"]
    else:
        folders = [place]
    names = (f"{name}-idx{rank}-ubyte", f"{name}.idx{rank}-ubyte")
    paths = (p / (n + suffix) for p in folders for n in names for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _read(dataset: PublishedDataset, place: Path, splits: dict[str, str]) -> Content:
    class_names = tuple(dataset.class_names) or _CLASS_NAMES[dataset.builder]
    arrays = {}
    for split, name in splits.items():
        paths = []
        for kind, rank in (("images", 3), ("labels", 1)):
            paths.append(_find_file(place, f"{name}-{kind}", rank))
            if paths[-1] is None:
                raise ConfigError(f"no file {name}-{kind}-idx{rank}-ubyte or .gz in {place}")
        images, labels = _read_split(*paths)
        if dataset.is_transposed:
            images = images.swapaxes(1, 2)
        arrays[f"{split}_inputs"] = np.ascontiguousarray(images)
        arrays[f"{split}_labels"] = require_labels(paths[1], labels, class_names)
    first_labels = arrays["train_labels"][:12].tolist()
    for other, other_labels in _FIRST_LABELS.items():
        if other != dataset.builder and first_labels == other_labels:
            raise ConfigError(f"{place} has the files of {other}: expected {dataset.builder}")
    facts = {"class_names": list(class_names), "source": f"idx files in {place.name}"}
    return arrays, {**facts, "order": FILE_ORDER}


def _read_split(images_path: Any, labels_path: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the images `[N, H, W, 1]` and the labels `[N]` of a split."""
    images, labels = read_idx(images_path, 3)[..., None], read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ConfigError(
            f"{labels_path} has {len(labels):,} labels: expected {len(images):,}, one for each "
            "image"
        )
    return images, labels


def read_idx(path: Any, rank: int) -> np.ndarray:
    """Read an idx file of bytes.

    The format is described at http://yann.lecun.com/exdb/mnist: a magic number with type and rank,
    the sizes as 32-bit integers, and the values.

    Args:
      path: a path, or an object with `read_bytes`; content compressed by gzip is recognized.
      rank: expected number of axes.

    Returns:
      Values, uint8, with `rank` axes.

    Raises:
      ConfigError: if the file is missing, has another magic number, or is too short or too long.
    """
    content = read_file(path)
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except READ_ERRORS as error:
            raise ConfigError(f"{path} cannot be decompressed ({error})") from error
    magic = bytes((0, 0, _UINT8, rank))
    if content[:4] != magic:
        raise ConfigError(
            f"{path} has the magic number 0x{content[:4].hex()}: expected 0x{magic.hex()}, an idx "
            f"file of bytes with {rank} axes"
        )
    header_size = 4 + 4 * rank
    shape = np.frombuffer(content[4:header_size].ljust(4 * rank, b"\0"), ">u4").tolist()
    if len(content) != header_size + math.prod(shape):
        raise ConfigError(
            f"{path} has {len(content):,} bytes: expected {header_size + math.prod(shape):,} for "
            f"the shape {tuple(shape)} that it states"
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


SOURCE = Source(
    "idx",
    "idx:FOLDER, files with the names of MNIST's, plain or gzip; for mnist, fashion_mnist and emnist_*",
    read=read_idx_folder,
    find=find_idx,
    files={
        "mnist": "train-images-idx3-ubyte(.gz) and its three companions",
        "fashion_mnist": "train-images-idx3-ubyte(.gz) and its three companions",
        "emnist_balanced": "gzip.zip or emnist-balanced-train-images-idx3-ubyte(.gz)",
        "emnist_byclass": "gzip.zip or emnist-byclass-train-images-idx3-ubyte(.gz)",
    },
)
