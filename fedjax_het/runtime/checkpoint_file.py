"""The file of a checkpoint: its arrays, and the record that must match before a run resumes.

The file is replaced in one step, and a run resumes from it exactly.
"""

from pathlib import Path
from typing import Annotated, Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.config.local_training import is_horizon_dependent
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.arrays import decode_arrays, encode_arrays, is_prng_key, to_numpy_bits
from fedjax_het.utils.config import (
    Bounds,
    NonNegativeFloat,
    PositiveInt,
    validate,
    validate_fields,
)
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.io import DamagedFileError, read_npz, write_npz
from fedjax_het.utils.text import to_one_line


def save_checkpoint(path: Path, tree: Any, meta: dict) -> None:
    """Write a pytree of arrays, of any type that jax has, and a JSON-able record, atomically and
    with a checksum of both. Raises OSError.

    The keys of a run's rounds are not among them: they are derived from the seed and the round.
    """
    write_npz(path, encode_arrays(flatten_by_path(tree)), meta)


def read_checkpoint(path: Path) -> tuple[dict, dict[str, Any]]:
    """The record of a checkpoint, and its arrays by name. Raises DamagedFileError, in one line, if
    the file is none, or is not as it was written."""
    try:
        arrays, meta = read_npz(path)
        return meta, decode_arrays(arrays)
    except Exception as error:  # of arbitrary bytes
        reason = str(error) if isinstance(error, DamagedFileError) else type(error).__name__
        raise make_damaged_checkpoint_error(path, reason) from error


def read_meta(path: Path) -> dict:
    """The record of a checkpoint alone."""
    return read_checkpoint(path)[0]


def load_checkpoint(path: Path, template: Any) -> Any:
    """The pytree of a checkpoint, in the structure of `like`. Raises ConfigError on any misfit."""
    _, arrays = read_checkpoint(path)
    leaves = []
    for name, leaf in flatten_by_path(template).items():
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ConfigError(
                f"checkpoint = {str(path)!r}: expected {name} of shape {leaf.shape} and type "
                f"{leaf.dtype}, as this configuration has; it is another configuration's"
            )
        leaves.append(array)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(template), leaves)


def nonfinite_array_names(arrays: dict[str, Any]) -> list[str]:
    """The names of arrays, of those that `flatten_by_path` gives, that hold what is no number."""
    return [
        name
        for name, leaf in arrays.items()
        if not is_prng_key(leaf)
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
        and not np.isfinite(to_numpy_bits(leaf)).all()
    ]


def flatten_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their place in it, as a checkpoint names them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def make_damaged_checkpoint_error(path: Path, reason: str) -> DamagedFileError:
    """The error of a checkpoint that cannot be used, with what is to be done."""
    return DamagedFileError(
        to_one_line(
            f"checkpoint = {str(path)!r}: expected a checkpoint of this program, but it is damaged "
            f"and cannot be read ({reason}); remove it to start afresh"
        )
    )


_Count = Annotated[int, Bounds(0, 2**63)]


class _CheckpointRecord(TypedDict):
    """The values that every checkpoint holds beside those of `describe_environment`."""

    digest: str
    spec: dict[str, Any]
    dataset: str
    partition: str
    round: _Count
    stopped: _Count | None
    work: dict[str, _Count]
    blocks: PositiveInt
    lanes: PositiveInt
    touched: _Count | None
    within: dict[str, list[_Count]] | None  # see `runtime.resumable_rounds.RoundProgress`
    seconds: NonNegativeFloat
    not_finite: list[str]
    begun_under: dict[str, Any] | None


