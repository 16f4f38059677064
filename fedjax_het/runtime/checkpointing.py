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

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.state_paging import HostClientStates
from fedjax_het.runtime.checkpoint_file import (
    check_environment,
    flatten_by_path,
    load_checkpoint,
    nonfinite_array_names,
    read_checkpoint_record,
    require_matching_settings,
    save_checkpoint,
)
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import Curves, is_evaluation_curve
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.runtime.resumable_rounds import RoundProgress
from fedjax_het.runtime.trained_model import InputSpec
from fedjax_het.utils.arrays import fetch_to_host, from_numpy_bits, stack_on_host, to_numpy_bits
from fedjax_het.utils.env import get_checkpoint_seconds
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import remove_stale_files
from fedjax_het.utils.text import to_one_line

CHECKPOINT_SECONDS = 20.0  # unless FEDJAX_HET_CHECKPOINT_SECONDS says otherwise; 0: always
MAX_CHECKPOINT_FRACTION = 0.1  # of the time, at most, is spent on checkpoints
CHECKPOINT_FILE = "checkpoint.npz"
UNFINISHED_FOLDER = "unfinished"  # of a sweep, the folder of its runs' checkpoints

_DISPLAY_NAMES = {
    "initial": "model (init_from)"
}  # parts of a run that are named otherwise than passed

log = logging.getLogger("fedjax_het")

Tree = Any


class CheckpointWriter:
    """Of runs that go in step: a folder for each, or None where none are kept."""

    def __init__(self, folders: Sequence[Path] | None = None):
        self.folders = folders
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self.has_failed = False  # whether one could not be written
        self._min_interval = get_checkpoint_seconds(CHECKPOINT_SECONDS)

    def save(self, group_state: GroupState, *, force: bool = False) -> None:
        """Write those of the runs that have no result yet, if they are wanted, this process's, and
        the last are old enough, or they are to be written now."""
        start = time.perf_counter()
        mesh = group_state.group.program.plan.mesh
        is_multi_process = mesh is not None and mesh.is_multi_process
        if group_state.round_progress is not None and is_multi_process:
            return  # what a round carries is spread over the processes: after it
        is_writer = not is_multi_process or jax.process_index() == 0
        if self.folders is None or not is_writer:
            return
        if self._min_interval and not force:
            interval = max(self._min_interval, self._save_seconds / MAX_CHECKPOINT_FRACTION)
            if start - self._saved_at < interval:
                return
        for i, (folder, state) in enumerate(
            zip(self.folders, group_state.fetch_states(), strict=True)
        ):
            if i not in group_state.reported:
                self._write(folder / CHECKPOINT_FILE, *_build_checkpoint(group_state, i, state))
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - start

    def save_final_state(self, group_state: GroupState, i: int, path: Path) -> None:
        """Write how a run that is done ended, unless it diverged, to a file that `continuing`
        finds."""
        if group_state.diverged_rounds[i] is None:
            self._write(path, *_build_checkpoint(group_state, i, group_state.fetch_states()[i]))

    def _write(self, path: Path, tree: Tree, record: dict) -> None:
        """What cannot be written is said once: the run is worth more than its checkpoint."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(path, tree, record)
        except Exception as error:
            if not self.has_failed:
                reason = getattr(error, "strerror", None) or error
                text = f"{str(path)!r} cannot be written ({reason}): the run goes on without"
                log.warning("checkpoint = %s", to_one_line(text))
            self.has_failed = True

    def require_matching_data(self, group_state: GroupState, records: Sequence[dict]) -> None:
        """Raise ConfigError if a checkpoint is of other data than the run."""
        for i, record in enumerate(records):
            _require_same_data(Path(record["path"]), record, group_state, i)

    def restore(self, group_state: GroupState, records: Sequence[dict]) -> None:
        """Let runs that have begun go on from the checkpoints whose records these are. Raises
        ConfigError if one is of other data."""
        self.require_matching_data(group_state, records)
        states, carries = [], []
        for i, record in enumerate(records):
            state, group_state.curves[i], carry = _load_run(
                Path(record["path"]), record, group_state, i
            )
            group_state.diverged_rounds[i] = record["stopped"]
            if record["begun_under"] is not None:
                group_state.begun_under[i] = record["begun_under"]
            states.append(state)
            carries.append(carry)
        num_idle = len(group_state.slots) - len(states)
        if group_state.group.runs_parallel:
            group_state.state = group_state.group.stack_slots(states + states[-1:] * num_idle)
        else:
            group_state.state = group_state.group.program.plan.map_state(
                states[0], group_state.group.program.plan.put
            )
        if (progress_record := records[0].get("within")) is not None:
            group_state.round_progress = _restore_round_progress(
                group_state, progress_record, carries + carries[-1:] * num_idle
            )
        group_state.rounds_done, group_state.timing.resumed_seconds = (
            records[0]["round"],
            records[0]["seconds"],
        )


def find_checkpoint_record(
    folder: Path, spec: RunSpec, *, allow_more_rounds: bool = False
) -> dict | None:
    """The record of this configuration's checkpoint in a folder, with its `path`; None if there is
    none. Raises ConfigError if there is another configuration's, and DamagedFileError.

    longer: or that of the same with another number of rounds, of which no more are done.
    """
    checkpoint = folder / CHECKPOINT_FILE
    if not checkpoint.exists():
        return None
    record = read_checkpoint_record(checkpoint)
    require_matching_settings(checkpoint, record, spec, allow_more_rounds=allow_more_rounds)
    return {**record, "path": str(checkpoint)}


def find_resumable_record(
    folder: Path,
    spec: RunSpec,
    *,
    saved_state: Path | None = None,
    resume_anyway: bool = False,
    quarantine: bool = False,
) -> dict | None:
    """The record of the checkpoint to continue a run from; None if there is none yet.

    Args:
      ended: how the same with fewer rounds ended, where no checkpoint is in the folder.
      resume_anyway: also from one that was begun under another version, device or precision.
      quarantine: rename what is damaged, or another run's, with a line in the log: as if there were
        none yet.
    Raises: ConfigError for what cannot be gone on from.
    """
    checkpoint = folder / CHECKPOINT_FILE
    try:
        record = find_checkpoint_record(folder, spec, allow_more_rounds=True)
    except ConfigError as error:
        if not quarantine:
            raise
        quarantine_path = checkpoint.with_name(f"{CHECKPOINT_FILE}.damaged")
        with contextlib.suppress(OSError):  # then the next one takes its place
            os.replace(checkpoint, quarantine_path)
        log.warning(
            "%s: begun again; the old one is %s", error, to_one_line(repr(str(quarantine_path)))
        )
        return None
    if record is None and saved_state is not None:
        record = {**read_checkpoint_record(saved_state), "path": str(saved_state)}
    if record is not None:
        record["begun_under"] = check_environment(Path(record["path"]), record, resume_anyway)
    return record


def delete_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a run whose result is written, and the folder of a sweep's run if
    nothing else, such as what was set aside, is in it."""
    with contextlib.suppress(OSError):
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
        remove_stale_files(folder)
        if folder.parent.name == UNFINISHED_FOLDER:
            folder.rmdir()


