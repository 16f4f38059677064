"""FedCM (Xu et al., 2021, arXiv:2106.10874)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, num_bytes
from fedjax_het.algorithms.client_state import zeros_like_params
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.optimizers import transform_gradient
from fedjax_het.utils.config import Config, DecayFactor, SearchRange

Tree = Any


@dataclass(frozen=True)
class FedCMHyperParameters(Config):
    """Hyperparameters of FedCM."""

    fedcm_alpha: Annotated[DecayFactor, SearchRange(0.03, 1)] = 0.1
    """Weight alpha of the client's gradient in its local steps. The weight of the global direction,
    the clients' mean step of the last round, is 1 - alpha; 1 is FedAvg."""


class ClientMomentumUpdate(NamedTuple):
    """Upload of a client, averaged over the round's clients."""

    change: Tree
    "Change of the client's variables."
    direction_sum: Tree
    "Sum of the directions of the client's steps, like the parameters."
    num_steps: jax.Array
    "`[]` float32: number of the client's minibatches."


def fedcm(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedCM: clients step along their gradient mixed with the last global direction.

        v = alpha g_k(y) + (1 - alpha) d,  y <- y - local_lr v      K_k local steps, from y = w
        w <- w + server_lr sum_k p_k (w_k - w)
        d <- sum_k p_k (w - w_k) / (local_lr sum_k p_k K_k)

    g_k is a minibatch gradient, alpha is `fedcm_alpha`, and d is zero at first. The first round is
    thus FedAvg with a rate of alpha local_lr. alpha 1 is FedAvg. The paper has p_k 1 / M for the M
    clients of a round and one number of steps K. With unequal K_k, d is parallel to the change of w
    and has the length of a mean step.

    The mixture v is the gradient that the local optimizer receives, before clipping and decay. d is
    the mean of the steps' directions, with clipping and weight decay: under plain SGD with a
    constant rate this is the formula. Under momentum and adaptive optimizers (w - w_k) / (K
    local_lr) is no mean direction: momentum 0.9 makes it up to ten times as long in each round.
    With `gradient_accumulation` this mean clips each minibatch alone. Batch-norm statistics are
    averaged as in FedAvg. A round in which no client has data changes nothing.

    Default: alpha 0.1, the value of FL-Simulator.

    Traffic: two models down; one up under plain SGD with a constant rate, since the server then
    computes d from the models, else two. State: one more model on the server. Cost: FedAvg's.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    return build_client_momentum_algorithm(training, plan, "fedcm_alpha")


def build_client_momentum_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    weight_name: str,
    loss_and_gradient: Callable | None = None,
) -> Algorithm:
    """Return FedAvg, whose clients mix the global direction into every step, see `fedcm`.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      weight_name: name of the hyperparameter that weights the client's gradient.
      loss_and_gradient: gradient of every step, see `make_training_step`.

    Returns:
      The method.
    """
    name = training.optimizer
    assert name is not None, "clients that condense have none"

    def adjust(context, gradient, local, batch):
        hp, params, weight = context.hp, local.variables["params"], context.hp[weight_name]
        mixture = jax.tree.map(
            lambda g, d: weight * g + (1 - weight) * d, gradient, context.message.extra
        )
        direction = transform_gradient(name, training.options, hp, mixture, params)
        return mixture, jax.tree.map(jnp.add, local.aux, direction)

    base = make_local_sgd(training, adjust=adjust, loss_and_gradient=loss_and_gradient)

    def begin(context, state):
        zeros = zeros_like_params(context.hp, context.message.variables)
        return base.begin(context, state)._replace(aux=zeros)

    def end(context, local, state):
        update, state, output = base.end(context, local, state)
        num_steps = context.client.num_steps.astype(jnp.float32)
        mean = ClientMomentumUpdate(update.mean, local.aux, num_steps)
        return ClientUpdate(mean), state, output

    def init_server(hp, variables):
        return ServerMessage(variables, extra=zeros_like_params(hp, variables))

    def update_server(hp, server, client_update, counts):
        change, direction_sum, num_steps = client_update.mean
        has_trained, num_steps = counts.num_trained > 0, jnp.maximum(num_steps, 1)
        direction = jax.tree.map(
            lambda old, total: jnp.where(has_trained, total / num_steps, old),
            server.extra,
            direction_sum,
        )
        return add_mean_change(hp, server, change)._replace(extra=direction)

    def traffic(hp, state):
        model, direction = num_bytes(state.server.variables), num_bytes(state.server.extra)
        is_implied = name == "sgd" and training.options.lr_schedule is None
        return Traffic(model + direction, model if is_implied else model + direction)

    client = base._replace(begin=begin, end=end)
    return build_federated_algorithm(
        training, plan, client, init_server=init_server, update=update_server
    )._replace(traffic=traffic)


SPEC = AlgorithmSpec(
    "fedcm",
    fedcm,
    "clients mix the last global direction into their steps (Xu et al., 2021)",
    title="FedCM",
    paper="Xu, Wang, Wang and Yao, 2021, arXiv:2106.10874",
    hyperparameters=FedCMHyperParameters,
    color="#6A51A3",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
