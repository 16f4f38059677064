"""Checkpoints of runs: when they are written, what is in them, and how runs go on from them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.common.arrays import bits, host_values, with_bits
from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError
from fedjax_het.engine.checkpoint import load_checkpoint, read_meta, save_checkpoint
from fedjax_het.engine.host_state import HostState
from fedjax_het.running.accounts import Curves
from fedjax_het.running.runs import Runs
from fedjax_het.settings.spec import RunSpec

CHECKPOINT_SECONDS = float(os.environ.get("FEDJAX_HET_CHECKPOINT_SECONDS", "20"))  # 0: always
CHECKPOINT_SHARE = 0.1  # of the time, at most, is spent on checkpoints
CHECKPOINT = "checkpoint.npz"
UNFINISHED = "unfinished"  # of a sweep, the folder of its runs' checkpoints

Tree = Any


class Checkpoints:
    """Of runs that go in step: a folder for each, or None where none are kept."""

    def __init__(self, folders: Sequence[Path] | None = None):
        self.folders = folders
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0

    def save(self, runs: Runs) -> None:
        """Write them, if they are wanted, this process's, and the last are old enough."""
        start = time.perf_counter()
        mesh = runs.plan.mesh
        ours = mesh is None or not mesh.is_multi_process or jax.process_index() == 0
        if self.folders is None or not ours:
            return
        if CHECKPOINT_SECONDS:
            wait = max(CHECKPOINT_SECONDS, self._save_seconds / CHECKPOINT_SHARE)
            if start - self._saved_at < wait:
                return
        for i, (folder, state) in enumerate(zip(self.folders, runs.host_states(), strict=True)):
            clients = None if runs.pager is None else runs.pager.states[i]
            kept: tuple = (state, runs.curves[i])
            if clients is not None:
                kept = (state._replace(clients=clients.rows), runs.curves[i], clients.touched)
            save_checkpoint(folder / CHECKPOINT, kept, _record(runs, i, state, clients))
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - start

    def restore(self, runs: Runs, records: Sequence[dict]) -> None:
        """Let runs that have begun go on from the checkpoints whose records these are. Raises
        ConfigError if one is of other data."""
        assert self.folders is not None
        states = []
        for i, (record, folder) in enumerate(zip(records, self.folders, strict=True)):
            path = folder / CHECKPOINT
            _require_same_data(path, record, runs, i)
            state, runs.curves[i] = _loaded(path, record, runs, i)
            runs.stopped[i] = record["stopped"]
            states.append(state)
        idle = len(runs.source.places) - len(states)
        runs.state = runs.source.for_places(states + states[-1:] * idle)
        runs.done, runs.spent.before = records[0]["round"], records[0]["seconds"]


def resumable(folder: Path, spec: RunSpec) -> dict | None:
    """The record of the checkpoint to continue a run from; None if there is none yet."""
    checkpoint = folder / CHECKPOINT
    if not checkpoint.exists():
        return None
    record = read_meta(checkpoint)
    if record["digest"] != spec.digest():
        then, now = record["spec"], spec.resolved().to_dict()
        differ = [f"{k} {then.get(k)!r} -> {now[k]!r}" for k in now if then.get(k) != now[k]]
        raise ConfigError(
            f"checkpoint = {str(checkpoint)!r}: expected this configuration's, but it is another "
            f"one's ({', '.join(differ)}); use its settings or another output_dir"
        )
    return record


def _record(runs: Runs, i: int, state: Any, clients: HostState | None) -> dict[str, Any]:
    federation = runs.federations[i]
    return {
        "digest": federation.spec.digest(),
        "spec": federation.spec.to_dict(),
        "partition": federation.partition.digest(),
        "dataset": runs.group.dataset.digest(),
        **runs.group.program.network_digest,
        "round": runs.done,
        "work": {work.name: work.done(state) for work in runs.algorithm.host_work},
        "stopped": runs.stopped[i],
        "blocks": runs.plan.blocks,
        "lanes": runs.plan.lanes,
        # How many clients' states there are, if not all.
        "touched": None if clients is None else len(clients.touched),
        "seconds": runs.spent.wall(len(runs.federations)),
        **environment(),
    }


def _require_same_data(path: Path, record: dict, runs: Runs, i: int) -> None:
    group = runs.group
    ours = {
        "dataset": group.dataset.digest(),
        "partition": runs.federations[i].partition.digest(),
        "network": group.program.network_digest.get("network_digest"),
    }
    saved = {**record, "network": record.get("network_digest")}
    for name, digest in ours.items():
        if saved[name] != digest:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected this {name}'s, but it is "
                f"another one's; pass the same {name} or another output_dir"
            )


def _loaded(path: Path, record: dict, runs: Runs, i: int) -> tuple[Any, Curves]:
    """A run's state and curves, from a checkpoint of a run that had clients' states where this one
    has them or elsewhere."""
    state, curves, touched = runs.host_states()[i], runs.curves[i], record.get("touched")
    pager = runs.pager
    if pager is None and touched is None:
        return load_checkpoint(path, (state, curves))
    first = pager.states[i].first if pager else jax.tree.map(lambda a: a[0], state.clients)
    everyone = np.arange(runs.group.program.measuring.num_clients)
    count = len(everyone) if touched is None else touched
    rows_like = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), first)
    like: tuple = (state._replace(clients=rows_like), curves)
    if touched is not None:
        like = (*like, everyone[:count])
    saved, curves, *ids = load_checkpoint(path, like)
    clients = ids[0] if ids else everyone
    if pager is not None:
        pager.states[i].scatter(clients, saved.clients)
        return saved._replace(clients=()), curves
    return saved._replace(clients=_with_rows(state.clients, clients, saved.clients)), curves


def _with_rows(all_clients: Tree, clients: np.ndarray, rows: Tree) -> Tree:
    """The states of all clients, of which these have become `rows`."""

    def with_rows_leaf(leaf, new):
        data = np.array(bits(leaf))
        data[clients] = bits(new)
        return with_bits(data, host_values(leaf))

    return jax.tree.map(with_rows_leaf, all_clients, rows)
