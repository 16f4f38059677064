"""The record in a checkpoint: what it must say before a run goes on from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_het.config.resolve import is_horizon_dependent
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.checkpoint_file import (
    make_damaged_checkpoint_error,
    nonfinite_array_names,
    read_checkpoint,
)
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.errors import ConfigError, is_integer_at_least
from fedjax_het.utils.text import to_one_line


def read_checkpoint_record(path: Path) -> dict[str, Any]:
    """The record of a checkpoint that is whole and says what it must. Raises DamagedFileError."""
    record, arrays = read_checkpoint(path)
    if not isinstance(record, dict):
        raise make_damaged_checkpoint_error(path, f"its record is a {type(record).__name__}")
    for name, is_valid in _build_field_checks(record).items():
        if name not in record or not is_valid(record[name]):
            raise make_damaged_checkpoint_error(path, f"{name} = {record.get(name)!r}")
    unexpected_nonfinite = sorted(set(nonfinite_array_names(arrays)) - set(record["not_finite"]))
    if unexpected_nonfinite:
        raise make_damaged_checkpoint_error(path, f"{unexpected_nonfinite[0]} is not finite")
    return record


def _build_field_checks(record: dict[str, Any]) -> dict[str, Callable[[Any], bool]]:
    """By name, whether a value can be one."""
    spec = record.get("spec")
    rounds = spec.get("rounds") if isinstance(spec, dict) else None
    max_rounds = int(rounds) if rounds is not None and is_integer_at_least(rounds, 1) else 0
    done = record.get("round")
    return {
        "digest": lambda value: isinstance(value, str),
        "spec": lambda value: isinstance(value, dict) and max_rounds > 0,
        "dataset": lambda value: isinstance(value, str),
        "partition": lambda value: isinstance(value, str),
        "round": lambda value: is_integer_at_least(value, 0) and value <= max_rounds,
        "stopped": lambda value: value is None or (is_integer_at_least(value, 1) and value <= done),
        "work": lambda value: (
            isinstance(value, dict)
            and all(is_integer_at_least(count, 0) for count in value.values())
        ),
        "blocks": lambda value: is_integer_at_least(value, 1),
        "lanes": lambda value: is_integer_at_least(value, 1),
        "touched": lambda value: value is None or is_integer_at_least(value, 0),
        "within": lambda value: value is None or _is_round_progress(value),
        "seconds": lambda value: isinstance(value, int | float) and 0 <= value < float("inf"),
        "not_finite": lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "begun_under": lambda value: value is None or isinstance(value, dict),
        **{name: lambda value: value is not None for name in describe_environment()},
    }


def _is_round_progress(value: Any) -> bool:
    """Whether it says where a round stands: see `runtime.resumable_rounds.RoundProgress`."""
    if not isinstance(value, dict) or value.keys() != {"done", "totals"}:
        return False
    done, totals = value["done"], value["totals"]
    if not (isinstance(done, list) and isinstance(totals, list) and len(totals) < len(done)):
        return False
    all_counts = all(is_integer_at_least(count, 0) for count in done + totals)
    return all_counts and done[: len(totals)] == totals


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def require_matching_settings(
    path: Path, record: dict[str, Any], spec: RunSpec, *, allow_more_rounds: bool = False
) -> None:
    """Raise ConfigError if the checkpoint is of other settings; not, where it may be `longer`, if
    the number of rounds is all that differs, of which no more are done than there are to be, and on
    which its rates do not depend."""
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
    """What a run was begun under, where that was another version, device or precision. Raises
    ConfigError unless it is to be resumed anyway."""
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
