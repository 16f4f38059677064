"""Checks of the functions of a method, made while its program is traced.

The checks concern structures, shapes and types only; the compiled program contains none of them.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fedjax_het.core.client_algorithm import (
    Batch,
    ClientAlgorithm,
    ClientContext,
    ClientUpdate,
)
from fedjax_het.utils.arrays import AnyArray, is_prng_key
from fedjax_het.utils.errors import ConfigError, describe_error

Tree = Any


class ContractError(ConfigError):
    """A function of a method breaks the contract; one line names the function and the leaf.

    Example:
      >>> from fedjax_het.methods import ContractError
      >>> issubclass(ContractError, ValueError)
      True
    """


class ClientError(ContractError):
    """A function of a client raised an exception in debug mode.

    One line names method, round, client and step, all counted from 0. `__cause__` is the exception.
    """


class _UndeclaredNameError(KeyError):
    """A function reads a hyperparameter that its method does not declare."""


class DeclaredHyperParameters(dict[str, Any]):
    """Values of the hyperparameters by name; reading another name raises KeyError.

    `call_user_function` reports that error as a ContractError.

    Example:
      >>> from fedjax_het.core.contract_checks import DeclaredHyperParameters, call_user_function
      >>> hp = DeclaredHyperParameters({"local_lr": 0.1})
      >>> call_user_function("update", lambda hp: hp["lr"], hp=hp)
      Traceback (most recent call last):
      ...
      fedjax_het.core.contract_checks.ContractError: update reads hp['lr']: expected ...
    """

    def __missing__(self, name: str) -> NoReturn:
        """Raise KeyError for a name that is not declared."""
        declared = ", ".join(sorted(self)) or "none"
        expected = f"a declared hyperparameter ({declared}); see `hyperparameters=`"
        raise _UndeclaredNameError(f"reads hp[{name!r}]: expected {expected}")


# With the leaves of a plain dictionary, in the same order.
jax.tree_util.register_pytree_with_keys(
    DeclaredHyperParameters,
    lambda hp: (
        [(jax.tree_util.DictKey(name), hp[name]) for name in sorted(hp)],
        tuple(sorted(hp)),
    ),
    lambda names, values: DeclaredHyperParameters(zip(names, values, strict=True)),
)


def with_contract_checks(algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """Return the algorithm with functions that check their results.

    Args:
      algorithm: the functions of a client.

    Returns:
      Functions that raise ContractError, while they are traced, if they break the contract.

    Example:
      >>> from fedjax_het.core.client_algorithm import ClientAlgorithm
      >>> from fedjax_het.core.contract_checks import with_contract_checks
      >>> checked = with_contract_checks(ClientAlgorithm(lambda hp, variables: None, *[max] * 3))
      >>> checked.init({}, {})
      Traceback (most recent call last):
      ...
      fedjax_het.core.contract_checks.ContractError: ClientAlgorithm.init returned None: ...
    """

    def call(function: str, **arguments: Any) -> Any:
        name = f"ClientAlgorithm.{function}"
        return call_user_function(name, getattr(algorithm, function), **arguments)

    def init(hp, variables):
        state = call("init", hp=hp, variables=variables)
        return require_arrays("ClientAlgorithm.init", state, "the client's state")

    def begin(context, state):
        local = call("begin", context=context, state=state)
        return require_arrays("ClientAlgorithm.begin", local, "the client in training")

    def step(context, local, batch):
        name = "ClientAlgorithm.step"
        outputs = call("step", context=context, local=local, batch=batch)
        new_local, loss = unpack_tuple(name, outputs, ("local", "loss"))
        require_like(f"{name}: local", new_local, local, "`begin` returns")
        require_scalar(f"{name}: loss", loss)
        return new_local, loss

    def end(context, local, state):
        name = "ClientAlgorithm.end"
        outputs = call("end", context=context, local=local, state=state)
        update, new_state, output = unpack_tuple(name, outputs, ("update", "state", "output"))
        _require_client_update(f"{name}: update", update)
        require_like(f"{name}: state", new_state, state, "`init` returns")
        return update, new_state, output

    return algorithm._replace(init=init, begin=begin, step=step, end=end)


def with_error_locations(algorithm: ClientAlgorithm, round_index: AnyArray) -> ClientAlgorithm:
    """Return the algorithm with functions whose exceptions name round, client and step.

    For runs without jit, where the client's id and the step are values.

    Args:
      algorithm: the functions of a client.
      round_index: the round, counted from 0.

    Returns:
      Functions that raise ClientError for any exception.
    """

    def locate(function: Callable) -> Callable:
        def call(context: ClientContext, *args: Any) -> Any:
            try:
                return function(context, *args)
            except Exception as error:
                location = f"round {round_index}, client {context.client.id}"
                if isinstance(args[-1], Batch):
                    location += f", step {args[-1].step_index}"
                raise ClientError(f"{location}: {describe_error(error)}") from error

        return call

    return algorithm._replace(
        begin=locate(algorithm.begin), step=locate(algorithm.step), end=locate(algorithm.end)
    )


def call_user_function(name: str, function: Callable, /, **arguments: Any) -> Any:
    """Call a function of a method with arguments in the order of the contract.

    Args:
      name: the function's name in the contract, for messages.
      function: called with the values of `arguments` by position, so that a method may use other
        parameter names.
      **arguments: values by the names that the contract gives them.

    Returns:
      The result of the function.

    Raises:
      ContractError: if `function` is not callable or does not accept this number of arguments. Also
        if it reads a hyperparameter that the method does not declare. Any other exception of the
        function receives a note with `name`.

    Example:
      >>> from fedjax_het.core.contract_checks import call_user_function
      >>> call_user_function("update", lambda a, b: a + b, hp=1, server=2)
      3
    """
    expected = f"({', '.join(arguments)})"
    if not callable(function):
        raise ContractError(f"{name} = {function!r}: expected a function of {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function without a signature
        signature = None
    try:
        if signature is not None:
            signature.bind(*arguments)
    except TypeError:
        raise ContractError(f"{name} takes {signature}: expected {expected}") from None
    try:
        return function(*arguments.values())
    except ContractError:
        raise
    except _UndeclaredNameError as error:
        raise ContractError(f"{name} {error.args[0]}") from None
    except Exception as error:
        error.add_note(f"in {name}")
        raise


@contextlib.contextmanager
def without_trace_frames() -> Iterator[None]:
    """Raise a ContractError again, without the frames and the note of jax's traces.

    Example:
      >>> import jax
      >>> from fedjax_het.core.contract_checks import require_scalar, without_trace_frames
      >>> with without_trace_frames():
      ...     jax.eval_shape(lambda: require_scalar("loss", None))
      Traceback (most recent call last):
      ...
      fedjax_het.core.contract_checks.ContractError: loss is None: expected a float32 scalar
    """
    try:
        yield
    except ContractError as error:
        raise type(error)(*error.args) from error.__cause__


def unpack_tuple(name: str, value: Any, names: Sequence[str]) -> tuple:
    """Require a plain tuple of parts.

    Args:
      name: name of the function that returned `value`, for messages.
      value: any value.
      names: names of the parts.

    Returns:
      `value`.

    Raises:
      ContractError: unless `value` is a tuple with `len(names)` parts.

    Example:
      >>> from fedjax_het.core.contract_checks import unpack_tuple
      >>> unpack_tuple("step", (1, 2), ("local", "loss"))
      (1, 2)
    """
    expected = f"({', '.join(names)})"
    if not isinstance(value, tuple) or hasattr(value, "_fields"):
        raise ContractError(f"{name} returned {describe_value(value)}: expected {expected}")
    if len(value) != len(names):
        raise ContractError(f"{name} returned {len(value)} values: expected {expected}")
    return value


def require_like(name: str, tree: Tree, expected: Tree, origin: str) -> None:
    """Require that two trees agree in structure, shapes and types.

    Args:
      name: name of `tree`, for messages.
      tree: a tree of arrays.
      expected: a tree of arrays.
      origin: where `expected` comes from, for messages.

    Raises:
      ContractError: unless they agree; the message names the first leaf that differs.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.contract_checks import require_like
      >>> require_like("state", {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}, "`init` returns")
    """
    leaves, expected_leaves = _list_leaves(tree), _list_leaves(expected)
    # jax's stub does not declare that structures can be compared.
    if jax.tree.structure(tree) != jax.tree.structure(expected):  # type: ignore[operator]
        unexpected = sorted(leaves.keys() - expected_leaves.keys())
        missing = sorted(expected_leaves.keys() - leaves.keys())
        difference = f" is {describe_value(tree)}: expected {describe_value(expected)}, "
        if unexpected:
            missing_note = f", and {missing[0]} is missing" if missing and missing[0] else ""
            difference = f"{unexpected[0]} is one too many{missing_note}: expected "
        elif missing:
            difference = f"{missing[0]} is missing: expected "
        raise ContractError(f"{name}{difference}the same structure, as {origin}")
    for path, leaf in leaves.items():
        actual_type, expected_type = _describe_array(leaf), _describe_array(expected_leaves[path])
        if actual_type != expected_type:
            expected_text = f"expected {expected_type}, as {origin}"
            raise ContractError(f"{name}{path} is {actual_type}: {expected_text}")


def require_scalar(name: str, value: Any) -> None:
    """Require a scalar of a float type.

    Args:
      name: name of the value, for messages.
      value: any value.

    Raises:
      ContractError: unless it is a scalar of a float type.

    Example:
      >>> from fedjax_het.core.contract_checks import require_scalar
      >>> require_scalar("loss", 0.5)
    """
    is_number = hasattr(value, "shape") or isinstance(value, float | int)
    is_scalar = is_number and jnp.shape(value) == ()
    if not is_scalar or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ContractError(f"{name} is {describe_value(value)}: expected a float32 scalar")


def describe_value(value: Any) -> str:
    """Return a description of any value in one to four words.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.contract_checks import describe_value
      >>> describe_value(jnp.zeros((10, 3))), describe_value((1, 2)), describe_value([])
      ('float32[10,3]', 'a tuple of 2', 'a list')
    """
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _describe_array(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def require_arrays(name: str, tree: Any, expected: str) -> Any:
    """Require a tree of arrays and numbers.

    Args:
      name: name of the function that returned `tree`, for messages.
      tree: any value; None is the result of a function without `return`.
      expected: description of `tree`, for messages.

    Returns:
      `tree`.

    Raises:
      ContractError: for None and for leaves that are neither arrays nor numbers.

    Example:
      >>> from fedjax_het.core.contract_checks import require_arrays
      >>> require_arrays("init", {"count": 0}, "the client's state")
      {'count': 0}
    """
    if tree is None:
        raise ContractError(f"{name} returned None: expected {expected}, () if there is none")
    for path, leaf in _list_leaves(tree).items():
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            subject = path or "it"
            raise ContractError(f"{name}: {subject} is {describe_value(leaf)}: expected an array")
    return tree


def _require_client_update(name: str, value: Any) -> None:
    """Raise ContractError unless `value` is a `ClientUpdate` without PRNG keys."""
    if not isinstance(value, ClientUpdate):
        expected = "ClientUpdate(mean=..., sum=...), which the engine averages and adds up"
        raise ContractError(f"{name} is {describe_value(value)}: expected {expected}")
    for path, leaf in _list_leaves(value).items():
        if is_prng_key(jnp.asarray(leaf)):
            kind = _describe_array(leaf)
            raise ContractError(f"{name}{path} is {kind}: random keys have no sum")


def _list_leaves(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths as text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _describe_array(leaf: Any) -> str:
    """Return an array's type and shape as text, for example `float32[10,3]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"
