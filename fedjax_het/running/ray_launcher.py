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

from fedjax_het.common.doors import door
from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.records import Count, NonNegative
from fedjax_het.common.variables import RAY_ADDRESS, require_variables, text_of
from fedjax_het.data import Dataset
from fedjax_het.running.ledger import Job, Ledger, teller
from fedjax_het.running.placement import Placement
from fedjax_het.running.programs import static_key, with_network, with_optimizer
from fedjax_het.running.rescue import Keeper
from fedjax_het.running.result import Result
from fedjax_het.running.splits import data_given
from fedjax_het.running.store import load_result
from fedjax_het.running.sweeps import SweepResult, make_runs, names_of
from fedjax_het.running.trackers import require_trackers
from fedjax_het.running.trackers.tracking import with_trackers
from fedjax_het.settings.spec import ResolvedSpec, RunSpec

PARTS = 2  # for each task that runs at once, so that none is long alone at the end
TRIES = 10  # of a part that is lost again and again


class LostError(Exception):
    """A task's process or machine is no more."""


class Cluster(Protocol):
    """What is asked of Ray."""

    def slots(self) -> int:
        """Tasks that run at once."""

    def submit(self, function: Callable, *arguments: Any) -> Any:
        """Start a task: -> a ticket."""

    def first_done(self, tickets: Sequence[Any]) -> Any:
        """Wait for one of them."""

    def get(self, ticket: Any) -> Any:
        """What it returned. Raises what it raised, and LostError."""

    def close(self) -> None:
        """Stop what still runs."""


class Part(NamedTuple):
    """What a task is told."""

    named: dict[str, ResolvedSpec]  # its runs, by the names of their files
    counts: Counter[str]  # of all runs of the sweep, by signature
    directory: Path
    mark: str  # a file in it, by which a machine knows it as the same
    data: dict[str, Any]  # which runs have the user's data set; network and folder of data
    placement: Placement
    resume_anyway: bool
    keep_state: bool
    track: tuple[str, ...]
    setup: Callable[[], object] | None


