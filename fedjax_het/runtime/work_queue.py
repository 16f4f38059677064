"""The queue of a sweep's runs, which several workers on one folder may share."""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER, find_resumable_record
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.result_store import load_result
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.signature import compute_static_key
from fedjax_het.runtime.sweep_log import Job, SweepProgress
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import find_stored_file, list_stored_names
from fedjax_het.utils.text import to_one_line

POLL_SECONDS = 1.0
"""Seconds between looks at the leases of other workers."""
CHECK_SECONDS = 0.5
"""Seconds between checks of this worker's own leases."""
LEASES_FOLDER = "claims"
"""Name of the folder of leases in the folder of results."""


class LeaseLostError(Exception):
    """Another worker has acquired the lease of a run, which this worker did not renew in time."""


class WorkQueue:
    """The runs of a sweep that have no result yet, and the leases on them.

    Attributes:
      directory: folder of results; None where results are only returned.
      leases: the leases of this worker.
      results: results by the digests of their files, of all workers.
      remaining: runs that have no result yet and were not rejected, in order.
      not_run: reasons why runs were rejected, by `RunSpec.digest()`.
      sweep_progress: reports.
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
          specs_by_digest: the runs by the digests of their files.
          directory: folder of results; None where results are only returned.
          leases: the leases of this worker.
          progress: function that receives a line per event.
          resume_anyway: resume checkpoints of other versions and devices, too.
          find_saved_state: function that returns the final state of a run with fewer rounds.
        """
        self.directory, self.leases, self._resume_anyway = directory, leases, resume_anyway
        self._find_saved_state = functools.cache(lambda d: find_saved_state(specs_by_digest[d]))
        self._unreadable_mtimes: dict[str, int] = {}
        self.results: dict[str, Result] = {}
        self.remaining, self.not_run = dict(specs_by_digest), dict[str, str]()
        count = self._load_new_results()
        self.sweep_progress = SweepProgress(len(self.remaining), progress)
        self.sweep_progress.report_existing(count, len(specs_by_digest), directory)
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
            groups = self._group_by_signature(unleased)
            if not groups:
                return
            busy = {compute_static_key(self.remaining[d]) for d in leased if d in self.remaining}
            if busy and started:  # other workers look for their next group, too: elsewhere
                groups.sort(key=lambda jobs: self._compute_worker_order(jobs[0].spec))
            jobs = min(groups, key=lambda jobs: compute_static_key(jobs[0].spec) in busy)
            if started or any(self._acquire(job) for job in jobs):
                started |= {job.digest for job in jobs}
                yield jobs

    def acquire_slots(self, jobs: Sequence[Job], count: int) -> list[int]:
        """Acquire the leases of jobs that are at one point, the least advanced first.

        Args:
          jobs: the jobs of a group.
          count: maximum number of leases.

        Returns:
          Positions of the acquired jobs among `jobs`.
        """
        slots: list[int] = []
        for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].record or {}).get("round", 0)):
            first = jobs[slots[0] if slots else i]
            is_at_same_point = _get_resume_point(jobs[i]) == _get_resume_point(first)
            if len(slots) == count:
                break
            if jobs[i].digest in self.remaining and is_at_same_point and self._acquire(jobs[i]):
                slots.append(i)
        return slots

    def suspend(self, jobs: Sequence[Job]) -> list[Job]:
        """Release these runs, and return them with the records of their latest checkpoints."""
        suspended = [
            job._replace(record=self._find_record(job.digest, is_leased=True)) for job in jobs
        ]
        self.release(jobs)
        return suspended

    def reject(self, jobs: Sequence[Job], reason: Exception | str) -> None:
        """Remove and report runs that cannot be executed.

        Args:
          jobs: the runs; finished runs are ignored.
          reason: why.
        """
        jobs = [job for job in jobs if self.remaining.pop(job.digest, None) is not None]
        self.release(jobs)
        reason = to_one_line(str(reason))
        if jobs:
            is_new = reason not in self.not_run.values()
            self.sweep_progress.report_rejected(jobs, reason, show_reason=is_new)
        self.not_run |= {job.spec.digest(): reason for job in jobs}

    def complete(self, job: Job, result: Result) -> None:
        """Remove a run that this worker has executed.

        Args:
          job: the run.
          result: its result, which is written.
        """
        self.results[job.digest] = result
        self.remaining.pop(job.digest, None)
        self.leases.release(job.digest)

    def require_leases(self, jobs: Sequence[Job]) -> None:
        """Raise LeaseLostError if a lease is lost; read the files at most twice a second."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_SECONDS:
            if not self.has_leases(jobs):
                raise LeaseLostError
            self._checked_at = now

    def has_leases(self, jobs: Sequence[Job]) -> bool:
        """Return whether this worker still has the leases of all these runs."""
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
        """Load new results, and return their number; log a damaged file once."""
        if self.directory is None:
            return 0
        # Listing the folder also lets a network file system see new files.
        names, num_before = {*list_stored_names(self.directory)}, len(self.results)
        for digest in [d for d in self.remaining if f"{d}.json" in names]:
            try:
                mtime = find_stored_file(self.directory / f"{digest}.json").stat().st_mtime_ns
            except OSError:  # removed meanwhile
                continue
            if self._unreadable_mtimes.get(digest) != mtime:
                if (result := load_result(self.directory, digest)) is None:
                    self._unreadable_mtimes[digest] = mtime
                else:
                    self.results[digest] = result
                    del self.remaining[digest]
        return len(self.results) - num_before

    def _acquire(self, job: Job) -> bool:
        """Acquire the lease of a run if it has no result yet and is where it was when grouped."""
        if self.directory is None:
            return True
        if not self.leases.acquire(job.digest):
            return False
        self.refresh()  # its owner may have ended between the last look and now
        if job.digest in self.remaining:
            current = job._replace(record=self._find_record(job.digest, is_leased=True))
            if _get_resume_point(current) == _get_resume_point(job):
                return True
        self.leases.release(job.digest)
        return False

    def _find_record(self, digest: str, *, is_leased: bool) -> dict | None:
        """Return the record of the checkpoint from which a run resumes, or None.

        A worker that has the lease may set a damaged checkpoint aside.
        """
        if self.directory is None:
            return None
        return find_resumable_record(
            self.directory / UNFINISHED_FOLDER / digest,
            self.remaining[digest],
            saved_state=self._find_saved_state(digest),
            resume_anyway=self._resume_anyway,
            quarantine=is_leased,
        )

    def _group_by_signature(self, digests: Sequence[str]) -> list[list[Job]]:
        groups: dict[tuple, list[Job]] = {}
        for digest in digests:
            try:
                record = self._find_record(digest, is_leased=False)
            except ConfigError:  # the worker that executes the run sets it aside, or reports it
                record = None
            job = Job(self.remaining[digest], digest, record)
            key = compute_static_key(job.spec), _get_resume_point(job)
            groups.setdefault(key, []).append(job)
        return list(groups.values())

    def _compute_worker_order(self, spec: ResolvedRunSpec) -> str:
        text = self.leases.owner.token + compute_static_key(spec)
        return hashlib.sha256(text.encode()).hexdigest()


def _get_resume_point(job: Job) -> tuple | None:
    """Return the point of a run at which its checkpoint was written, and its lanes."""
    if (record := job.record) is None:
        return None
    progress = str(record["work"]), str(record.get("within"))
    return record["round"], *progress, record["blocks"], record["lanes"]
