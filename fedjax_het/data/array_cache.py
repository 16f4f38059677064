"""Decode once: a private folder of checksummed arrays."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_het.utils.cache import get_cache_dir, make_private_dir
from fedjax_het.utils.io import DamagedFileError
from fedjax_het.utils.npz import read_npz, write_npz

_log = logging.getLogger(__name__)


def dataset_cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """Where decoded data sets are kept.

    `cache_dir`, else `datasets` in the user's cache folder (`fedjax_het.utils.cache`).
    """
    return get_cache_dir() / "datasets" if cache_dir is None else Path(cache_dir).expanduser()


def load_or_build_arrays(
    key: str,
    fingerprint: str,
    build: Callable[[], tuple[dict[str, np.ndarray], dict]],
    cache_dir: str | os.PathLike | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
    """`build()`'s `(arrays, meta)`, from the file `key`.npz where it is whole and up to date.

    `fingerprint` identifies what `build` reads: a file made from something else is stale. A stale
    or damaged file is rebuilt with a one-line warning in the log; a folder that cannot be read or
    written costs the decoding each time and nothing else.
    """
    path = dataset_cache_folder(cache_dir) / f"{key}.npz"
    if (entry := _read_entry(path)) is not None:
        arrays, meta, cached_fingerprint = entry
        if cached_fingerprint == fingerprint:
            return arrays, meta
        _log.warning("cache %s was made from other data: rebuilding it", path)
    arrays, meta = build()
    try:
        make_private_dir(path.parent)
        write_npz(path, arrays, {**meta, "fingerprint": fingerprint}, private=True)
    except OSError as error:
        _log.warning("cache %s cannot be written (%s): working without it", path, error)
    return arrays, meta


def load_cached_arrays(
    key: str, cache_dir: str | os.PathLike | None = None
) -> tuple[dict[str, np.ndarray], dict] | None:
    """The same where what they are built from is not there: those of the file, if it is whole."""
    entry = _read_entry(dataset_cache_folder(cache_dir) / f"{key}.npz")
    return None if entry is None else entry[:2]


def _read_entry(path: Path) -> tuple[dict[str, np.ndarray], dict, str | None] | None:
    """(arrays, meta, fingerprint) of a file that is there and whole."""
    try:
        arrays, meta = read_npz(path)
        return arrays, meta, meta.pop("fingerprint", None)
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        _log.warning("cache: %s: rebuilding it", error)
    except OSError as error:
        _log.warning("cache %s cannot be read (%s): working without it", path, error)
    return None
