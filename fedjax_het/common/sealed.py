"""Archives of arrays (.npz) that end with a checksum of every byte before it.

It is the archive's comment, so that whatever reads .npz files reads these.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedjax_het.common.arrays import save_arrays
from fedjax_het.common.files import DamagedFileError, write_atomically

_MARK = b"sha256:"
_LENGTH = len(_MARK) + 64


def write_sealed(path: Path, arrays: dict[str, Any]) -> None:
    """Write these arrays, whole or not at all. Raises OSError. Cost: that of reading them too."""

    def write(file: BinaryIO) -> None:
        save_arrays(file, arrays)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _LENGTH))  # of the comment that follows
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        file.write(_MARK + digest.encode())

    write_atomically(path, write)


def read_sealed(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that `write_sealed` wrote. Raises DamagedFileError for any other, and
    FileNotFoundError."""
    try:
        with open(path, "rb") as file:
            _require_seal(file)
            with np.load(file, allow_pickle=False) as data:
                return dict(data)
    except FileNotFoundError:
        raise
    except Exception as error:  # what is raised of arbitrary bytes, and by disks
        what = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise DamagedFileError(what) from error


def _require_seal(file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    if size <= _LENGTH:
        raise DamagedFileError(f"it has {size} bytes")
    sha, left = hashlib.sha256(), size - _LENGTH
    while left:
        block = file.read(min(left, 2**20))
        if not block:
            raise DamagedFileError("it is cut short")
        sha.update(block)
        left -= len(block)
    if file.read() != _MARK + sha.hexdigest().encode():
        raise DamagedFileError("its checksum does not match")
    file.seek(0)
