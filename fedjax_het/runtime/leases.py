"""Leases: at most one of several workers on one folder executes a run.

A lease is a small file that is named after the run. It is created in one exclusive step, which
network file systems support, too. The owner increments a counter in the file every few seconds. A
watcher that sees no increment for `LEASE_SECONDS` by its own clock regards the owner as dead, so
clocks of different machines are never compared. The file of a dead owner is moved away in one step
before another lease is created.

A worker that was suspended for longer than `LEASE_SECONDS` may have lost a lease. It calls
`Leases.is_held` before it writes.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedjax_het.utils.errors import ConfigError, display_name
from fedjax_het.utils.text import to_one_line

LEASE_SECONDS = 60.0
"""Seconds without a heartbeat after which the owner of a lease is regarded as dead."""
HEARTBEATS_PER_LEASE = 6
"""Heartbeats in `LEASE_SECONDS`."""

log = logging.getLogger("fedjax_het")


class LeaseOwner(NamedTuple):
    """A worker, as its lease files name it."""

    host: str
    """Name of the machine."""
    pid: int
    """Process id on that machine."""
    token: str
    """Random text, different for every `Leases`."""

    def __str__(self) -> str:
        return to_one_line(f"{self.host} (process {self.pid})")


class _Observation(NamedTuple):
    content: bytes
    seen_at: float
    silent_seconds: float  # during which the content was unchanged


class Leases:
    """The leases of one worker in a folder.

    Every lease is acquired without a folder: then there are no other workers. A folder that cannot
    be written is logged, and ignored from then on. The context manager renews the leases in a
    thread, and releases them at its end.

    Attributes:
      folder: the folder of the lease files, or None.
      owner: this worker.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from fedjax_het.runtime.leases import Leases
      >>> folder = Path(tempfile.mkdtemp()) / "claims"
      >>> with Leases(folder) as first, Leases(folder) as second:
      ...     first.acquire("run"), second.acquire("run")
      (True, False)
    """

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.monotonic):
        self.folder, self._clock = folder, clock
        self.owner = LeaseOwner(socket.gethostname(), os.getpid(), secrets.token_hex(8))
        self._leases: set[str] = set()
        self._observations: dict[str, _Observation] = {}
        self._heartbeat_count = 0
        self._closed = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._run_heartbeat, daemon=True)

    def __enter__(self) -> "Leases":
        self._heartbeat_thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._heartbeat_thread.join()

    def acquire(self, digest: str) -> bool:
        """Acquire the lease of a run, unless a live worker owns it.

        Returns:
          Whether this worker has the lease now.
        """
        if self.folder is None or self.is_held(digest):
            return True
        self._leases.discard(digest)
        if self.find_owner(digest) is not None:
            return False
        path, observation = self.folder / digest, self._observations.pop(digest, None)
        try:
            is_free = observation is None or self._remove_file(path, observation.content)
            if not (is_free and self._create_file(path)):
                return False
            self._leases.add(digest)
        except OSError as error:
            text = "leases cannot be written in %s (%s): other workers may execute the same runs"
            log.warning(text, self.folder, error.strerror)
            self.folder = None
        return True

    def is_held(self, digest: str) -> bool:
        """Return whether this worker still has the lease of a run, according to the file."""
        if self.folder is None:
            return True
        return digest in self._leases and self._is_own(_read_file(self.folder / digest))

    def release(self, digest: str) -> None:
        """Release the lease of a run if this worker has it."""
        if self.folder is not None and digest in self._leases:
            self._leases.remove(digest)
            content = _read_file(self.folder / digest)
            if content is not None and self._is_own(content):
                with contextlib.suppress(OSError):  # then other workers wait until it expires
                    self._remove_file(self.folder / digest, content)

    def find_owner(self, digest: str) -> str | None:
        """Return the live owner of a run's lease as text; None if it is free or this worker's."""
        if self.folder is None or digest in self._leases:
            return None
        content, now = _read_file(self.folder / digest), self._clock()
        previous = self._observations.pop(digest, None)
        if content is None:
            return None
        silent_seconds = 0.0
        if previous is not None and previous.content == content:
            # This process may have been suspended during a long gap, when it watched nobody.
            max_gap = LEASE_SECONDS / HEARTBEATS_PER_LEASE
            silent_seconds = previous.silent_seconds + min(now - previous.seen_at, max_gap)
        self._observations[digest] = _Observation(content, now, silent_seconds)
        if silent_seconds >= LEASE_SECONDS:
            return None
        return str(_parse_owner(content) or "another worker")

    def list_other_owners(self) -> dict[str, str]:
        """Return the runs whose leases other live workers own, with the owners as text."""
        try:
            names = [] if self.folder is None else os.listdir(self.folder)
        except FileNotFoundError:
            return {}
        owners = {name: self.find_owner(name) for name in sorted(names) if "." not in name}
        return {name: owner for name, owner in owners.items() if owner is not None}

    def close(self) -> None:
        """Release all leases, and remove the folder if it is empty."""
        self._closed.set()
        for digest in list(self._leases):
            self.release(digest)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # it has leases of others, or does not exist
                self.folder.rmdir()

    def renew_all(self) -> None:
        """Increment the counter in all files whose leases this worker still has."""
        for path in [] if self.folder is None else map(self.folder.joinpath, list(self._leases)):
            # A write through an open file follows the file when it is moved away. It therefore
            # never changes another worker's file in the same place. `is_held` finds out about lost
            # files.
            with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
                if self._is_own(file.read()):
                    file.seek(0)
                    file.write(self._build_content())

    def _create_file(self, path: Path) -> bool:
        """Create a lease, and return whether no other worker was faster. Raise OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "xb")  # noqa: SIM115  closed below
        except (FileExistsError, FileNotFoundError):  # or its last owner removed the folder
            return False
        try:
            with file:
                file.write(self._build_content())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def _remove_file(self, path: Path, content: bytes) -> bool:
        """Remove a lease if it has this content; of several workers that try, one succeeds."""
        moved_path = path.with_name(f"{path.name}.{self.owner.token}")
        try:
            path.rename(moved_path)
        except FileNotFoundError:
            return False
        moved_content = _read_file(moved_path)
        # A heartbeat may have changed the file of this worker since it was read.
        is_expected = moved_content == content or self._is_own(moved_content)
        if not is_expected:  # another worker created or renewed it meanwhile: put it back
            with contextlib.suppress(OSError):
                os.link(moved_path, path)
        moved_path.unlink(missing_ok=True)
        return is_expected

    def _build_content(self) -> bytes:
        self._heartbeat_count += 1
        return f"{self._heartbeat_count:012} {json.dumps(self.owner)}\n".encode()

    def _is_own(self, content: bytes | None) -> bool:
        return _parse_owner(content) == self.owner

    def _run_heartbeat(self) -> None:
        while not self._closed.wait(LEASE_SECONDS / HEARTBEATS_PER_LEASE):
            self.renew_all()


