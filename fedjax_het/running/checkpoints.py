"""Checkpoints of runs: when they are written, what is in them, and how runs go on from them."""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.common.arrays import bits, host_values, stacked, with_bits
from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError
from fedjax_het.common.files import remove_left_overs
from fedjax_het.common.text import one_line
from fedjax_het.common.variables import checkpoint_seconds
from fedjax_het.engine.checkpoint import (
    arrays_by_name,
    load_checkpoint,
    not_finite,
    save_checkpoint,
)
from fedjax_het.engine.host_state import HostState
from fedjax_het.running.accounts import Curves, is_evaluated
from fedjax_het.running.checkpoint_record import begun_under, read_record, require_own
from fedjax_het.running.long_rounds import Within
from fedjax_het.running.runs import Runs
from fedjax_het.running.trained import Inputs
from fedjax_het.settings.spec import RunSpec

CHECKPOINT_SECONDS = 20.0  # unless FEDJAX_HET_CHECKPOINT_SECONDS says otherwise; 0: always
CHECKPOINT_SHARE = 0.1  # of the time, at most, is spent on checkpoints
CHECKPOINT = "checkpoint.npz"
UNFINISHED = "unfinished"  # of a sweep, the folder of its runs' checkpoints

_SAID = {"initial": "model (init_from)"}  # parts of a run that are named otherwise than passed

log = logging.getLogger("fedjax_het")

Tree = Any


