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

_CHECKSUM_PREFIX = b"sha256:"
_CHECKSUM_LENGTH = len(_CHECKSUM_PREFIX) + 64


def save_checksummed_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write these arrays, whole or not at all. Raises OSError. Cost: that of reading them too."""

    def write(file: BinaryIO) -> None:
        save_arrays(file, arrays)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _CHECKSUM_LENGTH))  # of the comment that follows
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        file.write(_CHECKSUM_PREFIX + digest.encode())

    write_atomically(path, write)


def load_checksummed_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that `save_checksummed_npz` wrote. Raises DamagedFileError for any other, and
    FileNotFoundError."""
    try:
        with open(path, "rb") as file:
            _verify_checksum(file)
            with np.load(file, allow_pickle=False) as data:
                return dict(data)
    except FileNotFoundError:
        raise
    except Exception as error:  # what is raised of arbitrary bytes, and by disks
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise DamagedFileError(reason) from error


def _verify_checksum(file: BinaryIO) -> None:
    size = os.fstat(file.fileno()).st_size
    if size <= _CHECKSUM_LENGTH:
        raise DamagedFileError(f"it has {size} bytes")
    hasher, num_remaining = hashlib.sha256(), size - _CHECKSUM_LENGTH
    while num_remaining:
        block = file.read(min(num_remaining, 2**20))
        if not block:
            raise DamagedFileError("it is cut short")
        hasher.update(block)
        num_remaining -= len(block)
    if file.read() != _CHECKSUM_PREFIX + hasher.hexdigest().encode():
        raise DamagedFileError("its checksum does not match")
    file.seek(0)
