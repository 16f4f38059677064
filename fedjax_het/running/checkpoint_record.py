"""The record in a checkpoint: what it must say before a run goes on from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError, is_whole
from fedjax_het.common.text import one_line
from fedjax_het.engine.checkpoint import damaged, not_finite, read_checkpoint
from fedjax_het.settings.local_training import depends_on_end
from fedjax_het.settings.spec import RunSpec


def read_record(path: Path) -> dict[str, Any]:
    """The record of a checkpoint that is whole and says what it must. Raises DamagedFileError."""
    record, arrays = read_checkpoint(path)
    if not isinstance(record, dict):
        raise damaged(path, f"its record is a {type(record).__name__}")
    for name, fits in _fields(record).items():
        if name not in record or not fits(record[name]):
            raise damaged(path, f"{name} = {record.get(name)!r}")
    wrong = sorted(set(not_finite(arrays)) - set(record["not_finite"]))
    if wrong:
        raise damaged(path, f"{wrong[0]} is not finite")
    return record


def _fields(record: dict[str, Any]) -> dict[str, Callable[[Any], bool]]:
    """By name, whether a value can be one."""
    spec = record.get("spec")
    rounds = spec.get("rounds") if isinstance(spec, dict) else None
    most = int(rounds) if rounds is not None and is_whole(rounds, 1) else 0
    done = record.get("round")
    return {
        "digest": lambda value: isinstance(value, str),
        "spec": lambda value: isinstance(value, dict) and most > 0,
        "dataset": lambda value: isinstance(value, str),
        "partition": lambda value: isinstance(value, str),
        "round": lambda value: is_whole(value, 0) and value <= most,
        "stopped": lambda value: value is None or (is_whole(value, 1) and value <= done),
        "work": lambda value: (
            isinstance(value, dict) and all(is_whole(count, 0) for count in value.values())
        ),
        "blocks": lambda value: is_whole(value, 1),
        "lanes": lambda value: is_whole(value, 1),
        "touched": lambda value: value is None or is_whole(value, 0),
        "within": lambda value: value is None or _stands(value),
        "seconds": lambda value: isinstance(value, int | float) and 0 <= value < float("inf"),
        "not_finite": lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "begun_under": lambda value: value is None or isinstance(value, dict),
        **{name: lambda value: value is not None for name in environment()},
    }


def _stands(value: Any) -> bool:
    """Whether it says where a round stands: see `running.long_rounds.Within`."""
    if not isinstance(value, dict) or value.keys() != {"done", "totals"}:
        return False
    done, totals = value["done"], value["totals"]
    if not (isinstance(done, list) and isinstance(totals, list) and len(totals) < len(done)):
        return False
    whole = all(is_whole(count, 0) for count in done + totals)
    return whole and done[: len(totals)] == totals


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def require_own(path: Path, record: dict[str, Any], spec: RunSpec, *, longer: bool = False) -> None:
    """Raise ConfigError if the checkpoint is of other settings; not, where it may be `longer`, if
    the number of rounds is all that differs, of which no more are done than there are to be, and on
    which its rates do not depend."""
    if record["digest"] == spec.digest():
        return
    then, now = record["spec"], spec.resolved().to_dict()
    names = [k for k in {**now, **then} if then.get(k) != now.get(k)]
    ends = depends_on_end(spec)
    if longer and names == ["rounds"] and record["round"] <= now["rounds"] and not ends:
        return
    differ = [f"{k} {then.get(k)!r} -> {now.get(k)!r}" for k in names]
    more = ""
    if names == ["rounds"]:
        more = f"; {record['round']} are done"
        if ends:
            more += f", at rates of {spec.lr_schedule} to another end, unless hp lr_length says it"
    raise ConfigError(
        one_line(
            f"checkpoint = {str(path)!r}: expected this configuration's, but it is another "
            f"one's ({', '.join(differ)}{more}); use its settings or another output_dir, or remove "
            "it"
        )
    )


def begun_under(path: Path, record: dict[str, Any], resume_anyway: bool) -> dict[str, Any] | None:
    """What a run was begun under, where that was another version, device or precision. Raises
    ConfigError unless it is to be resumed anyway."""
    now = environment()
    then = {name: record[name] for name in now}
    differ = [f"{name} {then[name]} -> {now[name]}" for name in now if then[name] != now[name]]
    if differ and not resume_anyway:
        raise ConfigError(
            one_line(
                f"checkpoint = {str(path)!r}: expected one of this version and device, but it is "
                f"another one's ({', '.join(differ)}), and its bits may differ; resume_anyway "
                "(--resume-anyway) goes on from it, which the result then says; or remove it"
            )
        )
    return record["begun_under"] or (then if differ else None)
