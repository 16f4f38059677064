"""Sweeps: many runs, executed in groups, with their results in one folder.

Runs that differ in seed, partition, alpha, averaging or numeric hyperparameters share their
compiled programs. They run in parallel: one on each core or device, or vmapped on an accelerator.
"""

import dataclasses
import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.memory import usable_free_bytes
from fedjax_het.core.optimizers import compute_optimizer_digest
from fedjax_het.data import Dataset, load_dataset
from fedjax_het.nn import compute_network_digest, to_model
from fedjax_het.runtime.build import RunGroup, prepare_group, with_plan
from fedjax_het.runtime.callbacks import Callback
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER
from fedjax_het.runtime.data_assignment import (
    DataAssignment,
    UserObjects,
    assign_data,
    load_server_pool,
    user_dataset_digest,
)
from fedjax_het.runtime.device_report import describe_environment, warn_unused_hardware
from fedjax_het.runtime.group_init import init_group
from fedjax_het.runtime.group_runner import GroupRunner
from fedjax_het.runtime.identity import RegisteredIdentity, compute_class_names_digest
from fedjax_het.runtime.leases import Leases, exit_on_sigterm
from fedjax_het.runtime.memory_limits import InsufficientMemoryError
from fedjax_het.runtime.placement import Placement, balance_parallel_runs
from fedjax_het.runtime.program_memory import measure_required_memory, require_memory_for_programs
from fedjax_het.runtime.progress import SweepProgressOption
from fedjax_het.runtime.result_display import (
    build_runs_dataset,
    format_outcome,
    format_settings,
    list_varying_settings,
)
from fedjax_het.runtime.result_store import (
    ResultWriter,
    SavedStateIndex,
    build_dataframe,
    load_result,
)
from fedjax_het.runtime.results import PARTIAL_SUFFIX, Result
from fedjax_het.runtime.signature import compute_static_key
from fedjax_het.runtime.trackers import add_tracker_callback
from fedjax_het.runtime.trained_model import compute_initial_digest
from fedjax_het.runtime.work_queue import LEASES_FOLDER, Job, StoredRuns, WorkQueue
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.console import count_repeated_warnings
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import list_stored_names, make_output_directory
from fedjax_het.utils.text import escape_html, make_html_table

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

log = logging.getLogger("fedjax_het")

_MAX_SHOWN_RUNS = 10  # runs of a sweep that is printed
_UNUSABLE_ERRORS = (ConfigError, FileNotFoundError, ImportError)


