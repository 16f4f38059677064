"""Many federations: grouped, made together, kept in one folder.

Runs that differ in seed, partition, alpha or numeric hyper-parameters share their compiled programs
and go side by side: one on each core or device, or vmapped on an accelerator.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fedjax_het.common.environment import environment, run_digest
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.files import make_output_directory
from fedjax_het.data import Dataset, Partition, load_dataset
from fedjax_het.engine.memory import free_bytes
from fedjax_het.nn import as_model, network_digest
from fedjax_het.running.advance import finish, start
from fedjax_het.running.checkpoints import UNFINISHED, Checkpoints, forget, resumable
from fedjax_het.running.ledger import Job, Ledger
from fedjax_het.running.needs import NoRoom, require_room_for_programs
from fedjax_het.running.outcome import results_of
from fedjax_het.running.placement import Placement
from fedjax_het.running.prepare import Group, narrower, prepare
from fedjax_het.running.programs import static_key, with_network
from fedjax_het.running.rescue import Keeper
from fedjax_het.running.result import Result
from fedjax_het.running.runs import gathered, memory_needed
from fedjax_het.running.splits import (
    data_given,
    dataset_of,
    own_dataset_digest,
    server_data_of,
    server_pool_of,
    split_clients,
)
from fedjax_het.running.store import frame, load_result
from fedjax_het.settings.spec import ResolvedSpec, RunSpec

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedjax_het")

_UNUSABLE = (ConfigError, FileNotFoundError, ImportError)


class SweepResult(NamedTuple):
    """What a sweep made, or found made.

    `results[i]` is that of `specs[i]`: None if it is another shard's or could not be run.
    `not_run` says why, under `RunSpec.digest()`.
    """

    results: list[Result | None]
    not_run: dict[str, str]

    def summary(self, directory: str | os.PathLike) -> dict[str, Any]:
        """The sweep in one JSON-able record."""
        made = [result for result in self.results if result is not None]
        return {
            "output_dir": str(directory),
            "runs": len(self.results),
            "results": len(made),
            "diverged": sum(bool(result.summary["diverged"]) for result in made),
            "not_run": len(self.not_run),
        }

    def frame(self) -> "pd.DataFrame":
        """The results as `load_results` gives them."""
        return frame(result for result in self.results if result is not None)


def sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike | None = None,
    *,
    dataset: Dataset | None = None,
    network: Any = None,
    data_dir: str | os.PathLike | None = None,
    shard: tuple[int, int] | None = None,
    resume_anyway: bool = False,
    progress: Callable[[str], None] = print,
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
      data_dir: of the prepared data (default: TFDS_DATA_DIR).
      shard: (i, n): only the i-th (from 0) of n parts of the sweep, which depend on `specs` alone,
        so that n programs need not know of each other. Default: everything; with
        `jax.distributed`, every process takes a part, on its own devices.
      resume_anyway: go on also from checkpoints that were begun under another version, device or
        precision, which the runs' summaries then name (`begun_under`).
      progress: gets a line per run. What is running is shown besides, on standard error.
      placement: where they go, on this process's devices unless it says otherwise; as many at a
        time as memory allows.
    Raises: ConfigError, before the first run, if settings cannot be used. A run whose data or
      optional package is missing does not stop the others: see `SweepResult.not_run`. A checkpoint
      that is damaged is set aside, and its run begun again. NotWrittenError, when all runs are
      made, if results could not be written to `directory`: it has them, and says where they are.
    """
    resolved = [with_network(spec, network).resolved() for spec in specs]
    if placement.devices is None:
        placement = dataclasses.replace(placement, devices=jax.local_devices())
    directory = None if directory is None else make_output_directory(directory)
    names, named = _named(resolved, dataset, network, data_dir)
    part = _part(named, shard)
    known = {d: None if directory is None else load_result(directory, d) for d in part}
    missing = {d: named[d] for d in part if known[d] is None}
    if done := len(part) - len(missing):
        progress(f"{done} of {len(part)} runs are in {directory} already")

    reasons: dict[str, str] = {}
    ledger, keeper = Ledger(len(missing), progress), Keeper(directory)
    data = {"dataset": data_given(resolved, dataset), "network": network, "data_dir": data_dir}
    prepared = (
        _prepared(jobs, data, placement, ledger, reasons)
        for jobs in _groups(missing, directory, resume_anyway)
    )
    for jobs, group in _compiled_ahead(prepared, placement.memory):
        try:
            if group.plan.capacity == 1:  # not even one by itself may fit
                one = gathered(group, group.federations[:1])
                require_room_for_programs(one, placement.memory)
        except NoRoom as error:
            _cannot(ledger, reasons, jobs, error)
            continue
        for first in range(0, len(jobs), group.plan.capacity):
            known |= _run(group, jobs, first, keeper, ledger)
    made = SweepResult([known.get(name) for name in names], reasons)
    keeper.require_all(made)
    return made


