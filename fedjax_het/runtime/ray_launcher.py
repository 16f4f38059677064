"""Sweeps as tasks of Ray, on this machine or on an existing cluster.

The runs of each compiled program are split into a few parts, and each part is a task that executes
a sweep. A machine that shares the folder of results keeps checkpoints and leases there, so that
other workers find them; other machines keep nothing. Results return to the process that started the
sweep, which reports progress and writes results that are not in the folder yet. A part whose
process or machine is lost is executed again elsewhere.
"""

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import Dataset
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.identity import RegisteredIdentity
from fedjax_het.runtime.leases import Leases
from fedjax_het.runtime.placement import Placement
from fedjax_het.runtime.progress import SweepProgressOption
from fedjax_het.runtime.result_store import ResultWriter, load_result
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.signature import compute_static_key
from fedjax_het.runtime.sweep import (
    ExecutionOptions,
    SweepResult,
    compute_run_digests,
    execute_runs,
)
from fedjax_het.runtime.trackers import add_tracker_callback
from fedjax_het.runtime.work_queue import Job, StoredRuns, WorkQueue
from fedjax_het.utils.config import NonNegativeFloat, PositiveInt, validate_arguments
from fedjax_het.utils.env import RAY_ADDRESS, get_text, require_variables
from fedjax_het.utils.errors import ConfigError, display_name, require
from fedjax_het.utils.io import make_output_directory
from fedjax_het.utils.text import to_one_line

PARTS_PER_SLOT = 2
"""Parts per task that runs at once, so that no single task is long at the end."""
MAX_ATTEMPTS = 10
"""Attempts to execute a part that is lost again and again."""

PartResult = tuple[dict[str, Result], dict[str, str]]
"""Results by the digests of their files, and reasons of the other runs by `RunSpec.digest()`."""


class TaskLostError(Exception):
    """The process or the machine of a task has ended."""


