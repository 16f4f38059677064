"""The queue of a sweep's runs, which several workers on one folder may share."""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER, find_resumable_record
from fedjax_het.runtime.compiled_programs import compute_static_key
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.result_store import load_result
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.sweep_log import Job, SweepProgress, build_status_printer
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import find_stored_file, list_stored_names

POLL_SECONDS = 1.0  # between looks at what others do
LEASES_FOLDER = "claims"  # a folder beside the results


class LeaseLostError(Exception):
    """Another worker has acquired the lease of a run, which this worker did not renew in time."""


class WorkQueue:
    """The runs of a sweep that have no result yet, and the leases on them.

    Attributes:
      results: results by the names of their files, of all workers.
      remaining: runs that have no result yet and were not rejected, in order.
      leases: the leases of this worker.
      sweep_progress: reports what is done.
    """

    def __init__(
        self,
        specs_by_digest: dict[str, ResolvedRunSpec],
        directory: Path | None,
        leases: Leases,
        progress: Callable[[str], None] | None,
        resume_anyway: bool = False,
        find_saved_state: Callable[[ResolvedRunSpec], Path | None] = lambda spec: None,
    ):
        """Load the results that exist.

        Args:
          specs_by_digest: the runs by the names of their files.
          directory: the folder of results; None where they are only returned.
          leases: the leases of this worker.
          progress: called with a line per event.
          resume_anyway: whether checkpoints of other versions and devices are used, too.
          find_saved_state: returns the final state of a run with fewer rounds, if there is one.
        """
        self.directory, self.leases = directory, leases
        self._find_saved_state = functools.cache(
            lambda digest: find_saved_state(specs_by_digest[digest])
        )
        self._resume_anyway = resume_anyway
        self._unreadable_mtimes: dict[
            str, int
        ] = {}  # when results that cannot be read were written
        self.results: dict[str, Result] = {}
        self.remaining = dict(specs_by_digest)
        self._load_new_results()
        if self.results:
            line = f"{len(self.results)} of {len(specs_by_digest)} runs are in {directory} already"
            build_status_printer(progress)(line)
        self.sweep_progress = SweepProgress(len(self.remaining), progress)
        self._checked_at = time.monotonic()

    def iterate_groups(self) -> Iterator[list[Job]]:
        """Yield runs that can go in step: of one signature, and at the same point if they resume.

        Groups without another worker come first, because compilation is expensive. One run of the
        first group is leased at once, so that workers that start together begin with different
        groups.
        """
        started: set[str] = set()
        while True:
            self.refresh()
            leased = self.leases.list_other_owners()
            unleased = [d for d in self.remaining if d not in started and d not in leased]
            busy_signatures = {
                compute_static_key(self.remaining[d]) for d in leased if d in self.remaining
            }
            groups = self._group_by_signature(unleased)
            if not groups:
                return
            if busy_signatures and started:  # others look for their next group, too: elsewhere
                groups.sort(key=lambda jobs: self._compute_worker_order(jobs[0].spec))
            jobs = min(groups, key=lambda jobs: compute_static_key(jobs[0].spec) in busy_signatures)
            if started or any(self._acquire(job) for job in jobs):
                started |= {job.digest for job in jobs}
                yield jobs

    def acquire_slots(self, jobs: Sequence[Job], count: int) -> list[int]:
        """Acquire the leases of up to `count` jobs that are at one point, the least advanced first.

        Returns:
          Their positions among `jobs`.
        """
        slots: list[int] = []
        for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].record or {}).get("round", 0)):
            job = jobs[i]
            is_at_other_point = slots and _get_resume_point(job.record) != _get_resume_point(
                jobs[slots[0]].record
            )
            if len(slots) == count:
                break
            if job.digest in self.remaining and not is_at_other_point and self._acquire(job):
                slots.append(i)
        return slots

    def suspend(self, jobs: Sequence[Job]) -> list[Job]:
        """Release these runs, and return them with the records of their latest checkpoints."""
        records = [self._find_record(job.digest, is_leased=True) for job in jobs]
        self.release(jobs)
        return [job._replace(record=record) for job, record in zip(jobs, records, strict=True)]

    def reject(self, jobs: Sequence[Job]) -> None:
        """Remove runs that cannot be executed."""
        for job in jobs:
            self.remaining.pop(job.digest, None)
            self.leases.release(job.digest)

    def complete(self, job: Job, result: Result) -> None:
        """Remove a run whose result this worker has written."""
        self.results[job.digest] = result
        self.remaining.pop(job.digest, None)
        self.leases.release(job.digest)

    def require_leases(self, jobs: Sequence[Job]) -> None:
        """Raise LeaseLostError if a lease is lost; the files are read at most twice a second."""
        now = time.monotonic()
        if now - self._checked_at >= 0.5:
            if not self.has_leases(jobs):
                raise LeaseLostError
            self._checked_at = now

    def has_leases(self, jobs: Sequence[Job]) -> bool:
        return all(self.leases.is_held(job.digest) for job in jobs)

    def release(self, jobs: Sequence[Job]) -> None:
        """Release the leases that this worker still has."""
        for job in jobs:
            self.leases.release(job.digest)

    def refresh(self) -> None:
        """Load the results that other workers have written."""
        if count := self._load_new_results():
            self.sweep_progress.report_elsewhere(count)

    def wait_for_work(self) -> bool:
        """Wait while other workers have all remaining runs.

        Returns:
          Whether there is a run to execute; False if none is left.
        """
        reported_owners: set[str] = set()
        while True:
            leased = self.leases.list_other_owners()
            self.refresh()
            if any(digest not in leased for digest in self.remaining):
                return True
            if not self.remaining:
                return False
            owners = {leased[digest] for digest in self.remaining}
            if owners - reported_owners:
                self.sweep_progress.report_waiting(len(self.remaining), sorted(owners))
                reported_owners |= owners
            time.sleep(POLL_SECONDS)

    def _load_new_results(self) -> int:
        """Load new results, and return their number."""
        if self.directory is None:
            return 0
        # Listing the folder also lets a network file system see what is new.
        names = {*list_stored_names(self.directory)}
        available = [digest for digest in self.remaining if f"{digest}.json" in names]
        return sum(self._load_if_readable(digest) for digest in available)

    def _load_if_readable(self, digest: str) -> bool:
        assert self.directory is not None
        try:
            mtime = find_stored_file(self.directory / f"{digest}.json").stat().st_mtime_ns
        except OSError:  # removed meanwhile
            return False
        if self._unreadable_mtimes.get(digest) == mtime:  # which has been said
            return False
        result = load_result(self.directory, digest)
        if result is None:
            self._unreadable_mtimes[digest] = mtime
            return False
        self.results[digest] = result
        del self.remaining[digest]
        return True

    def _acquire(self, job: Job) -> bool:
        """Acquire the lease of a run if it has no result yet and is where it was when grouped."""
        if self.directory is None:
            return True
        if not self.leases.acquire(job.digest):
            return False
        self.refresh()  # its owner may have ended between the last look and now
        if job.digest in self.remaining:
            record = self._find_record(job.digest, is_leased=True)
            if _get_resume_point(record) == _get_resume_point(job.record):
                return True
        self.leases.release(job.digest)
        return False

    def _find_record(self, digest: str, *, is_leased: bool) -> dict | None:
        """Return the record of the checkpoint from which a run resumes, or None.

        A worker that has the lease may set a damaged checkpoint aside.
        """
        if self.directory is None:
            return None
        folder, spec = self.directory / UNFINISHED_FOLDER / digest, self.remaining[digest]
        return find_resumable_record(
            folder,
            spec,
            saved_state=self._find_saved_state(digest),
            resume_anyway=self._resume_anyway,
            quarantine=is_leased,
        )

    def _group_by_signature(self, digests: Sequence[str]) -> list[list[Job]]:
        groups: dict[tuple, list[Job]] = {}
        for digest in digests:
            try:
                record = self._find_record(digest, is_leased=False)
            except ConfigError:  # whoever makes the run sets it aside, or says why it stops
                record = None
            job = Job(self.remaining[digest], digest, record)
            groups.setdefault((compute_static_key(job.spec), _get_resume_point(record)), []).append(
                job
            )
        return list(groups.values())

    def _compute_worker_order(self, spec: ResolvedRunSpec) -> str:
        text = self.leases.owner.token + compute_static_key(spec)
        return hashlib.sha256(text.encode()).hexdigest()


def _get_resume_point(record: dict | None) -> tuple | None:
    """Return the point of a run at which its checkpoint was written, and its lanes."""
    if record is None:
        return None
    progress = str(record["work"]), str(record.get("within"))
    return record["round"], *progress, record["blocks"], record["lanes"]
