"""What a method tells of a run when that is done, which must not lose the run.

What a method brings, checked: which of its functions breaks the contract, and where, a line.

All checks are of shapes and types, made while the program is traced, or of what the host is told:
none is in the program.
"""

import json
import logging
import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from fedjax_het.utils.arrays import to_numpy_bits
from fedjax_het.utils.config import to_python_scalar, validate_named_tuple
from fedjax_het.utils.errors import ConfigError, format_value, is_integer_at_least

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


def validate_algorithm(name: str, algorithm: Algorithm) -> Algorithm:
    """The same, whose functions say which of them breaks the contract, and of which method.

    All checks are of shapes and types, made while the program is traced: none is in the program.
    """
    if not isinstance(algorithm, Algorithm):
        raise ContractError(
            f"method {name!r} built {describe_value(algorithm)}: expected an Algorithm"
        )
    algorithm = _validate_field_types(name, algorithm)

    add_method_name = partial(_add_method_name, name)

    def init(hp, key, variables, num_clients):
        state = call_user_function(
            "Algorithm.init",
            algorithm.init,
            hp=hp,
            key=key,
            variables=variables,
            num_clients=num_clients,
        )
        _require_state("Algorithm.init", state)
        return state

    def round_(hp, state, key, cohort):
        round_output = call_user_function(
            "Algorithm.round", algorithm.round, hp=hp, state=state, key=key, cohort=cohort
        )
        new_state, info = unpack_tuple("Algorithm.round", round_output, ("state", "info"))
        _require_state("Algorithm.round", new_state)
        require_like("Algorithm.round: state", new_state, state, "what `init` made")
        if not isinstance(info, RoundInfo):
            raise ContractError(
                f"Algorithm.round: info is {describe_value(info)}: expected a RoundInfo"
            )
        require_scalar("Algorithm.round: info.train_loss", info.train_loss)
        require_scalar("Algorithm.round: info.update_norm", info.update_norm)
        _validate_records(info.records, algorithm.record_shapes)
        return new_state, info

    def global_model(state):
        assert algorithm.global_model is not None
        name = "Algorithm.global_model"
        variables = call_user_function(name, algorithm.global_model, state=state)
        return _require_variables(name, variables)

    def with_global_model(state, variables):
        assert algorithm.with_global_model is not None
        name = "Algorithm.with_global_model"
        new_state = call_user_function(
            name, algorithm.with_global_model, state=state, variables=variables
        )
        require_like(f"{name}: state", new_state, state, "the state given")
        return new_state

    def traffic(hp, state):
        name = "Algorithm.traffic"
        traffic_count = call_user_function(name, algorithm.traffic, hp=hp, state=state)
        return _require_bytes(name, traffic_count, Traffic)

    def initial_traffic(federation_data):
        name = "Algorithm.initial_traffic"
        traffic_count = call_user_function(
            name, algorithm.initial_traffic, federation_data=federation_data
        )
        return _require_bytes(name, traffic_count, InitialTraffic)

    def personal_variables(hp, state, k):
        assert algorithm.personal_variables is not None
        name = "Algorithm.personal_variables"
        variables = call_user_function(name, algorithm.personal_variables, hp=hp, state=state, k=k)
        return _require_variables(name, variables)

    def record_shapes(num_clients):
        shapes = call_user_function(
            "Algorithm.record_shapes", algorithm.record_shapes, num_clients=num_clients
        )
        if not isinstance(shapes, dict):
            raise ContractError(
                f"Algorithm.record_shapes returned {describe_value(shapes)}: expected a dict"
            )
        return shapes

    has_global_model = algorithm.global_model is not None
    return algorithm._replace(
        init=add_method_name(init),
        round=add_method_name(round_),
        global_model=add_method_name(global_model) if has_global_model else None,
        with_global_model=add_method_name(with_global_model)
        if algorithm.with_global_model
        else None,
        traffic=add_method_name(traffic),
        initial_traffic=add_method_name(initial_traffic),
        record_shapes=add_method_name(record_shapes),
        artifacts=safe_outputs(name, "artifacts", algorithm.artifacts, validate_array),
        summary=safe_outputs(name, "summary", algorithm.summary, validate_json),
        personal_variables=add_method_name(personal_variables)
        if algorithm.personal_variables
        else None,
        round_inputs=tuple(
            round_input._replace(make_inputs=add_method_name(_validate_make_inputs(round_input)))
            for round_input in algorithm.round_inputs
        ),
        server_stages=tuple(
            stage._replace(
                advance=add_method_name(_validate_advance(stage)),
                count_completed=add_method_name(_validate_count_completed(stage)),
            )
            for stage in algorithm.server_stages
        ),
    )