def lock_run(folder: Path, digest: str) -> Callable[[], None]:
    """Lock a single run in a folder against other processes.

    The system releases the lock when the process ends, also after `kill -9`. A process can lock a
    run several times. The function does nothing if the folder or the system has no locks.

    Args:
      folder: the output folder.
      digest: digest of the run's result.

    Returns:
      A function that releases the lock and removes its file.

    Raises:
      ConfigError: if another process has the lock.
    """
    path = folder / f".{digest}.lock"
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        return lambda: None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode())
    except (BlockingIOError, PermissionError):
        owner = to_one_line(os.read(descriptor, 200).decode(errors="replace"))
        os.close(descriptor)
        raise ConfigError(
            f"{display_name('output_dir')} = {str(folder)!r}: expected a run that no other process "
            f"executes, but another process ({owner}) executes it; wait for its end, or use "
            "another folder"
        ) from None
    except OSError:  # of file systems without locks
        os.close(descriptor)
        return lambda: None

    def release() -> None:
        path.unlink(missing_ok=True)
        os.close(descriptor)

    return release


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, so that leases are released at once.

    A handler that is installed already stays, and so does the default in other threads.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read_file(path: Path) -> bytes | None:
    """Return the content of a file: None if there is no file, empty if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return b""


def _parse_owner(content: bytes | None) -> LeaseOwner | None:
    """Return the owner that a file names; None while it is being written, or if it is no lease."""
    try:
        return LeaseOwner(*json.loads((content or b"")[13:]))
    except (ValueError, TypeError):
        return None
