"""Asynchronous aggregation: clients train from older models, which the server stores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, AsynchronousSchedule
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, model_traffic
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientContext, ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage
from fedjax_het.utils.arrays import set_row, take_row
from fedjax_het.utils.config import Config, NonNegativeFloat, NonNegativeInt, SearchRange

Tree = Any


@dataclass(frozen=True)
class AsynchronousOptions(Config):
    """Options of all asynchronous methods."""

    max_staleness: NonNegativeInt = 20
    """Largest staleness of an update that the server uses, in changes of the model; it stores one
    more models."""


@dataclass(frozen=True)
class AsynchronousHyperParameters(Config):
    """Hyperparameters of all asynchronous methods."""

    staleness_exponent: Annotated[NonNegativeFloat, SearchRange(0.1, 1)] = 0.5
    "Exponent a of the weight (1 + staleness)^-a of an update; 0 weights all updates equally."


class ModelHistory(NamedTuple):
    """The latest models of the server."""

    models: Tree
    "Variables of version v in row v mod n, `[n, ...]`."
    version: jax.Array
    "`[]` int32: number of changes of the model."


def compute_staleness_weight(staleness: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return the weight (1 + staleness)^-exponent of an update.

    Args:
      staleness: updates of the server since the client received its model, int32 `[]`.
      exponent: a number >= 0; 0 weights all updates equally.

    Returns:
      The weight in (0, 1], float32 `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.asynchronous import compute_staleness_weight
      >>> float(compute_staleness_weight(jnp.int32(3), 0.5))
      0.5
    """
    return (1.0 + staleness) ** -jnp.float32(exponent)


def compute_hinge_weight(
    staleness: jax.Array, slope: jax.Array | float, delay: jax.Array | float
) -> jax.Array:
    """Return FedAsync's hinge weight 1 / (slope * max(staleness - delay, 0) + 1) of an update.

    Args:
      staleness: updates of the server since the client received its model, int32 `[]`.
      slope: a number >= 0, a in the paper; 0 weights all updates equally.
      delay: staleness up to which the weight is 1, b in the paper.

    Returns:
      The weight in (0, 1], float32 `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.asynchronous import compute_hinge_weight
      >>> compute_hinge_weight(jnp.arange(3, 6), slope=1.0, delay=4.0).tolist()
      [1.0, 1.0, 0.5]
    """
    return 1.0 / (slope * jnp.maximum(staleness - jnp.float32(delay), 0.0) + 1.0)


def _compute_polynomial_weight(hp: dict[str, Any], staleness: jax.Array) -> jax.Array:
    return compute_staleness_weight(staleness, hp["staleness_exponent"])


def build_asynchronous_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    client: ClientAlgorithm,
    schedule: AsynchronousSchedule,
    *,
    measures_from_received: bool,
    compute_weight: Callable[[dict[str, Any], jax.Array], jax.Array] = _compute_polynomial_weight,
) -> Algorithm:
    """Return a method whose clients train from the models that they received.

        w <- w + server_lr sum_k p_k s(tau_k) d_k

    The sum is over the updates in the server's buffer, and tau_k is the staleness of an update.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      client: local training whose update is the change of the model.
      schedule: the sizes of the buffer and of the server's history.
      measures_from_received: whether d_k is the change from the model that the client received;
        otherwise d_k is the difference of its model from the server's present model.
      compute_weight: `compute_weight(hp, staleness)` returns s(tau_k), by default
        (1 + tau_k)^-`staleness_exponent`.

    Returns:
      The method.
    """
    num_models = schedule.max_staleness + 1

    def with_received_model(context: ClientContext) -> ClientContext:
        history = context.message.extra
        row = (history.version - context.client.staleness) % num_models
        variables = jax.tree.map(lambda models: take_row(models, row), history.models)
        return context._replace(message=ServerMessage(variables))

    def begin(context, state):
        return client.begin(with_received_model(context), state)

    def step(context, local, batch):
        return client.step(with_received_model(context), local, batch)

    def end(context, local, state):
        own_context = with_received_model(context) if measures_from_received else context
        update, state, output = client.end(own_context, local, state)
        weight = compute_weight(context.hp, context.client.staleness)
        change = jax.tree.map(lambda leaf: weight * leaf, update.mean)
        return ClientUpdate(change), state, output

    def init_server(hp, variables):
        return ServerMessage(variables, _start_history(variables))

    def update_server(hp, server, client_update, counts):
        new_server = add_mean_change(hp, server, client_update.mean)
        models, version = server.extra
        version += counts.num_trained > 0
        row = version % num_models
        models = jax.tree.map(
            lambda rows, leaf: set_row(rows, leaf, row), models, new_server.variables
        )
        return ServerMessage(new_server.variables, ModelHistory(models, version))

    def _start_history(variables: Tree) -> ModelHistory:
        models = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_models, *leaf.shape)), variables
        )
        return ModelHistory(models, jnp.int32(0))

    def with_global_model(state, variables):
        server = ServerMessage(variables, _start_history(variables))
        return state._replace(server=server)

    algorithm = build_federated_algorithm(
        # Clients do not know the weights of their updates, which have several starts.
        training.with_plain_uploads(),
        plan,
        client._replace(begin=begin, step=step, end=end),
        init_server=init_server,
        update=update_server,
    )
    return algorithm._replace(
        traffic=model_traffic, with_global_model=with_global_model, asynchronous=schedule
    )