class SweepResult(NamedTuple):
    """Results of the runs of a sweep, which `sweep` returns.

    Example:
      >>> from fedjax_het import RunSpec, sweep
      >>> run = RunSpec("fedavg", "digits", model="mlp", num_clients=2, rounds=1)
      >>> results = sweep([run], progress=None)
      >>> results.to_pandas()["num_clients"].tolist(), results.not_run
      ([2], {})
    """

    results: list[Result | None]
    """Results in the order of the specs, of all workers; None for a run that cannot be executed."""
    not_run: dict[str, str]
    """Reasons why runs cannot be executed, by `RunSpec.digest()`."""

    @property
    def _finished(self) -> list[Result]:
        return [result for result in self.results if result is not None]

    def to_summary(self, directory: str | os.PathLike) -> dict[str, Any]:
        """Return the numbers of runs by outcome, which JSON can hold.

        Args:
          directory: folder of results.

        Returns:
          `output_dir` and the numbers `runs`, `results`, `diverged` and `not_run`.
        """
        return {
            "output_dir": str(directory),
            "runs": len(self.results),
            "results": len(self._finished),
            "diverged": sum(result.diverged for result in self._finished),
            "not_run": len(self.not_run),
        }

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row per result, as `load_results` does."""
        return build_dataframe(self._finished)

    def to_xarray(self) -> "xr.Dataset":
        """Return the metrics of all results with the dimensions run, round and client.

        Settings that differ are coordinates of the runs, see `Result.to_xarray`.
        """
        return build_runs_dataset(self._finished)

    def __repr__(self) -> str:
        lines = [f"{settings}: {outcome}" for settings, outcome in self._list_shown()]
        return "\n  ".join([f"SweepResult({self._count_runs()}", *lines, *self._list_notes()]) + ")"

    def _repr_html_(self) -> str:
        table = make_html_table(self._list_shown(), header=("run", "outcome"))
        notes = "".join(f"<p>{escape_html(note)}</p>" for note in self._list_notes())
        return f"<p>{self._count_runs()}</p>{table}{notes}"

    def _count_runs(self) -> str:
        return f"{len(self._finished)} of {len(self.results)} runs"

    def _list_shown(self) -> list[tuple[str, str]]:
        """Return settings and outcomes of the first runs."""
        varying = list_varying_settings(run.spec for run in self._finished)
        return [
            (format_settings(run.spec, run.summary, varying), format_outcome(run))
            for run in self._finished[:_MAX_SHOWN_RUNS]
        ]

    def _list_notes(self) -> list[str]:
        """Return the number of runs that are not shown, and why runs were not executed."""
        num_hidden = len(self._finished) - _MAX_SHOWN_RUNS
        notes = [f"and {num_hidden} more"] if num_hidden > 0 else []
        return notes + [f"not run: {reason}" for reason in dict.fromkeys(self.not_run.values())]


@validate_arguments
def sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike | None = None,
    *,
    dataset: Dataset | None = None,
    network: Any = None,
    optimizer: Any = None,
    data_dir: str | os.PathLike | None = None,
    resume_anyway: bool = False,
    keep_state: bool = False,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    progress: SweepProgressOption = "auto",
    placement: Placement = Placement(),
) -> SweepResult:
    """Execute every run whose result is not in a folder yet.

    Runs that differ only in seed, partition, alpha, averaging and numeric hyperparameters are a
    group. A group is compiled once, and its runs are executed in parallel, limited by memory. The
    numbers of a run do not depend on the other runs beyond rounding. Each result is written as its
    run ends, and a sweep that was stopped resumes from the checkpoints in `directory/unfinished`.

    Args:
      specs: the runs.
      directory: folder of results (default: results are only returned, and nothing resumes).
      dataset: data set of the user for the specs whose dataset is "user"; if there are none, for
        all specs. The results' digests then include the digest of the data set.
      network: network of the user for all specs, which then name none; see `simulate`.
      optimizer: clients' optimizer of the user for all specs, which then name none; see `simulate`.
      data_dir: folder of the prepared data (default: TFDS_DATA_DIR).
      resume_anyway: resume checkpoints of other versions, devices and precisions, too; summaries
        name them in `begun_under`.
      keep_state: write the final state of every run. Runs with more rounds resume from it, and
        loaded results have their models.
      callbacks: functions that are called for every run in turn, see `runtime.callbacks.RunStatus`.
      track: names of trackers of `TRACKERS`, which keep a record of every run in `directory`.
      progress: "auto" or True prints a line per run, and shows the progress of the current runs on
        standard error; a notebook shows one bar instead. A function receives the lines instead.
        None or False shows nothing.
      placement: devices, lanes and memory of the runs (default: the devices of this process, and
        the most parallel runs that memory allows).

    Returns:
      The results. Runs whose data or optional packages are missing have reasons in `not_run`.

    Raises:
      ConfigError: before the first run, for settings that cannot be used.
      ResultNotWrittenError: after all runs, if results could not be written to the folder. It has
        the results, and names the folder in which they are.

    Example:
      >>> from fedjax_het import grid, sweep
      >>> settings = {"dataset": "digits", "model": "mlp", "num_clients": 4, "rounds": 2}
      >>> results = sweep(grid(algorithm="fedavg", seed=[0, 1], **settings), progress=None)
      >>> results.to_pandas()[["seed", "rounds"]].values.tolist()
      [[0, 2], [1, 2]]
    """
    require_variables()
    if not placement.has_explicit_cpus:
        warn_unused_hardware()
    user_objects = UserObjects(dataset, None, network, optimizer, data_dir)
    resolved_specs, user_objects = user_objects.resolve_all(specs)
    directory = None if directory is None else make_output_directory(directory)
    callbacks = add_tracker_callback(callbacks, track, directory, argument="directory")
    digests, specs_by_digest = compute_run_digests(resolved_specs, user_objects)
    result_writer = ResultWriter(directory)
    options = ExecutionOptions(user_objects, placement, resume_anyway, keep_state)
    results, not_run = execute_runs(
        specs_by_digest, result_writer, options, progress, callbacks=callbacks
    )
    sweep_result = SweepResult([results.get(digest) for digest in digests], not_run)
    result_writer.require_all_written(sweep_result)
    return sweep_result


class ExecutionOptions(NamedTuple):
    """Options of the runs of a sweep, on this process or on another one."""

    user_objects: UserObjects
    """Objects of the user."""
    placement: Placement
    """Devices, lanes and memory."""
    resume_anyway: bool = False
    """Resume checkpoints of other versions, devices and precisions, too."""
    keep_state: bool = False
    """Write the final state of every run."""


def execute_runs(
    specs_by_digest: dict[str, ResolvedRunSpec],
    result_writer: ResultWriter,
    options: ExecutionOptions,
    progress: SweepProgressOption,
    *,
    callbacks: Sequence[Callback] = (),
    runs_per_signature: Counter[str] | None = None,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Execute runs, group by group.

    Args:
      specs_by_digest: the runs by the digests of their files.
      result_writer: writes each result as its run ends.
      options: objects of the user, placement, and options of checkpoints and states.
      progress: reports of the runs, see `sweep`.
      callbacks: functions that are called for every run in turn.
      runs_per_signature: the number of all runs of the sweep by `compute_static_key`, of which
        these may be some (default: these are all).

    Returns:
      Results by the digests of their files, and reasons of the other runs by `RunSpec.digest()`.
    """
    user_objects, placement = options.user_objects, options.placement
    if placement.devices is None:
        placement = dataclasses.replace(placement, devices=jax.local_devices())
    # All runs count, not only the remaining ones, so that results do not depend on who starts when.
    num_runs = runs_per_signature or Counter(map(compute_static_key, specs_by_digest.values()))
    folder = result_writer.folder
    leases = Leases(None if folder is None else folder / LEASES_FOLDER)
    with exit_on_sigterm(), leases, count_repeated_warnings():
        saved_states = SavedStateIndex(folder)
        list_changes = RegisteredIdentity(user_objects).list_changes
        stored_runs = StoredRuns(
            options.resume_anyway,
            lambda spec: saved_states.find(
                spec, user_objects.get_dataset(spec), list_changes=list_changes
            ),
            list_changes,
            describe_environment(),
            user_objects.get_user_digests,
        )
        work_queue = WorkQueue(specs_by_digest, folder, leases, progress, stored_runs)
        while work_queue.wait_for_work():
            groups = _prepare_groups(work_queue, user_objects, placement, num_runs)
            for jobs, group in _precompile_groups(groups, placement.memory):
                capacity = group.program.plan.max_parallel_runs
                try:
                    if capacity == 1:  # not even a single run may fit
                        single_run = init_group(group, group.prepared_runs[:1])
                        require_memory_for_programs(single_run, placement.memory)
                except InsufficientMemoryError as error:
                    work_queue.reject(jobs, error)
                while slots := work_queue.acquire_slots(jobs, capacity):
                    group_runner = GroupRunner(
                        group, jobs, slots, result_writer, work_queue, callbacks
                    )
                    jobs = group_runner.run_jobs(keep_state=options.keep_state)
    return work_queue.results, work_queue.not_run


