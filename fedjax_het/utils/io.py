"""Files: atomic writing, checksummed archives of arrays (.npz), and archives of result folders."""

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import platform
import re
import secrets
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedjax_het.utils.arrays import AnyArray, save_arrays
from fedjax_het.utils.errors import ConfigError, make_value_error
from fedjax_het.utils.memory_maps import iter_blocks

STALE_SECONDS = 86_400
"""Age in seconds from which a temporary file has no owner."""


class DamagedFileError(ConfigError):
    """Raised for a file of another program, a truncated file, and a file with a wrong checksum."""


def write_atomically(
    path: str | os.PathLike, write: Callable[[BinaryIO], object], *, private: bool = False
) -> None:
    """Write a file so that readers see the old file or the whole new file.

    The folder of the file is created if it is missing. Temporary files that killed programs left
    in the folder are removed first.

    Args:
      path: path of the file.
      write: function that writes to a temporary binary file beside `path`, and may read it.
      private: give only the user access; otherwise the umask decides.

    Raises:
      OSError: if the file cannot be written; no partial file is left behind.

    Example:
      >>> import pathlib, tempfile
      >>> from fedjax_het.utils.io import write_atomically
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "notes.txt"
      ...     write_atomically(path, lambda file: file.write(b"done"))
      ...     path.read_text(encoding="utf-8")
      'done'
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_files(path.parent)
    # A longer part of the name could exceed the limit of the system.
    unique_suffix = f"{_get_host_id()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.parent / f".{path.name[:60]}-{unique_suffix}.tmp"
    file = _open_new_file(temporary, 0o600 if private else 0o666)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # A writer of archives may raise another error on its way out after the system's error.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause in (error, None) or not isinstance(error, Exception):
            raise
        raise cause from error


def _open_new_file(path: Path, mode: int) -> BinaryIO:
    """Create a file with a mode, from which the umask removes rights."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, mode), "w+b")


def remove_stale_files(folder: Path) -> None:
    """Remove temporary files of dead processes of this host, and those older than a day.

    Files of living processes stay.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if _is_stale(path):
                    path.unlink()


def _is_stale(path: Path) -> bool:
    # Former versions wrote names without the host and the process.
    match = re.fullmatch(r"\..*?-(?:([0-9a-zA-Z_.]+)-(\d+)-)?\w{8}\.tmp", path.name)
    if match is None:
        return False
    is_alive = _is_process_alive(int(match[2])) if match[1] == _get_host_id() else None
    if is_alive is not None:
        return not is_alive
    return time.time() - path.stat().st_mtime > STALE_SECONDS


def _get_host_id() -> str:
    """Return a name of the scope of process ids: the machine and the container."""
    name = re.sub(r"[^0-9a-zA-Z.]", "_", platform.node())[:40] or "host"
    try:
        return f"{name}_{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return name


def _is_process_alive(pid: int) -> bool | None:
    """Return whether this host has a process of this id; None if the system cannot tell."""
    if os.name != "posix":  # other systems deliver signal 0
        return None
    with contextlib.suppress(PermissionError, OverflowError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def make_output_directory(directory: str | os.PathLike) -> Path:
    """Create an output folder, and remove temporary files of dead processes in it.

    Args:
      directory: path of the folder, which may exist.

    Returns:
      The path.

    Raises:
      ConfigError: if files cannot be written into the folder.
    """
    try:
        directory = Path(directory).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        expected = f"a folder that can be created and written to ({reason})"
        raise make_value_error("output_dir", directory, expected) from error
    remove_stale_files(directory)
    return directory


_CHECKSUM_PREFIX = b"sha256:"
_CHECKSUM_LENGTH = len(_CHECKSUM_PREFIX) + 64
_META_KEY = "__meta__"
_ZIP_HEADER = "<4s5H3L2H"  # of a member; the last two are the lengths of what follows
_HEADER_KEY = "__header__"  # of files of version 0.6.0, which have a checksum of their contents


def write_npz(
    path: Path, arrays: Mapping[str, AnyArray], meta: Any, *, private: bool = False
) -> None:
    """Write arrays and a JSON-able record as an .npz archive that ends with its checksum.

    The checksum is the comment of the archive, so that other readers of .npz files read it, too.

    Args:
      path: path of the file; readers see the old file or the whole new one.
      arrays: arrays by name.
      meta: values that JSON can store.
      private: give only the user access.

    Raises:
      OSError: if the file cannot be written; no partial file is left behind.

    Example:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> from fedjax_het.utils.io import read_npz, write_npz
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "a.npz"
      ...     write_npz(path, {"x": np.arange(3)}, {"round": 7})
      ...     read_npz(path)
      ({'x': array([0, 1, 2])}, {'round': 7})
    """
    entries = {**arrays, _META_KEY: np.frombuffer(json.dumps(meta).encode(), np.uint8)}

    def write(file: BinaryIO) -> None:
        save_arrays(file, entries)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _CHECKSUM_LENGTH))  # length of the comment that follows
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        file.write(_CHECKSUM_PREFIX + digest.encode())

    write_atomically(path, write, private=private)


def read_npz(
    path: Path, *, is_mapped: Callable[[str, int], bool] = lambda name, num_bytes: False
) -> tuple[dict[str, np.ndarray], Any]:
    """Read a file that `write_npz` wrote; no code of the file is run.

    Args:
      path: path of the file.
      is_mapped: function of the name and the bytes of an array, which returns whether the array is
        mapped into memory instead of read. Such an array cannot be changed. Compressed arrays are
        read.

    Returns:
      `(arrays, meta)` as given to `write_npz`.

    Raises:
      OSError: if the file cannot be read.
      DamagedFileError: if the file is not as it was written.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as npz:
            arrays = {}
            for name, member in zip(npz.files, npz.zip.infolist(), strict=True):
                is_stored = member.compress_type == zipfile.ZIP_STORED
                if is_stored and is_mapped(name, member.file_size):
                    arrays[name] = _map_member(path, file, member)
                else:
                    arrays[name] = npz[name]
        if _HEADER_KEY in arrays:
            header = json.loads(str(arrays.pop(_HEADER_KEY)))
            meta = header["meta"]
            is_intact = digest_arrays(arrays, meta) == header["sha256"]
        else:
            meta = json.loads(arrays.pop(_META_KEY).tobytes())
            content: Any = np.memmap(path, np.uint8, "r")
            sha = hashlib.sha256()
            for block in iter_blocks(content[:-_CHECKSUM_LENGTH]):
                sha.update(block.data)
            digest = _CHECKSUM_PREFIX + sha.hexdigest().encode()
            is_intact = bytes(content[-_CHECKSUM_LENGTH:]) == digest
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # arbitrary bytes and disks raise many types
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not is_intact:
        raise DamagedFileError(f"{path} is damaged (its checksum does not match)")
    return arrays, meta


