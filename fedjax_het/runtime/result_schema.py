"""Contents of a result's file: its JSON with a checksum, and the types of its values."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.config import validate, validate_fields
from fedjax_het.utils.errors import ConfigError, require

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{64})"')
_CHECKSUM_PLACEHOLDER = "0" * 64
_RECORD_KEYS = {"spec", "summary", "arrays", "checksum"}


class _Summary(TypedDict, total=False):
    """The values of a summary that reports read."""

    finished: str | None
    fedjax_het: str | None
    jax: str | None
    jaxlib: str | None
    device: str | None
    matmul_precision: str | None
    precision: str | None
    dataset_note: str | None
    final_accuracy: float | None
    final_accuracy_std: float | None
    final_client_accuracy: float | None
    best_accuracy: float | None
    last_accuracy: float | None
    window_accuracy: float | None
    rise_time: float | None
    rounds_to_half: float | None
    bmta: float | None
    bmta_round: float | None
    bmta_worst_decile: float | None
    wall_seconds: float | None
    client_samples_per_second: float | None
    bytes_up: float | None
    bytes_down: float | None
    rounds: float | None
    epsilon: float | None
    held_out_accuracy: float | None
    held_out_tuned_accuracy: float | None
    diverged: bool | None
    x64: bool | None


def encode_record(record: dict[str, Any]) -> str:
    """Return the JSON of a record with a checksum of all of it among its keys."""
    text = json.dumps(
        {**record, "checksum": _CHECKSUM_PLACEHOLDER},
        indent=1,
        sort_keys=True,
        allow_nan=False,
        default=str,
    )
    return text.replace(_CHECKSUM_PLACEHOLDER, hashlib.sha256(text.encode()).hexdigest(), 1)


def decode_record(text: str) -> dict[str, Any]:
    """Return the record of a JSON text. Raises ValueError if it is damaged.

    Older versions wrote no checksum.
    """
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
    """Return the settings of a result.

    Args:
      values: settings by name.
      version: version of fedjax_het that made the result, for messages.

    Raises:
      ConfigError: for settings that this version does not have, and for values of other types.
    """
    for name in values.keys() - RunSpec.__dataclass_fields__.keys():
        package_version = describe_environment()["fedjax_het"]
        raise ConfigError(
            f"setting = {name!r}: fedjax_het {package_version} does not have it; the result was made by "
            f"{version if isinstance(version, str) else 'another version'}"
        )
    validate_fields(values, RunSpec)
    for name, value in values.get("hp", {}).items():
        validate(name, value, float)
    return RunSpec.from_dict(values)


def validate_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary after checking the values that reports read. Raises ConfigError."""
    validate_fields(summary, _Summary)
    return summary


def validate_arrays(
    arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (metrics, artifacts) of a file's arrays. Raises ConfigError for other arrays."""
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
    """Return a value as JSON can hold it, without ever failing.

    Numbers of NumPy and jax become Python's, numbers that are not finite become None, and other
    objects become their `repr`.
    """
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
