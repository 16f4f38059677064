"""Many federations: grouped, made together, kept in one folder.

Runs that differ in seed, partition, alpha or numeric hyper-parameters share their compiled programs
and go side by side: one on each core or device, or vmapped on an accelerator.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedjax_het.common.environment import environment, run_digest
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.files import make_output_directory
from fedjax_het.data import Dataset, Partition, load_dataset
from fedjax_het.engine.memory import free_bytes
from fedjax_het.engine.plan import RUNS
from fedjax_het.running.advance import Batch, resumable
from fedjax_het.running.prepare import (
    Group,
    narrower,
    prepare,
    server_data_of,
    server_pool_of,
    split_clients,
    static_key,
)
from fedjax_het.running.progress import clock, progress_line
from fedjax_het.running.result import Result
from fedjax_het.running.store import frame, load_result
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedjax_het")

_UNUSABLE = (ConfigError, FileNotFoundError, ImportError)


class Sweep(NamedTuple):
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


class _Job(NamedTuple):
    """One run to be made."""

    spec: RunSpec
    digest: str  # of its files
    meta: dict | None  # of the checkpoint that it continues from


def sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike | None = None,
    *,
    dataset: Dataset | None = None,
    data_dir: str | os.PathLike | None = None,
    shard: tuple[int, int] | None = None,
    progress: Callable[[str], None] = print,
    lanes: int | str = "auto",
    devices: Sequence[jax.Device] | int | None = None,
    spread: str = "auto",
    width: int | str = "auto",
    client_state: str = "auto",
    memory: int | None = None,
) -> Sweep:
    """Make every run of `specs` that `directory` does not hold yet.

    Runs that differ in nothing but seed, partition, alpha, averaging and numeric hyper-parameters
    are a group: it is compiled once, and as many of its runs as fit go side by side. Each result is
    saved as its run ends; a sweep that was stopped goes on from the last checkpoints, kept in
    `directory/unfinished`. What a run measures does not depend on the others beyond rounding.

    Args:
      directory: of the results (default: they are only returned, and nothing resumes).
      dataset: the user's own, for specs whose dataset is "user".
      data_dir: of the prepared data (default: TFDS_DATA_DIR).
      shard: (i, n): only the i-th (from 0) of n parts of the sweep, which depend on `specs` alone,
        so that n programs need not know of each other. Default: everything; with
        `jax.distributed`, every process takes a part, on its own devices.
      progress: gets a line per run. What is running is shown besides, on standard error.
      lanes, spread, width: see `engine.plan.Plan`; "auto" takes what should be fastest.
      client_state: where clients' states are, "device", "host" or "auto", see `prepare`.
      memory: bytes on each device that federations may take (default: what is free).
    Raises: ConfigError, before the first run, if settings cannot be used. A run whose data or
      optional package is missing does not stop the others: see `Sweep.not_run`.
    """
    specs = [spec.resolved() for spec in specs]
    require(spread in ("auto", "lanes", RUNS), "spread", spread, "'auto', 'lanes' or 'runs'")
    devices = jax.local_devices() if devices is None else devices
    directory = None if directory is None else make_output_directory(directory)
    names, named = _named(specs, dataset)
    mine = _part(named, shard)
    known = {d: None if directory is None else load_result(directory, d) for d in mine}
    missing = {d: named[d] for d in mine if known[d] is None}
    if done := len(mine) - len(missing):
        progress(f"{done} of {len(mine)} runs are in {directory} already")

    reasons: dict[str, str] = {}
    ledger = _Ledger(len(missing), progress)
    settings = {"lanes": lanes, "devices": devices, "spread": spread, "width": width}
    settings |= {"client_state": client_state, "memory": memory}
    for jobs in _groups(missing, directory):
        jobs, group = _prepared(jobs, dataset, data_dir, settings, ledger, reasons)
        if group is None:
            continue
        group = _fitting(group, memory)
        capacity = group.plan.capacity
        for start in range(0, len(jobs), capacity):
            made = _run(
                group, jobs[start : start + capacity], start, directory, ledger, jobs[start:]
            )
            known |= made
    return Sweep([known.get(name) for name in names], reasons)


def plan_sweep(
    specs: Iterable[RunSpec],
    directory: str | os.PathLike,
    *,
    dataset: Dataset | None = None,
    shard: tuple[int, int] | None = None,
) -> list[tuple[str, RunSpec, str]]:
    """What `sweep` would do: (digest of the files, spec, "done", "unfinished" or "missing")."""
    directory = Path(directory)
    _, named = _named([spec.resolved() for spec in specs], dataset)

    def state(digest: str) -> str:
        if load_result(directory, digest) is not None:
            return "done"
        return "unfinished" if (directory / "unfinished" / digest).exists() else "missing"

    return [(digest, named[digest], state(digest)) for digest in _part(named, shard)]


def _named(
    specs: Sequence[RunSpec], dataset: Dataset | None
) -> tuple[list[str], dict[str, RunSpec]]:
    """The name of every run's files, and the runs by name, each once."""
    made_in, data = environment(), None if dataset is None else dataset.digest()
    names = [
        run_digest(spec.digest(), made_in, data if spec.dataset == "user" else None)
        for spec in specs
    ]
    return names, dict(zip(names, specs, strict=True))