def _build_checkpoint(group_state: GroupState, i: int, state: Any) -> tuple[Tree, dict[str, Any]]:
    """What is written of a run: arrays, and a record."""
    clients = None if group_state.pager is None else group_state.pager.states[i]
    carry = () if group_state.round_progress is None else _fetch_carry(group_state, i)
    tree: tuple = (state, group_state.curves[i], (), carry)
    if clients is not None:
        paged_state = state._replace(clients=clients.rows)
        tree = (paged_state, group_state.curves[i], clients.written_client_ids, carry)
    record = _build_record(group_state, i, state, clients)
    return tree, {**record, "not_finite": nonfinite_array_names(flatten_by_path(tree))}


def _build_record(
    group_state: GroupState, i: int, state: Any, clients: HostClientStates | None
) -> dict[str, Any]:
    prepared_run = group_state.prepared_runs[i]
    return {
        "digest": prepared_run.spec.digest(),
        "spec": prepared_run.spec.to_dict(),
        "partition": prepared_run.partition.digest(),
        "dataset": group_state.prepared_runs[i].dataset.digest(),
        "inputs": InputSpec.from_dataset(group_state.prepared_runs[i].dataset)._asdict(),
        **group_state.group.program.signature.compute_user_digests(prepared_run.spec),
        "initial": _get_initial_digest(group_state),
        "round": group_state.rounds_done,
        "work": {
            work.name: work.count_completed(state)
            for work in group_state.group.program.algorithm.server_stages
        },
        "stopped": group_state.diverged_rounds[i],
        "within": None
        if group_state.round_progress is None
        else group_state.round_progress.to_record(),
        "blocks": group_state.group.program.plan.blocks,
        "lanes": group_state.group.program.plan.lanes,
        # How many clients' states there are, if not all.
        "touched": None if clients is None else len(clients.written_client_ids),
        "seconds": group_state.timing.compute_wall_seconds(len(group_state.prepared_runs)),
        "begun_under": group_state.begun_under.get(i),
        **describe_environment(),
    }


def _require_same_data(path: Path, record: dict, group_state: GroupState, i: int) -> None:
    group = group_state.group
    prepared_run = group_state.prepared_runs[i]
    user_digests = group.program.signature.compute_user_digests(prepared_run.spec)
    current_digests = {
        "dataset": group_state.prepared_runs[i].dataset.digest(),
        "partition": group_state.prepared_runs[i].partition.digest(),
        "network": user_digests.get("network_digest"),
        "optimizer": user_digests.get("optimizer_digest"),
        "initial": _get_initial_digest(group_state),
    }
    checkpoint_digests = {"initial": None, **record}
    checkpoint_digests |= {name: record.get(f"{name}_digest") for name in ("network", "optimizer")}
    for name, digest in current_digests.items():
        if checkpoint_digests[name] != digest:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected this {name}'s, but it is "
                f"another one's; pass the same {_DISPLAY_NAMES.get(name, name)} or another output_dir"
            )