@door
def sweep_on_ray(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike,
    *,
    address: str | None = None,
    cpus_per_task: Count = 1,
    gpus_per_task: NonNegative = 0,
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
    resolved = [with_optimizer(with_network(spec, network), optimizer).resolved() for spec in specs]
    require(
        placement.devices is None, "devices", placement.devices, "None: tasks use what Ray gives"
    )
    directory = make_output_directory(directory).resolve()
    require_trackers(track, directory, argument="directory")
    data = {"dataset": data_given(resolved, dataset), "network": network, "data_dir": data_dir}
    data["optimizer"] = optimizer
    told = teller(progress)
    cluster = cluster or RayCluster(address, cpus_per_task, gpus_per_task)
    with contextlib.closing(cluster), _marked(directory) as mark:
        made_in = cluster.get(cluster.submit(_environment, setup))
        names, named = names_of(resolved, dataset, network, data_dir, made_in, optimizer=optimizer)
        found = {name: load_result(directory, name) for name in named}
        known = {name: result for name, result in found.items() if result is not None}
        if known:
            told(f"{len(known)} of {len(named)} runs are in {directory} already")
        missing = {name: spec for name, spec in named.items() if name not in known}
        counts = Counter(static_key(spec) for spec in named.values())
        parts = [
            Part(
                part,
                counts,
                directory,
                mark,
                data,
                placement,
                resume_anyway,
                keep_state,
                tuple(track),
                setup,
            )
            for part in parts_of(missing, PARTS * cluster.slots(), cpus_per_task)
        ]
        ledger = Ledger(len(missing), progress)
        reasons: dict[str, str] = {}
        keeper = Keeper(directory)
        for part, (made, not_run) in _done(cluster, parts, told):
            jobs = {name: Job(spec, name, None) for name, spec in part.named.items()}
            for name, result in made.items():
                if load_result(directory, name) is None:
                    keeper.keep(result)
                ledger.returned(jobs[name], result)
            for digest, reason in not_run.items():
                lost = [job for job in jobs.values() if job.spec.digest() == digest]
                ledger.cannot(lost, reason, shown=reason not in reasons.values())
                reasons[digest] = reason
            known |= made
    together = SweepResult([known.get(name) for name in names], reasons)
    keeper.require_all(together)
    return together


def parts_of(
    named: dict[str, ResolvedSpec], most: int, at_once: int
) -> Iterator[dict[str, ResolvedSpec]]:
    """Runs of one signature each, in about so many parts, none without need smaller than what a
    task makes at once."""
    groups: dict[str, list[str]] = {}
    for name, spec in named.items():
        groups.setdefault(static_key(spec), []).append(name)
    for names in groups.values():
        count = -(-most * len(names) // len(named))
        count = max(1, min(count, len(names) // at_once))
        for i in range(count):
            yield {name: named[name] for name in names[i::count]}


def _done(
    cluster: Cluster, parts: Sequence[Part], progress: Callable[[str], None]
) -> Iterator[tuple[Part, tuple[dict[str, Result], dict[str, str]]]]:
    """All parts as they are done; what is lost is begun again. What one raises is raised when the
    others are done."""
    tries, failure = Counter[int](), None
    tickets = {cluster.submit(make_part, part): i for i, part in enumerate(parts)}
    while tickets:
        ticket = cluster.first_done(list(tickets))
        i = tickets.pop(ticket)
        try:
            yield parts[i], cluster.get(ticket)
        except LostError as error:
            tries[i] += 1
            if tries[i] == TRIES:
                raise
            text = " ".join(str(error).split())[:100]
            progress(f"a task of {len(parts[i].named)} runs was lost ({text}): begun again")
            tickets[cluster.submit(make_part, parts[i])] = i
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def make_part(part: Part) -> tuple[dict[str, Result], dict[str, str]]:
    """In a task: -> results by the names of their files, and why others were not run."""
    if part.setup is not None:
        part.setup()
    shared = (part.directory / part.mark).exists()
    known, reasons = make_runs(
        part.named,
        Keeper(part.directory if shared else None, rescue=False),  # results are returned, too
        part.data,
        None,  # what is said is said once, where the sweep was asked for
        part.placement,
        resume_anyway=part.resume_anyway,
        keep_state=part.keep_state,
        callbacks=with_trackers((), part.track if shared else (), part.directory),
        counts=part.counts,
    )
    return known, reasons


def _environment(setup: Callable[[], object] | None) -> dict[str, Any]:
    if setup is not None:
        setup()
    return environment()


@contextlib.contextmanager
def _marked(directory: Path) -> Iterator[str]:
    """A file that only those have who see the same folder."""
    mark = directory / f".shared-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


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
        self._ray, self._asked = ray, {"CPU": cpus, "GPU": gpus}
        self._began = not ray.is_initialized()
        if self._began:
            try:
                ray.init(address=address, logging_level="warning")
            except (ConnectionError, ValueError) as error:
                why, name = " ".join(str(error).split()), "ray_address"
                if address is None and text_of(RAY_ADDRESS):
                    name, address = RAY_ADDRESS.name, text_of(RAY_ADDRESS)
                raise ConfigError(
                    f"{name} = {address!r}: expected that of a cluster of Ray's ({why})"
                ) from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for kind, name in (("CPU", "cpus_per_task"), ("GPU", "gpus_per_task")):
            most = max(node.get(kind, 0) for node in nodes)
            fits = self._asked[kind] <= most
            require(fits, name, self._asked[kind], f"at most {most:g}, what a machine of Ray's has")
        self._slots = int(
            sum(
                min(node.get(kind, 0) // asked for kind, asked in self._asked.items() if asked)
                for node in nodes
            )
        )

    def slots(self) -> int:
        return max(1, self._slots)

    def submit(self, function: Callable, *arguments: Any) -> Any:
        settings = {
            "num_cpus": self._asked["CPU"],
            "num_gpus": self._asked["GPU"],
            "max_retries": 0,  # `_done` begins them again, and says so
            "max_calls": 0,  # a process keeps its compiled programs for the next part
            "runtime_env": {"env_vars": {"JAX_NUM_CPU_DEVICES": str(self._asked["CPU"])}},
        }
        return self._ray.remote(**settings)(function).remote(*arguments)

    def first_done(self, tickets: Sequence[Any]) -> Any:
        (done, *_), _ = self._ray.wait(list(tickets), num_returns=1)
        return done

    def get(self, ticket: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ticket)
        except exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from error
        except exceptions.RayError as error:
            raise LostError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        if self._began:
            self._ray.shutdown()
