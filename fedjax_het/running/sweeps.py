"""Many federations: grouped, made together, kept in one folder.

Runs that differ in seed, partition, alpha or numeric hyper-parameters share their compiled programs
and go side by side: one on each core or device, or vmapped on an accelerator.
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

from fedjax_het.common.doors import door
from fedjax_het.common.environment import environment, run_digest
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.hardware import tell_of_unused_hardware
from fedjax_het.common.variables import require_variables
from fedjax_het.data import Dataset, Partition, load_dataset
from fedjax_het.data.held_out import of_clients
from fedjax_het.engine.memory import free_bytes
from fedjax_het.engine.optimizers import optimizer_digest
from fedjax_het.nn import as_model, network_digest
from fedjax_het.running.checkpoints import UNFINISHED
from fedjax_het.running.claims import Claims, stopped_in_order
from fedjax_het.running.continuing import Ended
from fedjax_het.running.initial import initial_digest
from fedjax_het.running.ledger import Job
from fedjax_het.running.needs import NoRoom, require_room_for_programs
from fedjax_het.running.placement import Placement
from fedjax_het.running.places import balanced
from fedjax_het.running.prepare import Group, narrower, prepare
from fedjax_het.running.programs import static_key, with_network, with_optimizer
from fedjax_het.running.rescue import Keeper
from fedjax_het.running.result import Result
from fedjax_het.running.runs import gathered, memory_needed
from fedjax_het.running.sharing_out import CLAIMS, Sharing
from fedjax_het.running.splits import (
    data_given,
    dataset_of,
    own_dataset_digest,
    server_data_of,
    server_pool_of,
    set_apart,
    split_clients,
)
from fedjax_het.running.store import frame, load_result
from fedjax_het.running.together import Together
from fedjax_het.running.trackers.tracking import with_trackers
from fedjax_het.running.views import outcome_of, runs_dataset, setting_of
from fedjax_het.running.watching import Callback
from fedjax_het.settings.spec import ResolvedSpec, RunSpec

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

log = logging.getLogger("fedjax_het")

_SHOWN = 10  # runs of a sweep that is printed
_UNUSABLE = (ConfigError, FileNotFoundError, ImportError)


class SweepResult(NamedTuple):
    """What a sweep made, or found made.

    `results[i]` is that of `specs[i]`, whoever made it: None if it could not be run.
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

    def to_xarray(self) -> "xr.Dataset":
        """Their metrics, with the dimension run, see `Result.to_xarray`: settings that differ are
        coordinates of it."""
        return runs_dataset([result for result in self.results if result is not None])

    def __repr__(self) -> str:
        made = [result for result in self.results if result is not None]
        lines = [f"SweepResult({len(made)} of {len(self.results)} runs"]
        lines += [f"  {setting_of(each.spec)}: {outcome_of(each)}" for each in made[:_SHOWN]]
        if len(made) > _SHOWN:
            lines.append(f"  and {len(made) - _SHOWN} more")
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
        table = self.frame()
        return table[[name for name in columns if name in table]].to_html(max_rows=_SHOWN)