def _get_initial_digest(group_state: GroupState) -> str | None:
    """The digest of the model that a run began with, if that was in a file."""
    initial_model = group_state.group.initial_model
    return None if initial_model is None else initial_model.digest


def _fetch_carry(group_state: GroupState, i: int) -> Tree:
    """What the loops of a run's round carry, on the host."""
    assert group_state.round_progress is not None
    carry = jax.tree.map(fetch_to_host, group_state.round_progress.carry)
    return jax.tree.map(lambda a: a[i], carry) if group_state.group.runs_parallel else carry


def _restore_round_progress(
    group_state: GroupState, progress_record: dict, carries: list[Tree]
) -> RoundProgress:
    """Where a round stands, of what is carried in every place."""
    assert group_state.loop_layout is not None
    carry = carries[0]
    if group_state.group.runs_parallel:
        carry = jax.tree.map(lambda *leaves: stack_on_host(leaves), *carries)
    return RoundProgress(group_state.loop_layout.place_carry(carry), **progress_record)


def _load_run(
    path: Path, record: dict, group_state: GroupState, i: int
) -> tuple[Any, Curves, Tree]:
    """A run's state and curves, from a checkpoint of a run that had clients' states where this one
    has them or elsewhere; and what its round carries, if that has begun."""
    state, num_stored_clients, pager = (
        group_state.fetch_states()[i],
        record.get("touched"),
        group_state.pager,
    )
    carry = _get_carry_shapes(group_state) if record.get("within") else ()
    rounds = record["spec"]["rounds"]
    curve_shapes = {
        name: jax.ShapeDtypeStruct((rounds, *curve.shape[1:]), curve.dtype)
        for name, curve in group_state.curves[i].items()
    }
    if pager is None and num_stored_clients is None:
        state, curves, _, carry = load_checkpoint(path, (state, curve_shapes, (), carry))
        return state, _resize_curves(group_state, i, curves, record), carry
    single_client = (
        pager.states[i].initial_state if pager else jax.tree.map(lambda a: a[0], state.clients)
    )
    all_clients = np.arange(group_state.group.program.signature.evaluation.num_clients)
    count = len(all_clients) if num_stored_clients is None else num_stored_clients
    rows_like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), single_client
    )
    ids = () if num_stored_clients is None else all_clients[:count]
    expected = (state._replace(clients=rows_like), curve_shapes, ids, carry)
    loaded_state, curves, ids, carry = load_checkpoint(path, expected)
    curves = _resize_curves(group_state, i, curves, record)
    clients = all_clients if num_stored_clients is None else ids
    if pager is not None:
        pager.states[i].scatter_states(clients, loaded_state.clients)
        return loaded_state._replace(clients=()), curves, carry
    client_states = _replace_client_rows(state.clients, clients, loaded_state.clients)
    return loaded_state._replace(clients=client_states), curves, carry


def _resize_curves(group_state: GroupState, i: int, curves: Curves, record: dict) -> Curves:
    """The curves of a run that had another number of rounds as this one has them."""
    done, rounds = record["round"], group_state.total_rounds
    if record["spec"]["rounds"] == rounds:
        return curves
    scheduler, resized = group_state.prepared_runs[i].scheduler, dict(group_state.curves[i])
    evaluation = group_state.group.program.signature.evaluation
    has_evaluation = np.array([scheduler.is_eval_round(r) for r in range(done)], bool)
    for name, values in curves.items():
        resized[name] = np.array(resized[name])
        resized[name][:done] = values[:done]
        # Its last rounds were evaluated, whatever `eval_every` says.
        if is_evaluation_curve(name, evaluation):
            resized[name][:done][~has_evaluation] = np.nan
    return resized


def _get_carry_shapes(group_state: GroupState) -> Tree:
    """Of what `_carried` gives."""
    assert group_state.loop_layout is not None
    if not group_state.group.runs_parallel:
        return group_state.loop_layout.carry_shapes
    to_run_shape = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)  # noqa: E731
    return jax.tree.map(to_run_shape, group_state.loop_layout.carry_shapes)


def _replace_client_rows(all_clients: Tree, clients: np.ndarray, rows: Tree) -> Tree:
    """The states of all clients, of which these have become `rows`."""

    def replace_rows(leaf, new):
        data = np.array(to_numpy_bits(leaf))
        data[clients] = to_numpy_bits(new)
        return from_numpy_bits(data, fetch_to_host(leaf))

    return jax.tree.map(replace_rows, all_clients, rows)
