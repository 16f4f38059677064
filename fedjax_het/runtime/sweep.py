"""Sweeps: many runs, executed in groups, with their results in one folder.

Runs that differ in seed, partition, alpha or numeric hyper-parameters share their compiled programs
and run in parallel: one on each core or device, or vmapped on an accelerator.
"""

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.memory import usable_free_bytes
from fedjax_het.core.optimizers import compute_optimizer_digest
from fedjax_het.data import Dataset, Partition, load_dataset
from fedjax_het.data.partition import select_clients
from fedjax_het.nn import compute_network_digest, to_model
from fedjax_het.runtime.build import (
    compute_initial_digest,
    prepare_group,
    with_fewer_parallel_runs,
)
from fedjax_het.runtime.callbacks import Callback
from fedjax_het.runtime.checkpointing import UNFINISHED_FOLDER
from fedjax_het.runtime.compiled_programs import compute_static_key
from fedjax_het.runtime.data_assignment import (
    build_partition,
    build_server_data,
    choose_held_out_clients,
    load_server_pool,
    user_dataset_digest,
)
from fedjax_het.runtime.group_runner import GroupRunner
from fedjax_het.runtime.group_state import init_group, measure_required_memory
from fedjax_het.runtime.hardware import warn_unused_hardware
from fedjax_het.runtime.leases import Leases, exit_on_sigterm
from fedjax_het.runtime.memory_limits import InsufficientMemoryError, require_memory_for_programs
from fedjax_het.runtime.placement import Placement, balance_parallel_runs
from fedjax_het.runtime.prepared_run import RunGroup
from fedjax_het.runtime.provenance import compute_run_digest, describe_environment
from fedjax_het.runtime.result_display import build_runs_dataset, format_outcome, format_settings
from fedjax_het.runtime.result_store import (
    ResultWriter,
    SavedStateIndex,
    build_dataframe,
    load_result,
)
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.sweep_log import Job
from fedjax_het.runtime.trackers.callback import add_tracker_callback
from fedjax_het.runtime.user_objects import UserObjects
from fedjax_het.runtime.work_queue import LEASES_FOLDER, WorkQueue
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import make_output_directory
from fedjax_het.utils.validation import validate_arguments

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

log = logging.getLogger("fedjax_het")

_MAX_SHOWN_RUNS = 10  # runs of a sweep that is printed
_UNUSABLE_ERRORS = (ConfigError, FileNotFoundError, ImportError)


