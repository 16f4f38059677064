"""Checks of the functions of an `Algorithm`: arguments, structures, shapes and types.

The checks run while a program is traced, before anything compiles; a compiled program contains none
of them. A message names the method, the function and the leaf. `artifacts` and `summary` are called
when a run is done, so their failures are logged and do not lose the run.
"""

import json
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import (
    Algorithm,
    InitialTraffic,
    RoundInfo,
    RoundInput,
    ServerStage,
    State,
    Traffic,
)
from fedjax_het.core.contract_checks import (
    ClientError,
    ContractError,
    call_user_function,
    describe_value,
    require_like,
    require_scalar,
    unpack_tuple,
)
from fedjax_het.nn import Model
from fedjax_het.utils.arrays import make_key, to_numpy_bits
from fedjax_het.utils.config import to_python_scalar, validate_fields
from fedjax_het.utils.errors import (
    ConfigError,
    format_value,
    is_integer_at_least,
    require,
    summarize_error,
)

log = logging.getLogger("fedjax_het")
Arguments = dict[str, Any]  # by the names of the contract


def validate_algorithm(method: str, algorithm: Algorithm, model: Model) -> Algorithm:
    """Return the algorithm with functions that raise ContractError if they break the contract.

    Args:
      method: name of the method, for messages.
      algorithm: the result of the method's `build`.
      model: the network that the method trains.

    Returns:
      The algorithm, whose functions check their arguments and results while they are traced.

    Raises:
      ContractError: if a field has a wrong type.

    Example:
      >>> from fedjax_het.algorithms.checks import validate_algorithm
      >>> validate_algorithm("mine", None, model=None)  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      ContractError: method 'mine' built None: expected an Algorithm
    """
    is_algorithm = isinstance(algorithm, Algorithm)
    _require(is_algorithm, f"method {method!r} built", algorithm, "an Algorithm")
    try:
        fields = validate_fields(algorithm._asdict(), Algorithm, prefix="Algorithm.")
        algorithm = algorithm._replace(**fields)
        parts: tuple[Any, ...] = (*algorithm.server_stages, *algorithm.round_inputs)
        for part in (*parts, algorithm.fine_tuning, algorithm.condensation_work):
            if part is not None:
                validate_fields(part._asdict(), type(part), prefix=f"{type(part).__name__}.")
        for stage in algorithm.server_stages:
            rounds = list(stage.before_rounds)
            is_ascending = rounds == sorted(set(rounds))
            require(is_ascending, "ServerStage.before_rounds", rounds, "rounds in ascending order")
    except ConfigError as error:
        raise ContractError(f"method {method!r}: {error}") from None
    contract = _Contract(method, algorithm, model)
    return contract.with_checks("Algorithm", algorithm)._replace(
        artifacts=_with_warnings(method, "artifacts", algorithm.artifacts, _require_array),
        summary=_with_warnings(method, "summary", algorithm.summary, _to_json),
        round_inputs=tuple(
            contract.with_checks(f"RoundInput({part.name!r})", part)
            for part in algorithm.round_inputs
        ),
        server_stages=tuple(
            contract.with_checks(f"ServerStage({part.name!r})", part)
            for part in algorithm.server_stages
        ),
    )


class _Contract(NamedTuple):
    """A method whose functions are checked."""

    method: str
    algorithm: Algorithm
    model: Model

    def with_checks(self, name: str, record: Any) -> Any:
        """Return an `Algorithm`, `RoundInput` or `ServerStage` with functions that are checked."""
        checked = {
            field: self._with_check(f"{name}.{field}", getattr(record, field), arguments, check)
            for field, (arguments, check) in _CHECKS[type(record)].items()
            if getattr(record, field) is not None
        }
        return record._replace(**checked)

    def _with_check(self, name: str, function: Callable, argument_names: str, check: Callable):
        def call(*values):
            arguments = dict(zip(argument_names.split(), values, strict=True))
            try:
                return check(name, call_user_function(name, function, **arguments), arguments, self)
            except ContractError as error:
                if str(error).startswith("method "):  # of a wrapped method
                    raise
                if isinstance(error, ClientError):
                    raise ClientError(f"method {self.method!r}, {error}") from error.__cause__
                raise ContractError(f"method {self.method!r}: {error}") from None
            except Exception as error:
                if "in method" not in getattr(error, "__notes__", [""])[-1]:
                    error.add_note(f"in method {self.method!r}")
                raise

        return call


def _require(condition: bool, subject: str, value: Any, expected: str) -> None:
    if not condition:
        raise ContractError(f"{subject} {describe_value(value)}: expected {expected}")


# Each check is `check(name, output, arguments, contract) -> output`.


def _check_state(name: str, state: Any, arguments: Arguments, contract: _Contract) -> State:
    _require(isinstance(state, State), f"{name}: state is", state, "a State")
    is_count = getattr(state.round, "dtype", None) == np.int32 and np.shape(state.round) == ()
    _require(is_count, f"{name}: state.round is", state.round, "an int32 scalar")
    return state


