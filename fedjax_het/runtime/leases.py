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
HEARTBEATS_PER_LEASE = 6  # signs of life in a lease

log = logging.getLogger("fedjax_het")


class LeaseOwner(NamedTuple):
    """A worker: what its claims say of it."""

    host: str
    machine_id: str  # and its space of process numbers; another one after a restart
    pid: int
    start_ticks: (
        int | None
    )  # when the process was, as the system counts; None where it does not tell
    token: str  # of one `Leases`

    def __str__(self) -> str:
        host = "".join(letter for letter in str(self.host) if letter.isprintable())
        return f"{host} (process {self.pid})"


class _Observation(NamedTuple):
    content: bytes
    seen_at: float  # when last looked at
    silent_seconds: float  # seconds that it has been the same


class Leases:
    """Those of one worker in a folder (None: nobody else is there, and nothing is written)."""

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.monotonic):
        self.folder, self._clock = folder, clock
        self.owner = _describe_process()
        self._leases: dict[str, bool] = {}  # of each run claimed, whether that is written
        self._observations: dict[str, _Observation] = {}
        self._heartbeat_count = 0
        self._closed = threading.Event()
        self._heartbeat_thread: threading.Thread | None = None
        self._has_warned = False

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def acquire(self, digest: str) -> bool:
        """Whether the run is this worker's now: nobody's, or a dead owner's, it becomes so."""
        if self.folder is None or self.is_held(digest):
            return True
        self._leases.pop(digest, None)
        if self.find_owner(digest) is not None:
            return False
        observation = self._observations.pop(digest, None)
        try:
            if observation is not None and not self._remove_file(digest, observation.content):
                return False
            if not self._create_file(digest):
                return False
        except OSError as error:
            self._warn_once(error)
        self._leases[digest] = not self._has_warned
        if self._heartbeat_thread is None:
            self._heartbeat_thread = threading.Thread(
                target=self._run_heartbeat, name="claims", daemon=True
            )
            self._heartbeat_thread.start()
        return True

    def is_held(self, digest: str) -> bool:
        """Whether the run is still this worker's, as the file says now."""
        if self.folder is None or self._leases.get(digest) is False:
            return True
        return (
            digest in self._leases and _parse_owner(_read_file(self.folder / digest)) == self.owner
        )

    def release(self, digest: str) -> None:
        """The run may be another's, or is done."""
        if self._leases.pop(digest, None) and self.folder is not None:
            content = _read_file(self.folder / digest)
            if _parse_owner(content) == self.owner:
                assert content is not None
                with contextlib.suppress(OSError):  # then it lasts for a lease
                    self._remove_file(digest, content)

    def find_owner(self, digest: str) -> str | None:
        """Who else is at the run, in words; None if nobody who lives."""
        if self.folder is None or digest in self._leases:
            return None
        content, now = _read_file(self.folder / digest), self._clock()
        if content is None:
            self._observations.pop(digest, None)
            return None
        owner, previous = _parse_owner(content), self._observations.get(digest)
        silent_seconds = 0.0
        if previous is not None and previous.content == content:
            # Nobody watched for most of a long gap: this process may have been suspended in it.
            silent_seconds = previous.silent_seconds + min(
                now - previous.seen_at, LEASE_SECONDS / HEARTBEATS_PER_LEASE
            )
        self._observations[digest] = _Observation(content, now, silent_seconds)
        is_dead = owner is not None and _is_dead(owner, self.owner)
        if is_dead or silent_seconds >= LEASE_SECONDS:
            return None
        return "another worker" if owner is None else str(owner)

    def list_other_owners(self) -> dict[str, str]:
        """Who else is at which runs, by name of the run, in words."""
        owners = {}
        for digest in self._list_lease_files():
            if (owner := self.find_owner(digest)) is not None:
                owners[digest] = owner
        return owners

    def close(self) -> None:
        """Give everything back."""
        self._closed.set()
        if (
            self._heartbeat_thread is not None
            and self._heartbeat_thread is not threading.current_thread()
        ):
            self._heartbeat_thread.join()
        for digest in list(self._leases):
            self.release(digest)
        if self.folder is not None:
            with contextlib.suppress(OSError):  # others' claims are in it, or it was never made
                self.folder.rmdir()

    def _list_lease_files(self) -> list[str]:
        if self.folder is None:
            return []
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if "." not in name)

    def _create_file(self, digest: str) -> bool:
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
                file.write(self._build_content())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning(
                "no claims can be written in %s (%s): other workers may make the same runs",
                self.folder,
                error.strerror,
            )
        self._has_warned = True

    def _remove_file(self, digest: str, content: bytes) -> bool:
        """Remove the claim that says this, and no other: of several who try, one does."""
        assert self.folder is not None
        path = self.folder / digest
        moved_path = self.folder / f"{digest}.{self.owner.token}"
        try:
            path.rename(moved_path)
        except FileNotFoundError:
            return False
        moved_content = _read_file(moved_path)
        is_own_lease = (
            _parse_owner(moved_content) == self.owner
        )  # which may have beaten since it was read
        is_expected = moved_content == content or is_own_lease
        if not is_expected:  # made, or gone on with, since it was looked at: back to its place
            with contextlib.suppress(OSError):
                os.link(moved_path, path)
        moved_path.unlink(missing_ok=True)
        return is_expected

    def _build_content(self) -> bytes:
        self._heartbeat_count += 1
        return f"{self._heartbeat_count:012} {json.dumps(self.owner)}\n".encode()

    def _run_heartbeat(self) -> None:
        while not self._closed.wait(LEASE_SECONDS / HEARTBEATS_PER_LEASE):
            self.renew_all()

    def renew_all(self) -> None:
        """Count up in all claims that are still this worker's."""
        for digest, is_written in list(self._leases.items()):
            if is_written:
                with contextlib.suppress(OSError):  # gone, or the disk is: `holds` will see
                    self._renew(digest)

    def _renew(self, digest: str) -> None:
        assert self.folder is not None
        # What is written through this handle goes where the file goes: if it is moved away between
        # the look and the stroke, another's claim in its place is not touched.
        with open(self.folder / digest, "r+b", buffering=0) as file:
            if _parse_owner(file.read()) == self.owner:
                file.seek(0)
                file.write(self._build_content())


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM, where nobody else sees to it, ends the program as Ctrl-C does, so that claims are
    given back at once."""

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


def _describe_process() -> LeaseOwner:
    host, pid = socket.gethostname(), os.getpid()
    parts = [host]
    with contextlib.suppress(OSError):  # no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return LeaseOwner(host, " ".join(parts), pid, _read_start_ticks(pid), secrets.token_hex(8))


def _is_dead(owner: LeaseOwner, local_owner: LeaseOwner) -> bool:
    """Whether the owner is a process of this machine that is no more."""
    is_same_machine = (
        owner.machine_id == local_owner.machine_id and local_owner.start_ticks is not None
    )
    return is_same_machine and _read_start_ticks(owner.pid) != owner.start_ticks


def _read_start_ticks(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none, or only what a
    parent has not collected yet, or where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _read_file(path: Path) -> bytes | None:
    """None if it is not there; nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return b""


def _parse_owner(content: bytes | None) -> LeaseOwner | None:
    """None of what is being written just now, or is no claim."""
    try:
        return LeaseOwner(*json.loads((content or b"")[13:]))
    except (ValueError, TypeError):
        return None
