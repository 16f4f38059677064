"""What a result's file may hold: its text with a checksum, and the types of what is in it."""

import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.errors import ConfigError, require

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{64})"')
_CHECKSUM_PLACEHOLDER = "0" * 64
_RECORD_KEYS = {"spec", "summary", "arrays", "checksum"}
# What reports read of a summary.
_TEXT_FIELDS = (
    *("finished", "fedjax_het", "jax", "jaxlib", "device", "matmul_precision", "precision"),
    "dataset_note",
)
_NUMBER_FIELDS = (
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
_BOOLEAN_FIELDS = ("diverged", "x64")
_POSITIVE_FIELDS = ("alpha", "rounds", "num_clients")


def encode_record(record: dict[str, Any]) -> str:
    """The JSON of a record, with a checksum of all of it among its keys."""
    text = json.dumps(
        {**record, "checksum": _CHECKSUM_PLACEHOLDER},
        indent=1,
        sort_keys=True,
        allow_nan=False,
        default=str,
    )
    return text.replace(_CHECKSUM_PLACEHOLDER, hashlib.sha256(text.encode()).hexdigest(), 1)


def decode_record(text: str) -> dict[str, Any]:
    """The record of a text, which older versions wrote without a checksum. Raises ValueError."""
    match = _CHECKSUM.search(text)
    if match is not None:
        unsigned_text = text.replace(match[1], _CHECKSUM_PLACEHOLDER, 1)
        require(
            hashlib.sha256(unsigned_text.encode()).hexdigest() == match[1],
            "checksum",
            match[1],
            "that of the text",
        )
    record = json.loads(text, parse_constant=_reject_constant)
    require(isinstance(record, dict), "record", type(record).__name__, "a dict")
    for key in sorted(record.keys() - _RECORD_KEYS):
        raise ConfigError(f"key = {key!r}: expected one of {', '.join(sorted(_RECORD_KEYS))}")
    for key in ("spec", "summary"):
        require(isinstance(record.get(key), dict), key, record.get(key), "a dict")
    require(
        "checksum" not in record or match is not None, "checksum", record.get("checksum"), "one"
    )
    return record


def _reject_constant(name: str) -> float:
    raise ConfigError(f"number = {name}: expected a finite one")


def validate_spec(values: dict[str, Any], version: Any) -> RunSpec:
    """The settings of a record of that version. Raises ConfigError for those that this version does
    not know, and for values of other types."""
    hints = get_type_hints(RunSpec)
    for name in values.keys() - hints.keys():
        package_version = describe_environment()["fedjax_het"]
        raise ConfigError(
            f"setting = {name!r}: fedjax_het {package_version} does not have it; the result was made by "
            f"{version if isinstance(version, str) else 'another version'}"
        )
    for name, value in values.items():
        require(_is_instance(value, hints[name]), name, value, _format_type(hints[name]))
    for name in _POSITIVE_FIELDS:
        value = values.get(name)
        require(value is None or value > 0, name, value, "a number > 0")
    for name, value in values.get("hp", {}).items():
        require(_is_instance(value, float), name, value, "a number")
    return RunSpec.from_dict(values)


def _is_instance(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is_instance(value, argument) for argument in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, get_origin(kind) or kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _format_type(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def validate_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary of which what reports read is of its type. Raises ConfigError."""
    field_checks: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_TEXT_FIELDS, lambda value: isinstance(value, str), "a text"),
        (_NUMBER_FIELDS, lambda value: _is_instance(value, float), "a number"),
        (_BOOLEAN_FIELDS, lambda value: isinstance(value, bool), "true or false"),
    ]
    for names, is_valid, expected in field_checks:
        for name in names:
            value = summary.get(name)
            require(value is None or is_valid(value), name, value, expected)
    return summary


def validate_arrays(
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
        is_numeric = array.ndim > 0 and array.dtype.kind in "biuf"
        require(is_numeric, f"metric {name}", f"{array.dtype} {array.shape}", "numbers by round")
    lengths = {len(array) for array in metrics.values() if array.ndim == 1}
    require(len(lengths) <= 1, "rounds of the metrics", sorted(lengths), "the same of all")
    return metrics, groups["artifacts"]


def to_json_value(value: Any) -> Any:
    """What JSON can keep of a value: NumPy's and jax's numbers as Python's, what is not finite as
    None, and what it has no form for as the text that describes it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    if hasattr(value, "tolist"):  # an array, or a scalar of an array's library
        value = np.asarray(value).tolist()
        if isinstance(value, list):
            return to_json_value(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | str) or value is None else repr(value)
