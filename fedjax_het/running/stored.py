"""What a result's file may hold: its text with a checksum, and the types of what is in it."""

import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.settings.spec import RunSpec

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{64})"')
_EMPTY = "0" * 64
_KEYS = {"spec", "summary", "arrays", "checksum"}
# What reports read of a summary.
_TEXTS = (
    *("finished", "fedjax_het", "jax", "jaxlib", "device", "matmul_precision", "precision"),
    "dataset_note",
)
_NUMBERS = (
    "final_accuracy",
    "final_accuracy_std",
    "final_client_accuracy",
    "best_accuracy",
    "last_accuracy",
    "window_accuracy",
    "rise_time",
    "rounds_to_half",
    "bmta",
    "bmta_round",
    "bmta_worst_decile",
    "wall_seconds",
    "client_samples_per_second",
    "bytes_up",
    "bytes_down",
    "rounds",
    "epsilon",
    "held_out_accuracy",
    "held_out_tuned_accuracy",
)
_TRUTHS = ("diverged", "x64")
_POSITIVE = ("alpha", "rounds", "num_clients")


def to_text(record: dict[str, Any]) -> str:
    """The JSON of a record, with a checksum of all of it among its keys."""
    text = json.dumps(
        {**record, "checksum": _EMPTY}, indent=1, sort_keys=True, allow_nan=False, default=str
    )
    return text.replace(_EMPTY, hashlib.sha256(text.encode()).hexdigest(), 1)


def from_text(text: str) -> dict[str, Any]:
    """The record of a text, which older versions wrote without a checksum. Raises ValueError."""
    found = _CHECKSUM.search(text)
    if found is not None:
        whole = text.replace(found[1], _EMPTY, 1)
        require(
            hashlib.sha256(whole.encode()).hexdigest() == found[1],
            "checksum",
            found[1],
            "that of the text",
        )
    record = json.loads(text, parse_constant=_no_number)
    require(isinstance(record, dict), "record", type(record).__name__, "a dict")
    for key in sorted(record.keys() - _KEYS):
        raise ConfigError(f"key = {key!r}: expected one of {', '.join(sorted(_KEYS))}")
    for key in ("spec", "summary"):
        require(isinstance(record.get(key), dict), key, record.get(key), "a dict")
    require(
        "checksum" not in record or found is not None, "checksum", record.get("checksum"), "one"
    )
    return record


def _no_number(name: str) -> float:
    raise ConfigError(f"number = {name}: expected a finite one")


def checked_spec(values: dict[str, Any], version: Any) -> RunSpec:
    """The settings of a record of that version. Raises ConfigError for those that this version does
    not know, and for values of other types."""
    hints = get_type_hints(RunSpec)
    for name in values.keys() - hints.keys():
        ours = environment()["fedjax_het"]
        raise ConfigError(
            f"setting = {name!r}: fedjax_het {ours} does not have it; the result was made by "
            f"{version if isinstance(version, str) else 'another version'}"
        )
    for name, value in values.items():
        require(_is_a(value, hints[name]), name, value, _in_words(hints[name]))
    for name in _POSITIVE:
        value = values.get(name)
        require(value is None or value > 0, name, value, "a number > 0")
    for name, value in values.get("hp", {}).items():
        require(_is_a(value, float), name, value, "a number")
    return RunSpec.from_dict(values)


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is_a(value, own) for own in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, get_origin(kind) or kind)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _in_words(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def checked_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary of which what reports read is of its type. Raises ConfigError."""
    kinds: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_TEXTS, lambda value: isinstance(value, str), "a text"),
        (_NUMBERS, lambda value: _is_a(value, float), "a number"),
        (_TRUTHS, lambda value: isinstance(value, bool), "true or false"),
    ]
    for names, fits, words in kinds:
        for name in names:
            value = summary.get(name)
            require(value is None or fits(value), name, value, words)
    return summary


def checked_arrays(
    arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(metrics, artifacts) of a file's arrays. Raises ConfigError for others."""
    groups: dict[str, dict[str, np.ndarray]] = {"metrics": {}, "artifacts": {}}
    for key, array in arrays.items():
        group, _, name = key.partition("/")
        require(group in groups, "array", key, "metrics/NAME or artifacts/NAME")
        groups[group][name] = array
    metrics = groups["metrics"]
    for name, array in metrics.items():
        numeric = array.ndim > 0 and array.dtype.kind in "biuf"
        require(numeric, f"metric {name}", f"{array.dtype} {array.shape}", "numbers by round")
    lengths = {len(array) for array in metrics.values() if array.ndim == 1}
    require(len(lengths) <= 1, "rounds of the metrics", sorted(lengths), "the same of all")
    return metrics, groups["artifacts"]


def plain(value: Any) -> Any:
    """What JSON can keep of a value: NumPy's and jax's numbers as Python's, what is not finite as
    None, and what it has no form for as the text that describes it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(own) for own in value]
    if hasattr(value, "tolist"):  # an array, or a scalar of an array's library
        value = np.asarray(value).tolist()
        if isinstance(value, list):
            return plain(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | str) or value is None else repr(value)