def _part(named: dict[str, RunSpec], shard: tuple[int, int] | None) -> list[str]:
    """The digests of a shard: every n-th run, group by group, so that parts take equally long."""
    digests = sorted(named, key=lambda d: static_key(named[d]))  # stable: else in order
    if shard is None and jax.process_count() > 1:
        shard = (jax.process_index(), jax.process_count())
    if shard is None:
        return digests
    index, count = shard
    require(0 <= index < count, "shard", f"{index}/{count}", "i/n with 0 <= i < n")
    return digests[index::count]


def _groups(missing: dict[str, RunSpec], directory: Path | None) -> list[list[_Job]]:
    """Runs that can be made together: of one signature, and at the same point if they resume."""
    groups: dict[tuple, list[_Job]] = {}
    for digest, spec in missing.items():
        meta = None
        if directory is not None:
            meta = resumable(directory / "unfinished" / digest, spec)
        point = meta and (meta["round"], str(meta["work"]), meta["blocks"], meta["lanes"])
        groups.setdefault((static_key(spec), point), []).append(_Job(spec, digest, meta))
    return list(groups.values())


def _prepared(
    jobs: list[_Job],
    dataset: Dataset | None,
    data_dir: str | os.PathLike | None,
    settings: dict,
    ledger: "_Ledger",
    reasons: dict[str, str],
) -> tuple[list[_Job], Group | None]:
    """The group of those jobs whose data are there; why the others cannot run goes to `reasons`."""

    def cannot(those: list[_Job], error: Exception) -> None:
        reason = " ".join(str(error).split())
        ledger.cannot(those, reason, told=reason in reasons.values())
        reasons.update({job.spec.digest(): reason for job in those})

    first = jobs[0].spec
    try:
        if first.dataset != "user" or dataset is None:
            require(first.dataset != "user", "dataset", "user", "a Dataset passed to sweep()")
            dataset = load_dataset(
                first.dataset, normalisation=first.normalisation, data_dir=data_dir
            )
        pool = server_pool_of(first, dataset, data_dir)
    except _UNUSABLE as error:
        cannot(jobs, error)
        return [], None
    usable: list[_Job] = []
    partitions: list[Partition] = []
    for job in jobs:
        try:
            split = split_clients(job.spec, dataset)
            server_data_of(job.spec, dataset, split, pool)
            partitions.append(split)
            usable.append(job)
        except ConfigError as error:
            cannot([job], error)
    if not usable:
        return [], None
    if (meta := usable[0].meta) is not None:  # as it began, so that sums are taken in one order
        settings = {**settings, "lanes": meta["lanes"], "blocks": meta["blocks"]}
    specs = [job.spec for job in usable]
    return usable, prepare(specs, dataset=dataset, partitions=partitions, pool=pool, **settings)


def _fitting(group: Group, memory: int | None) -> Group:
    """The group with as many federations at a time as memory allows."""
    while group.plan.spreads == RUNS:
        devices = list(group.plan.mesh.devices.flat)
        allowed = memory or free_bytes(devices)
        if allowed is None or group.plan.capacity == 1:
            break
        needed = Batch(group, group.federations[: group.plan.capacity]).memory()
        if needed <= allowed:
            break
        width = group.plan.width
        fewer = min(width - 1, max(int(width * allowed / needed), 1 if width > 1 else 0))
        log.info(
            "%d federations on each device would take %.2f GB and %.2f are free: %s",
            width,
            needed / 1e9,
            allowed / 1e9,
            f"{fewer} at a time" if fewer else "one at a time on all devices",
        )
        group = narrower(group, fewer)
    return group