@validate_arguments
def plan_sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike,
    *,
    dataset: Dataset | None = None,
    network: Any = None,
    optimizer: Any = None,
    data_dir: str | os.PathLike | None = None,
) -> list[tuple[str, RunSpec, str]]:
    """Return the state of every run of a sweep, in the order of execution.

    Args:
      specs: the runs.
      directory: folder of results, which need not exist.
      dataset: data set of the user, see `sweep`.
      network: network of the user, see `sweep`.
      optimizer: clients' optimizer of the user, see `sweep`.
      data_dir: folder of the prepared data (default: TFDS_DATA_DIR).

    Returns:
      Digest of the files, spec and state of every run. States are "done", "claimed" (a live worker
      has the lease), "unfinished" (begun, without a worker), "partial", "outdated" (a registered
      object has changed since) and "missing". A callback or the caller ended a "partial" run; the
      next sweep finishes it.

    Raises:
      ConfigError: for settings that cannot be used, and if `directory` is a file.
    """
    directory = Path(directory)
    is_usable = directory.is_dir() or not directory.exists()
    require(is_usable, "directory", str(directory), "a folder of results, or one to be made")
    user_objects = UserObjects(dataset, None, network, optimizer, data_dir)
    _, specs_by_digest = compute_run_digests(*user_objects.resolve_all(specs))
    leased = Leases(directory / LEASES_FOLDER).list_other_owners()
    names = {*list_stored_names(directory)} if directory.is_dir() else set()
    list_changes = RegisteredIdentity(user_objects).list_changes

    def get_state(digest: str) -> str:
        result = load_result(directory, digest)
        is_outdated = result is not None and list_changes(specs_by_digest[digest], result.summary)
        if result is not None and not is_outdated:
            return "done"
        if digest in leased:
            return "claimed"
        if {f"{digest}.json", f"{digest}{PARTIAL_SUFFIX}.json"} & names:
            return "outdated" if is_outdated else "partial"
        return "unfinished" if (directory / UNFINISHED_FOLDER / digest).exists() else "missing"

    # The order of runs of one signature stays.
    runs = sorted(specs_by_digest.items(), key=lambda run: compute_static_key(run[1]))
    return [(digest, spec, get_state(digest)) for digest, spec in runs]