def plan_sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike,
    *,
    dataset: Dataset | None = None,
    network: Any = None,
    data_dir: str | os.PathLike | None = None,
    shard: tuple[int, int] | None = None,
) -> list[tuple[str, RunSpec, str]]:
    """What `sweep` would do: (digest of the files, spec, "done", "unfinished" or "missing")."""
    directory = Path(directory)
    resolved = [with_network(spec, network).resolved() for spec in specs]
    _, named = _named(resolved, dataset, network, data_dir)

    def state(digest: str) -> str:
        if load_result(directory, digest) is not None:
            return "done"
        return "unfinished" if (directory / UNFINISHED / digest).exists() else "missing"

    return [(digest, named[digest], state(digest)) for digest in _part(named, shard)]


def _named(
    specs: Sequence[ResolvedSpec],
    dataset: Dataset | None,
    network: Any,
    data_dir: str | os.PathLike | None,
) -> tuple[list[str], dict[str, ResolvedSpec]]:
    """The name of every run's files, and the runs by name, each once."""
    made_in, given = environment(), data_given(specs, dataset)
    digest_of = functools.cache(functools.partial(_network_digest, network, data_dir))
    names = []
    for spec in specs:
        options = tuple(sorted(spec.model_options.items()))
        data = given(spec)
        of_network = digest_of(data, spec.dataset, spec.normalisation, options) if network else None
        of_data = None if data is None else own_dataset_digest(spec, data)
        names.append(run_digest(spec.digest(), made_in, of_data, of_network))
    return names, dict(zip(names, specs, strict=True))


def _network_digest(
    network: Any,
    data_dir: str | os.PathLike | None,
    dataset: Dataset | None,
    name: str,
    normalisation: str | None,
    options: tuple,
) -> str:
    """What tells the user's network from another one, on the user's data set, or the one of this
    name."""
    try:
        if dataset is None:
            dataset = load_dataset(name, normalisation=normalisation, data_dir=data_dir)
    except _UNUSABLE:  # then the run cannot be made, and says why
        return "unknown"
    shape, num_classes = dataset.input_shape, dataset.num_classes
    return network_digest(as_model(network, shape, num_classes, **dict(options)))


def _part(named: dict[str, ResolvedSpec], shard: tuple[int, int] | None) -> list[str]:
    """The digests of a shard: every n-th run, group by group, so that parts take equally long."""
    digests = sorted(named, key=lambda d: static_key(named[d]))  # stable: else in order
    if shard is None and jax.process_count() > 1:
        shard = (jax.process_index(), jax.process_count())
    if shard is None:
        return digests
    index, count = shard
    require(0 <= index < count, "shard", f"{index}/{count}", "i/n with 0 <= i < n")
    return digests[index::count]


def _groups(
    missing: dict[str, ResolvedSpec], directory: Path | None, resume_anyway: bool
) -> list[list[Job]]:
    """Runs that can be made together: of one signature, and at the same point if they resume."""
    groups: dict[tuple, list[Job]] = {}
    for digest, spec in missing.items():
        record, point = None, None
        if directory is not None:
            folder = directory / UNFINISHED / digest
            record = resumable(folder, spec, resume_anyway=resume_anyway, set_aside=True)
        if record is not None:
            where = str(record["work"]), str(record.get("within"))
            point = record["round"], *where, record["blocks"], record["lanes"]
        groups.setdefault((static_key(spec), point), []).append(Job(spec, digest, record))
    return list(groups.values())


