"""A sweep as tasks of Ray: on this machine, or on a cluster that is there already.

Runs of one group are cut into a few parts, and a part is a task: a sweep of its own, in the folder
of the results where the task's machine has it too, so that checkpoints and claims are where others
find them, else in memory. Results come back to this process, which says how far all is and writes
what is not there yet. A part whose process or machine is lost is made again elsewhere.
"""

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.data import Dataset
from fedjax_het.runtime.compiled_programs import compute_static_key
from fedjax_het.runtime.placement import Placement
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.runtime.result_store import ResultWriter, load_result
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.sweep import (
    ExecutionOptions,
    SweepResult,
    compute_run_digests,
    execute_runs,
)
from fedjax_het.runtime.sweep_log import Job, SweepProgress, build_status_printer
from fedjax_het.runtime.trackers import require_trackers
from fedjax_het.runtime.trackers.callback import add_tracker_callback
from fedjax_het.runtime.user_objects import UserObjects
from fedjax_het.utils.config import NonNegativeFloat, PositiveInt
from fedjax_het.utils.env import RAY_ADDRESS, get_text, require_variables
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import make_output_directory
from fedjax_het.utils.validation import validate_arguments

PARTS_PER_SLOT = 2  # for each task that runs at once, so that none is long alone at the end
MAX_ATTEMPTS = 10  # of a part that is lost again and again


class TaskLostError(Exception):
    """A task's process or machine is no more."""


class Cluster(Protocol):
    """What is asked of Ray."""

    def count_slots(self) -> int:
        """Tasks that run at once."""

    def submit(self, function: Callable, *arguments: Any) -> Any:
        """Start a task: -> a ticket."""

    def wait_for_first(self, tickets: Sequence[Any]) -> Any:
        """Wait for one of them."""

    def get(self, ticket: Any) -> Any:
        """What it returned. Raises what it raised, and TaskLostError."""

    def close(self) -> None:
        """Stop what still runs."""


class SweepPart(NamedTuple):
    """What a task is told."""

    specs_by_digest: dict[str, ResolvedRunSpec]  # its runs, by the names of their files
    runs_per_signature: Counter[str]  # of all runs of the sweep, by signature
    directory: Path
    marker_file: str  # a file in it, by which a machine knows it as the same
    options: ExecutionOptions
    track: tuple[str, ...]
    setup: Callable[[], object] | None


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
    progress: Callable[[str], None] | None = print,
    placement: Placement = Placement(),
    cluster: Cluster | None = None,
) -> SweepResult:
    """What `sweep` does, by tasks of Ray.

    Args:
      address: of a cluster, as `ray.init` takes it; "auto": the one that this machine belongs to
        (default: RAY_ADDRESS, or a cluster of this machine's own for as long as this takes).
      cpus_per_task, gpus_per_task: of each task; on CPUs it has as many devices.
      track: of machines that share the folder.
      setup: called first in each task, to register what is the user's own; Ray pickles it.
      cluster: another one that does what is asked of Ray.
      others: as for `sweep`. All machines need this package, and the data.
    Raises: ConfigError as `sweep` does, and if no machine of the cluster has so much.
    """
    require_variables(devices=False)
    user_objects = UserObjects(dataset, None, network, optimizer, data_dir)
    resolved_specs, user_objects = user_objects.resolve_all(specs)
    require(
        placement.devices is None, "devices", placement.devices, "None: tasks use what Ray gives"
    )
    directory = make_output_directory(directory).resolve()
    require_trackers(track, directory, argument="directory")
    options = ExecutionOptions(user_objects, placement, resume_anyway, keep_state)
    print_line = build_status_printer(progress)
    cluster = cluster or RayCluster(address, cpus_per_task, gpus_per_task)
    with contextlib.closing(cluster), _create_marker_file(directory) as marker_file:
        task_environment = cluster.get(cluster.submit(_get_environment, setup))
        digests, specs_by_digest = compute_run_digests(
            resolved_specs, user_objects, task_environment
        )
        stored_results = {name: load_result(directory, name) for name in specs_by_digest}
        results = {name: result for name, result in stored_results.items() if result is not None}
        if results:
            print_line(f"{len(results)} of {len(specs_by_digest)} runs are in {directory} already")
        missing_specs = {
            name: spec for name, spec in specs_by_digest.items() if name not in results
        }
        runs_per_signature = Counter(compute_static_key(spec) for spec in specs_by_digest.values())
        parts = [
            SweepPart(
                part,
                runs_per_signature,
                directory,
                marker_file,
                options,
                tuple(track),
                setup,
            )
            for part in split_into_parts(
                missing_specs, PARTS_PER_SLOT * cluster.count_slots(), cpus_per_task
            )
        ]
        sweep_progress = SweepProgress(len(missing_specs), progress)
        reasons: dict[str, str] = {}
        result_writer = ResultWriter(directory)
        for part, (part_results, not_run) in _iterate_completed(cluster, parts, print_line):
            jobs = {name: Job(spec, name, None) for name, spec in part.specs_by_digest.items()}
            for name, result in part_results.items():
                if load_result(directory, name) is None:
                    result_writer.write(result)
                sweep_progress.report_returned(jobs[name], result)
            for digest, reason in not_run.items():
                rejected_jobs = [job for job in jobs.values() if job.spec.digest() == digest]
                sweep_progress.report_rejected(
                    rejected_jobs, reason, show_reason=reason not in reasons.values()
                )
                reasons[digest] = reason
            results |= part_results
    sweep_result = SweepResult([results.get(name) for name in digests], reasons)
    result_writer.require_all_written(sweep_result)
    return sweep_result


