"""The queue of a sweep's runs, which several workers may share, and its status lines."""

import functools
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER, find_resumable_record
from fedjax_het.runtime.identity import ListChanges, list_environment_changes, list_no_changes
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.progress import (
    NotebookBar,
    SweepProgressOption,
    find_notebook_display,
    format_duration,
    show_progress,
)
from fedjax_het.runtime.result_display import format_run_label, list_varying_settings
from fedjax_het.runtime.result_store import load_result
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.signature import compute_static_key
from fedjax_het.utils import console
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import find_stored_file, list_stored_names
from fedjax_het.utils.text import to_one_line

log = logging.getLogger("fedjax_het")

POLL_SECONDS = 1.0
"""Seconds between looks at the leases of other workers."""
CHECK_SECONDS = 0.5
"""Seconds between checks of this worker's own leases."""
LEASES_FOLDER = "claims"
"""Name of the folder of leases in the folder of results."""


class Job(NamedTuple):
    """A run of a sweep."""

    spec: ResolvedRunSpec
    """Settings of the run."""
    digest: str
    """Digest that names the files of its result."""
    record: dict | None = None
    """Record of the checkpoint from which it resumes, if there is one."""


class LeaseLostError(Exception):
    """Another worker has acquired the lease of a run, which this worker did not renew in time."""


class StoredRuns(NamedTuple):
    """Rules for the results, checkpoints and final states that a folder has already."""

    resume_anyway: bool = False
    """Resume checkpoints of other versions and devices, too."""
    find_saved_state: Callable[[ResolvedRunSpec], Path | None] = lambda spec: None
    """Returns the final state of a run with fewer rounds."""
    list_changes: ListChanges = list_no_changes
    """Names registered objects that have changed since a file was written."""
    environment: Mapping[str, Any] = MappingProxyType({})
    """Versions and switches of the runs, see `describe_environment`."""
    user_digests: Callable[[ResolvedRunSpec], dict[str, str]] = lambda spec: {}
    """Returns the digests of a user's data that replace the named data, for labels."""


MIN_RUNS_OF_ESTIMATE = 3
"""Number of finished runs from which the remaining time is estimated; the first ones compile."""


class SweepProgress:
    """Reports of a sweep, a line each.

    A function `progress` receives the lines; `print` also respects the output mode of the process,
    see `utils.console`. None prints nothing. In a notebook, `print` shows one bar instead, and at
    the end the number of runs and the time.

    Attributes:
      total: number of runs without a result at the start.
      print_line: function that prints a line.
      num_processed: runs that ended, were rejected or were executed by other workers.
      num_finished: runs that this worker executed.
      num_elsewhere: runs that other workers executed.
    """

    def __init__(
        self,
        num_runs: int,
        num_existing: int,
        directory: Path | None,
        progress: SweepProgressOption,
        format_label: Callable[[ResolvedRunSpec], str] = format_run_label,
    ):
        """Report results that exist before the sweep.

        Args:
          num_runs: number of runs of the sweep.
          num_existing: number of runs with a result.
          directory: folder of results.
          progress: "auto" or True for `print`, a function that receives a line per event, or None
            or False.
          format_label: function that describes a run in a few words.
        """
        self._format_label = format_label
        self.total = num_runs - num_existing
        self._shows_progress = progress in ("auto", True, print)
        self.print_line: Callable[[str], None] = lambda line: None
        self._notebook_bar: NotebookBar | None = None
        if self._shows_progress:
            self.print_line = console.print_status
            display = find_notebook_display()
            if self.total and display and console.output_mode() == console.TEXT:
                self._notebook_bar = NotebookBar(display)
        elif callable(progress):
            self.print_line = progress
        self.num_processed = self.num_finished = self.num_elsewhere = 0
        self._reported_reasons: set[str] = set()
        self._start_time = time.perf_counter()
        if num_existing:
            self.print_line(f"{num_existing} of {num_runs} runs are in {directory} already")

    def report_rejected(self, jobs: Sequence[Job], reason: str) -> None:
        """Report runs that cannot be executed; each reason has one line.

        Args:
          jobs: the runs.
          reason: why.
        """
        if reason not in self._reported_reasons:
            self.print_line(f"{self._format_jobs(jobs)}: not run: {reason}")
            self._reported_reasons.add(reason)
        self.num_processed += len(jobs)

    def report_lost(self, jobs: Sequence[Job]) -> None:
        """Report runs whose leases another worker has acquired."""
        self.print_line(f"{self._format_jobs(jobs)}: left to the worker that acquired the lease")

    def show_running(self, jobs: Sequence[Job]) -> AbstractContextManager[Callable | None]:
        """Return a context that shows the progress of runs and yields a callable for it."""
        last = self.num_processed + len(jobs)
        numbers = f"{last}" if len(jobs) == 1 else f"{self.num_processed + 1} to {last}"
        label = f"[{numbers}/{self.total}] {self._format_label(jobs[0].spec)}"
        label += " and more" if len(jobs) > 1 else ""
        if bar := self._notebook_bar:
            bar.start(label)
            return nullcontext(bar)
        return show_progress(label, quiet=not self._shows_progress, transient=True)

    def report_finished(
        self,
        jobs: Sequence[Job],
        results: Sequence[Result],
        remaining: Sequence[Job] = (),
    ) -> None:
        """Report runs that this worker has executed, a line each.

        Args:
          jobs: the runs.
          results: their results.
          remaining: runs of their group that are still to be executed.
        """
        self.num_finished += len(jobs)
        num_ended = self.num_finished + self.num_elsewhere
        elapsed = time.perf_counter() - self._start_time
        mean_seconds = elapsed / num_ended
        seconds_per_run = results[0].seconds  # runs in lockstep have equal shares of the time
        num_others = self.total - self.num_processed - len(jobs)
        seconds_to_go = mean_seconds * num_others
        if not self.num_elsewhere:  # then the rest of the group is expected to take as long
            seconds_to_go += (seconds_per_run - mean_seconds) * len(remaining)
        for job, result in zip(jobs, results, strict=True):
            label = self._format_jobs([job])
            self.num_processed += 1
            outcome = f"{_format_outcome(result.summary)} in {format_duration(seconds_per_run)}"
            parts = [f"{label}: {outcome}"]
            if self.num_processed == self.total:
                parts.append("done")
            elif num_ended >= max(MIN_RUNS_OF_ESTIMATE, self.total / 10):
                parts.append(f"about {format_duration(seconds_to_go)} to go")
            if self.num_elsewhere:
                parts.append(f"{self.num_elsewhere} by other workers")
            if self._notebook_bar is None:
                self.print_line("; ".join(parts))
        if self._notebook_bar is not None:
            self._notebook_bar.write(
                f"{self.num_processed} of {self.total} runs in {format_duration(elapsed)}"
            )

    def report_elsewhere(self, count: int) -> None:
        """Count runs that other workers have executed."""
        self.num_elsewhere += count
        self.num_processed += count

    def report_waiting(self, count: int, owners: Sequence[str]) -> None:
        """Report that other workers have the leases of all remaining runs.

        Args:
          count: number of remaining runs.
          owners: the other workers.
        """
        runs = "1 run" if count == 1 else f"{count} runs"
        self.print_line(f"waiting for {runs} of other workers: {', '.join(owners)}")

    def _format_jobs(self, jobs: Sequence[Job]) -> str:
        label = f"[{self.num_processed + 1}/{self.total}] {self._format_label(jobs[0].spec)}"
        return label + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")


