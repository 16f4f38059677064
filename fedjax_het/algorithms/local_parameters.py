"""The split of a network's variables into the part of the clients and the part of the server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fedjax_het.core.client_algorithm import Batch, ClientAlgorithm, ClientContext, ClientUpdate
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.contract_checks import ContractError, describe_value
from fedjax_het.core.local_training import LocalTraining, apply_gradient, init_local_optimizer
from fedjax_het.nn import Model
from fedjax_het.nn.model import require_parts
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import Config
from fedjax_het.utils.errors import (
    ConfigError,
    describe_error,
    display_name,
    make_value_error,
    require,
)

Tree = Any


@dataclass(frozen=True)
class HeadOptions(Config):
    """Choice of the layers that form a network's head; all other layers are its body."""

    head_layers: tuple[str, ...] = ()
    """Layers of the head, by their paths within the network's parameters, such as `hidden2` or
    `block3/conv1`, with commas between them. The head is a part of the network that the method
    treats differently from all other layers, the body. Empty: the last fully connected layer."""


def select_head(model: Model, variables: Tree, *, options: HeadOptions) -> list[Tree]:
    """Return the leaves of a network's head, for `AlgorithmSpec.local_parameters`.

    Args:
      model: the network.
      variables: variables of the network, `{"params": ..., "state": ...}`.
      options: choice of the layers.

    Returns:
      The leaves, with the running statistics of the head's normalization layers.

    Raises:
      ConfigError: if a layer does not exist, or if the network has no last fully connected layer
        and `head_layers` is empty.

    Example:
      >>> import jax
      >>> from fedjax_het.algorithms.local_parameters import HeadOptions, select_head
      >>> from fedjax_het.nn import make_model
      >>> model = make_model("mlp", (4, 4, 1), 3, hidden=[5])
      >>> variables = model.init(jax.random.key(0))
      >>> [leaf.shape for leaf in select_head(model, variables, options=HeadOptions())]
      [(3,), (5, 3)]
    """
    if not options.head_layers:
        params, option = variables["params"], display_name("options head_layers")
        known = f" (of {', '.join(params)})" if isinstance(params, dict) else ""
        alternative = f", or {option} with the paths of layers{known}"
        require_parts(model, "head", alternative=alternative)
        assert model.head is not None
        return jax.tree.leaves(model.head.get_parameters(variables))
    paths = jax.tree_util.tree_leaves_with_path(variables)
    # The first part of a path is "params" or "state".
    names = [jax.tree_util.keystr(path[1:], simple=True, separator="/") for path, _ in paths]
    prefixes = tuple(f"{layer}/" for layer in options.head_layers)
    for layer, prefix in zip(options.head_layers, prefixes, strict=True):
        if not any(f"{name}/".startswith(prefix) for name in names):
            layers = sorted({name.split("/")[0] for name in names})
            expected = f"layers of the network: {', '.join(layers)}"
            raise make_value_error("head_layers", layer, expected)
    leaves = [leaf for _, leaf in paths]
    is_in_head = [f"{name}/".startswith(prefixes) for name in names]
    expected = "not all layers of the network, whose body would be empty"
    require(not all(is_in_head), "head_layers", list(options.head_layers), expected)
    return [leaf for leaf, is_head in zip(leaves, is_in_head, strict=True) if is_head]


def select_head_weights(model: Model, variables: Tree, *, options: HeadOptions) -> list[Tree]:
    """Return the leaves of a network's head without running statistics.

    Args:
      model: the network.
      variables: variables of the network, `{"params": ..., "state": ...}`.
      options: choice of the layers.

    Returns:
      The leaves.

    Raises:
      ConfigError: see `select_head`.
    """
    return select_head(model, {**variables, "state": {}}, options=options)