class RayCluster:
    """Machines that execute tasks of Ray, which is started here unless the process has done so."""

    def __init__(self, address: str | None, cpus: int, gpus: float):
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"{display_name('launcher')} = 'ray': expected the package ray: "
                "pip install 'fedjax_het[ray]'"
            ) from None
        self._ray, self._requests = ray, {"CPU": cpus, "GPU": gpus}
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            try:
                ray.init(address=address, logging_level="warning")
            except (ConnectionError, ValueError) as error:
                name, value = "ray_address", address
                if address is None and get_text(RAY_ADDRESS):
                    name, value = RAY_ADDRESS.name, get_text(RAY_ADDRESS)
                message = f"{name} = {value!r}: expected the address of a Ray cluster ({error})"
                raise ConfigError(message) from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for kind, name in (("CPU", "cpus_per_task"), ("GPU", "gpus_per_task")):
            maximum, requested = max(node.get(kind, 0) for node in nodes), self._requests[kind]
            expected = f"at most {maximum:g}, the number of the largest machine of the cluster"
            require(requested <= maximum, name, requested, expected)
        kinds = [kind for kind, requested in self._requests.items() if requested]
        self._num_slots = sum(
            int(min(node.get(kind, 0) // self._requests[kind] for kind in kinds)) for node in nodes
        )

    def count_slots(self) -> int:
        """Return the number of tasks for which there are CPUs and GPUs, at least 1."""
        return max(1, self._num_slots)

    def submit(self, function: Callable, *arguments: Any) -> Any:
        """Start a task that calls a function.

        Args:
          function: function of module level.
          arguments: its positional arguments, which can be pickled.

        Returns:
          The handle of the task.
        """
        cpus = self._requests["CPU"]
        settings = {
            "num_cpus": cpus,
            "num_gpus": self._requests["GPU"],
            "max_retries": 0,  # `_iterate_completed` starts lost parts again, and logs that
            "max_calls": 0,  # a process keeps its compiled programs for the next part
            "runtime_env": {"env_vars": {"JAX_NUM_CPU_DEVICES": str(cpus)}},
        }
        return self._ray.remote(**settings)(function).remote(*arguments)

    def wait_for_first(self, handles: Sequence[Any]) -> Any:
        """Return the handle of a task that has ended."""
        (done, *_), _ = self._ray.wait(list(handles), num_returns=1)
        return done

    def get(self, handle: Any) -> Any:
        """Return the result of a task, or raise its exception or TaskLostError."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(handle)
        except exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from error
        except exceptions.RayError as error:
            raise TaskLostError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Stop the cluster if it was started here."""
        if self._owns_cluster:
            self._ray.shutdown()


class SweepPart(NamedTuple):
    """Input of a task."""

    specs_by_digest: dict[str, ResolvedRunSpec]
    """Its runs by the digests of their files."""
    runs_per_signature: Counter[str]
    """Number of all runs of the sweep by signature."""
    directory: Path
    """Folder of results."""
    marker_file: str
    """File in the folder, which exists on machines that share the folder."""
    options: ExecutionOptions
    """Options of all runs."""
    track: tuple[str, ...]
    """Names of trackers."""
    setup: Callable[[], object] | None
    """Function to call first."""


@validate_arguments
def sweep_on_ray(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike,
    *,
    address: str | None = None,
    cpus_per_task: PositiveInt = 1,
    gpus_per_task: NonNegativeFloat = 0,
    dataset: Dataset | None = None,
    network: Any = None,
    optimizer: Any = None,
    data_dir: str | os.PathLike | None = None,
    resume_anyway: bool = False,
    keep_state: bool = False,
    track: Sequence[str] = (),
    setup: Callable[[], object] | None = None,
    progress: SweepProgressOption = "auto",
    placement: Placement = Placement(),
) -> SweepResult:
    """Execute a sweep as tasks of Ray. All machines need this package and the data.

    Args:
      specs: the runs.
      directory: folder of results.
      address: address of a cluster, as `ray.init` takes it; "auto" for the cluster that this
        machine belongs to (default: RAY_ADDRESS, or a new cluster of this machine).
      cpus_per_task: CPUs of each task, which are its devices if it has no GPU.
      gpus_per_task: GPUs of each task.
      dataset: data set of the user, see `sweep`.
      network: network of the user, see `sweep`.
      optimizer: clients' optimizer of the user, see `sweep`.
      data_dir: folder of the prepared data on every machine (default: TFDS_DATA_DIR).
      resume_anyway: resume checkpoints of other versions, devices and precisions, too.
      keep_state: write the final state of every run on machines that share the folder.
      track: names of trackers, for machines that share the folder.
      setup: function that every task calls first, to register the user's objects; Ray pickles it.
      progress: "auto" or True prints a line per run. A function receives the lines instead.
      placement: lanes and memory of each task; its devices must be None.

    Returns:
      The results, as `sweep` returns them.

    Raises:
      ConfigError: for settings that cannot be used, and if no machine has the CPUs or GPUs of a
        task.
      ResultNotWrittenError: after all runs, if results could not be written to the folder.

    Example:
      >>> from fedjax_het import grid
      >>> from fedjax_het.runtime.ray_launcher import sweep_on_ray
      >>> sweep_on_ray(grid(seed=[0, 1]), "results", address="auto")  # doctest: +SKIP
    """
    require_variables(devices=False)
    user_objects = UserObjects(dataset, None, network, optimizer, data_dir)
    resolved_specs, user_objects = user_objects.resolve_all(specs)
    devices = placement.devices
    require(devices is None, "devices", devices, "None: tasks use the devices that Ray assigns")
    directory = make_output_directory(directory).resolve()
    add_tracker_callback((), track, directory, argument="directory")  # validates them
    options = ExecutionOptions(user_objects, placement, resume_anyway, keep_state)
    result_writer = ResultWriter(directory)
    cluster = RayCluster(address, cpus_per_task, gpus_per_task)
    with (
        contextlib.closing(cluster),
        tempfile.NamedTemporaryFile(prefix=".shared-", dir=directory) as marker,
    ):
        task_environment = cluster.get(cluster.submit(_get_environment, setup))
        digests, specs_by_digest = compute_run_digests(
            resolved_specs, user_objects, task_environment
        )
        # Tasks have the leases: this process only keeps the ledger of the results.
        list_changes = RegisteredIdentity(user_objects).list_changes
        stored_runs = StoredRuns(
            list_changes=list_changes,
            environment=task_environment,
            user_digests=user_objects.get_user_digests,
        )
        work_queue = WorkQueue(specs_by_digest, directory, Leases(None), progress, stored_runs)
        sweep_progress = work_queue.sweep_progress
        num_runs = Counter(map(compute_static_key, specs_by_digest.values()))
        max_parts = PARTS_PER_SLOT * cluster.count_slots()
        parts = [
            SweepPart(part, num_runs, directory, marker.name, options, tuple(track), setup)
            for part in split_into_parts(work_queue.remaining, max_parts, cpus_per_task)
        ]
        for part, (part_results, not_run) in _iterate_completed(
            cluster, parts, sweep_progress.print_line
        ):
            jobs = {digest: Job(spec, digest) for digest, spec in part.specs_by_digest.items()}
            for digest, result in part_results.items():
                stored = load_result(directory, digest)
                if stored is None or list_changes(jobs[digest].spec, stored.summary):
                    result_writer.write(result)
                work_queue.complete(jobs[digest], result)
                sweep_progress.report_finished([jobs[digest]], [result])
            for spec_digest, reason in not_run.items():
                rejected_jobs = [job for job in jobs.values() if job.spec.digest() == spec_digest]
                work_queue.reject(rejected_jobs, reason)
    results = [work_queue.results.get(digest) for digest in digests]
    sweep_result = SweepResult(results, work_queue.not_run)
    result_writer.require_all_written(sweep_result)
    return sweep_result


def split_into_parts(
    specs_by_digest: dict[str, ResolvedRunSpec], max_parts: int, min_part_size: int
) -> Iterator[dict[str, ResolvedRunSpec]]:
    """Split runs into parts of one signature each.

    Args:
      specs_by_digest: the runs by the digests of their files.
      max_parts: approximate number of parts; every signature has at least one.
      min_part_size: number of runs that a task executes at once; no part of a signature with more
        runs is smaller.

    Yields:
      The runs of a part by digest.
    """
    groups: dict[str, list[str]] = {}
    for digest, spec in specs_by_digest.items():
        groups.setdefault(compute_static_key(spec), []).append(digest)
    for digests in groups.values():
        count = -(-max_parts * len(digests) // len(specs_by_digest))
        count = max(1, min(count, len(digests) // min_part_size))
        for i in range(count):
            yield {digest: specs_by_digest[digest] for digest in digests[i::count]}


def _iterate_completed(
    cluster: RayCluster, parts: Sequence[SweepPart], print_line: Callable[[str], None]
) -> Iterator[tuple[SweepPart, PartResult]]:
    """Yield all parts as they end; start lost parts again.

    An exception of a task is raised when all others have ended.
    """
    attempts, failure = Counter[int](), None
    pending = {cluster.submit(execute_part, part): i for i, part in enumerate(parts)}
    while pending:
        handle = cluster.wait_for_first(list(pending))
        i = pending.pop(handle)
        try:
            yield parts[i], cluster.get(handle)
        except TaskLostError as error:
            attempts[i] += 1
            if attempts[i] == MAX_ATTEMPTS:
                raise
            text, num_runs = to_one_line(str(error))[:100], len(parts[i].specs_by_digest)
            print_line(f"a task of {num_runs} runs was lost ({text}): executed again")
            pending[cluster.submit(execute_part, parts[i])] = i
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def execute_part(part: SweepPart) -> PartResult:
    """Execute the runs of a part in a task."""
    if part.setup is not None:
        part.setup()
    is_shared = Path(part.marker_file).exists()
    # The process that started the sweep receives all results, and reports them.
    writer = ResultWriter(part.directory if is_shared else None, use_fallback=False)
    callbacks = add_tracker_callback((), part.track if is_shared else (), part.directory)
    return execute_runs(
        part.specs_by_digest,
        writer,
        part.options,
        None,
        callbacks=callbacks,
        runs_per_signature=part.runs_per_signature,
    )


def _get_environment(setup: Callable[[], object] | None) -> dict[str, Any]:
    if setup is not None:
        setup()
    return describe_environment()
