"""Claims: who of several workers on one folder makes a run.

A claim is a small file named after the run. It is made in one exclusive step, which holds on
network file systems too, and its owner counts up in it every few seconds. Who finds one watches it:
an owner whose count has stood still for a lease, by the watcher's own clock, is dead, so that no
two machines' clocks are ever compared; on the same machine it is dead as soon as its process is. A
dead one's claim is moved away, in one step, before another is made.

A worker that was suspended for longer than its lease may find its claim gone: it asks `holds`
before it writes.
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

LEASE_SECONDS = 60.0  # of silence, after which an owner is taken for dead
BEATS = 6  # signs of life in a lease

log = logging.getLogger("fedjax_het")


class Owner(NamedTuple):
    """A worker: what its claims say of it."""

    host: str
    machine: str  # and its space of process numbers; another one after a restart
    pid: int
    started: int | None  # when the process was, as the system counts; None where it does not tell
    token: str  # of one `Claims`

    def __str__(self) -> str:
        host = "".join(letter for letter in str(self.host) if letter.isprintable())
        return f"{host} (process {self.pid})"


class _Watched(NamedTuple):
    content: bytes
    seen: float  # when last looked at
    silent: float  # seconds that it has been the same


class Claims:
    """Those of one worker in a folder (None: nobody else is there, and nothing is written)."""

    def __init__(self, folder: Path | None, *, now: Callable[[], float] = time.monotonic):
        self.folder, self._now = folder, now
        self.owner = _this_process()
        self._held: dict[str, bool] = {}  # of each run claimed, whether that is written
        self._watched: dict[str, _Watched] = {}
        self._count = 0
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        self._warned = False

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, digest: str) -> bool:
        """Whether the run is this worker's now: nobody's, or a dead owner's, it becomes so."""
        if self.folder is None or self.holds(digest):
            return True
        self._held.pop(digest, None)
        if self.owner_of(digest) is not None:
            return False
        watched = self._watched.pop(digest, None)
        try:
            if watched is not None and not self._remove(digest, watched.content):
                return False
            if not self._make(digest):
                return False
        except OSError as error:
            self._warn(error)
        self._held[digest] = not self._warned
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="claims", daemon=True)
            self._beating.start()
        return True

    def holds(self, digest: str) -> bool:
        """Whether the run is still this worker's, as the file says now."""
        if self.folder is None or self._held.get(digest) is False:
            return True
        return digest in self._held and _owner(_read(self.folder / digest)) == self.owner

    def give_back(self, digest: str) -> None:
        """The run may be another's, or is done."""
        if self._held.pop(digest, None) and self.folder is not None:
            content = _read(self.folder / digest)
            if _owner(content) == self.owner:
                assert content is not None
                with contextlib.suppress(OSError):  # then it lasts for a lease
                    self._remove(digest, content)

    def owner_of(self, digest: str) -> str | None:
        """Who else is at the run, in words; None if nobody who lives."""
        if self.folder is None or digest in self._held:
            return None
        content, now = _read(self.folder / digest), self._now()
        if content is None:
            self._watched.pop(digest, None)
            return None
        owner, last = _owner(content), self._watched.get(digest)
        silent = 0.0
        if last is not None and last.content == content:
            # Nobody watched for most of a long gap: this process may have been suspended in it.
            silent = last.silent + min(now - last.seen, LEASE_SECONDS / BEATS)
        self._watched[digest] = _Watched(content, now, silent)
        gone = owner is not None and _is_gone(owner, self.owner)
        if gone or silent >= LEASE_SECONDS:
            return None
        return "another worker" if owner is None else str(owner)

    def others(self) -> dict[str, str]:
        """Who else is at which runs, by name of the run, in words."""
        owners = {}
        for digest in self._names():
            if (owner := self.owner_of(digest)) is not None:
                owners[digest] = owner
        return owners

    def close(self) -> None:
        """Give everything back."""
        self._closed.set()
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join()
        for digest in list(self._held):
            self.give_back(digest)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # others' claims are in it, or it was never made
                self.folder.rmdir()

    def _names(self) -> list[str]:
        if self.folder is None:
            return []
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if "." not in name)

    def _make(self, digest: str) -> bool:
        """Make the file, unless another was faster."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / digest
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except (FileExistsError, FileNotFoundError):  # or its last owner removed the folder
            return False
        try:
            with open(handle, "wb") as file:
                file.write(self._content())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning(
                "no claims can be written in %s (%s): other workers may make the same runs",
                self.folder,
                error.strerror,
            )
        self._warned = True

    def _remove(self, digest: str, content: bytes) -> bool:
        """Remove the claim that says this, and no other: of several who try, one does."""
        assert self.folder is not None
        path = self.folder / digest
        aside = self.folder / f"{digest}.{self.owner.token}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return False
        found = _read(aside)
        own = _owner(found) == self.owner  # which may have beaten since it was read
        right = found == content or own
        if not right:  # made, or gone on with, since it was looked at: back to its place
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)
        return right

    def _content(self) -> bytes:
        self._count += 1
        return f"{self._count:012} {json.dumps(self.owner)}\n".encode()

    def _beat(self) -> None:
        while not self._closed.wait(LEASE_SECONDS / BEATS):
            self.renew()

    def renew(self) -> None:
        """Count up in all claims that are still this worker's."""
        for digest, written in list(self._held.items()):
            if written:
                with contextlib.suppress(OSError):  # gone, or the disk is: `holds` will see
                    self._renew(digest)

    def _renew(self, digest: str) -> None:
        assert self.folder is not None
        # What is written through this handle goes where the file goes: if it is moved away between
        # the look and the stroke, another's claim in its place is not touched.
        with open(self.folder / digest, "r+b", buffering=0) as file:
            if _owner(file.read()) == self.owner:
                file.seek(0)
                file.write(self._content())


@contextlib.contextmanager
def stopped_in_order() -> Iterator[None]:
    """SIGTERM, where nobody else sees to it, ends the program as Ctrl-C does, so that claims are
    given back at once."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _this_process() -> Owner:
    host, pid = socket.gethostname(), os.getpid()
    parts = [host]
    with contextlib.suppress(OSError):  # no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return Owner(host, " ".join(parts), pid, _started(pid), secrets.token_hex(8))


def _is_gone(owner: Owner, here: Owner) -> bool:
    """Whether the owner is a process of this machine that is no more."""
    same = owner.machine == here.machine and here.started is not None
    return same and _started(owner.pid) != owner.started


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none, or only what a
    parent has not collected yet, or where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _read(path: Path) -> bytes | None:
    """None if it is not there; nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return b""


def _owner(content: bytes | None) -> Owner | None:
    """None of what is being written just now, or is no claim."""
    try:
        return Owner(*json.loads((content or b"")[13:]))
    except (ValueError, TypeError):
        return None
