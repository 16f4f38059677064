"""Arrays on disk: a checksummed .npz file that is either whole or absent.

Read back with pickling off, so that opening a file never runs code.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.utils.arrays import save_arrays
from fedjax_het.utils.io import DamagedFileError, write_atomically


def digest_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping | None = None) -> str:
    """SHA-256 (hex) of names, types, shapes and values, and of the JSON-able `meta`.

    The same on every platform; independent of the order of the names and of the memory layout.
    """
    sha = hashlib.sha256(json.dumps(dict(meta or {}), sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        sha.update(f"|{name}:{array.dtype.str}:{array.shape}|".encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def write_npz(
    path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping, *, private: bool = False
) -> None:
    """Write `arrays` and the JSON-able `meta`, for the user alone if it is private; readers see the
    old file or the whole new one.

    Raises `OSError` where the folder cannot be written; no partial file is left behind.
    """
    header = json.dumps({"meta": dict(meta), "sha256": digest_arrays(arrays, meta)})
    entries: dict[str, Any] = {"__header__": np.array(header), **arrays}
    write_atomically(path, lambda file: save_arrays(file, entries), private=private)


def read_npz(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Return `(arrays, meta)` as given to `write_npz`.

    Raises `FileNotFoundError`, other `OSError`s of the file system, or `DamagedFileError`.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as npz:
            header = json.loads(str(npz["__header__"]))
            arrays = {name: npz[name] for name in npz.files if name != "__header__"}
        meta, expected_digest = header["meta"], header["sha256"]
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # What np.load, the zip reader and the JSON reader raise on arbitrary bytes; a damaged header
    # may also claim an array larger than memory.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        OSError,
        MemoryError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if digest_arrays(arrays, meta) != expected_digest:
        raise DamagedFileError(f"{path} is damaged (its checksum does not match)")
    return arrays, meta