def _map_member(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> np.ndarray:
    """Return an array of an archive as a memory map of the file."""
    file.seek(member.header_offset)
    *_, name_length, extra_length = struct.unpack(
        _ZIP_HEADER, file.read(struct.calcsize(_ZIP_HEADER))
    )
    file.seek(name_length + extra_length, os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        message = f"format {version}"
        raise ValueError(message)
    shape, is_fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    order: Any = "F" if is_fortran_order else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)


def digest_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping | None = None) -> str:
    """Hash names, types, shapes and values of arrays, and a JSON-able record.

    The digest is equal on every platform, and independent of the order of the names and of the
    memory layout.

    Args:
      arrays: arrays by name.
      meta: values that JSON can store.

    Returns:
      SHA-256 as 64 hexadecimal digits.
    """
    sha = hashlib.sha256(json.dumps(dict(meta or {}), sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        dtype = array.dtype.newbyteorder("<")
        sha.update(f"|{name}:{dtype.str}:{array.shape}|".encode())
        for block in iter_blocks(np.atleast_1d(array)):
            sha.update(np.ascontiguousarray(block, dtype).data)
    return sha.hexdigest()


ARCHIVE_NAME = "runs.zip"
"""Name of the archive of a folder of results, whose members are read as if they were files."""


def list_stored_names(directory: str | os.PathLike) -> list[str]:
    """List the files of a folder of results, including the members of its archive `runs.zip`.

    Args:
      directory: a folder that exists.

    Returns:
      File names in ascending order, each name once.
    """
    directory = Path(directory)
    names = {path.name for path in directory.iterdir()}
    if ARCHIVE_NAME in names:
        names |= {*_open_archive(directory / ARCHIVE_NAME).namelist()}
    return sorted(names)


def find_stored_file(path: Path) -> Path:
    """Return the file that holds the content of a path: the path itself, or the archive beside it.

    Args:
      path: a file of a folder of results.

    Returns:
      `path` or the path of the archive.

    Raises:
      FileNotFoundError: if `path` is neither a file nor a member of `runs.zip` in its folder.
    """
    if path.exists():
        return path
    archive = path.with_name(ARCHIVE_NAME)
    if archive.is_file() and path.name in _open_archive(archive).NameToInfo:
        return archive
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def read_stored_file(path: Path) -> bytes:
    """Read a file of a folder of results, from the folder or from its archive `runs.zip`.

    Args:
      path: a file of the folder. A file beside the archive takes precedence over a member.

    Returns:
      The content.

    Raises:
      FileNotFoundError: if there is neither such a file nor such a member.
      DamagedFileError: if the archive is damaged.
    """
    stored_path = find_stored_file(path)
    if stored_path == path:
        return path.read_bytes()
    try:
        return _open_archive(stored_path).read(path.name)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DamagedFileError(f"archive {str(stored_path)!r} is damaged ({error})") from error


def write_archive(directory: Path, names: Sequence[str]) -> None:
    """Move files of a folder, and the members of its archive, into a new archive `runs.zip`.

    Equal files give equal archives: members are sorted and have a constant time.

    Args:
      directory: the folder.
      names: names of files in the folder.
    """
    archive = directory / ARCHIVE_NAME
    members = {*names, *(_open_archive(archive).namelist() if archive.is_file() else ())}

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new_archive:
            for name in sorted(members):
                content = read_stored_file(directory / name)
                member = zipfile.ZipInfo(name)  # with the default time, 1980-01-01
                new_archive.writestr(member, content, zipfile.ZIP_DEFLATED)

    write_atomically(archive, write)
    for name in names:
        (directory / name).unlink()


def _open_archive(path: Path) -> zipfile.ZipFile:
    return _open_unchanged_archive(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)  # a folder of hundreds of runs reads its index once
def _open_unchanged_archive(path: Path, mtime_ns: int) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    except zipfile.BadZipFile as error:
        raise DamagedFileError(f"archive {str(path)!r} is damaged ({error})") from error