def select_body(model: Model, variables: Tree, *, options: HeadOptions) -> list[Tree]:
    """Return the leaves outside of a network's head, for `AlgorithmSpec.local_parameters`.

    Args:
      model: the network.
      variables: variables of the network, `{"params": ..., "state": ...}`.
      options: choice of the head's layers.

    Returns:
      The leaves, with the running statistics of the body's normalization layers.

    Raises:
      ConfigError: see `select_head`.

    Example:
      >>> import jax
      >>> from fedjax_het.algorithms.local_parameters import HeadOptions, select_body
      >>> from fedjax_het.nn import make_model
      >>> model = make_model("mlp", (4, 4, 1), 3, hidden=[5])
      >>> variables = model.init(jax.random.key(0))
      >>> [leaf.shape for leaf in select_body(model, variables, options=HeadOptions())]
      [(5,), (16, 5)]
    """
    leaves = jax.tree.leaves(variables)
    structure: Any = jax.tree.structure(variables)
    positions = structure.unflatten(range(len(leaves)))
    head = select_head(model, positions, options=options)
    return [leaf for i, leaf in enumerate(leaves) if i not in head]


class LocalParametersState(NamedTuple):
    """A client with parameters of its own, between the rounds or in training."""

    parameters: tuple[jax.Array, ...]
    "The client's own parameters, as they were at the start of the round."
    inner: Tree
    "State of the method's own client algorithm, or its client in training."


class ParameterSplit(NamedTuple):
    """The places of the local parameters in the variables of a network."""

    structure: Any
    "Structure of the variables."
    indices: frozenset[int]
    "Positions of the local parameters among the leaves."

    def get_local(self, variables: Tree) -> tuple[jax.Array, ...]:
        """Return the local parameters of a tree like the variables."""
        leaves = jax.tree.leaves(variables)
        return tuple(leaf for i, leaf in enumerate(leaves) if i in self.indices)

    def drop_local(self, variables: Tree) -> Tree:
        """Return a tree like the variables with None in place of the local parameters."""
        leaves = enumerate(jax.tree.leaves(variables))
        return self.structure.unflatten([None if i in self.indices else a for i, a in leaves])

    def join(self, shared: Tree, local: tuple[jax.Array, ...]) -> Tree:
        """Return the whole variables.

        Args:
          shared: a result of `drop_local`.
          local: a result of `get_local`.

        Returns:
          A tree like the variables.
        """
        others, own = iter(jax.tree.leaves(shared)), iter(local)
        places = range(self.structure.num_leaves)
        return self.structure.unflatten(
            [next(own if i in self.indices else others) for i in places]
        )

    def get_complement(self) -> "ParameterSplit":
        """Return the split whose local parameters are the shared ones of this split."""
        places = range(self.structure.num_leaves)
        return self._replace(indices=frozenset(i for i in places if i not in self.indices))

    def drop_local_changes(self, update: ClientUpdate) -> ClientUpdate:
        """Return a client's upload without the changes of its local parameters."""

        def is_like_variables(tree: Tree) -> bool:
            return jax.tree.structure(tree) == self.structure

        parts = jax.tree.leaves(update.mean, is_leaf=is_like_variables)
        if parts and not any(map(is_like_variables, parts)):
            raise ContractError(
                f"ClientAlgorithm.end: update.mean is {describe_value(update.mean)}: expected a "
                "change of all variables, of which local_parameters are not uploaded"
            )
        drop = lambda part: self.drop_local(part) if is_like_variables(part) else part  # noqa: E731
        return update._replace(mean=jax.tree.map(drop, update.mean, is_leaf=is_like_variables))