@door
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
      callbacks: called for every run in turn, see `simulate` and `running.watching.Standing`.
      track: names of trackers, of `TRACKERS`, that keep a record of every run in `directory`.
      progress: gets a line per run. With `print`, what is running is shown besides, on standard
        error; with another function or None nothing is.
      placement: where they go, on this process's devices unless it says otherwise; as many at a
        time as memory allows.
    Raises: ConfigError, before the first run, if settings cannot be used. A run whose data or
      optional package is missing does not stop the others: see `SweepResult.not_run`. A checkpoint
      that is damaged is set aside, and its run begun again. NotWrittenError, when all runs are
      made, if results could not be written to `directory`: it has them, and says where they are.
    """
    require_variables()
    if not placement.on_chosen_cpus:
        tell_of_unused_hardware()
    resolved = [with_optimizer(with_network(spec, network), optimizer).resolved() for spec in specs]
    directory = None if directory is None else make_output_directory(directory)
    callbacks = with_trackers(callbacks, track, directory, argument="directory")
    names, named = names_of(resolved, dataset, network, data_dir, optimizer=optimizer)
    data = {"dataset": data_given(resolved, dataset), "network": network, "data_dir": data_dir}
    data["optimizer"] = optimizer
    keeper = Keeper(directory)
    known, reasons = make_runs(
        named,
        keeper,
        data,
        progress,
        placement,
        resume_anyway=resume_anyway,
        keep_state=keep_state,
        callbacks=callbacks,
    )
    made = SweepResult([known.get(name) for name in names], reasons)
    keeper.require_all(made)
    return made


def make_runs(
    named: dict[str, ResolvedSpec],
    keeper: Keeper,
    data: dict[str, Any],
    progress: Callable[[str], None] | None,
    placement: Placement,
    *,
    resume_anyway: bool = False,
    keep_state: bool = False,
    callbacks: Sequence[Callback] = (),
    counts: Counter[str] | None = None,
) -> tuple[dict[str, Result], dict[str, str]]:
    """The same of runs by the names of their files: -> (results by name, why others were not run,
    by `RunSpec.digest()`).

    keeper: of what is made. data: which runs have the user's data set, see `data_given`; network
    and folder of data. counts: of all runs of the sweep, by signature, where these are some.
    """
    if placement.devices is None:
        placement = dataclasses.replace(placement, devices=jax.local_devices())
    reasons: dict[str, str] = {}
    # By all runs, not by what is left of them: then it does not matter who begins when.
    counts = counts or Counter(static_key(spec) for spec in named.values())
    claims = Claims(None if keeper.folder is None else keeper.folder / CLAIMS)
    with stopped_in_order(), claims:
        kept = Ended(keeper.folder)
        share = Sharing(
            named,
            keeper.folder,
            claims,
            progress,
            resume_anyway,
            lambda spec: kept.before(spec, data["dataset"](spec)),
        )
        while share.wait():
            prepared = (
                _prepared(jobs, data, placement, share, counts, reasons) for jobs in share.groups()
            )
            for jobs, group in _compiled_ahead(prepared, placement.memory):
                try:
                    if group.plan.capacity == 1:  # not even one by itself may fit
                        one = gathered(group, group.federations[:1])
                        require_room_for_programs(one, placement.memory)
                except NoRoom as error:
                    _cannot(share, reasons, jobs, error)
                while places := share.claimed(jobs, group.plan.capacity):
                    some = Together(group, jobs, places, keeper, share, callbacks)
                    jobs = some.made(keep_state=keep_state)
    return share.known, reasons


@door
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
    usable = directory.is_dir() or not directory.exists()
    require(usable, "directory", str(directory), "a folder of results, or one to be made")
    resolved = [with_optimizer(with_network(spec, network), optimizer).resolved() for spec in specs]
    _, named = names_of(resolved, dataset, network, data_dir, optimizer=optimizer)

    claimed = Claims(directory / CLAIMS).others()

    def state(digest: str) -> str:
        if load_result(directory, digest) is not None:
            return "done"
        if digest in claimed:
            return "claimed"
        return "unfinished" if (directory / UNFINISHED / digest).exists() else "missing"

    digests = sorted(named, key=lambda digest: static_key(named[digest]))  # stable: else in order
    return [(digest, named[digest], state(digest)) for digest in digests]


def names_of(
    specs: Sequence[ResolvedSpec],
    dataset: Dataset | None,
    network: Any,
    data_dir: str | os.PathLike | None,
    made_in: dict[str, Any] | None = None,
    *,
    optimizer: Any = None,
) -> tuple[list[str], dict[str, ResolvedSpec]]:
    """The name of every run's files, and the runs by name, each once.

    made_in: the `environment` that they are made in (default: this process's).
    """
    made_in, given = made_in or environment(), data_given(specs, dataset)
    digest_of = functools.cache(functools.partial(_network_digest, network, data_dir))
    names, initial = [], functools.cache(initial_digest)
    for spec in specs:
        options = tuple(sorted(spec.model_options.items()))
        data = given(spec)
        of_network = digest_of(data, spec.dataset, spec.normalisation, options) if network else None
        of_data = None if data is None else own_dataset_digest(spec, data)
        more = {"initial": None if spec.init_from is None else initial(spec.init_from)}
        if optimizer is not None:
            more["optimizer"] = optimizer_digest(optimizer, spec.hp)
        names.append(run_digest(spec.digest(), made_in, of_data, of_network, **more))
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


def _prepared(
    jobs: list[Job],
    given: dict[str, Any],
    placement: Placement,
    share: Sharing,
    counts: Counter[str],
    reasons: dict[str, str],
) -> tuple[list[Job], Group | None]:
    """The group of those jobs whose data are there; why the others cannot run goes to `reasons`.

    given: which runs have the user's data set, see `data_given`; network and folder of data.
    counts: of the runs of each signature.
    """

    cannot = functools.partial(_cannot, share, reasons)
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
            ids, apart = set_apart(job.spec, partition)
            taking_part = of_clients(partition, ids) if len(apart) else partition
            server_data_of(job.spec, dataset, taking_part, pool)
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
            optimizer=given["optimizer"],
            placement=placement,
            pool=pool,
            count=counts[static_key(first)],
        )
    except NoRoom as error:
        cannot(usable, error)
        return [], None
    return usable, group


def _cannot(share: Sharing, reasons: dict[str, str], unusable: list[Job], error: Exception) -> None:
    """Note why these runs are not made."""
    unusable = [job for job in unusable if job.digest in share.left]
    reason = " ".join(str(error).split())
    share.cannot(unusable)
    if unusable:
        share.ledger.cannot(unusable, reason, shown=reason not in reasons.values())
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
        if fewer:
            assert group.plan.mesh is not None
            fewer = balanced(len(group.federations), group.plan.mesh.size, fewer)
        log.info(
            "%d federations on each device would take %.2f GB and %.2f are free: %s",
            width,
            needed / 1e9,
            allowed / 1e9,
            f"{fewer} at a time" if fewer else "one at a time on all devices",
        )
        group = narrower(group, fewer)
