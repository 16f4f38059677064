"""Data sets without images that are read from the files of their authors, and readers of tables."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.data.array_cache import load_cached_arrays, load_or_build_arrays
from fedjax_het.data.sources.source import FILE_ORDER, Content, list_files
from fedjax_het.data.sources.tfds import resolve_data_root
from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError, display_name, summarize_error

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class AuthorDataset:
    """A data set that is read from files of its authors in a user's folder.

    Attributes:
      name: name of the data set in settings, also of its cache file.
      description: one line for `fedjax-het list`.
      folders: folders within the user's folder, in the order of preference; "" is the user's folder
        itself. The folder with the first file is read.
      files: paths of the files in the folder; `.gz` may follow.
      read: function `paths -> (arrays, facts)` of the path of each file by its entry in `files`.
        Errors name the file.
      defaults: default settings of runs, such as a network that accepts the inputs.
      other_files: paths of files with equal content in another format, read without `files`.
    """

    name: str
    description: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[Mapping[str, Path]], Content]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_files: tuple[str, ...] = ()

    def load(self, data_dir: Any = None, cache_dir: Any = None) -> Content:
        """Read the files, through the cache.

        Args:
          data_dir: folder of the files, see `resolve_data_root`. If no folder is named, and the
            default folder does not hold the data set, the cache is read.
          cache_dir: folder of decoded data sets, see `dataset_cache_folder`.

        Returns:
          `(arrays, facts)`.

        Raises:
          ConfigError: if a file is missing or damaged.
        """
        try:
            return self._load(resolve_data_root(data_dir), data_dir, cache_dir)
        except ConfigError as error:
            raise ConfigError(f"{display_name('dataset')} = {self.name!r}: {error}") from error

    def _load(self, root: Path, data_dir: Any, cache_dir: Any) -> Content:
        formats = [files for files in (self.files, self.other_files) if files]
        layouts = [(root / folder, files) for files in formats for folder in self.folders]
        found = [layout for layout in layouts if _find_file(layout[0], layout[1][0]).is_file()]
        if not found:
            is_named = data_dir or env.get_value(env.TFDS_DATA_DIR)
            if not is_named and (entry := load_cached_arrays(self.name, cache_dir)) is not None:
                return entry
            names = " or ".join(name for name in self.folders if name)
            raise ConfigError(
                f"no data in {root}; set TFDS_DATA_DIR (or data_dir) to a folder that holds "
                f"{self.files[0]}, or the folder {names} with it"
            )
        folder, files = found[0]
        paths = {name: _find_file(folder, name) for name in files}
        digest = hashlib.sha256(repr(list_files(paths.values())).encode()).hexdigest()

        def build() -> Content:
            arrays, facts = self.read(paths)
            return arrays, {"source": f"files in {folder.name}", "order": FILE_ORDER, **facts}

        return load_or_build_arrays(self.name, digest, build, cache_dir)


def _find_file(folder: Path, name: str) -> Path:
    """Return the path of a file that may be compressed; it need not exist."""
    compressed = folder / f"{name}.gz"
    return compressed if compressed.is_file() else folder / name


def read_frame(
    path: Path, num_columns: int, *, has_missing_values: bool = False, **options: Any
) -> "pd.DataFrame":
    """Read a table, by default without a line of names.

    Args:
      path: the file; compressed if it ends in `.gz`.
      num_columns: number of values of a line.
      has_missing_values: whether values may be missing.
      **options: arguments of `pandas.read_csv`.

    Returns:
      The table.

    Raises:
      ConfigError: if the file cannot be read, is empty, or has lines of another length.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, **{"header": None, **options})
    except Exception as error:  # of arbitrary bytes
        reason = summarize_error(error)
        raise ConfigError(
            f"{path} cannot be read ({reason}): expected lines of {num_columns} values"
        ) from error
    if frame.shape[1] != num_columns:
        raise ConfigError(
            f"{path} has lines of {frame.shape[1]} values: expected {num_columns} in each line"
        )
    if not has_missing_values and (is_missing := frame.isna().any(axis=1)).any():
        raise ConfigError(
            f"{path} has too few values in its line of data {int(is_missing.argmax()) + 1}: "
            f"expected {num_columns}"
        )
    return frame


def read_numbers(
    path: Path, num_columns: int, *, separator: str = r"\s+", has_missing_values: bool = False
) -> np.ndarray:
    """Read lines of numbers.

    Args:
      path: the file; compressed if it ends in `.gz`.
      num_columns: number of values of a line.
      separator: text between numbers, a regular expression.
      has_missing_values: whether numbers may be NaN.

    Returns:
      Numbers, float32 `[N, num_columns]`.

    Raises:
      ConfigError: if the file cannot be read, is empty, or has another content.
    """
    frame = read_frame(
        path, num_columns, has_missing_values=has_missing_values, sep=separator, dtype=np.float32
    )
    return frame.to_numpy()


def require_equal_lengths(arrays: Mapping[Path, np.ndarray]) -> None:
    """Raise ConfigError unless the files of a data set have one number of examples.

    Args:
      arrays: the content of each file, in the order of the examples.
    """
    first, *_ = arrays
    for path, array in arrays.items():
        if len(array) != len(arrays[first]):
            raise ConfigError(
                f"{path} has {len(array):,} lines: expected {len(arrays[first]):,} as {first.name}"
            )