def split_parameters(
    model: Model, select: Callable[[Model, Tree], Tree], *, allows_empty: bool = False
) -> ParameterSplit:
    """Find the local parameters of a network.

    Args:
      model: the network.
      select: `select(model, variables) -> parts of the variables`.
      allows_empty: whether a network without local parameters is valid.

    Returns:
      The places of the local parameters.

    Raises:
      ContractError: if `select` fails, or returns anything but parts of the variables, or returns
        no parameters or all of them.
      ConfigError: if `select` raises it.
    """
    variables = jax.eval_shape(model.init, make_key(0))
    leaves = jax.tree.leaves(variables)
    structure: Any = jax.tree.structure(variables)
    # The positions stand for the arrays, so that the parts show where they come from.
    positions = structure.unflatten(range(len(leaves)))
    try:
        selected = jax.tree.leaves(select(model, positions))
    except ConfigError:
        raise
    except Exception as error:
        params = variables["params"]
        names = f", with the parameters {', '.join(params)}" if isinstance(params, dict) else ""
        head = "" if model.head else " and no head"
        network = f"the network {model.name!r}{names}{head}"
        raise ContractError(
            f"local_parameters fails on {network} ({describe_error(error)})"
        ) from error
    indices = {i for i in selected if type(i) is int and 0 <= i < len(leaves)}
    min_count = 0 if allows_empty else 1
    if len(indices) != len(selected) or not min_count <= len(indices) < len(leaves):
        actual = f"{len(selected)} leaves of {len(leaves)}"
        expected = "parts of the variables without change, at least one leaf and not all"
        raise ContractError(f"local_parameters returned {actual}: expected {expected}")
    return ParameterSplit(structure, frozenset(indices))


def init_shared_optimizer(
    training: LocalTraining, hp: Any, variables: Tree, split: ParameterSplit
) -> Tree:
    """Return the state of a local optimizer of the shared parameters before its first step.

    Args:
      training: the choices of local training.
      hp: values of the hyperparameters by name.
      variables: variables of the network, `{"params": ..., "state": ...}`.
      split: the places of the local parameters.

    Returns:
      The state, which has no arrays for the local parameters.
    """
    return init_local_optimizer(training, hp, split.drop_local(variables))


def apply_shared_gradient(
    training: LocalTraining,
    context: ClientContext,
    variables: Tree,
    gradient: Tree,
    optimizer_state: Tree,
    batch: Batch,
    split: ParameterSplit,
) -> tuple[Tree, Tree]:
    """Make one step of the local optimizer on the shared parameters only.

    The local parameters do not change and have no part in momentum, weight decay or the norm of
    the gradient.

    Args:
      training: the choices of local training.
      context: the context of the method's `step`.
      variables: variables of the network, `{"params": ..., "state": ...}`.
      gradient: gradient of the loss, like `variables["params"]`.
      optimizer_state: state of the optimizer, see `init_shared_optimizer`.
      batch: the minibatch of the method's `step`.
      split: the places of the local parameters.

    Returns:
      The variables with new shared parameters, and the new state of the optimizer.
    """
    shared = split.drop_local(variables)
    shared_gradient = split.drop_local({**variables, "params": gradient})["params"]
    shared, optimizer_state = apply_gradient(
        training, context, shared, shared_gradient, optimizer_state, batch
    )
    return split.join(shared, split.get_local(variables)), optimizer_state


def with_local_parameters(client: ClientAlgorithm, split: ParameterSplit) -> ClientAlgorithm:
    """Return a client that stores its local parameters and uploads the others only.

    Args:
      client: a client algorithm that trains all variables, `local.variables`.
      split: the places of the local parameters.

    Returns:
      A client algorithm for messages without the local parameters. The functions of `client` see
      messages that contain the client's own.
    """

    def fill(context: ClientContext, local: tuple[jax.Array, ...]) -> ClientContext:
        variables = split.join(context.message.variables, local)
        return context._replace(message=context.message._replace(variables=variables))

    def init(hp, variables):
        return LocalParametersState(split.get_local(variables), client.init(hp, variables))

    def begin(context, state):
        local = client.begin(fill(context, state.parameters), state.inner)
        return state._replace(inner=local)

    def step(context, local, batch):
        inner, loss = client.step(fill(context, local.parameters), local.inner, batch)
        return local._replace(inner=inner), loss

    def end(context, local, state):
        context = fill(context, state.parameters)
        update, inner, output = client.end(context, local.inner, state.inner)
        own = split.get_local(local.inner.variables)
        return split.drop_local_changes(update), LocalParametersState(own, inner), output

    return client._replace(init=init, begin=begin, step=step, end=end)


def get_personal_variables(split: ParameterSplit) -> Callable:
    """Return `Algorithm.personal_variables` of a method with local parameters."""

    def personal_variables(hp, state, k):
        own = get_client_row(state.clients.parameters, k)
        return split.join(state.server.variables, own)

    return personal_variables