def _check_round(
    name: str, output: Any, arguments: Arguments, contract: _Contract
) -> tuple[State, RoundInfo]:
    state, info = unpack_tuple(name, output, ("state", "info"))
    _check_state(name, state, arguments, contract)
    require_like(f"{name}: state", state, arguments["state"], "the result of `init`")
    _require(isinstance(info, RoundInfo), f"{name}: info is", info, "a RoundInfo")
    require_scalar(f"{name}: info.train_loss", info.train_loss)
    require_scalar(f"{name}: info.update_norm", info.update_norm)
    get_shapes = contract.algorithm.record_shapes
    names, shapes = sorted(info.records), get_shapes(1)
    source = "as in `Algorithm.record_shapes`"
    if names != sorted(shapes):
        expected = f"{sorted(shapes)}, {source}"
        raise ContractError(f"{name}: info.records has {names}: expected {expected}")
    for key, leaf in info.records.items():
        # The number of clients is not known here: the shape must be right for some number.
        shape = np.shape(leaf)
        is_valid = any(tuple(get_shapes(k)[key]) == shape for k in {1, *shape})
        expected = f"the shape {shapes[key]}, {source} of one client"
        _require(is_valid, f"{name}: info.records[{key!r}] is", leaf, expected)
    return state, info


def _check_new_state(name: str, state: Any, arguments: Arguments, contract: _Contract) -> Any:
    require_like(f"{name}: state", state, arguments["state"], "the state given")
    return state


def _check_variables(
    is_personal: bool, name: str, variables: Any, arguments: Arguments, contract: _Contract
) -> Any:
    is_valid = isinstance(variables, Mapping) and {"params", "state"} <= set(variables)
    expected = "variables, a dict of params and state"
    _require(is_valid, f"{name} returned", variables, expected)
    personal_model = contract.algorithm.personal_model if is_personal else None
    model = personal_model or contract.model
    # Only the shapes are checked: evaluation converts types.
    shapes, network_shapes = (
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(getattr(leaf, "shape", ()), np.float32), tree
        )
        for tree in (variables, jax.eval_shape(model.init, make_key(0)))
    )
    require_like(
        f"{name}: variables", shapes, network_shapes, f"the network {model.name!r} has them"
    )
    return variables


def _check_traffic(
    kind: Any, name: str, traffic: Any, arguments: Arguments, contract: _Contract
) -> Any:
    _require(type(traffic) is kind, f"{name} returned", traffic, f"a {kind.__name__}")
    traffic = kind(*map(to_python_scalar, traffic))
    for field, value in traffic._asdict().items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and 0 <= value < math.inf):
            text = format_value(value)
            raise ContractError(f"{name}: {field} = {text}: expected a number of bytes")
    return traffic


def _check_dict(name: str, value: Any, arguments: Arguments, contract: _Contract) -> dict:
    _require(isinstance(value, dict), f"{name} returned", value, "a dict")
    return value


def _check_inputs(name: str, inputs: Any, arguments: Arguments, contract: _Contract) -> list:
    count = len(arguments["federations"])
    if not isinstance(inputs, list | tuple) or len(inputs) != count:
        actual = f"{len(inputs)} of them" if isinstance(inputs, list) else describe_value(inputs)
        expected = f"a list of {count}, one for each federation"
        raise ContractError(f"{name} returned {actual}: expected {expected}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(list(inputs)):
        is_array = hasattr(leaf, "dtype") or isinstance(leaf, int | float)
        _require(is_array, f"{name}: {jax.tree_util.keystr(path)} is", leaf, "an array")
    return list(inputs)


def _check_count(name: str, count: Any, arguments: Arguments, contract: _Contract) -> int:
    count = to_python_scalar(count)
    _require(is_integer_at_least(count, 0), f"{name} returned", count, "a whole number")
    return int(count)


# By record and field: the arguments of the function, and the check of its output.
_CHECKS: dict[type, dict[str, tuple[str, Callable]]] = {
    Algorithm: {
        "init": ("hp key variables num_clients", _check_state),
        "round": ("hp state key cohort", _check_round),
        "global_model": ("state", partial(_check_variables, False)),
        "result_model": ("state", partial(_check_variables, False)),
        "with_global_model": ("state variables", _check_new_state),
        "personal_variables": ("hp state k", partial(_check_variables, True)),
        "traffic": ("hp state", partial(_check_traffic, Traffic)),
        "initial_traffic": ("federation_data", partial(_check_traffic, InitialTraffic)),
        "record_shapes": ("num_clients", _check_dict),
    },
    RoundInput: {"make_inputs": ("federations", _check_inputs)},
    ServerStage: {
        "advance": ("hp state key num_iterations server_examples", _check_new_state),
        "count_completed": ("state", _check_count),
    },
}


def _with_warnings(method: str, field: str, function: Callable, convert: Callable) -> Callable:
    """Return a function that logs its failures and passes each output to `convert`."""

    def warn(output: str, error: Exception) -> None:
        name, reason = f"Algorithm.{field}{output}", summarize_error(error)
        log.warning("method %r: %s is left out of the result: %s", method, name, reason)

    def call(*args):
        converted: dict[str, Any] = {}
        try:
            outputs = function(*args)
            _require(isinstance(outputs, Mapping), "it returned", outputs, "a dict")
        except Exception as error:
            warn("", error)
            return converted
        for key, value in outputs.items():
            try:
                converted[str(key)] = convert(value)
            except Exception as error:
                warn(f"[{key!r}]", error)
        return converted

    return call


def _require_array(value: Any) -> Any:
    """Return an array that a file can store; raise ContractError for another value."""
    _require(to_numpy_bits(value).dtype.kind != "O", "it is", value, "an array")
    return value


def _to_json(value: Any) -> Any:
    """Return a value as JSON represents it; raise TypeError if JSON cannot."""
    value = value.tolist() if hasattr(value, "tolist") else value
    json.dumps(value)
    return value
