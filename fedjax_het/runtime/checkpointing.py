"""Checkpoints and final states of runs.

A file contains the state of a run, its metrics, and a record that must match before a run resumes.
The file is replaced in one step, and a resumed run continues to the same bits. The PRNG keys of the
rounds are derived from seed and round, so they are not part of the file.
"""

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.config.resolve import USER_PROVIDED, is_horizon_dependent
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.config.settings import rename_former_settings
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.runtime.compiled_programs import build_algorithm
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import Curves, is_evaluation_curve
from fedjax_het.runtime.identity import (
    IDENTITY_FIELDS,
    ListChanges,
    collect_function_digests,
    compute_class_names_digest,
    list_no_changes,
)
from fedjax_het.runtime.leases import lock_run
from fedjax_het.runtime.resumable_rounds import RoundProgress
from fedjax_het.runtime.trained_model import (
    InputSpec,
    TrainedModel,
    build_signature_from_file,
    extract_model,
)
from fedjax_het.utils import config, env
from fedjax_het.utils.arrays import (
    decode_arrays,
    encode_arrays,
    fetch_to_host,
    from_numpy_bits,
    is_prng_key,
    to_numpy_bits,
)
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.former_names import make_former_path
from fedjax_het.utils.io import DamagedFileError, read_npz, remove_stale_files, write_npz
from fedjax_het.utils.memory_maps import iter_blocks
from fedjax_het.utils.text import to_one_line

CHECKPOINT_SECONDS = 20.0
"""Seconds between checkpoints unless FEDJAX_HET_CHECKPOINT_SECONDS is set; 0 for every chunk."""
MAX_CHECKPOINT_FRACTION = 0.1
"""Largest fraction of the time that is spent on checkpoints."""
CHECKPOINT_FILE = "checkpoint.npz"
"""Name of the file of a checkpoint."""
NOTHING_SAVED = "nothing was saved yet; the next run starts again"
"""Note on the exception of Ctrl-C or SIGTERM before the first checkpoint."""
UNFINISHED_FOLDER = "unfinished"
"""Name of the folder of checkpoints in the folder of a sweep."""

_DIGEST_LABELS = {
    "network_digest": "network",
    "optimizer_digest": "optimizer",
    "initial": "model (init_from)",
    "class_names_digest": "class names",
}
_YOUNG_DIGESTS = ("class_names_digest",)
# Values of `describe_environment` in the checkpoints of all versions.
_ENVIRONMENT_FIELDS = (*IDENTITY_FIELDS, "jax", "jaxlib")
_Count = Annotated[int, config.Bounds(0, 2**63)]
_MAX_READ_BYTES = 2**28  # of the states of clients in a checkpoint; larger ones are mapped

log = logging.getLogger("fedjax_het")

Tree = Any


class _CheckpointRecord(TypedDict):
    """The values that every record contains in addition to the values of `describe_environment`."""

    digest: str
    spec: dict[str, Any]
    dataset: str
    partition: str
    round: _Count
    stopped: _Count | None  # the round in which the run diverged
    work: dict[str, _Count]
    blocks: config.PositiveInt
    lanes: config.PositiveInt
    touched: _Count | None  # the number of clients' states, if not all are stored
    within: dict[str, list[_Count]] | None  # see `runtime.resumable_rounds.RoundProgress`
    seconds: config.NonNegativeFloat
    not_finite: list[str]
    begun_under: dict[str, Any] | None


