"""CIFAR-10 and CIFAR-100 as their authors publish them, in the binary and the Python version."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.source import (
    FILE_ORDER,
    Content,
    PublishedDataset,
    Source,
    find_folder,
    read_file,
    read_lines,
    read_records,
    require_labels,
    to_rows,
    without_cache,
)
from fedjax_het.utils.errors import ConfigError, summarize_error

_SHAPE = (3, 32, 32)
_NUM_PIXELS = 3 * 32 * 32
# Files of both splits, folders of the binary and the Python version, files of class names.
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_SPLITS: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {"train": _BATCHES, "test": ("test_batch",)},
    "cifar100": {"train": ("train",), "test": ("test",)},
}
_BINARY_FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
_PYTHON_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_BINARY_NAMES = {"cifar10": "batches.meta.txt", "cifar100": "fine_label_names.txt"}
_PYTHON_NAMES = {
    "cifar10": ("batches.meta", "label_names"),
    "cifar100": ("meta", "fine_label_names"),
}
_PYTHON_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}
_NUM_LABEL_BYTES = {"cifar10": 1, "cifar100": 2}  # the last one is the label, the other its group
# Objects that the files contain, under their names in old and new versions of NumPy.
_reconstruct = np.zeros(0).__reduce__()[0]
_ALLOWED_OBJECTS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): lambda text, encoding: str(text).encode("latin1"),
}


def find_cifar(dataset: PublishedDataset, root: Path) -> Callable[[Any], Content] | None:
    """Find the files of CIFAR-10 or CIFAR-100.

    Args:
      dataset: the data set.
      root: folder of the files, or the folder that contains it. The binary version is preferred.

    Returns:
      A function `(cache_dir) -> content`, or None.
    """
    name = dataset.name
    if name not in _SPLITS:
        return None
    first_file = _SPLITS[name]["train"][0]
    if folder := find_folder(root, ("", _BINARY_FOLDERS[name]), f"{first_file}.bin"):
        return without_cache(_read_binary, name, folder)
    if folder := find_folder(root, ("", _PYTHON_FOLDERS[name]), first_file):
        return without_cache(_read_python, name, folder)
    return None


def _read_binary(name: str, folder: Path) -> Content:
    class_names = read_lines(folder / _BINARY_NAMES[name])
    num_label_bytes = _NUM_LABEL_BYTES[name]

    def read(file: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / f"{file}.bin"
        records = read_records(path, num_label_bytes + _NUM_PIXELS)
        labels = require_labels(path, records[:, num_label_bytes - 1], class_names)
        return records[:, num_label_bytes:], labels

    return _join(name, read, class_names, f"binary version in {folder.name}")


def _read_python(name: str, folder: Path) -> Content:
    file, key = _PYTHON_NAMES[name]
    class_names = _get_list(folder / file, _unpickle(folder / file), key, str)

    def read(file: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / file
        batch = _unpickle(path)
        pixels: Any = batch.get("data")
        labels = np.array(_get_list(path, batch, _PYTHON_LABELS[name], int), np.int64)
        shape = (len(labels), _NUM_PIXELS)
        is_array = isinstance(pixels, np.ndarray)
        if not is_array or (pixels.dtype, pixels.shape) != (np.uint8, shape):
            raise ConfigError(f"{path}: expected data, uint8 [{len(labels)}, {_NUM_PIXELS}]")
        return pixels, require_labels(path, labels, class_names)

    return _join(name, read, class_names, f"Python version in {folder.name}")


def _join(
    name: str,
    read: Callable[[str], tuple[np.ndarray, np.ndarray]],
    class_names: list[str],
    source: str,
) -> Content:
    """Read the files of both splits."""
    arrays = {}
    for split, files in _SPLITS[name].items():
        pixels, labels = zip(*map(read, files), strict=True)
        arrays[f"{split}_inputs"] = to_rows(np.concatenate(pixels), _SHAPE)
        arrays[f"{split}_labels"] = np.concatenate(labels)
    return arrays, {"class_names": class_names, "source": source, "order": FILE_ORDER}


class _RestrictedUnpickler(pickle.Unpickler):
    """Loads numbers, texts, lists, dictionaries and arrays, and no other object."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_OBJECTS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of CIFAR's files")
        return _ALLOWED_OBJECTS[module, name]


def _unpickle(path: Path) -> dict[str, Any]:
    content = io.BytesIO(read_file(path))
    try:
        batch = _RestrictedUnpickler(content, encoding="latin1").load()
    except Exception as error:  # damaged files raise errors of many types
        reason = summarize_error(error)
        raise ConfigError(
            f"{path} cannot be read ({reason}): expected a file of CIFAR's Python version"
        ) from error
    if not isinstance(batch, dict):
        raise ConfigError(f"{path}: expected a dictionary of CIFAR's Python version")
    # Files that Python 3 wrote have bytes as keys.
    return {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}


def _get_list(path: Path, batch: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = batch.get(key)
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path} has no list {key!r}: expected a file of CIFAR's Python version")
    values = [v.decode("latin1") if isinstance(v, bytes) else v for v in values]
    if any(type(value) is not kind for value in values):
        raise ConfigError(f"{path}: expected a list of {kind.__name__} as {key!r}")
    return values


SOURCE = Source(
    "cifar",
    "for cifar10 and cifar100: their authors' files, binary or Python version",
    find=find_cifar,
    files={
        name: f"{_BINARY_FOLDERS[name]} or {_PYTHON_FOLDERS[name]}, unpacked" for name in _SPLITS
    },
)
