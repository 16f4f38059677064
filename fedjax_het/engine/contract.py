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

The engine weighs: of what is in `Upload.mean` the server gets the average that the run's settings
ask for, of what is in `Upload.sum` the sum. A method has no weights to forget.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_het.common.arrays import is_key
from fedjax_het.common.errors import ConfigError

Tree = Any
HyperParameters = dict[str, jax.Array]  # float32 scalars by name


class Client(NamedTuple):
    """What a client knows of itself in a round; scalars but for `start`."""

    id: jax.Array  # int32; of a pair of client and class where those are what the lanes run through
    num_samples: jax.Array  # int32
    num_steps: jax.Array  # int32, over all passes
    key: jax.Array  # its own of this round; a step's is fold_in(key, step)
    start: jax.Array  # [I, H, W, C] stored images that it starts from; I = 0 in local training


class Batch(NamedTuple):
    """One minibatch as stored; `mask` is 1 for samples and 0 for padding."""

    images: jax.Array  # [B, H, W, C] uint8 or float32
    labels: jax.Array  # [B] int32
    mask: jax.Array  # [B] float32
    number: jax.Array  # [] int32: the client's steps so far in this round


class Upload(NamedTuple):
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


class InitClient(Protocol):
    """-> what a client keeps between rounds, before its first; () if nothing."""

    def __call__(self, hp: HyperParameters, variables: Tree) -> Tree: ...


class BeginRound(Protocol):
    """-> local: what a client carries from step to step."""

    def __call__(
        self, hp: HyperParameters, broadcast: Tree, state: Tree, client: Client
    ) -> Tree: ...


class TakeStep(Protocol):
    """-> (local, of the same structure, shapes and types; the minibatch's mean loss, a scalar)."""

    def __call__(
        self,
        hp: HyperParameters,
        broadcast: Tree,
        local: Tree,
        batch: Batch,
        client: Client,
        key: jax.Array,
    ) -> tuple[Tree, jax.Array]: ...


class EndRound(Protocol):
    """-> (upload, state, of the same structure, shapes and types; output, any arrays)."""

    def __call__(
        self, hp: HyperParameters, broadcast: Tree, local: Tree, state: Tree, client: Client
    ) -> tuple[Upload, Tree, Tree]: ...


class ClientMethod(NamedTuple):
    """How one client trains: pure functions of a single client.

    init(hp, variables) -> state
    begin(hp, broadcast, state, client) -> local
    step(hp, broadcast, local, batch, client, key) -> (local, loss)
    end(hp, broadcast, local, state, client) -> (Upload, state, output)

    Outputs are kept per client. `extra_passes` are passes over the client's data before its local
    epochs. State, local, uploads and outputs may have arrays of any type that jax has (uploads: but
    random keys).
    """

    init: InitClient
    begin: BeginRound
    step: TakeStep
    end: EndRound
    extra_passes: int = 0


class ContractError(ConfigError):
    """A function that a method brings does not do what the contract says; one line that names the
    function, and the leaf."""


def checked_client(method: ClientMethod) -> ClientMethod:
    """The same method, whose functions say which of them breaks the contract, and where.

    All checks are of shapes and types, made while the program is traced: none is in the program.
    """

    def begin(hp, broadcast, state, client):
        given = (hp, broadcast, state, client)
        local = call("ClientMethod.begin", method.begin, BeginRound, *given)
        return _require_some("ClientMethod.begin", local, "what a client carries, () if nothing")

    def step(hp, broadcast, local, batch, client, key):
        name = "ClientMethod.step"
        given = (hp, broadcast, local, batch, client, key)
        moved, loss = parts(name, call(name, method.step, TakeStep, *given), ("local", "loss"))
        require_like(f"{name}: local", moved, local, "what `begin` made")
        require_scalar(f"{name}: loss", loss)
        return moved, loss

    def end(hp, broadcast, local, state, client):
        name = "ClientMethod.end"
        found = call(name, method.end, EndRound, hp, broadcast, local, state, client)
        upload, new, output = parts(name, found, ("upload", "state", "output"))
        require_upload(f"{name}: upload", upload)
        require_like(f"{name}: state", new, state, "what `init` made")
        return upload, new, output

    def init(hp, variables):
        state = call("ClientMethod.init", method.init, InitClient, hp, variables)
        return _require_some("ClientMethod.init", state, "what a client keeps, () if nothing")

    if getattr(method.begin, "is_checked", False):
        return method
    begin.is_checked = True  # type: ignore[attr-defined]
    return ClientMethod(init, begin, step, end, method.extra_passes)