class CheckpointWriter:
    """Writer of the checkpoints of runs in lockstep.

    Attributes:
      folders: folder of each run; None to write nothing.
      has_failed: whether a file could not be written.
      unlock_run: releases the lock of `lock_run`.
    """

    def __init__(self, folders: Sequence[Path] | None = None):
        self.folders, self.has_failed = folders, False
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self._min_interval = env.get_value(env.CHECKPOINT_SECONDS, CHECKPOINT_SECONDS)
        self._saved_point: tuple | None = None  # of the last checkpoint, or of the start
        self._saved_round: int | None = None
        self.unlock_run: Callable[[], object] = lambda: None

    def lock_run(self, folder: Path, digest: str) -> None:
        """Lock a run against other processes until the writer is deleted, see `leases.lock_run`.

        Args:
          folder: the output folder.
          digest: digest of the run's result.

        Raises:
          ConfigError: if another process executes the run.
        """
        if jax.process_index() == 0:
            self.unlock_run = weakref.finalize(self, lock_run(folder, digest))

    @contextlib.contextmanager
    def save_at_interrupt(
        self, group_state: GroupState, may_write: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Write the checkpoints if Ctrl-C or SIGTERM ends the block.

        A note on the exception states where the runs continue. A second signal ends the write.

        Args:
          group_state: the state of the runs.
          may_write: returns whether the runs still belong to this process.

        Yields:
          Nothing.
        """
        self._saved_point = self._saved_point or _get_point(group_state)
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            has_results = len(group_state.reported) == len(group_state.prepared_runs)
            if self.folders is None or has_results:
                raise
            try:
                with contextlib.suppress(ConfigError):  # an error has destroyed the state
                    group_state.require_state()
                    if _get_point(group_state) != self._saved_point and may_write():
                        self.save(group_state, force=True)
            finally:
                if self._saved_round is not None:
                    total = group_state.total_rounds
                    text = f"the next run continues after round {self._saved_round} of {total}"
                    error.add_note(text)
            raise

    def save(self, group_state: GroupState, *, force: bool = False) -> None:
        """Write the checkpoints of the runs without a result, if they are due.

        Only the first process writes, and only whole rounds if processes share a run.

        Args:
          group_state: the state of the runs.
          force: write now.
        """
        plan = group_state.group.program.plan
        is_shared = plan.mesh is not None and plan.mesh.is_multi_process
        is_writer = not is_shared or (
            jax.process_index() == 0 and group_state.round_progress is None
        )
        start = time.perf_counter()
        interval = max(self._min_interval, self._save_seconds / MAX_CHECKPOINT_FRACTION)
        is_due = force or not self._min_interval or start - self._saved_at >= interval
        if self.folders is None or not is_writer or not is_due:
            return
        is_written = [
            self._write(self.folders[i] / CHECKPOINT_FILE, group_state, i, state)
            for i, state in enumerate(group_state.fetch_states())
            if i not in group_state.reported
        ]
        if is_written and all(is_written):
            self._saved_point, self._saved_round = _get_point(group_state), group_state.rounds_done
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - start

    def save_run(self, group_state: GroupState, i: int) -> None:
        """Write the checkpoint of one run now.

        Args:
          group_state: the state of the runs.
          i: index of the run.
        """
        if self.folders is not None:
            path = self.folders[i] / CHECKPOINT_FILE
            self._write(path, group_state, i, group_state.fetch_state(i))

    def save_final_state(self, group_state: GroupState, i: int, path: Path) -> None:
        """Write the final state of a run, unless it diverged, for `SavedStateIndex`.

        Args:
          group_state: the state of the runs.
          i: index of the run.
          path: file to write.
        """
        if group_state.diverged_rounds[i] is None:
            self._write(path, group_state, i, group_state.fetch_state(i))

    def _write(self, path: Path, group_state: GroupState, i: int, state: Any) -> bool:
        """Write a file, and return whether it is written.

        The first error is logged, since a run is worth more than its checkpoint.
        """
        tree, record = _build_checkpoint(group_state, i, state)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(path, tree, record)
            return True
        except Exception as error:
            if not self.has_failed:
                reason = getattr(error, "strerror", None) or error
                text = f"{str(path)!r} cannot be written ({reason}): the run continues without"
                log.warning("checkpoint = %s", to_one_line(text))
            self.has_failed = True
            return False

    def require_matching_data(self, group_state: GroupState, records: Sequence[dict]) -> None:
        """Raise ConfigError if the checkpoint of a run is of other data.

        Args:
          group_state: the state of the runs.
          records: records of the checkpoints of the runs.
        """
        for i, record in enumerate(records):
            for name, digest in _compute_data_digests(group_state, i).items():
                # Checkpoints of earlier versions lack the digests of class names and functions.
                is_known = name in record or name not in _YOUNG_DIGESTS
                if is_known and record.get(name) != digest:
                    label = _DIGEST_LABELS.get(name, name)
                    raise ConfigError(
                        f"checkpoint = {record['path']!r}: expected a checkpoint of this "
                        f"{label}, but it has another; pass this {label} or another output_dir"
                    )

    def restore(self, group_state: GroupState) -> None:
        """Load the checkpoints of `group_state.records`.

        The initial states of the runs are on the devices and are replaced.

        Raises:
          ConfigError: if a checkpoint is of other data.
        """
        records = group_state.records
        self.require_matching_data(group_state, records)
        group, layout, states, carries = group_state.group, group_state.loop_layout, [], []
        plan, round_progress = group.program.plan, None
        for i, record in enumerate(records):
            state, group_state.curves[i], carry = _load_run(group_state, i, record)
            if record["begun_under"] is not None:
                group_state.begun_under[i] = record["begun_under"]
            states.append(state)
            carries.append(carry)
        if group.runs_parallel:
            num_idle = len(group_state.slots) - len(states)
            state = group.stack_slots(states + states[-1:] * num_idle)
            carry = group.stack_slots(carries + carries[-1:] * num_idle)
        else:
            state, carry = plan.map_state(states[0], plan.put), carries[0]
        if (progress := records[0]["within"]) is not None:
            assert layout is not None
            done, totals = tuple(progress["done"]), tuple(progress["totals"])
            round_progress = RoundProgress(layout.place_carry(carry), done, totals)
        group_state.timing.resumed_seconds = records[0]["seconds"]
        group_state.update(
            state=state,
            rounds_done=records[0]["round"],
            round_progress=round_progress,
            diverged_rounds=tuple(record["stopped"] for record in records),
        )
        self._saved_round = group_state.rounds_done


def find_checkpoint_record(
    folder: Path, spec: RunSpec, *, allow_more_rounds: bool = False
) -> dict | None:
    """Return the record of the checkpoint of a run.

    Args:
      folder: folder of the checkpoint.
      spec: settings of the run.
      allow_more_rounds: accept another number of rounds if no more rounds are done, and if the
        schedule of learning rates does not depend on that number.

    Returns:
      The record with `path` and `arrays` of the file; None without a checkpoint.

    Raises:
      ConfigError: if the checkpoint is of another run.
      DamagedFileError: if it is damaged.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    record = read_checkpoint_record(path)
    if record["digest"] == spec.digest():
        return record
    stored = rename_former_settings(record["spec"])
    current = spec.resolved().to_dict()
    names = [name for name in {**current, **stored} if stored.get(name) != current.get(name)]
    text = ", ".join(f"{name} {stored.get(name)!r} -> {current.get(name)!r}" for name in names)
    if names == ["rounds"]:
        is_accepted = allow_more_rounds and record["round"] <= current["rounds"]
        if is_accepted and not is_horizon_dependent(spec):
            return record
        text += f"; {record['round']} rounds are done"
        if is_horizon_dependent(spec):
            text += (
                f", and the rates of {spec.lr_schedule} depend on that number without hp lr_length"
            )
    raise ConfigError(
        f"checkpoint = {str(path)!r}: expected a checkpoint of this configuration, but it has "
        f"another ({text}); use its settings or another output_dir, or remove it"
    )


def find_resumable_record(
    folder: Path,
    spec: ResolvedRunSpec,
    *,
    saved_state: Path | None = None,
    resume_anyway: bool = False,
    quarantine: bool = False,
    list_changes: ListChanges = list_no_changes,
) -> dict | None:
    """Return the record of the checkpoint from which a run resumes.

    Args:
      folder: folder of the checkpoint.
      spec: settings of the run.
      saved_state: final state of the run with fewer rounds, to use without a checkpoint.
      resume_anyway: accept checkpoints of other versions, devices and precisions.
      quarantine: rename a checkpoint that is damaged or of another run, do not use a final state
        of another version or device, and log that.
      list_changes: names registered objects that have changed since a checkpoint was written.

    Returns:
      The record with `path` and `arrays` of the file; None without a usable checkpoint.

    Raises:
      ConfigError: if the run cannot resume from the checkpoint.
    """
    path = folder / CHECKPOINT_FILE
    try:
        record = find_checkpoint_record(folder, spec, allow_more_rounds=True)
        if record is not None:
            digests = {f"{part}_digest": record[part] for part in ("dataset", "partition")}
            if changes := list_changes(spec, record | digests):
                text = f"{', '.join(changes)} has changed since it was written"
                raise ConfigError(
                    f"checkpoint = {str(path)!r}: expected a checkpoint of this run, but {text}; "
                    "use another output_dir, or remove it"
                )
    except ConfigError as error:
        if not quarantine:
            raise
        damaged_path = path.with_name(f"{CHECKPOINT_FILE}.damaged")
        with contextlib.suppress(OSError):  # then the next checkpoint replaces it
            os.replace(path, damaged_path)
        text = to_one_line(repr(str(damaged_path)))
        log.warning("%s: the run starts again; the old file is %s", error, text)
        return None
    is_final_state = record is None and saved_state is not None
    if record is None and saved_state is not None:
        record = read_checkpoint_record(saved_state)
    if record is None:
        return None
    current = describe_environment()
    stored = {name: record.get(name, value) for name, value in current.items()}
    changes = [f"{n} {stored[n]} -> {current[n]}" for n in current if stored[n] != current[n]]
    if changes and not resume_anyway:
        refusal = ConfigError(
            f"checkpoint = {record['path']!r}: expected a checkpoint of this version and device, "
            f"but these differ ({', '.join(changes)}), so that bits may differ; pass resume_anyway "
            "(--resume-anyway) to resume from it, which the result records, or remove it"
        )
        if is_final_state and quarantine:
            log.warning("%s: the run starts again", refusal)
            return None
        raise refusal
    return {**record, "begun_under": record["begun_under"] or (stored if changes else None)}


def delete_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a run whose result is written.

    The folder of a run of a sweep is removed if it is empty then; it may have renamed files. The
    folder of all runs is removed with its last folder.
    """
    with contextlib.suppress(OSError):
        (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
        remove_stale_files(folder)
        if folder.parent.name == UNFINISHED_FOLDER:
            folder.rmdir()
            folder.parent.rmdir()


def load_state_model(
    path: Path, client: int | None = None, *, network: Any = None, optimizer: Any = None
) -> TrainedModel:
    """Load a model from the final state of a run. Cost: reads the states of all clients.

    Args:
      path: file of the final state.
      client: id of a client whose clients have own models (default: the global model).
      network: network of the user that the run had, if it had one.
      optimizer: optimizer of the user that the run had, if it had one.

    Returns:
      The trained model.

    Raises:
      DamagedFileError: if the file is damaged.
      ConfigError: if the network or the optimizer is missing or is another one, and if the method
        has no such model.
    """
    record = read_checkpoint_record(path)
    spec = RunSpec.from_dict(record["spec"]).resolved()
    inputs = InputSpec.from_record(record["inputs"])
    is_user_optimizer = spec.local_optimizer == USER_PROVIDED
    expected = "None, as the settings name the optimizer"
    if is_user_optimizer:
        expected = "the optimizer of the run"
    require((optimizer is not None) == is_user_optimizer, "optimizer", optimizer, expected)
    digest = record.get("network_digest")
    signature = build_signature_from_file(spec, inputs, network, digest, optimizer)
    hp: dict[str, Any] = {name: np.float32(value) for name, value in spec.hyperparameters.items()}
    key = make_stream_key(spec.seed, Stream.INIT)

    def init_state() -> Any:
        variables = signature.training.task.model.init(key)
        return build_algorithm(signature).init(hp, key, variables, spec.num_clients)

    expected_state = jax.eval_shape(init_state)
    # States on the host are stored for the clients that were trained, which have no own models.
    if (count := record["touched"]) is not None:
        clients = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), expected_state.clients
        )
        expected_state = expected_state._replace(clients=clients)
    (state,) = load_checkpoint(path, (expected_state,), record["arrays"])
    return extract_model(signature, spec, inputs, state, hp, client)


# --- files


def save_checkpoint(path: Path, tree: Tree, record: dict[str, Any]) -> None:
    """Write arrays and a record in one step, with a checksum.

    Args:
      path: file to write.
      tree: pytree of arrays of any type of jax.
      record: values that JSON can hold.

    Raises:
      OSError: if the file cannot be written.
    """
    write_npz(path, encode_arrays(flatten_by_path(tree)), record)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record of a checkpoint, and its arrays by path in the tree.

    Raises:
      DamagedFileError: if the file is not as it was written.
    """
    try:
        arrays, record = read_npz(path, is_mapped=_is_too_large_to_read)
        return record, decode_arrays(arrays)
    except Exception as error:  # of arbitrary bytes
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise _make_damaged_error(path, reason) from error


def _is_too_large_to_read(name: str, num_bytes: int) -> bool:
    """Return whether an array has the states of clients that may not fit in memory."""
    return ".clients" in name and num_bytes > _MAX_READ_BYTES


def load_checkpoint(path: Path, template: Tree, arrays: dict[str, Any] | None = None) -> Tree:
    """Return the arrays of a checkpoint in the structure of a tree.

    Args:
      path: file of the checkpoint.
      template: pytree of arrays or shapes.
      arrays: arrays by path in the tree (default: they are read from the file).

    Returns:
      The pytree of arrays.

    Raises:
      ConfigError: if names, shapes or types differ.
    """
    if arrays is None:
        _, arrays = read_checkpoint(path)
    leaves = []
    for name, leaf in flatten_by_path(template).items():
        array = arrays.get(name, arrays.get(make_former_path(name)))
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected {name} of shape {leaf.shape} and type "
                f"{leaf.dtype}, as in this configuration; the checkpoint has another"
            )
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def read_checkpoint_record(path: Path) -> dict[str, Any]:
    """Return the valid record of a checkpoint with `path` and `arrays` of the file.

    Raises:
      DamagedFileError: if the record is invalid, or the file is damaged.
    """
    record, arrays = read_checkpoint(path)
    try:
        _validate_record(record, arrays)
    except ConfigError as error:
        raise _make_damaged_error(path, str(error)) from None
    return {**record, "path": str(path), "arrays": arrays}