class SweepResult(NamedTuple):
    """What a sweep made, or found made.

    `results[i]` is that of `specs[i]`, whoever made it: None if it could not be run.
    `not_run` says why, under `RunSpec.digest()`.
    """

    results: list[Result | None]
    not_run: dict[str, str]

    def to_summary(self, directory: str | os.PathLike) -> dict[str, Any]:
        """The sweep in one JSON-able record."""
        results = [result for result in self.results if result is not None]
        return {
            "output_dir": str(directory),
            "runs": len(self.results),
            "results": len(results),
            "diverged": sum(bool(result.summary["diverged"]) for result in results),
            "not_run": len(self.not_run),
        }

    def to_pandas(self) -> "pd.DataFrame":
        """The results as `load_results` gives them."""
        return build_dataframe(result for result in self.results if result is not None)

    def to_xarray(self) -> "xr.Dataset":
        """Their metrics, with the dimension run, see `Result.to_xarray`: settings that differ are
        coordinates of it."""
        return build_runs_dataset([result for result in self.results if result is not None])

    def __repr__(self) -> str:
        results = [result for result in self.results if result is not None]
        lines = [f"SweepResult({len(results)} of {len(self.results)} runs"]
        lines += [
            f"  {format_settings(result.spec)}: {format_outcome(result)}"
            for result in results[:_MAX_SHOWN_RUNS]
        ]
        if len(results) > _MAX_SHOWN_RUNS:
            lines.append(f"  and {len(results) - _MAX_SHOWN_RUNS} more")
        lines += [f"  not run: {reason}" for reason in dict.fromkeys(self.not_run.values())]
        return "\n".join(lines) + ")"

    def _repr_html_(self) -> str:
        columns = (
            "algorithm",
            "dataset",
            "alpha",
            "seed",
            "final_accuracy",
            "bmta",
            "wall_seconds",
        )
        table = self.to_pandas()
        return table[[name for name in columns if name in table]].to_html(max_rows=_MAX_SHOWN_RUNS)


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
    progress: Callable[[str], None] | None = print,
    placement: Placement = Placement(),
) -> SweepResult:
    """Make every run of `specs` that `directory` does not hold yet.

    Runs that differ in nothing but seed, partition, alpha, averaging and numeric hyper-parameters
    are a group: it is compiled once, and as many of its runs as fit go side by side. Each result is
    saved as its run ends; a sweep that was stopped goes on from the last checkpoints, kept in
    `directory/unfinished`. What a run measures does not depend on the others beyond rounding.

    Args:
      directory: of the results (default: they are only returned, and nothing resumes).
      dataset: the user's own, for specs whose dataset is "user"; where none's is, for all, whose
        results then say so in their names, see `simulate`.
      network: the user's own, for all specs, which then name none; see `simulate`.
      optimizer: the clients' own, for all specs, which then name none; see `simulate`.
      data_dir: of the prepared data (default: TFDS_DATA_DIR).
      resume_anyway: go on also from checkpoints that were begun under another version, device or
        precision, which the runs' summaries then name (`begun_under`).
      keep_state: write to `directory` how every run ended, as `simulate` does: from there a sweep
        with more rounds goes on, and loaded results have their models.
      callbacks: called for every run in turn, see `simulate` and `runtime.callbacks.RunStatus`.
      track: names of trackers, of `TRACKERS`, that keep a record of every run in `directory`.
      progress: gets a line per run. With `print`, what is running is shown besides, on standard
        error; with another function or None nothing is.
      placement: where they go, on this process's devices unless it says otherwise; as many at a
        time as memory allows.
    Raises: ConfigError, before the first run, if settings cannot be used. A run whose data or
      optional package is missing does not stop the others: see `SweepResult.not_run`. A checkpoint
      that is damaged is set aside, and its run begun again. ResultNotWrittenError, when all runs are
      made, if results could not be written to `directory`: it has them, and says where they are.
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
    results, reasons = execute_runs(
        specs_by_digest, result_writer, options, progress, callbacks=callbacks
    )
    sweep_result = SweepResult([results.get(digest) for digest in digests], reasons)
    result_writer.require_all_written(sweep_result)
    return sweep_result


class ExecutionOptions(NamedTuple):
    """How the runs of a sweep are executed, on this process or on another one."""

    user_objects: UserObjects
    placement: Placement
    resume_anyway: bool = False
    keep_state: bool = False


def execute_runs(
    specs_by_digest: dict[str, ResolvedRunSpec],
    result_writer: ResultWriter,
    options: ExecutionOptions,
    progress: Callable[[str], None] | None,
    *,
    callbacks: Sequence[Callback] = (),
    runs_per_signature: Counter[str] | None = None,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Execute runs, group by group.

    Args:
      specs_by_digest: the runs by the names of their files.
      result_writer: writes each result as its run ends.
      options: the user's objects, the placement, and what to do with checkpoints and states.
      progress: called with a line per run.
      callbacks: called for every run in turn.
      runs_per_signature: the number of all runs of the sweep by `compute_static_key`, of which
        these may be some (default: these are all).

    Returns:
      Results by the names of their files, and why other runs were not made, by `RunSpec.digest()`.
    """
    user_objects, placement = options.user_objects, options.placement
    if placement.devices is None:
        placement = dataclasses.replace(placement, devices=jax.local_devices())
    reasons: dict[str, str] = {}
    # By all runs, not by what is left of them: then it does not matter who begins when.
    runs_per_signature = runs_per_signature or Counter(
        compute_static_key(spec) for spec in specs_by_digest.values()
    )
    leases = Leases(None if result_writer.folder is None else result_writer.folder / LEASES_FOLDER)
    with exit_on_sigterm(), leases:
        saved_states = SavedStateIndex(result_writer.folder)
        work_queue = WorkQueue(
            specs_by_digest,
            result_writer.folder,
            leases,
            progress,
            options.resume_anyway,
            lambda spec: saved_states.find(spec, user_objects.get_dataset(spec)),
        )
        while work_queue.wait_for_work():
            prepared_groups = (
                _prepare_jobs(
                    jobs, user_objects, placement, work_queue, runs_per_signature, reasons
                )
                for jobs in work_queue.iterate_groups()
            )
            for jobs, group in _precompile_groups(prepared_groups, placement.memory):
                try:
                    if group.program.plan.max_parallel_runs == 1:  # not even one by itself may fit
                        single_run = init_group(group, group.prepared_runs[:1])
                        require_memory_for_programs(single_run, placement.memory)
                except InsufficientMemoryError as error:
                    _reject_jobs(work_queue, reasons, jobs, error)
                while slots := work_queue.acquire_slots(jobs, group.program.plan.max_parallel_runs):
                    group_runner = GroupRunner(
                        group, jobs, slots, result_writer, work_queue, callbacks
                    )
                    jobs = group_runner.run_jobs(keep_state=options.keep_state)
    return work_queue.results, reasons


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
    """What `sweep` would do: (digest of the files, spec, state).

    States: "done"; "claimed", a worker's who has not been seen dead; "unfinished", begun and
    nobody's; "missing".
    """
    directory = Path(directory)
    is_usable = directory.is_dir() or not directory.exists()
    require(is_usable, "directory", str(directory), "a folder of results, or one to be made")
    user_objects = UserObjects(dataset, None, network, optimizer, data_dir)
    _, specs_by_digest = compute_run_digests(*user_objects.resolve_all(specs))
    leased = Leases(directory / LEASES_FOLDER).list_other_owners()

    def get_state(digest: str) -> str:
        if load_result(directory, digest) is not None:
            return "done"
        if digest in leased:
            return "claimed"
        return "unfinished" if (directory / UNFINISHED_FOLDER / digest).exists() else "missing"

    digests = sorted(
        specs_by_digest, key=lambda digest: compute_static_key(specs_by_digest[digest])
    )  # stable: else in order
    return [(digest, specs_by_digest[digest], get_state(digest)) for digest in digests]


