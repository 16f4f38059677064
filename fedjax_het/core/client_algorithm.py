"""What a client does in a round, as users write it; and the checks that stand at its border.

    def begin(hp, broadcast, state, client):
        return Local(broadcast.variables, (), ())

    def step(hp, broadcast, local, batch, client, key):
        loss, gradient, variables = task.loss_and_gradient(local.variables, batch, key)
        ...
        return local, loss

    def end(hp, broadcast, local, state, client):
        change = jax.tree.map(jnp.subtract, local.variables, broadcast.variables)
        return Upload(mean=change, sum=jnp.int32(1)), state, ()

The engine weighs: of what is in `ClientUpdate.mean` the server gets the average that the run's settings
ask for, of what is in `ClientUpdate.sum` the sum. A method has no weights to forget.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.utils.arrays import is_prng_key
from fedjax_het.utils.errors import ConfigError

Tree = Any
HyperParameters = dict[str, jax.Array]  # float32 scalars by name


class ClientInfo(NamedTuple):
    """What a client knows of itself in a round; scalars but for `start`."""

    id: jax.Array  # int32; of a pair of client and class where those are what the lanes run through
    num_samples: jax.Array  # int32
    num_steps: jax.Array  # int32, over all passes
    key: jax.Array  # its own of this round; a step's is fold_in(key, step)
    init_images: (
        jax.Array
    )  # [I, H, W, C] stored images that it starts from; I = 0 in local training


class Batch(NamedTuple):
    """One minibatch as stored; `mask` is 1 for samples and 0 for padding.

    axis: the devices that share the batch, whose part of it this is; None for a whole batch, which
      is what clients always train on.
    """

    images: jax.Array  # [B, H, W, C] uint8 or float32
    labels: jax.Array  # [B] int32
    mask: jax.Array  # [B] float32
    step_index: jax.Array  # [] int32: the client's steps so far in this round
    axis: BatchAxis | None = None


class ClientUpdate(NamedTuple):
    """What a client sends, and what the server gets of all.

    mean: averaged over the round's clients, with the weights of the run's `averaging`. Zero where
      no client has trained.
    sum: added up over them.

    Any arrays but random keys. What is narrower than 32 bits is averaged and added up in 32: floats
    in float32, truth values and integers as integers where they are summed (float32 where they are
    averaged).
    """

    mean: Tree = ()
    sum: Tree = ()


class InitClientFunction(Protocol):
    """-> what a client keeps between rounds, before its first; () if nothing."""

    def __call__(self, hp: HyperParameters, variables: Tree) -> Tree: ...


class BeginRoundFunction(Protocol):
    """-> local: what a client carries from step to step."""

    def __call__(
        self, hp: HyperParameters, message: Tree, state: Tree, client: ClientInfo
    ) -> Tree: ...


class StepFunction(Protocol):
    """-> (local, of the same structure, shapes and types; the minibatch's mean loss, a scalar)."""

    def __call__(
        self,
        hp: HyperParameters,
        message: Tree,
        local: Tree,
        batch: Batch,
        client: ClientInfo,
        key: jax.Array,
    ) -> tuple[Tree, jax.Array]: ...


class EndRoundFunction(Protocol):
    """-> (upload, state, of the same structure, shapes and types; output, any arrays)."""

    def __call__(
        self, hp: HyperParameters, message: Tree, local: Tree, state: Tree, client: ClientInfo
    ) -> tuple[ClientUpdate, Tree, Tree]: ...


class ClientAlgorithm(NamedTuple):
    """How one client trains: pure functions of a single client.

    init(hp, variables) -> state
    begin(hp, broadcast, state, client) -> local
    step(hp, broadcast, local, batch, client, key) -> (local, loss)
    end(hp, broadcast, local, state, client) -> (Upload, state, output)

    Outputs are kept per client. `extra_passes` are passes over the client's data before its local
    epochs. State, local, uploads and outputs may have arrays of any type that jax has (uploads: but
    random keys).
    """

    init: InitClientFunction
    begin: BeginRoundFunction
    step: StepFunction
    end: EndRoundFunction
    extra_passes: int = 0


class ContractError(ConfigError):
    """A function that a method brings does not do what the contract says; one line that names the
    function, and the leaf."""


def with_contract_checks(algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """The same method, whose functions say which of them breaks the contract, and where.

    All checks are of shapes and types, made while the program is traced: none is in the program.
    """

    def begin(hp, message, state, client):
        args = (hp, message, state, client)
        local = call_user_function(
            "ClientAlgorithm.begin", algorithm.begin, BeginRoundFunction, *args
        )
        return _require_arrays(
            "ClientAlgorithm.begin", local, "what a client carries, () if nothing"
        )

    def step(hp, message, local, batch, client, key):
        name = "ClientAlgorithm.step"
        args = (hp, message, local, batch, client, key)
        new_local, loss = unpack_tuple(
            name, call_user_function(name, algorithm.step, StepFunction, *args), ("local", "loss")
        )
        require_like(f"{name}: local", new_local, local, "what `begin` made")
        require_scalar(f"{name}: loss", loss)
        return new_local, loss

    def end(hp, message, local, state, client):
        name = "ClientAlgorithm.end"
        outputs = call_user_function(
            name, algorithm.end, EndRoundFunction, hp, message, local, state, client
        )
        update, new_state, output = unpack_tuple(name, outputs, ("upload", "state", "output"))
        require_client_update(f"{name}: upload", update)
        require_like(f"{name}: state", new_state, state, "what `init` made")
        return update, new_state, output

    def init(hp, variables):
        state = call_user_function(
            "ClientAlgorithm.init", algorithm.init, InitClientFunction, hp, variables
        )
        return _require_arrays("ClientAlgorithm.init", state, "what a client keeps, () if nothing")

    if getattr(algorithm.begin, "is_checked", False):
        return algorithm
    begin.is_checked = True  # type: ignore[attr-defined]
    return ClientAlgorithm(init, begin, step, end, algorithm.extra_passes)


def _require_arrays(name: str, tree: Any, expected: str) -> Any:
    """Arrays, in whatever structure; None is what a function returns that forgets to."""
    if tree is None:
        raise ContractError(f"{name} returned None: expected {expected}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            leaf_path = jax.tree_util.keystr(path)
            raise ContractError(
                f"{name}: {leaf_path or 'it'} is {describe_value(leaf)}: expected an array"
            )
    return tree


def call_user_function(name: str, function: Callable, protocol: type, *args: Any) -> Any:
    """`function(*args)`. Raises ContractError if it does not take as many; what else it raises gets
    a note of its name."""
    argument_names = _argument_names(protocol)
    if not callable(function):
        raise ContractError(
            f"{name} = {function!r}: expected a function of ({', '.join(argument_names)})"
        )
    if not _accepts_arguments(function, len(args)):
        signature = inspect.signature(function)
        raise ContractError(f"{name} takes {signature}: expected ({', '.join(argument_names)})")
    try:
        return function(*args)
    except ContractError:
        raise
    except Exception as error:
        error.add_note(f"in {name}")
        raise


def unpack_tuple(name: str, value: Any, names: Sequence[str]) -> tuple:
    """What a function returned, if it is a tuple of these parts."""
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
    is_number = hasattr(value, "shape") or isinstance(value, float | int)
    if (
        not is_number
        or jnp.shape(value) != ()
        or not jnp.issubdtype(jnp.result_type(value), jnp.floating)
    ):
        raise ContractError(f"{name} is {describe_value(value)}: expected a float32 scalar")


def require_client_update(name: str, value: Any) -> None:
    if not isinstance(value, ClientUpdate):
        raise ContractError(
            f"{name} is {describe_value(value)}: expected Upload(mean=..., sum=...), of which the engine "
            "averages the one and adds up the other"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if is_prng_key(jnp.asarray(leaf)):
            leaf_path = jax.tree_util.keystr(path)
            raise ContractError(
                f"{name}{leaf_path} is {describe_array(leaf)}: random keys have no sum"
            )


def describe_array(leaf: Any) -> str:
    """An array's type and shape: `float32[10,3]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def describe_value(value: Any) -> str:
    """What something is, in a word or two."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe_array(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _first_difference(tree: Tree, expected: Tree) -> str:
    """Where two structures part, and how."""
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


@functools.cache
def _argument_names(protocol: type) -> tuple[str, ...]:
    names = tuple(inspect.signature(protocol.__call__).parameters)
    return names[1:]


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