class Checkpoints:
    """Of runs that go in step: a folder for each, or None where none are kept."""

    def __init__(self, folders: Sequence[Path] | None = None):
        self.folders = folders
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self.refused = False  # whether one could not be written
        self._least = checkpoint_seconds(CHECKPOINT_SECONDS)

    def save(self, runs: Runs, *, now: bool = False) -> None:
        """Write those of the runs that have no result yet, if they are wanted, this process's, and
        the last are old enough, or they are to be written now."""
        start = time.perf_counter()
        mesh = runs.plan.mesh
        spread = mesh is not None and mesh.is_multi_process
        if runs.within is not None and spread:
            return  # what a round carries is spread over the processes: after it
        ours = not spread or jax.process_index() == 0
        if self.folders is None or not ours:
            return
        if self._least and not now:
            wait = max(self._least, self._save_seconds / CHECKPOINT_SHARE)
            if start - self._saved_at < wait:
                return
        for i, (folder, state) in enumerate(zip(self.folders, runs.host_states(), strict=True)):
            if i not in runs.given:
                self._write(folder / CHECKPOINT, *_kept(runs, i, state))
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - start

    def keep(self, runs: Runs, i: int, path: Path) -> None:
        """Write how a run that is done ended, unless it diverged, to a file that `continuing`
        finds."""
        if runs.stopped[i] is None:
            self._write(path, *_kept(runs, i, runs.host_states()[i]))

    def _write(self, path: Path, kept: Tree, record: dict) -> None:
        """What cannot be written is said once: the run is worth more than its checkpoint."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(path, kept, record)
        except Exception as error:
            if not self.refused:
                why = getattr(error, "strerror", None) or error
                text = f"{str(path)!r} cannot be written ({why}): the run goes on without"
                log.warning("checkpoint = %s", one_line(text))
            self.refused = True

    def require_own_data(self, runs: Runs, records: Sequence[dict]) -> None:
        """Raise ConfigError if a checkpoint is of other data than the run."""
        for i, record in enumerate(records):
            _require_same_data(Path(record["path"]), record, runs, i)

    def restore(self, runs: Runs, records: Sequence[dict]) -> None:
        """Let runs that have begun go on from the checkpoints whose records these are. Raises
        ConfigError if one is of other data."""
        self.require_own_data(runs, records)
        states, within = [], []
        for i, record in enumerate(records):
            state, runs.curves[i], carried = _loaded(Path(record["path"]), record, runs, i)
            runs.stopped[i] = record["stopped"]
            if record["begun_under"] is not None:
                runs.begun_under[i] = record["begun_under"]
            states.append(state)
            within.append(carried)
        idle = len(runs.source.places) - len(states)
        if runs.source.apart:
            runs.state = runs.source.for_places(states + states[-1:] * idle)
        else:
            runs.state = runs.plan.with_clients(states[0], runs.plan.put)
        if (stands := records[0].get("within")) is not None:
            runs.within = _within(runs, stands, within + within[-1:] * idle)
        runs.done, runs.spent.before = records[0]["round"], records[0]["seconds"]


def own_record(folder: Path, spec: RunSpec, *, longer: bool = False) -> dict | None:
    """The record of this configuration's checkpoint in a folder, with its `path`; None if there is
    none. Raises ConfigError if there is another configuration's, and DamagedFileError.

    longer: or that of the same with another number of rounds, of which no more are done.
    """
    checkpoint = folder / CHECKPOINT
    if not checkpoint.exists():
        return None
    record = read_record(checkpoint)
    require_own(checkpoint, record, spec, longer=longer)
    return {**record, "path": str(checkpoint)}


def resumable(
    folder: Path,
    spec: RunSpec,
    *,
    ended: Path | None = None,
    resume_anyway: bool = False,
    set_aside: bool = False,
) -> dict | None:
    """The record of the checkpoint to continue a run from; None if there is none yet.

    Args:
      ended: how the same with fewer rounds ended, where no checkpoint is in the folder.
      resume_anyway: also from one that was begun under another version, device or precision.
      set_aside: rename what is damaged, or another run's, with a line in the log: as if there were
        none yet.
    Raises: ConfigError for what cannot be gone on from.
    """
    checkpoint = folder / CHECKPOINT
    try:
        record = own_record(folder, spec, longer=True)
    except ConfigError as error:
        if not set_aside:
            raise
        aside = checkpoint.with_name(f"{CHECKPOINT}.damaged")
        with contextlib.suppress(OSError):  # then the next one takes its place
            os.replace(checkpoint, aside)
        log.warning("%s: begun again; the old one is %s", error, one_line(repr(str(aside))))
        return None
    if record is None and ended is not None:
        record = {**read_record(ended), "path": str(ended)}
    if record is not None:
        record["begun_under"] = begun_under(Path(record["path"]), record, resume_anyway)
    return record


def forget(folder: Path) -> None:
    """Remove the checkpoint of a run whose result is written, and the folder of a sweep's run if
    nothing else, such as what was set aside, is in it."""
    with contextlib.suppress(OSError):
        (folder / CHECKPOINT).unlink(missing_ok=True)
        remove_left_overs(folder)
        if folder.parent.name == UNFINISHED:
            folder.rmdir()


def _kept(runs: Runs, i: int, state: Any) -> tuple[Tree, dict[str, Any]]:
    """What is written of a run: arrays, and a record."""
    clients = None if runs.pager is None else runs.pager.states[i]
    carried = () if runs.within is None else _carried(runs, i)
    kept: tuple = (state, runs.curves[i], (), carried)
    if clients is not None:
        rows = state._replace(clients=clients.rows)
        kept = (rows, runs.curves[i], clients.touched, carried)
    record = _record(runs, i, state, clients)
    return kept, {**record, "not_finite": not_finite(arrays_by_name(kept))}


def _record(runs: Runs, i: int, state: Any, clients: HostState | None) -> dict[str, Any]:
    federation = runs.federations[i]
    return {
        "digest": federation.spec.digest(),
        "spec": federation.spec.to_dict(),
        "partition": federation.partition.digest(),
        "dataset": runs.group.dataset.digest(),
        "inputs": Inputs.of(runs.group.dataset)._asdict(),
        **runs.group.program.own_digests(federation.spec.hp),
        "initial": _initial(runs, i),
        "round": runs.done,
        "work": {work.name: work.done(state) for work in runs.algorithm.host_work},
        "stopped": runs.stopped[i],
        "within": None if runs.within is None else runs.within.record(),
        "blocks": runs.plan.blocks,
        "lanes": runs.plan.lanes,
        # How many clients' states there are, if not all.
        "touched": None if clients is None else len(clients.touched),
        "seconds": runs.spent.wall(len(runs.federations)),
        "begun_under": runs.begun_under.get(i),
        **environment(),
    }


def _require_same_data(path: Path, record: dict, runs: Runs, i: int) -> None:
    group = runs.group
    own = group.program.own_digests(runs.federations[i].spec.hp)
    ours = {
        "dataset": group.dataset.digest(),
        "partition": runs.federations[i].partition.digest(),
        "network": own.get("network_digest"),
        "optimizer": own.get("optimizer_digest"),
        "initial": _initial(runs, i),
    }
    saved = {"initial": None, **record}
    saved |= {name: record.get(f"{name}_digest") for name in ("network", "optimizer")}
    for name, digest in ours.items():
        if saved[name] != digest:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected this {name}'s, but it is "
                f"another one's; pass the same {_SAID.get(name, name)} or another output_dir"
            )


def _initial(runs: Runs, i: int) -> str | None:
    """The digest of the model that a run began with, if that was in a file."""
    initial = runs.federations[i].initial
    return None if initial is None else initial.digest


def _carried(runs: Runs, i: int) -> Tree:
    """What the loops of a run's round carry, on the host."""
    assert runs.within is not None
    carried = jax.tree.map(host_values, runs.within.carried)
    return jax.tree.map(lambda a: a[i], carried) if runs.source.apart else carried