def _format_outcome(summary: dict[str, Any]) -> str:
    accuracy = summary["final_accuracy"]
    if summary.get("diverged"):
        text = "diverged"
    elif summary.get("bmta") is not None:
        text = f"{100 * summary['bmta']:.2f} % mean of clients' own tests"
    elif accuracy is None or math.isnan(accuracy):
        text = "no accuracy"
    else:
        text = f"{100 * accuracy:.2f} %"
    return text + (f" after round {summary['rounds']}" if summary.get("stopped_early") else "")


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
        progress: SweepProgressOption,
        stored_runs: StoredRuns = StoredRuns(),
    ):
        """Load the results that exist.

        Args:
          specs_by_digest: the runs by the digests of their files.
          directory: folder of results; None where results are only returned.
          leases: the leases of this worker.
          progress: "auto" or True for `print`, a function that receives a line per event, or None
            or False.
          stored_runs: rules for the files that the folder has already.
        """
        self.directory, self.leases, self._stored_runs = directory, leases, stored_runs
        self._find_saved_state = functools.cache(
            lambda digest: stored_runs.find_saved_state(specs_by_digest[digest])
        )
        self._unusable_mtimes: dict[str, int] = {}
        self.results: dict[str, Result] = {}
        self.remaining, self.not_run = dict(specs_by_digest), dict[str, str]()
        num_existing, num_runs = self._load_new_results(), len(specs_by_digest)
        varying = list_varying_settings(specs_by_digest.values())
        self.sweep_progress = SweepProgress(
            num_runs,
            num_existing,
            directory,
            progress,
            lambda spec: format_run_label(spec, stored_runs.user_digests(spec), varying),
        )
        self._report_environments()
        self._checked_at = time.monotonic()

    def iterate_groups(self) -> Iterator[list[Job]]:
        """Yield runs for lockstep: runs of one signature, and at one point if they resume.

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
            self.sweep_progress.report_rejected(jobs, reason)
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
        """Load new results, and return their number; log an unusable file once."""
        if self.directory is None:
            return 0
        num_changed: Counter[str] = Counter()
        # Listing the folder also lets a network file system see new files.
        names, num_before = {*list_stored_names(self.directory)}, len(self.results)
        for digest in [d for d in self.remaining if f"{d}.json" in names]:
            try:
                mtime = find_stored_file(self.directory / f"{digest}.json").stat().st_mtime_ns
            except OSError:  # removed meanwhile
                continue
            if self._unusable_mtimes.get(digest) == mtime:
                continue
            result, changes = load_result(self.directory, digest), list[str]()
            if result is not None:
                changes = self._stored_runs.list_changes(self.remaining[digest], result.summary)
            if result is None or changes:
                self._unusable_mtimes[digest] = mtime
                num_changed.update([", ".join(changes)] if changes else [])
            else:
                self.results[digest] = result
                del self.remaining[digest]
        for changed, count in num_changed.items():
            log.warning(
                "%s: changed since results in %s were written; executed again: %d",
                to_one_line(changed),
                self.directory,
                count,
            )
        return len(self.results) - num_before

    def _report_environments(self) -> None:
        """Report existing results of other versions and switches, which rounding may explain."""
        environment = self._stored_runs.environment
        texts = (list_environment_changes(r.summary, environment) for r in self.results.values())
        for text, count in Counter(filter(None, texts)).items():
            line = f"{count} of them have {text}, and may differ by rounding"
            self.sweep_progress.print_line(to_one_line(line))

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

        A worker that has the lease may set a damaged checkpoint aside. The record has no arrays,
        since arrays of all runs may not fit into memory.
        """
        if self.directory is None:
            return None
        record = find_resumable_record(
            self.directory / UNFINISHED_FOLDER / digest,
            self.remaining[digest],
            saved_state=self._find_saved_state(digest),
            resume_anyway=self._stored_runs.resume_anyway,
            quarantine=is_leased,
            list_changes=self._stored_runs.list_changes,
        )
        return record and {name: value for name, value in record.items() if name != "arrays"}

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