def compute_run_digests(
    specs: Sequence[ResolvedRunSpec],
    user_objects: UserObjects,
    run_environment: dict[str, Any] | None = None,
) -> tuple[list[str], dict[str, ResolvedRunSpec]]:
    """Compute the names of the runs' files.

    Args:
      specs: the runs.
      user_objects: the user's own objects.
      run_environment: version, device and precision that the runs are executed under (default:
        those of this process, see `describe_environment`).

    Returns:
      The name of every run's files in the order of `specs`, and the runs by name, each once.
    """
    run_environment = run_environment or describe_environment()
    compute_network_digest = functools.cache(
        functools.partial(_compute_network_digest, user_objects)
    )
    compute_initial_digest_cached = functools.cache(compute_initial_digest)
    digests = []
    for spec in specs:
        dataset = user_objects.get_dataset(spec)
        network_digest = None
        if user_objects.network is not None:
            options = tuple(sorted(spec.model_options.items()))
            network_digest = compute_network_digest(
                dataset, spec.dataset, spec.normalisation, options
            )
        initial = None if spec.init_from is None else compute_initial_digest_cached(spec.init_from)
        other_digests = {"initial": initial}
        if user_objects.optimizer is not None:
            other_digests["optimizer"] = compute_optimizer_digest(user_objects.optimizer, spec.hp)
        dataset_digest = None if dataset is None else user_dataset_digest(spec, dataset)
        digests.append(
            compute_run_digest(
                spec.digest(), run_environment, dataset_digest, network_digest, **other_digests
            )
        )
    return digests, dict(zip(digests, specs, strict=True))


def _compute_network_digest(
    user_objects: UserObjects,
    dataset: Dataset | None,
    name: str,
    normalisation: str | None,
    options: tuple,
) -> str:
    """Return the digest of the user's network on their data set, or on the one of this name."""
    try:
        if dataset is None:
            data_dir = user_objects.data_dir
            dataset = load_dataset(name, normalisation=normalisation, data_dir=data_dir)
    except _UNUSABLE_ERRORS:  # then the run cannot be made, and says why
        return "unknown"
    shape, num_classes = dataset.input_shape, dataset.num_classes
    network = to_model(user_objects.network, shape, num_classes, **dict(options))
    return compute_network_digest(network)


