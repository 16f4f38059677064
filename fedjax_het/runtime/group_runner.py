"""Execution of the runs of a sweep that share a program; `runtime.session` executes a single run.

Each result is written as its run ends.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

from fedjax_het.runtime.build import RunGroup
from fedjax_het.runtime.callbacks import Callback, CallbackRunner
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER, CheckpointWriter, delete_checkpoint
from fedjax_het.runtime.group_init import init_group, warn_about_settings
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.progress import END, START, Progress
from fedjax_het.runtime.result_builder import build_results
from fedjax_het.runtime.result_store import ResultWriter
from fedjax_het.runtime.results import Result, build_state_path
from fedjax_het.runtime.runner import advance_runs, start_runs
from fedjax_het.runtime.work_queue import Job, LeaseLostError, WorkQueue
from fedjax_het.utils.errors import ConfigError

NUM_PAUSES = 8  # points of a run at which other runs may take the slots of runs that have ended
MIN_FREE_FRACTION = 0.25  # fraction of the slots that must be free for it


class GroupRunner:
    """Executes a set of runs of a group, limited to the number of slots.

    The result of a run that diverges or ends early is written at once. If a quarter of the slots
    are free and further runs of the group wait, the active runs are suspended at the next of eight
    points. They resume from their checkpoints in full sets. Without a folder there are no
    checkpoints, and no run is suspended.
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
        self.active_jobs = {i: jobs[slot] for i, slot in enumerate(slots)}  # jobs without a result
        self.folders = None
        if result_writer.folder is not None:
            parent = result_writer.folder / UNFINISHED_FOLDER
            self.folders = [parent / job.digest for job in self.active_jobs.values()]
            for folder in self.folders:
                with contextlib.suppress(OSError):  # the first checkpoint reports it
                    folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = CheckpointWriter(self.folders)

    def run_jobs(self, *, keep_state: bool) -> list[Job]:
        """Execute the runs.

        Args:
          keep_state: whether to write the final states to the folder of the results.

        Returns:
          The jobs of the group, some of which may be suspended.
        """
        work_queue, sweep_progress = self.work_queue, self.work_queue.sweep_progress
        try:
            with sweep_progress.show_running(self._list_active_jobs()) as show_progress:

                def progress(progress: Progress) -> None:
                    if show_progress is not None:
                        show_progress(progress)
                    # As late as can be before a checkpoint.
                    work_queue.require_leases(self._list_active_jobs())

                self._advance(progress, keep_state)
        except (LeaseLostError, ConfigError, OSError):
            jobs = self._list_active_jobs()
            if work_queue.has_leases(jobs):
                raise
            sweep_progress.report_lost(jobs)
            work_queue.release(jobs)
            return self.jobs
        if not self.active_jobs:
            return self.jobs
        suspended_jobs = {job.digest: job for job in work_queue.suspend(self._list_active_jobs())}
        return [suspended_jobs.get(job.digest, job) for job in self.jobs]

    def _list_active_jobs(self) -> list[Job]:
        return list(self.active_jobs.values())

    def _advance(self, progress: Callable[[Progress], None], keep_state: bool) -> None:
        """Execute the runs until all have ended or should be suspended."""
        prepared_runs = [self.group.prepared_runs[slot] for slot in self.slots]
        records = [job.record for job in self.active_jobs.values() if job.record is not None]
        group_state = init_group(self.group, prepared_runs, progress=progress, records=records)
        if not records:  # otherwise the runs have begun
            warn_about_settings(prepared_runs)
        has_early_stopping = any(run.spec.has_early_stopping for run in self.group.prepared_runs)
        if has_early_stopping and self.folders is not None:
            group_state.pause_every = math.ceil(group_state.total_rounds / NUM_PAUSES)
        callback_runner = CallbackRunner(group_state, self.checkpoints, self.callbacks)

        def write_results(results: dict[int, Result]) -> None:
            """Write the results of runs that have ended."""
            jobs = [self.active_jobs[i] for i in results]
            if not self.work_queue.has_leases(jobs):
                raise LeaseLostError
            for i, result in results.items():
                job, folder = self.active_jobs.pop(i), self.result_writer.folder
                if keep_state and folder is not None:
                    path = build_state_path(folder, result.file_stem)
                    self.checkpoints.save_final_state(group_state, i, path)
                is_written = self.result_writer.write(result)
                if result.is_partial:  # the next sweep finishes it
                    self.checkpoints.save_run(group_state, i)
                elif is_written and self.folders is not None:
                    delete_checkpoint(self.folders[i])
                group_state.reported.add(i)
                self.work_queue.complete(job, result)
                callback_runner.call(i, END, result)
                result.state = result.models = None  # a sweep's states together may not fit
            self.work_queue.sweep_progress.report_finished(
                jobs, list(results.values()), self._list_waiting_jobs()
            )

        start_runs(group_state, self.checkpoints)
        callback_runner.call_unfinished(START)
        with self.checkpoints.save_at_interrupt(group_state, self._has_leases):
            for phase in advance_runs(group_state, self.checkpoints):
                callback_runner.call_unfinished(phase)
                finished = [i for i in self.active_jobs if i not in group_state.active]
                if finished and group_state.is_unfinished:
                    write_results(build_results(group_state, finished))
                if self._should_repack(group_state):
                    self.checkpoints.save(group_state, force=True)
                    if not self.checkpoints.has_failed:
                        return
        write_results(build_results(group_state, list(self.active_jobs)))

    def _has_leases(self) -> bool:
        return self.work_queue.has_leases(self._list_active_jobs())

    def _list_waiting_jobs(self) -> list[Job]:
        """Return the jobs of the group that have no result and are not executed here."""
        active_jobs, remaining = self._list_active_jobs(), self.work_queue.remaining
        return [job for job in self.jobs if job.digest in remaining and job not in active_jobs]

    def _should_repack(self, group_state: GroupState) -> bool:
        """Return whether the remaining runs should be suspended, so that sets are full again."""
        every, done = group_state.pause_every, group_state.rounds_done
        is_at_pause = every is not None and done % every == 0 and done < group_state.total_rounds
        if not is_at_pause or group_state.round_progress is not None or not self.active_jobs:
            return False
        capacity, num_active = self.group.program.plan.max_parallel_runs, len(self.active_jobs)
        has_free_slots = capacity - num_active >= MIN_FREE_FRACTION * capacity
        return has_free_slots and len(self._list_waiting_jobs()) > 0
