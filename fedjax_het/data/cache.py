"""Decode once: a private folder of checksummed arrays."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_het.common.cache import cache_root, private_folder
from fedjax_het.common.files import DamagedFileError
from fedjax_het.data.npz import read_npz, write_npz

_log = logging.getLogger(__name__)


def cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """Where decoded data sets are kept.

    `cache_dir`, else `datasets` in the user's cache folder (`fedjax_het.common.cache`).
    """
    return cache_root() / "datasets" if cache_dir is None else Path(cache_dir).expanduser()


def cached_arrays(
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
    path = cache_folder(cache_dir) / f"{key}.npz"
    try:
        arrays, meta = read_npz(path)
        if meta.pop("fingerprint", None) == fingerprint:
            return arrays, meta
        _log.warning("cache %s was made from other data: rebuilding it", path)
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        _log.warning("cache: %s: rebuilding it", error)
    except OSError as error:
        _log.warning("cache %s cannot be read (%s): working without it", path, error)

    arrays, meta = build()
    try:
        private_folder(path.parent)
        write_npz(path, arrays, {**meta, "fingerprint": fingerprint}, private=True)
    except OSError as error:
        _log.warning("cache %s cannot be written (%s): working without it", path, error)
    return arrays, meta
