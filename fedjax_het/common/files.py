"""Writing so that what was there stays until the new is whole."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from fedjax_het.common.errors import ConfigError


def write_atomically(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Let `write(file)` fill a temporary file beside `path`, then move it there in one step.

    Raises `OSError` where the folder cannot be written; no partial file is left behind.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_output_directory(directory: str | os.PathLike) -> Path:
    """The folder, made if it is not there. ConfigError if files cannot be written into it."""
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir = {str(directory)!r}: expected a folder that can be made and written to "
            f"({error.strerror})"
        ) from error
    return directory