def read_checkpoint_record(path: Path) -> dict[str, Any]:
    """Return the record of a checkpoint. Raises DamagedFileError if it is not whole and valid."""
    record, arrays = read_checkpoint(path)
    if not isinstance(record, dict):
        raise make_damaged_checkpoint_error(path, f"its record is a {type(record).__name__}")
    if not isinstance(record, dict):
        raise make_damaged_checkpoint_error(path, f"its record is a {type(record).__name__}")
    try:
        _validate_record(record)
    except ConfigError as error:
        raise make_damaged_checkpoint_error(path, str(error)) from None
    unexpected_nonfinite = sorted(set(nonfinite_array_names(arrays)) - set(record["not_finite"]))
    if unexpected_nonfinite:
        raise make_damaged_checkpoint_error(path, f"{unexpected_nonfinite[0]} is not finite")
    return record


def _validate_record(record: dict[str, Any]) -> None:
    for name in describe_environment():
        require(record.get(name) is not None, name, None, "a value")
    for name in _CheckpointRecord.__annotations__:
        require(name in record, name, None, "a value")
    validate_fields(record, _CheckpointRecord)
    max_rounds = validate("spec['rounds']", record["spec"].get("rounds"), PositiveInt)
    done, stopped, within = record["round"], record["stopped"], record["within"]
    require(done <= max_rounds, "round", done, f"at most {max_rounds}")
    require(stopped is None or 1 <= stopped <= done, "stopped", stopped, f"1 to {done}")
    if within is not None:
        require(within.keys() == {"done", "totals"}, "within", within, "done and totals")
        phases, totals = within["done"], within["totals"]
        is_consistent = len(totals) < len(phases) and phases[: len(totals)] == totals
        require(is_consistent, "within", within, "totals of the phases that are done")


def require_matching_settings(
    path: Path, record: dict[str, Any], spec: RunSpec, *, allow_more_rounds: bool = False
) -> None:
    """Raise ConfigError if a checkpoint is of other settings.

    Args:
      path: the checkpoint, for the message.
      record: its record.
      spec: settings of the run.
      allow_more_rounds: accept another number of rounds, unless more rounds are done or the
        schedule of learning rates depends on that number.
    """
    if record["digest"] == spec.digest():
        return
    checkpoint_settings, current_settings = record["spec"], spec.resolved().to_dict()
    names = [
        k
        for k in {**current_settings, **checkpoint_settings}
        if checkpoint_settings.get(k) != current_settings.get(k)
    ]
    depends_on_last_round = is_horizon_dependent(spec)
    if (
        allow_more_rounds
        and names == ["rounds"]
        and record["round"] <= current_settings["rounds"]
        and not depends_on_last_round
    ):
        return
    differences = [
        f"{k} {checkpoint_settings.get(k)!r} -> {current_settings.get(k)!r}" for k in names
    ]
    details = ""
    if names == ["rounds"]:
        details = f"; {record['round']} are done"
        if depends_on_last_round:
            details += (
                f", at rates of {spec.lr_schedule} to another end, unless hp lr_length says it"
            )
    raise ConfigError(
        to_one_line(
            f"checkpoint = {str(path)!r}: expected this configuration's, but it is another "
            f"one's ({', '.join(differences)}{details}); use its settings or another output_dir, or remove "
            "it"
        )
    )


def check_environment(
    path: Path, record: dict[str, Any], resume_anyway: bool
) -> dict[str, Any] | None:
    """Return the version, device and precision under which a run began; None if they are these.

    Raises:
      ConfigError: if they are others, unless `resume_anyway`.
    """
    current_environment = describe_environment()
    checkpoint_environment = {name: record[name] for name in current_environment}
    differences = [
        f"{name} {checkpoint_environment[name]} -> {current_environment[name]}"
        for name in current_environment
        if checkpoint_environment[name] != current_environment[name]
    ]
    if differences and not resume_anyway:
        raise ConfigError(
            to_one_line(
                f"checkpoint = {str(path)!r}: expected one of this version and device, but it is "
                f"another one's ({', '.join(differences)}), and its bits may differ; resume_anyway "
                "(--resume-anyway) goes on from it, which the result then says; or remove it"
            )
        )
    return record["begun_under"] or (checkpoint_environment if differences else None)