def _add_method_name(name: str, function: Callable) -> Callable:
    """`function`, whose errors name the method."""

    def call_with_method_name(*args):
        try:
            return function(*args)
        except ContractError as error:
            if str(error).startswith("method "):  # of one that this one is put over
                raise
            if isinstance(error, ClientError):
                raise ClientError(f"method {name!r}, {error}") from error.__cause__
            raise ContractError(f"method {name!r}: {error}") from error
        except Exception as error:
            if not hasattr(error, "__notes__") or "in method" not in error.__notes__[-1]:
                error.add_note(f"in method {name!r}")
            raise

    return call_with_method_name


def _validate_advance(stage: ServerStage) -> Callable:
    def advance(hp, state, key, num_iterations, server_examples=None):
        name = f"ServerStage({stage.name!r}).advance"
        new_state = call_user_function(
            name,
            stage.advance,
            hp=hp,
            state=state,
            key=key,
            num_iterations=num_iterations,
            server_examples=server_examples,
        )
        require_like(f"{name}: state", new_state, state, "the state given")
        return new_state

    return advance


def _validate_count_completed(stage: ServerStage) -> Callable:
    def count_completed(state):
        name = f"ServerStage({stage.name!r}).count_completed"
        completed = to_python_scalar(call_user_function(name, stage.count_completed, state=state))
        if not is_integer_at_least(completed, 0):
            raise ContractError(
                f"{name} returned {describe_value(completed)}: expected a whole number"
            )
        return int(completed)

    return count_completed


def _validate_make_inputs(round_input: RoundInput) -> Callable:
    def make_inputs(federations):
        name = f"RoundInput({round_input.name!r}).make_inputs"
        inputs = call_user_function(name, round_input.make_inputs, federations=federations)
        num_federations = len(federations)
        if not isinstance(inputs, list | tuple) or len(inputs) != num_federations:
            kind = f"{len(inputs)} of them" if isinstance(inputs, list) else describe_value(inputs)
            expected = f"a list of {num_federations}, one for each federation"
            raise ContractError(f"{name} returned {kind}: expected {expected}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(list(inputs)):
            if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float)):
                tree_path = jax.tree_util.keystr(path)
                raise ContractError(
                    f"{name}: {tree_path} is {describe_value(leaf)}: expected an array"
                )
        return list(inputs)

    return make_inputs


def _validate_field_types(name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose fields, and those of its parts, are of their annotations' kinds."""
    try:
        algorithm = validate_named_tuple("Algorithm", algorithm)
        for component in (
            *algorithm.server_stages,
            *algorithm.round_inputs,
            algorithm.fine_tuning,
            algorithm.condensation_work,
        ):
            if component is not None:
                validate_named_tuple(type(component).__name__, component)
    except ConfigError as error:
        raise ContractError(f"method {name!r}: {error}") from None
    return algorithm


def _require_bytes(
    name: str, traffic_count: Any, kind: type[Traffic] | type[InitialTraffic]
) -> Any:
    """`found`, with whole numbers for NumPy's."""
    if not isinstance(traffic_count, Traffic | InitialTraffic) or type(traffic_count) is not kind:
        raise ContractError(
            f"{name} returned {describe_value(traffic_count)}: expected a {kind.__name__}"
        )
    values = [to_python_scalar(value) for value in traffic_count]
    for field, value in zip(traffic_count._fields, values, strict=True):
        is_real_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_real_number and 0 <= value < math.inf):
            raise ContractError(
                f"{name}: {field} = {format_value(value)}: expected a number of bytes"
            )
    return kind(*values)


def _require_variables(name: str, variables: Any) -> Any:
    if not isinstance(variables, Mapping) or {"params", "state"} - set(variables):
        kind = describe_value(variables)
        raise ContractError(
            f"{name} returned {kind}: expected variables, a dict of params and state"
        )
    return variables


def _require_state(name: str, state: Any) -> None:
    if not isinstance(state, State):
        raise ContractError(f"{name}: state is {describe_value(state)}: expected a State")
    dtype = getattr(state.round, "dtype", None)
    if dtype is None or np.shape(state.round) != () or dtype != np.int32:
        raise ContractError(
            f"{name}: state.round is {describe_value(state.round)}: expected an int32 scalar"
        )


def _validate_records(
    records: dict[str, Any], get_record_shapes: Callable[[int], dict[str, tuple[int, ...]]]
) -> None:
    """How many clients there are is not known here: a shape must be right for some number."""
    single_client_shapes = get_record_shapes(1)
    if records.keys() != single_client_shapes.keys():
        raise ContractError(
            f"Algorithm.round: info.records has {sorted(records)}: expected {sorted(single_client_shapes)}, as "
            "`Algorithm.record_shapes` says"
        )
    for name, leaf in records.items():
        shape = np.shape(leaf)
        if not any(tuple(get_record_shapes(count)[name]) == shape for count in {1, *shape}):
            raise ContractError(
                f"Algorithm.round: info.records[{name!r}] is {describe_value(leaf)}: expected the shape "
                f"{single_client_shapes[name]}, as `Algorithm.record_shapes` says of one client"
            )