def split_into_parts(
    specs_by_digest: dict[str, ResolvedRunSpec], max_parts: int, min_part_size: int
) -> Iterator[dict[str, ResolvedRunSpec]]:
    """Runs of one signature each, in about so many parts, none without need smaller than what a
    task makes at once."""
    groups: dict[str, list[str]] = {}
    for name, spec in specs_by_digest.items():
        groups.setdefault(compute_static_key(spec), []).append(name)
    for names in groups.values():
        count = -(-max_parts * len(names) // len(specs_by_digest))
        count = max(1, min(count, len(names) // min_part_size))
        for i in range(count):
            yield {name: specs_by_digest[name] for name in names[i::count]}


def _iterate_completed(
    cluster: Cluster, parts: Sequence[SweepPart], progress: Callable[[str], None]
) -> Iterator[tuple[SweepPart, tuple[dict[str, Result], dict[str, str]]]]:
    """All parts as they are done; what is lost is begun again. What one raises is raised when the
    others are done."""
    attempts, failure = Counter[int](), None
    tickets = {cluster.submit(execute_part, part): i for i, part in enumerate(parts)}
    while tickets:
        ticket = cluster.wait_for_first(list(tickets))
        i = tickets.pop(ticket)
        try:
            yield parts[i], cluster.get(ticket)
        except TaskLostError as error:
            attempts[i] += 1
            if attempts[i] == MAX_ATTEMPTS:
                raise
            text = " ".join(str(error).split())[:100]
            progress(
                f"a task of {len(parts[i].specs_by_digest)} runs was lost ({text}): begun again"
            )
            tickets[cluster.submit(execute_part, parts[i])] = i
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def execute_part(part: SweepPart) -> tuple[dict[str, Result], dict[str, str]]:
    """In a task: -> results by the names of their files, and why others were not run."""
    if part.setup is not None:
        part.setup()
    has_shared_folder = (part.directory / part.marker_file).exists()
    results, reasons = execute_runs(
        part.specs_by_digest,
        ResultWriter(
            part.directory if has_shared_folder else None, use_fallback=False
        ),  # results are returned, too
        part.options,
        None,  # what is said is said once, where the sweep was asked for
        callbacks=add_tracker_callback((), part.track if has_shared_folder else (), part.directory),
        runs_per_signature=part.runs_per_signature,
    )
    return results, reasons


def _get_environment(setup: Callable[[], object] | None) -> dict[str, Any]:
    if setup is not None:
        setup()
    return describe_environment()


@contextlib.contextmanager
def _create_marker_file(directory: Path) -> Iterator[str]:
    """A file that only those have who see the same folder."""
    marker = directory / f".shared-{secrets.token_hex(8)}"
    marker.touch()
    try:
        yield marker.name
    finally:
        marker.unlink(missing_ok=True)


class RayCluster:
    """Ray, with so many CPUs and GPUs for each task."""

    def __init__(self, address: str | None, cpus: int, gpus: float):
        require(cpus >= 1, "cpus_per_task", cpus, "a whole number >= 1")
        require(gpus >= 0, "gpus_per_task", gpus, "a number >= 0")
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "launcher = 'ray': expected the package ray: pip install 'fedjax_het[ray]'"
            ) from None
        self._ray, self._task_resources = ray, {"CPU": cpus, "GPU": gpus}
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            try:
                ray.init(address=address, logging_level="warning")
            except (ConnectionError, ValueError) as error:
                reason, name = " ".join(str(error).split()), "ray_address"
                if address is None and get_text(RAY_ADDRESS):
                    name, address = RAY_ADDRESS.name, get_text(RAY_ADDRESS)
                raise ConfigError(
                    f"{name} = {address!r}: expected that of a cluster of Ray's ({reason})"
                ) from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for kind, name in (("CPU", "cpus_per_task"), ("GPU", "gpus_per_task")):
            maximum = max(node.get(kind, 0) for node in nodes)
            is_available = self._task_resources[kind] <= maximum
            require(
                is_available,
                name,
                self._task_resources[kind],
                f"at most {maximum:g}, what a machine of Ray's has",
            )
        self._num_slots = int(
            sum(
                min(
                    node.get(kind, 0) // requested
                    for kind, requested in self._task_resources.items()
                    if requested
                )
                for node in nodes
            )
        )

    def count_slots(self) -> int:
        return max(1, self._num_slots)

    def submit(self, function: Callable, *arguments: Any) -> Any:
        settings = {
            "num_cpus": self._task_resources["CPU"],
            "num_gpus": self._task_resources["GPU"],
            "max_retries": 0,  # `_done` begins them again, and says so
            "max_calls": 0,  # a process keeps its compiled programs for the next part
            "runtime_env": {"env_vars": {"JAX_NUM_CPU_DEVICES": str(self._task_resources["CPU"])}},
        }
        return self._ray.remote(**settings)(function).remote(*arguments)

    def wait_for_first(self, tickets: Sequence[Any]) -> Any:
        (done, *_), _ = self._ray.wait(list(tickets), num_returns=1)
        return done

    def get(self, ticket: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ticket)
        except exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from error
        except exceptions.RayError as error:
            raise TaskLostError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        if self._owns_cluster:
            self._ray.shutdown()