def _prepare_jobs(
    jobs: list[Job],
    user_objects: UserObjects,
    placement: Placement,
    work_queue: WorkQueue,
    runs_per_signature: Counter[str],
    reasons: dict[str, str],
) -> tuple[list[Job], RunGroup | None]:
    """Prepare the group of those jobs that can run.

    Args:
      jobs: jobs of one signature.
      user_objects: the user's own objects.
      placement: devices, lanes and the place of client states.
      work_queue: the queue of the sweep, from which jobs that cannot run are removed.
      runs_per_signature: number of the sweep's runs of each signature.
      reasons: receives why jobs cannot run, by `RunSpec.digest()`.

    Returns:
      The jobs that can run, and their group; None if there are none.
    """
    reject = functools.partial(_reject_jobs, work_queue, reasons)
    first = jobs[0].spec
    try:
        dataset = user_objects.load_dataset(first, caller="sweep")
        pool = load_server_pool(first, dataset, user_objects.data_dir)
    except _UNUSABLE_ERRORS as error:
        reject(jobs, error)
        return [], None
    usable_jobs: list[Job] = []
    partitions: list[Partition] = []
    for job in jobs:
        try:
            partition = build_partition(job.spec, dataset)
            ids, held_out_ids = choose_held_out_clients(job.spec, partition)
            participating = select_clients(partition, ids) if len(held_out_ids) else partition
            build_server_data(job.spec, dataset, participating, pool)
        except ConfigError as error:
            reject([job], error)
        else:
            partitions.append(partition)
            usable_jobs.append(job)
    if not usable_jobs:
        return [], None
    if (record := usable_jobs[0].record) is not None:  # as it began: sums are taken in one order
        checkpoint_layout = {"lanes": record["lanes"], "blocks": record["blocks"]}
        placement = dataclasses.replace(placement, **checkpoint_layout)
    try:
        group = prepare_group(
            [job.spec for job in usable_jobs],
            dataclasses.replace(user_objects, dataset=dataset, dataset_is_for_all=True),
            placement,
            partitions=partitions,
            pool=pool,
            num_runs=runs_per_signature[compute_static_key(first)],
        )
    except InsufficientMemoryError as error:
        reject(usable_jobs, error)
        return [], None
    return usable_jobs, group


def _reject_jobs(
    work_queue: WorkQueue, reasons: dict[str, str], unusable_jobs: list[Job], error: Exception
) -> None:
    """Remove jobs from the queue, and record why they cannot run."""
    unusable_jobs = [job for job in unusable_jobs if job.digest in work_queue.remaining]
    reason = " ".join(str(error).split())
    work_queue.reject(unusable_jobs)
    if unusable_jobs:
        work_queue.sweep_progress.report_rejected(
            unusable_jobs, reason, show_reason=reason not in reasons.values()
        )
    reasons.update({job.spec.digest(): reason for job in unusable_jobs})


def _precompile_groups(
    prepared_groups: Iterable[tuple[list[Job], RunGroup | None]], memory: int | None
) -> Iterator[tuple[list[Job], RunGroup]]:
    """Yield the groups with as many parallel runs as memory allows.

    While the caller executes a group, the programs of the next one are compiled. Groups are
    prepared in this thread, and while nothing compiles, because preparation may time programs.
    """
    with ThreadPoolExecutor(max_workers=1) as compiler:
        pending: tuple[list[Job], Future[RunGroup]] | None = None
        for jobs, group in prepared_groups:
            if group is None:
                continue
            # What the group before leaves free counts, as long as it has not begun.
            assert group.program.plan.mesh is not None
            available_bytes = memory or usable_free_bytes(
                list(group.program.plan.mesh.devices.flat)
            )
            future = compiler.submit(_fit_to_memory, group, available_bytes)
            if pending is not None:
                yield pending[0], pending[1].result()
            future.exception()  # waits
            pending = jobs, future
        if pending is not None:
            yield pending[0], pending[1].result()


def _fit_to_memory(group: RunGroup, available_bytes: int | None) -> RunGroup:
    """Compile the group with as many parallel runs as these bytes on each device allow."""
    while True:
        capacity, num_parallel = (
            group.program.plan.max_parallel_runs,
            group.program.plan.num_parallel,
        )
        required_bytes = measure_required_memory(init_group(group, group.prepared_runs[:capacity]))
        if available_bytes is None or capacity == 1 or required_bytes <= available_bytes:
            return group
        fewer = min(
            num_parallel - 1,
            max(int(num_parallel * available_bytes / required_bytes), 1 if num_parallel > 1 else 0),
        )
        if fewer:
            assert group.program.plan.mesh is not None
            fewer = balance_parallel_runs(
                len(group.prepared_runs), group.program.plan.mesh.size, fewer
            )
        log.info(
            "%d federations on each device would take %.2f GB and %.2f are free: %s",
            num_parallel,
            required_bytes / 1e9,
            available_bytes / 1e9,
            f"{fewer} at a time" if fewer else "one at a time on all devices",
        )
        group = with_fewer_parallel_runs(group, fewer)
