"""Execution of runs of a sweep that go in step; each result is written as its run ends."""

import contextlib
import math
from collections.abc import Sequence

from fedjax_het.runtime.build import RunGroup
from fedjax_het.runtime.callbacks import Callback, CallbackRunner
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER, CheckpointWriter, delete_checkpoint
from fedjax_het.runtime.group_state import GroupState, init_group
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.result_builder import build_result, build_results
from fedjax_het.runtime.result_store import ResultWriter
from fedjax_het.runtime.results import Result, build_state_path
from fedjax_het.runtime.runner import advance_runs, start_runs
from fedjax_het.runtime.sweep_log import Job
from fedjax_het.runtime.work_queue import LeaseLostError, WorkQueue
from fedjax_het.utils.errors import ConfigError

NUM_PAUSES = 8  # of a run, at which others may take the places of those that have ended
MIN_FREE_FRACTION = 0.25  # of the places, at least, that others then find


class GroupRunner:
    """Executes a set of runs of a group, at most as many as go in step.

    The result of a run that diverges or ends early is written at once. When a quarter of the slots
    are free and further runs of the group wait, the others are suspended at the next of eight
    points of their rounds; they resume from their checkpoints in full sets. Without a folder there
    are no checkpoints, and no run is suspended.
    """

    def __init__(
        self,
        group: RunGroup,
        jobs: list[Job],
        slots: list[int],
        result_writer: ResultWriter,
        work_queue: WorkQueue,
        callbacks: Sequence[Callback] = (),
    ):
        """Prepare the folders of checkpoints.

        Args:
          group: the runs that share the programs.
          jobs: the jobs of all runs of the group.
          slots: positions among `jobs` of the runs to execute, whose leases this worker has.
          result_writer: writes the results.
          work_queue: the queue of the sweep.
          callbacks: called for every run in turn.
        """
        self.group, self.jobs, self.slots = group, jobs, slots
        self.result_writer, self.work_queue, self.callbacks = result_writer, work_queue, callbacks
        self.active_jobs = {i: jobs[slot] for i, slot in enumerate(slots)}  # those without a result
        self.num_runs = len(slots)
        self.folders = None
        if result_writer.folder is not None:
            self.folders = [
                result_writer.folder / UNFINISHED_FOLDER / job.digest for job in self._active_jobs
            ]
            for folder in self.folders:
                with contextlib.suppress(OSError):  # which the first checkpoint will say
                    folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = CheckpointWriter(self.folders)

    def run_jobs(self, *, keep_state: bool) -> list[Job]:
        """Execute the runs; return the jobs of the group, some of which may be suspended."""
        try:
            with self.work_queue.sweep_progress.show_running(self._active_jobs) as show_progress:

                def progress(progress: Progress) -> None:
                    if show_progress is not None:
                        show_progress(progress)
                    self.work_queue.require_leases(
                        self._active_jobs
                    )  # as late as can be before a checkpoint

                self._advance(progress, keep_state)
        except (LeaseLostError, ConfigError, OSError):
            if self.work_queue.has_leases(self._active_jobs):
                raise
            self.work_queue.sweep_progress.report_lost(self._active_jobs)
            self.work_queue.release(self._active_jobs)
            return self.jobs
        return self._suspend() if self.active_jobs else self.jobs

    @property
    def _active_jobs(self) -> list[Job]:
        return list(self.active_jobs.values())

    def _advance(self, progress, keep_state: bool) -> None:
        prepared_runs = [self.group.prepared_runs[slot] for slot in self.slots]
        records = [job.record for job in self._active_jobs if job.record is not None]
        group_state = init_group(self.group, prepared_runs, progress=progress, records=records)
        group_state.pause_every = self._compute_pause_interval(group_state)
        callback_runner = CallbackRunner(group_state, self.checkpoints, self.callbacks)
        start_runs(group_state, self.checkpoints, records or None)
        callback_runner.on_start()
        for phase in advance_runs(group_state, self.checkpoints):
            callback_runner.on_phase_end(phase)
            finished = [i for i in self.active_jobs if i not in group_state.active]
            if (
                finished
                and group_state.active
                and group_state.rounds_done < group_state.total_rounds
            ):
                self._write_results(
                    group_state,
                    callback_runner,
                    {i: build_result(group_state, i) for i in finished},
                    keep_state,
                )
            if self._should_repack(group_state):
                self.checkpoints.save(group_state, force=True)
                if not self.checkpoints.has_failed:
                    return
        results = dict(enumerate(build_results(group_state)))
        self._write_results(
            group_state, callback_runner, {i: results[i] for i in self.active_jobs}, keep_state
        )

    def _write_results(
        self,
        group_state: GroupState,
        callback_runner: CallbackRunner,
        results: dict[int, Result],
        keep_state: bool,
    ) -> None:
        """Write the results of runs that have ended."""
        jobs = [self.active_jobs[i] for i in results]
        if not self.work_queue.has_leases(jobs):
            raise LeaseLostError
        for i, result in results.items():
            job = self.active_jobs.pop(i)
            if keep_state and self.result_writer.folder is not None:
                self.checkpoints.save_final_state(
                    group_state, i, build_state_path(self.result_writer.folder, job.digest)
                )
            if self.result_writer.write(result) and self.folders is not None:
                delete_checkpoint(self.folders[i])
            group_state.reported.add(i)
            self.work_queue.complete(job, result)
            callback_runner.on_run_end(i, result)
            result.state = result.models = None  # a sweep's states together may not fit
        remaining_jobs = [
            job
            for job in self.jobs
            if job.digest in self.work_queue.remaining and job not in self._active_jobs
        ]
        self.work_queue.sweep_progress.report_finished(
            jobs, list(results.values()), remaining_jobs, self.num_runs
        )

    def _compute_pause_interval(self, group_state: GroupState) -> int | None:
        """Return the rounds between points at which runs may be suspended; None for never."""
        can_stop_early = any(
            prepared_run.spec.has_early_stopping for prepared_run in self.group.prepared_runs
        )
        return (
            math.ceil(group_state.total_rounds / NUM_PAUSES)
            if can_stop_early and self.folders is not None
            else None
        )

    def _should_repack(self, group_state: GroupState) -> bool:
        """Return whether the remaining runs should be suspended, so that sets are full again."""
        if (
            group_state.pause_every is None
            or group_state.rounds_done % group_state.pause_every
            or group_state.rounds_done == group_state.total_rounds
        ):
            return False
        num_free = group_state.group.program.plan.max_parallel_runs - len(self.active_jobs)
        if (
            group_state.round_progress is not None
            or not self.active_jobs
            or num_free < MIN_FREE_FRACTION * group_state.group.program.plan.max_parallel_runs
        ):
            return False
        waiting_jobs = [job for job in self.jobs if job.digest in self.work_queue.remaining]
        return len(waiting_jobs) > len(self.active_jobs)

    def _suspend(self) -> list[Job]:
        """Suspend the remaining runs; return the jobs of the group with their new records."""
        suspended_jobs = {job.digest: job for job in self.work_queue.suspend(self._active_jobs)}
        return [suspended_jobs.get(job.digest, job) for job in self.jobs]