def _within(runs: Runs, stands: dict, carried: list[Tree]) -> Within:
    """Where a round stands, of what is carried in every place."""
    assert runs.stretched is not None
    whole = carried[0]
    if runs.source.apart:
        whole = jax.tree.map(lambda *leaves: stacked(leaves), *carried)
    return Within(runs.stretched.put(whole), **stands)


def _loaded(path: Path, record: dict, runs: Runs, i: int) -> tuple[Any, Curves, Tree]:
    """A run's state and curves, from a checkpoint of a run that had clients' states where this one
    has them or elsewhere; and what its round carries, if that has begun."""
    state, touched, pager = runs.host_states()[i], record.get("touched"), runs.pager
    carried = _carried_shapes(runs) if record.get("within") else ()
    rounds = record["spec"]["rounds"]
    written = {
        name: jax.ShapeDtypeStruct((rounds, *curve.shape[1:]), curve.dtype)
        for name, curve in runs.curves[i].items()
    }
    if pager is None and touched is None:
        state, curves, _, carried = load_checkpoint(path, (state, written, (), carried))
        return state, _as_long(runs, i, curves, record), carried
    first = pager.states[i].first if pager else jax.tree.map(lambda a: a[0], state.clients)
    everyone = np.arange(runs.group.program.measuring.num_clients)
    count = len(everyone) if touched is None else touched
    rows_like = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), first)
    ids = () if touched is None else everyone[:count]
    like = (state._replace(clients=rows_like), written, ids, carried)
    saved, curves, ids, carried = load_checkpoint(path, like)
    curves = _as_long(runs, i, curves, record)
    clients = everyone if touched is None else ids
    if pager is not None:
        pager.states[i].scatter(clients, saved.clients)
        return saved._replace(clients=()), curves, carried
    whole = _with_rows(state.clients, clients, saved.clients)
    return saved._replace(clients=whole), curves, carried


def _as_long(runs: Runs, i: int, curves: Curves, record: dict) -> Curves:
    """The curves of a run that had another number of rounds as this one has them."""
    done, rounds = record["round"], runs.rounds
    if record["spec"]["rounds"] == rounds:
        return curves
    scheduler, whole = runs.federations[i].scheduler, dict(runs.curves[i])
    measuring = runs.group.program.measuring
    due = np.array([scheduler.evaluates(r) for r in range(done)], bool)
    for name, values in curves.items():
        whole[name] = np.array(whole[name])
        whole[name][:done] = values[:done]
        # Its last rounds were evaluated, whatever `eval_every` says.
        if is_evaluated(name, measuring):
            whole[name][:done][~due] = np.nan
    return whole


def _carried_shapes(runs: Runs) -> Tree:
    """Of what `_carried` gives."""
    assert runs.stretched is not None
    if not runs.source.apart:
        return runs.stretched.carried
    own = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)  # noqa: E731
    return jax.tree.map(own, runs.stretched.carried)


def _with_rows(all_clients: Tree, clients: np.ndarray, rows: Tree) -> Tree:
    """The states of all clients, of which these have become `rows`."""

    def with_rows_leaf(leaf, new):
        data = np.array(bits(leaf))
        data[clients] = bits(new)
        return with_bits(data, host_values(leaf))

    return jax.tree.map(with_rows_leaf, all_clients, rows)
