"""What a method tells of a run when that is done, which must not lose the run."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_het.common.arrays import to_numpy_bits
from fedjax_het.engine.contract import ContractError, describe_value

log = logging.getLogger("fedjax_het")


def safe_outputs(
    name: str, output_name: str, function: Callable, convert_value: Callable
) -> Callable:
    """`function`, asked when a run is done: what it fails to tell is left out with a warning, for
    the run is worth more than that.

    value_of: what a result can keep of a value; raises where that is nothing.
    """

    def call_safely(*args):
        outputs: dict[str, Any] = {}
        try:
            raw_outputs = function(*args)
            if not isinstance(raw_outputs, Mapping):
                raise ContractError(f"it returned {describe_value(raw_outputs)}: expected a dict")
        except Exception as error:
            _warn_omitted(name, f"Algorithm.{output_name}", error)
            return outputs
        for key, value in raw_outputs.items():
            try:
                outputs[str(key)] = convert_value(value)
            except Exception as error:
                _warn_omitted(name, f"Algorithm.{output_name}[{key!r}]", error)
        return outputs

    return call_safely


def _warn_omitted(name: str, output_name: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:200]
    log.warning("method %r: %s is left out of the result: %s", name, output_name, reason)


def validate_array(value: Any) -> Any:
    """An array that a file can keep; ContractError for anything else."""
    if to_numpy_bits(value).dtype.kind == "O":
        raise ContractError(f"it is {describe_value(value)}: expected an array")
    return value


def validate_json(value: Any) -> Any:
    """A value as JSON has it; an error for one that it has not."""
    value = value.tolist() if hasattr(value, "tolist") else value
    json.dumps(value)
    return value