def compute_run_digests(
    specs: Sequence[ResolvedRunSpec],
    user_objects: UserObjects,
    run_environment: dict[str, Any] | None = None,
) -> tuple[list[str], dict[str, ResolvedRunSpec]]:
    """Compute the digests that name the runs' files.

    Args:
      specs: the runs.
      user_objects: objects of the user.
      run_environment: version, device and precision that the runs are executed under (default: of
        this process, see `describe_environment`).

    Returns:
      The digest of every run in the order of `specs`, and the runs by digest, each once.
    """
    environment = run_environment or describe_environment()
    get_initial_digest = functools.cache(compute_initial_digest)

    @functools.cache
    def get_network_digest(
        dataset: Dataset | None, name: str, normalization: str | None, options: str
    ) -> str:
        try:
            if dataset is None:
                data_dir = user_objects.data_dir
                dataset = load_dataset(name, normalization=normalization, data_dir=data_dir)
        except _UNUSABLE_ERRORS:  # the run is rejected later with the reason
            return "unknown"
        model = to_model(
            *(user_objects.network, dataset.input_shape, dataset.num_outputs),
            num_tokens=dataset.num_tokens,
            per_token=dataset.task_kind.is_per_token,
            **json.loads(options),
        )
        return compute_network_digest(model)

    digests = []
    for spec in specs:
        dataset, summary = user_objects.get_dataset(spec), dict(environment)
        if dataset is not None:
            summary["own_dataset"] = user_dataset_digest(spec, dataset)
            summary["class_names_digest"] = compute_class_names_digest(spec, dataset)
        if user_objects.network is not None:
            options = json.dumps(spec.model_options, sort_keys=True)  # lists cannot be hashed
            summary["network_digest"] = get_network_digest(
                dataset, spec.dataset, spec.normalization, options
            )
        if spec.init_from is not None:
            summary["initial_digest"] = get_initial_digest(spec.init_from)
        if user_objects.optimizer is not None:
            digest = compute_optimizer_digest(user_objects.optimizer, spec.hyperparameters)
            summary["optimizer_digest"] = digest
        digests.append(Result(spec, {}, summary).digest())
    return digests, dict(zip(digests, specs, strict=True))


