"""The contract of a client algorithm: what one client does in a round.

    def begin(context, state):
        return ClientTrainState(context.message.variables, (), ())

    def step(context, local, batch):
        loss, gradient, variables = task.loss_and_gradient(local.variables, batch, context.key)
        ...
        return local, loss

    def end(context, local, state):
        change = jax.tree.map(jnp.subtract, local.variables, context.message.variables)
        return ClientUpdate(mean=change, sum=jnp.int32(1)), state, ()

`context` is a `ClientContext`: hyper-parameters, message of the server, facts of the client, PRNG key.
The engine computes the weighted average of `ClientUpdate.mean` over the round's clients, with the
weights of the run's `averaging`, and the sum of `ClientUpdate.sum`. A method never sees a weight.

The functions of a method are checked by `with_contract_checks` while the program is traced. The
checks concern structures, shapes and types only; the compiled program contains none of them.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.utils.arrays import AnyArray, is_prng_key
from fedjax_het.utils.errors import ConfigError

Tree = Any
HyperParameters = dict[str, jax.Array]  # float32 scalars by name


class ClientInfo(NamedTuple):
    """Facts of one client in a round."""

    id: jax.Array
    """`[]` int32: index of the client, 0 to K - 1. For methods that condense data: index of the
    pair of client and class."""
    num_samples: jax.Array
    "`[]` int32: number of training examples of the client."
    num_steps: jax.Array
    "`[]` int32: number of minibatches in the round, over all passes."
    init_images: jax.Array
    """`[I, H, W, C]`: stored images from which a client that condenses data starts. I = 0 in local
    training."""


class ClientContext(NamedTuple):
    """What every function of a client reads besides the client's own arrays."""

    hp: HyperParameters
    "Values of the hyper-parameters by name, `[]` float32, traced: a new value compiles nothing."
    message: Tree
    "What the server sent, the same for all clients of the round: usually a `ServerMessage`."
    client: ClientInfo
    "Facts of the client."
    key: jax.Array
    """PRNG key: in `begin` and `end` the client's own key of the round, in `step` the key of that
    step, `fold_in(client's key, step_index)`."""


class Batch(NamedTuple):
    """One minibatch as stored."""

    images: jax.Array
    "`[B, H, W, C]` uint8 or float32."
    labels: jax.Array
    "`[B]` int32."
    mask: jax.Array
    "`[B]` float32: 1 for examples, 0 for padding."
    step_index: jax.Array
    "`[]` int32: number of minibatches that the client has processed in this round."
    axis: BatchAxis | None = None
    """Devices that share the batch, of which this is one part; None for a whole batch, as clients
    always have."""


class ClientUpdate(NamedTuple):
    """What a client sends, and what the server receives of all clients of a round.

    Leaves may be arrays of any type except PRNG keys. Types of less than 32 bits are widened to 32
    bits before they are averaged or summed: floats to float32; booleans and integers to float32 in
    `mean` and to integers in `sum`.
    """

    mean: Tree = ()
    """Averaged over the round's clients with the weights of the run's `averaging`. Zero if no client
    has trained."""
    sum: Tree = ()
    "Summed over the round's clients."


class ClientAlgorithm(NamedTuple):
    """How one client trains: pure functions of a single client, which jax can trace.

    State, local, update and output are pytrees of arrays of any type; updates without PRNG keys.
    """

    init: Callable[[HyperParameters, Tree], Tree]
    """`init(hp, variables) -> state`: what the client stores between rounds, before its first round;
    `()` for nothing. `variables` are those of the initial global model."""
    begin: Callable[[ClientContext, Tree], Tree]
    "`begin(context, state) -> local`: what the client carries from step to step."
    step: Callable[[ClientContext, Tree, Batch], tuple[Tree, jax.Array]]
    """`step(context, local, batch) -> (local, loss)`: `local` with unchanged structure, shapes and
    types; the mean loss of the minibatch, a float32 scalar."""
    end: Callable[[ClientContext, Tree, Tree], tuple[ClientUpdate, Tree, Tree]]
    """`end(context, local, state) -> (update, state, output)`: what the client sends; its state with
    unchanged structure, shapes and types; any arrays that the round reads for each client."""
    extra_passes: int = 0
    "Passes over the client's data before its local epochs."


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