def flatten_by_path(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a pytree by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _list_nonfinite(arrays: dict[str, Any]) -> list[str]:
    return [
        name
        for name, leaf in arrays.items()
        if not is_prng_key(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
        and not all(
            np.isfinite(block).all() for block in iter_blocks(np.atleast_1d(to_numpy_bits(leaf)))
        )
    ]


def _make_damaged_error(path: Path, reason: str) -> DamagedFileError:
    return DamagedFileError(
        f"checkpoint = {str(path)!r}: expected a checkpoint of this program, but it is damaged and "
        f"cannot be read ({reason}); remove it to start afresh"
    )


def _validate_record(record: dict[str, Any], arrays: dict[str, Any]) -> None:
    require(isinstance(record, dict), "record", record, "a dict")
    for name in _ENVIRONMENT_FIELDS:
        require(record.get(name) is not None, name, None, "a value")
    for name in _CheckpointRecord.__annotations__:
        require(name in record, name, None, "a value")
    config.validate_fields(record, _CheckpointRecord)
    max_rounds = config.validate("spec['rounds']", record["spec"].get("rounds"), config.PositiveInt)
    done, stopped, within = record["round"], record["stopped"], record["within"]
    require(done <= max_rounds, "round", done, f"at most {max_rounds}")
    require(stopped is None or 1 <= stopped <= done, "stopped", stopped, f"1 to {done}")
    if within is not None:
        require(within.keys() == {"done", "totals"}, "within", within, "done and totals")
        phases, totals = within["done"], within["totals"]
        is_consistent = len(totals) < len(phases) and phases[: len(totals)] == totals
        require(is_consistent, "within", within, "totals of the phases that are done")
    for name in sorted({*_list_nonfinite(arrays)} - {*record["not_finite"]}):
        raise ConfigError(f"{name} is not finite")


# --- contents


def _compute_data_digests(group_state: GroupState, i: int) -> dict[str, str | None]:
    """Return the digests of the data and of the user's objects, which a resumed run must share."""
    group, run = group_state.group, group_state.prepared_runs[i]
    return {
        "dataset": run.dataset.digest(),
        "partition": run.partition.digest(),
        "class_names_digest": compute_class_names_digest(run.spec, run.dataset),
        "network_digest": None,
        "optimizer_digest": None,
        **group.program.signature.compute_user_digests(run.spec),
        "initial": None if group.initial_model is None else group.initial_model.variables_digest,
    }


def _get_point(group_state: GroupState) -> tuple:
    """Return the point of the runs: rounds, parts of the next round, and work between rounds."""
    progress, stages = group_state.round_progress, group_state.group.program.algorithm.server_stages
    parts = None if progress is None else (progress.done, progress.totals)
    work = [group_state.count_stage_iterations(stage) for stage in stages]
    return group_state.rounds_done, parts, work


def _build_checkpoint(group_state: GroupState, i: int, state: Any) -> tuple[Tree, dict[str, Any]]:
    """Return the arrays and the record of a run."""
    group, run = group_state.group, group_state.prepared_runs[i]
    progress, pager = group_state.round_progress, group_state.pager
    carry: Tree = ()
    if progress is not None:
        carry = jax.tree.map(fetch_to_host, progress.carry)
        carry = jax.tree.map(lambda a: a[i], carry) if group.runs_parallel else carry
    client_ids: Any = ()
    if pager is not None:
        client_ids = pager.states[i].written_client_ids
        state = state._replace(clients=pager.states[i].rows)
    tree = (state, group_state.curves[i], client_ids, carry)
    stages = group.program.algorithm.server_stages
    record = {
        "digest": run.spec.digest(),
        "spec": run.spec.to_dict(),
        "inputs": InputSpec.from_dataset(run.dataset).to_record(),
        **_compute_data_digests(group_state, i),
        "functions": collect_function_digests(run.spec),
        "round": group_state.rounds_done,
        "work": {stage.name: stage.count_completed(state) for stage in stages},
        "stopped": group_state.diverged_rounds[i],
        "within": None if progress is None else progress.to_record(),
        "blocks": group.program.plan.blocks,
        "lanes": group.program.plan.lanes,
        "touched": None if pager is None else len(client_ids),
        "seconds": group_state.timing.compute_wall_seconds(len(group_state.prepared_runs)),
        "begun_under": group_state.begun_under.get(i),
        "not_finite": _list_nonfinite(flatten_by_path(tree)),
        **describe_environment(),
    }
    return tree, record


def _load_run(group_state: GroupState, i: int, record: dict) -> tuple[Any, Curves, Tree]:
    """Return the state, the curves and the carry of a round's loops from a checkpoint.

    The states of clients may have been in another place when the checkpoint was written.
    """
    state, pager, group = group_state.fetch_state(i), group_state.pager, group_state.group
    curve_shapes = {
        name: jax.ShapeDtypeStruct((record["spec"]["rounds"], *curve.shape[1:]), curve.dtype)
        for name, curve in group_state.curves[i].items()
    }
    carry: Tree = ()
    if record["within"] is not None:
        assert group_state.loop_layout is not None
        carry = group_state.loop_layout.carry_shapes
        if group.runs_parallel:
            carry = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), carry)
    ids: Any = ()
    template, all_ids = state, np.arange(group.program.signature.evaluation.num_clients)
    count, has_rows = record["touched"], pager is not None or record["touched"] is not None
    if has_rows:
        one = (
            pager.states[i].initial_state if pager else jax.tree.map(lambda a: a[0], state.clients)
        )
        ids = () if count is None else all_ids[:count]
        num_rows = len(all_ids) if count is None else count
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape), a.dtype), one)
        template = state._replace(clients=rows)
    expected = (template, curve_shapes, ids, carry)
    arrays = record.pop("arrays", None)  # they are needed once
    loaded, curves, ids, carry = load_checkpoint(Path(record["path"]), expected, arrays)
    if has_rows:
        ids = all_ids if count is None else ids
        if pager is not None:
            pager.states[i].scatter_states(ids, loaded.clients)
            clients: Tree = ()
        else:
            clients = _replace_rows(state.clients, ids, loaded.clients)
        loaded = loaded._replace(clients=clients)
    return loaded, _resize_curves(group_state, i, curves, record), carry


def _replace_rows(all_clients: Tree, ids: np.ndarray, rows: Tree) -> Tree:
    """Return the states of all clients with new states of some of them."""

    def replace(leaf, new):
        data = np.array(to_numpy_bits(leaf))
        data[ids] = to_numpy_bits(new)
        return from_numpy_bits(data, fetch_to_host(leaf))

    return jax.tree.map(replace, all_clients, rows)


def _resize_curves(group_state: GroupState, i: int, curves: Curves, record: dict) -> Curves:
    """Return the curves of a run that had another number of rounds with this number of rounds."""
    done = record["round"]
    if record["spec"]["rounds"] == group_state.total_rounds:
        return curves
    evaluation = group_state.group.program.signature.evaluation
    scheduler = group_state.prepared_runs[i].scheduler
    is_evaluated = np.array([scheduler.is_eval_round(r) for r in range(done)], bool)
    resized = {name: np.array(curve) for name, curve in group_state.curves[i].items()}
    for name, values in curves.items():
        resized[name][:done] = values[:done]
        # The last rounds of the shorter run were evaluated whatever `eval_every` is.
        if is_evaluation_curve(name, evaluation):
            resized[name][:done][~is_evaluated] = np.nan
    return resized