def _prepare_groups(
    work_queue: WorkQueue, user_objects: UserObjects, placement: Placement, num_runs: Counter[str]
) -> Iterator[tuple[list[Job], RunGroup]]:
    """Yield groups with their jobs; reject the jobs that cannot be executed.

    Args:
      work_queue: the queue of the sweep.
      user_objects: objects of the user.
      placement: devices, lanes and the place of client states.
      num_runs: number of the sweep's runs of each signature.
    """
    for jobs in work_queue.iterate_groups():
        first = jobs[0].spec
        try:
            dataset = user_objects.load_dataset(first, caller="sweep")
            pool = load_server_pool(first, dataset, user_objects.data_dir)
        except _UNUSABLE_ERRORS as error:
            work_queue.reject(jobs, error)
            continue
        usable_jobs: list[Job] = []
        assignments: list[DataAssignment] = []
        for job in jobs:
            try:
                assignments.append(assign_data(job.spec, dataset, pool))
            except ConfigError as error:
                work_queue.reject([job], error)
            else:
                usable_jobs.append(job)
        if not usable_jobs:
            continue
        group_placement, record = placement, usable_jobs[0].record
        if record is not None:  # the layout of the checkpoint, so that sums have the same order
            lanes, blocks = record["lanes"], record["blocks"]
            group_placement = dataclasses.replace(placement, lanes=lanes, blocks=blocks)
        try:
            group = prepare_group(
                [job.spec for job in usable_jobs],
                user_objects,
                group_placement,
                assignments=assignments,
                num_runs=num_runs[compute_static_key(first)],
            )
        except InsufficientMemoryError as error:
            work_queue.reject(usable_jobs, error)
        else:
            yield usable_jobs, group


def _precompile_groups(
    groups: Iterable[tuple[list[Job], RunGroup]], memory: int | None
) -> Iterator[tuple[list[Job], RunGroup]]:
    """Yield the groups, each with the most parallel runs that memory allows.

    While the caller executes a group, the programs of the next one are compiled. Groups are
    prepared in this thread, and while nothing compiles, because preparation may time programs.
    """
    with ThreadPoolExecutor(max_workers=1) as compiler:
        pending: tuple[list[Job], Future[RunGroup]] | None = None
        for jobs, group in groups:
            # The memory that the previous group leaves free counts until that group starts.
            mesh = group.program.plan.mesh
            assert mesh is not None
            available_bytes = memory or usable_free_bytes(list(mesh.devices.flat))
            future = compiler.submit(_fit_to_memory, group, available_bytes)
            if pending is not None:
                yield pending[0], pending[1].result()
            future.exception()  # waits
            pending = jobs, future
        if pending is not None:
            yield pending[0], pending[1].result()


def _fit_to_memory(group: RunGroup, available_bytes: int | None) -> RunGroup:
    """Compile the group with the most parallel runs that these bytes on each device allow."""
    while True:
        plan = group.program.plan
        capacity, num_parallel = plan.max_parallel_runs, plan.num_parallel
        required_bytes = measure_required_memory(init_group(group, group.prepared_runs[:capacity]))
        if available_bytes is None or capacity == 1 or required_bytes <= available_bytes:
            return group
        fewer = max(int(num_parallel * available_bytes / required_bytes), 1)
        fewer = min(num_parallel - 1, fewer)
        if fewer:
            assert plan.mesh is not None
            fewer = balance_parallel_runs(len(group.prepared_runs), plan.mesh.size, fewer)
        log.info(
            "%d federations on each device require %.2f GB and %.2f GB are free: %s",
            num_parallel,
            required_bytes / 1e9,
            available_bytes / 1e9,
            f"{fewer} at a time" if fewer else "one at a time on all devices",
        )
        if fewer:
            plan = plan._replace(num_parallel=fewer)
        else:
            plan = make_execution_plan(plan.lanes, plan.devices[: plan.blocks], blocks=plan.blocks)
        group = with_plan(group, plan)
