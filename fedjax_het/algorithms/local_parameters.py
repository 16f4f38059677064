"""Parameters that stay at the clients, such as the heads of FedPer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientContext, ClientUpdate
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.contract_checks import ContractError, describe_value
from fedjax_het.nn import Model
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import describe_error

Tree = Any


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


def split_parameters(model: Model, select: Callable[[Model, Tree], Tree]) -> ParameterSplit:
    """Find the local parameters of a network.

    Args:
      model: the network.
      select: `select(model, variables) -> parts of the variables`.

    Returns:
      The places of the local parameters.

    Raises:
      ContractError: if `select` fails, or returns anything but parts of the variables, or returns
        no parameters or all of them.
    """
    variables = jax.eval_shape(model.init, make_key(0))
    leaves = jax.tree.leaves(variables)
    structure: Any = jax.tree.structure(variables)
    # The positions stand for the arrays, so that the parts show where they come from.
    positions = structure.unflatten(range(len(leaves)))
    try:
        selected = jax.tree.leaves(select(model, positions))
    except Exception as error:
        params = variables["params"]
        names = f", with the parameters {', '.join(params)}" if isinstance(params, dict) else ""
        head = "" if model.head else " and no head"
        network = f"the network {model.name!r}{names}{head}"
        raise ContractError(
            f"local_parameters fails on {network} ({describe_error(error)})"
        ) from error
    indices = {i for i in selected if type(i) is int and 0 <= i < len(leaves)}
    if len(indices) != len(selected) or not 0 < len(indices) < len(leaves):
        actual = f"{len(selected)} leaves of {len(leaves)}"
        expected = "parts of the variables without change, at least one leaf and not all"
        raise ContractError(f"local_parameters returned {actual}: expected {expected}")
    return ParameterSplit(structure, frozenset(indices))


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