def _run(
    group: Group,
    jobs: list[_Job],
    start: int,
    directory: Path | None,
    ledger: "_Ledger",
    left: list[_Job],
) -> dict[str, Result]:
    """Make one batch of a group's runs and save them; -> results by digest."""
    federations = group.federations[start : start + len(jobs)]
    folders = None
    if directory is not None:
        folders = [directory / "unfinished" / job.digest for job in jobs]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    with ledger.running(jobs) as show:
        batch = Batch(group, federations, folders=folders, progress=show)
        batch.start([job.meta for job in jobs] if jobs[0].meta is not None else None)
        batch.finish()
        results = batch.results()
    for result in results:
        result.state = None  # a sweep's states together may not fit
        if directory is not None:
            result.save(directory)
    for folder in folders or ():
        shutil.rmtree(folder, ignore_errors=True)
    ledger.made(jobs, results, left[len(jobs) :])
    return {job.digest: result for job, result in zip(jobs, results, strict=True)}


def describe(spec: RunSpec) -> str:
    """A run in a few words, for status lines: what it is, not every setting."""
    parts = [spec.algorithm, spec.dataset]
    if spec.model:
        parts.append(spec.model + (f" width {spec.width}" if spec.width else ""))
    if spec.alpha is not None:
        parts.append(f"alpha {spec.alpha:g}")
    if spec.classes is not None:
        parts.append(f"{spec.classes} classes a client")
    usual = RunSpec(spec.algorithm, local_optimizer=spec.local_optimizer, options=spec.options)
    usual = usual.resolved().hp
    parts += [f"{name} {value:g}" for name, value in spec.hp.items() if value != usual.get(name)]
    if spec.scored is not None:
        parts.append(f"{spec.scored} models scored")
    return ", ".join([*parts, f"seed {spec.seed}"])


class _Ledger:
    """Says what is made, how it ended and how long the rest may take."""

    def __init__(self, total: int, progress: Callable[[str], None]):
        self.total, self.progress = total, progress
        self.number = 0  # runs dealt with
        self.finished = 0
        self.began = time.perf_counter()

    def cannot(self, jobs: list[_Job], reason: str, *, told: bool) -> None:
        if not told:
            more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
            label = self._label(self.number + 1, jobs[0])
            self.progress(f"{label}{more}: not run: {reason}")
        self.number += len(jobs)

    def running(self, jobs: list[_Job]) -> AbstractContextManager[Callable | None]:
        """Shows how far these are."""
        first, last = self.number + 1, self.number + len(jobs)
        more = "" if first == last else f" to {last}"
        label = f"[{first}{more}/{self.total}] {describe(jobs[0].spec)}"
        self.batch_began = time.perf_counter()
        return progress_line(label + (" and more" if more else ""), passing=True)

    def made(self, jobs: list[_Job], results: list[Result], left: list[_Job]) -> None:
        each = (time.perf_counter() - self.batch_began) / len(jobs)
        self.finished += len(jobs)
        # The rest of the group as these; of other groups only the mean so far is known.
        mean = (time.perf_counter() - self.began) / self.finished
        others = self.total - self.number - len(jobs) - len(left)
        to_go = each * len(left) + mean * others
        for job, result in zip(jobs, results, strict=True):
            self.number += 1
            outcome = _outcome(result.summary)
            rest = f"about {clock(to_go)} to go" if self.number < self.total else "done"
            self.progress(f"{self._label(self.number, job)}: {outcome} in {clock(each)}; {rest}")

    def _label(self, number: int, job: _Job) -> str:
        return f"[{number}/{self.total}] {describe(job.spec)}"


def _outcome(summary: dict) -> str:
    if summary.get("diverged"):
        return "diverged"
    if summary.get("bmta") is not None:
        return f"{100 * summary['bmta']:.2f} % of clients' own tests"
    accuracy = summary["final_accuracy"]
    return "no accuracy" if accuracy is None or np.isnan(accuracy) else f"{100 * accuracy:.2f} %"