def _prepared(
    jobs: list[Job],
    given: dict[str, Any],
    placement: Placement,
    ledger: Ledger,
    reasons: dict[str, str],
) -> tuple[list[Job], Group | None]:
    """The group of those jobs whose data are there; why the others cannot run goes to `reasons`.

    given: which runs have the user's data set, see `data_given`; network and folder of data.
    """

    cannot = functools.partial(_cannot, ledger, reasons)
    first = jobs[0].spec
    try:
        dataset = dataset_of(first, given["dataset"](first), given["data_dir"], caller="sweep")
        pool = server_pool_of(first, dataset, given["data_dir"])
    except _UNUSABLE as error:
        cannot(jobs, error)
        return [], None
    usable: list[Job] = []
    partitions: list[Partition] = []
    for job in jobs:
        try:
            partition = split_clients(job.spec, dataset)
            server_data_of(job.spec, dataset, partition, pool)
        except ConfigError as error:
            cannot([job], error)
        else:
            partitions.append(partition)
            usable.append(job)
    if not usable:
        return [], None
    if (record := usable[0].record) is not None:  # as it began: sums are taken in one order
        begun = {"lanes": record["lanes"], "blocks": record["blocks"]}
        placement = dataclasses.replace(placement, **begun)
    try:
        group = prepare(
            [job.spec for job in usable],
            dataset=dataset,
            partitions=partitions,
            network=given["network"],
            placement=placement,
            pool=pool,
        )
    except NoRoom as error:
        cannot(usable, error)
        return [], None
    return usable, group


def _cannot(ledger: Ledger, reasons: dict[str, str], unusable: list[Job], error: Exception) -> None:
    """Note why these runs are not made."""
    reason = " ".join(str(error).split())
    ledger.cannot(unusable, reason, shown=reason not in reasons.values())
    reasons.update({job.spec.digest(): reason for job in unusable})


def _compiled_ahead(
    prepared: Iterable[tuple[list[Job], Group | None]], memory: int | None
) -> Iterator[tuple[list[Job], Group]]:
    """The groups, one after the other, with as many federations at a time as memory allows; while
    one runs, the next one's programs are compiled.

    Groups are prepared in this thread, and when nothing compiles: that may time programs.
    """
    with ThreadPoolExecutor(max_workers=1) as compiler:
        waiting: tuple[list[Job], Future[Group]] | None = None
        for jobs, group in prepared:
            if group is None:
                continue
            # What the group before leaves free counts, as long as it has not begun.
            assert group.plan.mesh is not None
            allowed = memory or free_bytes(list(group.plan.mesh.devices.flat))
            ready = compiler.submit(_fitting, group, allowed)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            ready.exception()  # waits
            waiting = jobs, ready
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _fitting(group: Group, allowed: int | None) -> Group:
    """The group, compiled, with as many federations at a time as these bytes on each device
    allow."""
    while True:
        capacity, width = group.plan.capacity, group.plan.width
        needed = memory_needed(gathered(group, group.federations[:capacity]))
        if allowed is None or capacity == 1 or needed <= allowed:
            return group
        fewer = min(width - 1, max(int(width * allowed / needed), 1 if width > 1 else 0))
        log.info(
            "%d federations on each device would take %.2f GB and %.2f are free: %s",
            width,
            needed / 1e9,
            allowed / 1e9,
            f"{fewer} at a time" if fewer else "one at a time on all devices",
        )
        group = narrower(group, fewer)


def _run(
    group: Group, jobs: list[Job], first: int, keeper: Keeper, ledger: Ledger
) -> dict[str, Result]:
    """Make as many of a group's runs as go together, from the `first` on, and save them.

    Args:
      jobs: of all federations of the group. Returns: results by digest.
    """
    end = first + group.plan.capacity
    together, federations = jobs[first:end], group.federations[first:end]
    folders = None
    if keeper.folder is not None:
        folders = [keeper.folder / UNFINISHED / job.digest for job in together]
        for folder in folders:
            with contextlib.suppress(OSError):  # which the first checkpoint will say
                folder.mkdir(parents=True, exist_ok=True)
    with ledger.running(together) as show:
        runs, checkpoints = gathered(group, federations, progress=show), Checkpoints(folders)
        records = [job.record for job in together if job.record is not None]
        start(runs, checkpoints, records or None)
        finish(runs, checkpoints)
        results = results_of(runs)
    for i, result in enumerate(results):
        result.state = None  # a sweep's states together may not fit
        if keeper.keep(result) and folders is not None:
            forget(folders[i])
    ledger.made(together, results, jobs[end:])
    return {job.digest: result for job, result in zip(together, results, strict=True)}
