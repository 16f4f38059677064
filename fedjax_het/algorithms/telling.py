"""What a method tells of a run when that is done, which must not lose the run."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_het.common.arrays import bits
from fedjax_het.engine.contract import ContractError, kind_of

log = logging.getLogger("fedjax_het")


def told(name: str, what: str, function: Callable, value_of: Callable) -> Callable:
    """`function`, asked when a run is done: what it fails to tell is left out with a warning, for
    the run is worth more than that.

    value_of: what a result can keep of a value; raises where that is nothing.
    """

    def asked(*args):
        kept: dict[str, Any] = {}
        try:
            found = function(*args)
            if not isinstance(found, Mapping):
                raise ContractError(f"it returned {kind_of(found)}: expected a dict")
        except Exception as error:
            _left_out(name, f"Algorithm.{what}", error)
            return kept
        for key, value in found.items():
            try:
                kept[str(key)] = value_of(value)
            except Exception as error:
                _left_out(name, f"Algorithm.{what}[{key!r}]", error)
        return kept

    return asked


def _left_out(name: str, what: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:200]
    log.warning("method %r: %s is left out of the result: %s", name, what, reason)


def as_array(value: Any) -> Any:
    """An array that a file can keep; ContractError for anything else."""
    if bits(value).dtype.kind == "O":
        raise ContractError(f"it is {kind_of(value)}: expected an array")
    return value


def as_json(value: Any) -> Any:
    """A value as JSON has it; an error for one that it has not."""
    value = value.tolist() if hasattr(value, "tolist") else value
    json.dumps(value)
    return value