def _require_some(name: str, found: Any, expected: str) -> Any:
    """Arrays, in whatever structure; None is what a function returns that forgets to."""
    if found is None:
        raise ContractError(f"{name} returned None: expected {expected}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            place = jax.tree_util.keystr(path)
            raise ContractError(f"{name}: {place or 'it'} is {kind_of(leaf)}: expected an array")
    return found


def call(name: str, function: Callable, protocol: type, *args: Any) -> Any:
    """`function(*args)`. Raises ContractError if it does not take as many; what else it raises gets
    a note of its name."""
    wanted = _arguments(protocol)
    if not callable(function):
        raise ContractError(f"{name} = {function!r}: expected a function of ({', '.join(wanted)})")
    if not _takes(function, len(args)):
        signature = inspect.signature(function)
        raise ContractError(f"{name} takes {signature}: expected ({', '.join(wanted)})")
    try:
        return function(*args)
    except ContractError:
        raise
    except Exception as error:
        error.add_note(f"in {name}")
        raise


def parts(name: str, found: Any, names: Sequence[str]) -> tuple:
    """What a function returned, if it is a tuple of these parts."""
    wanted = f"({', '.join(names)})"
    if not isinstance(found, tuple) or hasattr(found, "_fields"):
        raise ContractError(f"{name} returned {kind_of(found)}: expected {wanted}")
    if len(found) != len(names):
        raise ContractError(f"{name} returned {len(found)} values: expected {wanted}")
    return found


def require_like(name: str, found: Tree, expected: Tree, what: str) -> None:
    """Raise ContractError, which names the first leaf, unless structure, shapes and types agree."""
    # jax's stub does not say that structures can be compared.
    if jax.tree.structure(found) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ContractError(f"{name}{_first_difference(found, expected)}, as {what}")
    for (path, leaf), want in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        here, there = type_of(leaf), type_of(want)
        if here != there:
            place = jax.tree_util.keystr(path)
            raise ContractError(f"{name}{place} is {here}: expected {there}, as {what}")


def require_scalar(name: str, found: Any) -> None:
    ok = hasattr(found, "shape") or isinstance(found, float | int)
    if not ok or jnp.shape(found) != () or not jnp.issubdtype(jnp.result_type(found), jnp.floating):
        raise ContractError(f"{name} is {kind_of(found)}: expected a float32 scalar")


def require_upload(name: str, found: Any) -> None:
    if not isinstance(found, Upload):
        raise ContractError(
            f"{name} is {kind_of(found)}: expected Upload(mean=..., sum=...), of which the engine "
            "averages the one and adds up the other"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if is_key(jnp.asarray(leaf)):
            place = jax.tree_util.keystr(path)
            raise ContractError(f"{name}{place} is {type_of(leaf)}: random keys have no sum")


def type_of(leaf: Any) -> str:
    """An array's type and shape: `float32[10,3]`."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def kind_of(found: Any) -> str:
    """What something is, in a word or two."""
    if found is None:
        return "None"
    if hasattr(found, "shape") and hasattr(found, "dtype"):
        return type_of(found)
    if isinstance(found, tuple) and not hasattr(found, "_fields"):
        return f"a tuple of {len(found)}"
    return f"a {type(found).__name__}"


def _first_difference(found: Tree, expected: Tree) -> str:
    """Where two structures part, and how."""
    here = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(found)}
    there = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(expected)}
    if extra := sorted(here - there):
        lacking = sorted(there - here)
        instead = f", and {lacking[0]} is missing" if lacking and lacking[0] else ""
        return f"{extra[0]} is one too many{instead}: expected the same structure"
    if lacking := sorted(there - here):
        return f"{lacking[0]} is missing: expected the same structure"
    return f" is {kind_of(found)}: expected {kind_of(expected)}, the same structure"


@functools.cache
def _arguments(protocol: type) -> tuple[str, ...]:
    names = tuple(inspect.signature(protocol.__call__).parameters)
    return names[1:]


def _takes(function: Callable, count: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in one that does not say
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
