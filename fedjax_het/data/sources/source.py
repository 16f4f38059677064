"""Records of sources of data: formats in which others publish or store labeled images."""

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.registry import format_entry, get_keyword_parameters

Content = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Arguments of `dataset_from_arrays`: arrays by name, and facts by name, such as class names."""
READ_ERRORS = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of missing and damaged files and archives, also of encrypted ones."""
FILE_ORDER = "files"
"""Order of examples as in the files of the authors."""
_READER_ARGUMENTS = ("location", "cache_dir")


@dataclass(frozen=True)
class PublishedDataset:
    """A data set that others publish, in one format or several.

    Attributes:
      name: name in messages and of the cache file.
      builder: name of its builder in tensorflow-datasets.
      configs: configurations of the builder; several are parts that are prepared one by one.
      is_transposed: whether rows and columns are exchanged, as in the original EMNIST files.
      class_names: name of each class, for data that only number their classes.
      read_prepared: function `(dataset, root, cache_dir) -> content` that reads the prepared data
        of tensorflow-datasets. Default: all images of the first configuration.
    """

    name: str
    builder: str
    configs: tuple[str, ...] = ("",)
    is_transposed: bool = False
    class_names: Sequence[str] = ()
    read_prepared: "Callable[[PublishedDataset, Path | None, Any], Content] | None" = None


class Source(NamedTuple):
    """Description of a source of data.

    Errors of its functions name the file and the expected content. Callers add the data set.

    Attributes:
      name: name of the source, the first part of `FORMAT:LOCATION`.
      description: one line for `fedjax-het list`.
      read: function `(location, cache_dir, **options) -> content`, for data of any name. None for
        a source of particular data sets.
      find: function `(dataset, root)` that looks for a published data set in a folder. It returns
        a function `(cache_dir) -> content`, or None without such files.
      files: accepted files and folders in words, by the name of the published data set.

    Example:
      >>> from fedjax_het.data.sources import SOURCES
      >>> SOURCES["images"].options
      {'size': None, 'color': True, 'use_valid': False, 'has_user_folders': False}
    """

    name: str
    description: str
    read: Callable[..., Content] | None = None
    find: Callable[[PublishedDataset, Path], Callable[[Any], Content] | None] | None = None
    files: Mapping[str, str] = MappingProxyType({})

    @property
    def options(self) -> dict[str, Any]:
        """Options of `read` by name, with their default or `REQUIRED`."""
        if self.read is None:
            return {}
        return get_keyword_parameters(self.read, exclude=_READER_ARGUMENTS)

    def __repr__(self) -> str:
        return format_entry(self)


def without_cache(read: Callable[..., Content], *arguments: Any) -> Callable[[Any], Content]:
    """Return a function `(cache_dir) -> content` of a reader that is fast without the cache.

    Args:
      read: the reader.
      *arguments: its arguments.

    Returns:
      The function, which ignores its argument.
    """
    return lambda cache_dir: read(*arguments)


def find_folder(root: Path, names: Sequence[str], required_file: str) -> Path | None:
    """Return the first of several folders that contains a file.

    Args:
      root: the folder of the user.
      names: folders within `root` in the order of preference; "" is `root` itself.
      required_file: name of the file.

    Returns:
      The folder, or None.
    """
    folders = (root / name for name in names)
    return next((folder for folder in folders if (folder / required_file).is_file()), None)


def require_folder(folder: Path, advice: str = "") -> None:
    """Raise ConfigError unless a folder exists.

    Args:
      folder: the folder.
      advice: end of the message.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}{advice}")


def list_files(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last change of files, which identify their contents.

    Args:
      paths: the files.

    Returns:
      A tuple for each file.

    Raises:
      ConfigError: if a file is missing.
    """
    listing = []
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"no file {path}")
        stat = path.stat()
        listing.append((path.name, stat.st_size, stat.st_mtime_ns))
    return listing


def read_file(path: Any) -> bytes:
    """Read a whole file.

    Args:
      path: a path, or an object with `read_bytes` such as `zipfile.Path`.

    Returns:
      The content.

    Raises:
      ConfigError: if the file is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, KeyError) as error:
        raise ConfigError(f"no file {path}") from error
    except READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason})") from error


def read_records(path: Path, num_bytes: int) -> np.ndarray:
    """Read a file of records of one size.

    Args:
      path: the file.
      num_bytes: number of bytes of a record.

    Returns:
      Records, uint8 `[N, num_bytes]`.

    Raises:
      ConfigError: if the file is missing or empty, or ends within a record.
    """
    content = read_file(path)
    if not content or len(content) % num_bytes:
        raise ConfigError(
            f"{path} has {len(content):,} bytes: expected a multiple of {num_bytes:,}, the size of "
            "an example"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, num_bytes)


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank.

    Raises:
      ConfigError: if the file is missing or no text.
    """
    try:
        lines = read_file(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text ({error.reason})") from error
    return [line.strip() for line in lines if line.strip()]


def require_labels(path: Any, labels: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
    """Require the labels of a file to be indices of classes.

    Args:
      path: the file, for the message.
      labels: labels, integers `[N]`.
      class_names: name of each class.

    Returns:
      The labels, int32 `[N]`.

    Raises:
      ConfigError: if a label is outside this range.
    """
    labels = labels.astype(np.int32)
    is_outside = (labels < 0) | (labels >= len(class_names))
    if is_outside.any():
        label = int(labels[is_outside][0])
        raise ConfigError(f"{path} has the label {label}: expected 0 to {len(class_names) - 1}")
    return labels


def to_rows(pixels: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Convert flat images in the order of channels, rows and columns.

    Args:
      pixels: `[N, C * H * W]`.
      shape: (C, H, W).

    Returns:
      Images `[N, H, W, C]`.
    """
    return np.ascontiguousarray(pixels.reshape(-1, *shape).transpose(0, 2, 3, 1))
