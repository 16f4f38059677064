"""A private folder of checksummed arrays, so that each data set is decoded once."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.utils.env import get_cache_dir, make_private_dir
from fedjax_het.utils.former_names import FORMER_ARRAY_NAMES, rename_former_arguments
from fedjax_het.utils.io import DamagedFileError, read_npz, write_npz

_log = logging.getLogger("fedjax_het")


def dataset_cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """Return the folder in which decoded data sets are cached.

    Args:
      cache_dir: a folder of the user's choice. Default: `datasets` in the user's cache folder
        (`fedjax_het.utils.env`).

    Returns:
      The folder, which may not exist yet.
    """
    return get_cache_dir() / "datasets" if cache_dir is None else Path(cache_dir).expanduser()


def load_or_build_arrays(
    key: str,
    fingerprint: str,
    build: Callable[[], tuple[dict[str, Any], dict]],
    cache_dir: str | os.PathLike | None = None,
) -> tuple[dict[str, Any], dict]:
    """Read cached arrays, or build them and write them to the cache.

    A stale or damaged file is rebuilt, with a one-line warning in the log. A folder that cannot be
    read or written costs the decoding each time and nothing else.

    Args:
      key: name of the cache file, without `.npz`.
      fingerprint: text that identifies the input of `build`. A file with another fingerprint is
        stale.
      build: function that returns `(arrays, meta)`: arrays by name, and values that JSON can store.
      cache_dir: folder of the cache, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)` as of `build`, with the fingerprint in `meta`. Inputs of several arrays, a
      dictionary, are built each time.
    """
    path = dataset_cache_folder(cache_dir) / f"{key}.npz"
    if (entry := load_cached_arrays(key, cache_dir)) is not None:
        if entry[1].get("fingerprint") == fingerprint:
            return entry
        _log.warning("cache %s was built from other data: rebuilding it", path)
    arrays, meta = build()
    if any(isinstance(value, Mapping) for value in arrays.values()):
        return arrays, meta  # a file has no arrays by name
    meta["fingerprint"] = fingerprint
    try:
        make_private_dir(path.parent)
        write_npz(path, arrays, meta, private=True)
    except OSError as error:
        _log.warning("cache %s cannot be written (%s): continuing without it", path, error)
    return arrays, meta


def load_cached_arrays(
    key: str, cache_dir: str | os.PathLike | None = None
) -> tuple[dict[str, np.ndarray], dict] | None:
    """Read cached arrays whose source is not available.

    The fingerprint is not compared, since there is nothing to compute it from.

    Args:
      key: name of the cache file, without `.npz`.
      cache_dir: folder of the cache, see `dataset_cache_folder`.

    Returns:
      `(arrays, meta)` as `load_or_build_arrays` wrote them, or None if the file is missing or
      damaged.
    """
    path = dataset_cache_folder(cache_dir) / f"{key}.npz"
    try:
        arrays, meta = read_npz(path)
        return rename_former_arguments(arrays, FORMER_ARRAY_NAMES), meta
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        _log.warning("cache: %s: rebuilding it", error)
    except OSError as error:
        _log.warning("cache %s cannot be read (%s): continuing without it", path, error)
    return None
