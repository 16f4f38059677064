"""Checks of the functions of a method, made while its program is traced.

The checks concern structures, shapes and types only; the compiled program contains none of them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
)
from fedjax_het.utils.arrays import AnyArray, is_prng_key
from fedjax_het.utils.errors import ConfigError

Tree = Any


class ContractError(ConfigError):
    """A function of a method breaks the contract; one line names the function and the leaf."""


class ClientError(ContractError):
    """A function of a client raised an exception in debug mode; one line names method, round, client
    and step, all counted from 0. `__cause__` is the exception."""


def with_contract_checks(algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """Return the algorithm with functions that raise ContractError if they break the contract.

    The checks run while the program is traced and concern structures, shapes and types only.
    """
    if getattr(algorithm.begin, "is_checked", False):
        return algorithm

    def init(hp, variables):
        name = "ClientAlgorithm.init"
        state = call_user_function(name, algorithm.init, hp=hp, variables=variables)
        return _require_arrays(name, state, "what a client keeps, () if nothing")

    def begin(context, state):
        name = "ClientAlgorithm.begin"
        local = call_user_function(name, algorithm.begin, context=context, state=state)
        return _require_arrays(name, local, "what a client carries, () if nothing")

    def step(context, local, batch):
        name = "ClientAlgorithm.step"
        outputs = call_user_function(
            name, algorithm.step, context=context, local=local, batch=batch
        )
        new_local, loss = unpack_tuple(name, outputs, ("local", "loss"))
        require_like(f"{name}: local", new_local, local, "what `begin` made")
        require_scalar(f"{name}: loss", loss)
        return new_local, loss

    def end(context, local, state):
        name = "ClientAlgorithm.end"
        outputs = call_user_function(name, algorithm.end, context=context, local=local, state=state)
        update, new_state, output = unpack_tuple(name, outputs, ("update", "state", "output"))
        require_client_update(f"{name}: update", update)
        require_like(f"{name}: state", new_state, state, "what `init` made")
        return update, new_state, output

    begin.is_checked = True  # type: ignore[attr-defined]
    return ClientAlgorithm(init, begin, step, end, algorithm.extra_passes)


def with_error_locations(algorithm: ClientAlgorithm, round_index: AnyArray) -> ClientAlgorithm:
    """Return the algorithm with functions whose exceptions name round, client and step.

    For runs without jit, where the client's id and the step are values.
    """

    def locate(function: Callable) -> Callable:
        def call(context: ClientContext, *args: Any) -> Any:
            try:
                return function(context, *args)
            except Exception as error:
                location = f"round {round_index}, client {context.client.id}"
                if isinstance(args[-1], Batch):
                    location += f", step {args[-1].step_index}"
                reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
                raise ClientError(f"{location}: {reason}") from error

        return call

    return algorithm._replace(
        begin=locate(algorithm.begin), step=locate(algorithm.step), end=locate(algorithm.end)
    )


def _require_arrays(name: str, tree: Any, expected: str) -> Any:
    """Return `tree`; raise ContractError for None, which a function without `return` gives, and for
    leaves that are not arrays."""
    if tree is None:
        raise ContractError(f"{name} returned None: expected {expected}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            leaf_path = jax.tree_util.keystr(path)
            raise ContractError(
                f"{name}: {leaf_path or 'it'} is {describe_value(leaf)}: expected an array"
            )
    return tree


def call_user_function(name: str, function: Callable, /, **arguments: Any) -> Any:
    """Call a function of a method with arguments in the order of the contract.

    Args:
      name: the function's name in the contract, for messages.
      function: called with the values of `arguments` by position, so that a method may use other
        parameter names.
      arguments: values by the names that the contract gives them.

    Returns:
      What the function returns.

    Raises:
      ContractError: if `function` is not callable or does not accept as many arguments. Any other
        exception of the function gets a note with `name`.
    """
    expected = f"({', '.join(arguments)})"
    if not callable(function):
        raise ContractError(f"{name} = {function!r}: expected a function of {expected}")
    if not _accepts_arguments(function, len(arguments)):
        raise ContractError(f"{name} takes {inspect.signature(function)}: expected {expected}")
    try:
        return function(*arguments.values())
    except ContractError:
        raise
    except Exception as error:
        error.add_note(f"in {name}")
        raise


def unpack_tuple(name: str, value: Any, names: Sequence[str]) -> tuple:
    """Return `value`; raise ContractError unless it is a plain tuple of parts with these names."""
    expected = f"({', '.join(names)})"
    if not isinstance(value, tuple) or hasattr(value, "_fields"):
        raise ContractError(f"{name} returned {describe_value(value)}: expected {expected}")
    if len(value) != len(names):
        raise ContractError(f"{name} returned {len(value)} values: expected {expected}")
    return value


def require_like(name: str, tree: Tree, expected: Tree, origin: str) -> None:
    """Raise ContractError, which names the first leaf, unless structure, shapes and types agree."""
    # jax's stub does not say that structures can be compared.
    if jax.tree.structure(tree) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ContractError(f"{name}{_first_difference(tree, expected)}, as {origin}")
    for (path, leaf), expected_leaf in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True
    ):
        actual_type, expected_type = describe_array(leaf), describe_array(expected_leaf)
        if actual_type != expected_type:
            leaf_path = jax.tree_util.keystr(path)
            raise ContractError(
                f"{name}{leaf_path} is {actual_type}: expected {expected_type}, as {origin}"
            )


def require_scalar(name: str, value: Any) -> None:
    """Raise ContractError unless `value` is a scalar of a float type."""
    is_number = hasattr(value, "shape") or isinstance(value, float | int)
    if (
        not is_number
        or jnp.shape(value) != ()
        or not jnp.issubdtype(jnp.result_type(value), jnp.floating)
    ):
        raise ContractError(f"{name} is {describe_value(value)}: expected a float32 scalar")


def require_client_update(name: str, value: Any) -> None:
    """Raise ContractError unless `value` is a `ClientUpdate` without PRNG keys."""
    if not isinstance(value, ClientUpdate):
        raise ContractError(
            f"{name} is {describe_value(value)}: expected ClientUpdate(mean=..., sum=...), of "
            "which the engine averages the one and adds up the other"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if is_prng_key(jnp.asarray(leaf)):
            leaf_path = jax.tree_util.keystr(path)
            raise ContractError(
                f"{name}{leaf_path} is {describe_array(leaf)}: random keys have no sum"
            )


def describe_array(leaf: Any) -> str:
    """Return an array's type and shape as text, for example `float32[10,3]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def describe_value(value: Any) -> str:
    """Return a description of any value in one to four words."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe_array(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _first_difference(tree: Tree, expected: Tree) -> str:
    """Return the first difference of two structures as text."""
    paths = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)}
    expected_paths = {
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(expected)
    }
    if unexpected := sorted(paths - expected_paths):
        missing = sorted(expected_paths - paths)
        missing_note = f", and {missing[0]} is missing" if missing and missing[0] else ""
        return f"{unexpected[0]} is one too many{missing_note}: expected the same structure"
    if missing := sorted(expected_paths - paths):
        return f"{missing[0]} is missing: expected the same structure"
    return f" is {describe_value(tree)}: expected {describe_value(expected)}, the same structure"


def _accepts_arguments(function: Callable, num_arguments: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in one that does not say
        return True
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True
