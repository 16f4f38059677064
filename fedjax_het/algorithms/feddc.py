"""FedDC (Gao et al., CVPR 2022, arXiv:2203.11751)."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, num_bytes
from fedjax_het.algorithms.client_state import with_client_memory, zeros_like_params
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.training_variants import measure_applied_gradient
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange

Tree = Any


@dataclass(frozen=True)
class FedDCHyperParameters(Config):
    """Hyperparameters of FedDC."""

    feddc_alpha: Annotated[NonNegativeFloat, SearchRange(0.001, 0.1)] = 0.01
    "Weight of the quadratic pull to the received model less the client's drift."


class DriftAndGradient(NamedTuple):
    """h_i and g_i of a client, or their means over all K clients, which the server stores."""

    drift: Tree
    gradient: Tree


class FedDCUpdate(NamedTuple):
    """Upload of a client: the changes of its model and of g_i."""

    model: Tree
    gradient: Tree


class _FedDCAux(NamedTuple):
    """State of a client in a round, and the g_i that it measures for the next."""

    drift: Tree
    gradient: Tree
    next_gradient: Tree


def feddc(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedDC: clients learn their drift, and the server subtracts it (Algorithm 1).

    Client i minimizes f_i(theta) + alpha/2 ||theta - (w - h_i)||^2 + <theta, g - g_i> from the
    received model w. h_i is the drift of its models so far. Then

        h_i <- h_i + theta_i - w,    g_i <- g_i - g + (w - theta_i) / (tau_i local_lr),
        w   <- w + server_lr (mean of the round's theta_i + mean of all K h_i - w),

    with the new h_i. g is the mean of all K g_i. All three means have the weights of the run's
    `averaging`, normalized over all clients or over the round's clients. All states start at zero.
    Under plain SGD the new g_i is the mean of the round's tau_i gradients of f_i and the quadratic
    term, without <theta, g - g_i>. This package measures that mean, because it is also valid under
    Adam. `local_weight_decay` and clipping are part of w - theta_i: with the corrected gradient d,
    the mean is of clip(d) + decay theta - (g - g_i). With `gradient_accumulation` it clips each
    minibatch alone. Decay that an optimizer decouples is not part of it. The gradient is corrected
    before clipping, decay and the optimizer. Batch-norm statistics are averaged as in FedAvg. A
    round in which no client has data changes nothing.

    Traffic: w and g down, theta_i and g_i up. State: two models per client, two more on the server.
    Cost: FedAvg's.

    alpha is 0.01 as in the public code (gaoliang13/FedDC). Other settings of that code are not part
    of the method. The code scales alpha and g by each client's share of the samples. The code has a
    weight decay of 0.001 (`local_weight_decay`), clips gradients to a norm of 10
    (`local_clip_norm`) and multiplies local_lr by 0.998 each round (`lr_schedule` exponential).

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def init(hp, variables):
        zeros = zeros_like_params(hp, variables)
        return DriftAndGradient(zeros, zeros)

    def begin(context, memory):
        zeros = jax.tree.map(jnp.zeros_like, memory.gradient)
        return _FedDCAux(memory.drift, memory.gradient, zeros)

    def end(context, local, memory, update):
        received, gradient = context.message.variables["params"], local.aux.next_gradient
        drift = jax.tree.map(jnp.subtract, local.variables["params"], received)
        change = jax.tree.map(jnp.subtract, gradient, memory.gradient)
        new_memory = DriftAndGradient(jax.tree.map(jnp.add, memory.drift, drift), gradient)
        return ClientUpdate(FedDCUpdate(update.mean, change)), new_memory

    def init_server(hp, variables):
        return ServerMessage(variables, extra=init(hp, variables))

    def update_server(hp, server, client_update, counts):
        (model, change), share = client_update.mean, counts.cohort_weight_share
        drift, gradient = (
            jax.tree.map(lambda mean, d: mean + share * d, old, round_mean)
            for old, round_mean in zip(server.extra, (model["params"], change), strict=True)
        )
        is_any = counts.num_trained > 0
        params = jax.tree.map(lambda m, h: m + jnp.where(is_any, h, 0), model["params"], drift)
        server = add_mean_change(hp, server, {**model, "params": params})
        return server._replace(extra=DriftAndGradient(drift, gradient))

    def traffic(hp, state):
        variables = state.server.variables
        size = num_bytes(variables) + num_bytes(variables["params"])
        return Traffic(size, size)

    base = make_local_sgd(training, adjust=partial(_adjust_gradient, training))
    client = with_client_memory(base, init=init, begin=begin, end=end)
    return build_federated_algorithm(
        training, plan, client, init_server=init_server, update=update_server
    )._replace(traffic=traffic)


def _adjust_gradient(training: LocalTraining, context, gradient, local, batch):
    """Measure the slope of f_i and the quadratic; step along it plus g - g_i."""
    drift, client_gradient, next_gradient = local.aux
    alpha, weight = context.hp["feddc_alpha"], 1 / context.client.num_steps
    slope = jax.tree.map(
        lambda g, theta, w, h: g + alpha * (theta - w + h),
        gradient,
        local.variables["params"],
        context.message.variables["params"],
        drift,
    )
    server_gradient = context.message.extra.gradient
    corrected = jax.tree.map(lambda s, g_i, g: s - g_i + g, slope, client_gradient, server_gradient)
    params = local.variables["params"]
    measured = measure_applied_gradient(training, context.hp, params, slope, corrected)
    next_gradient = jax.tree.map(lambda total, s: total + weight * s, next_gradient, measured)
    return corrected, _FedDCAux(drift, client_gradient, next_gradient)


SPEC = AlgorithmSpec(
    "feddc",
    feddc,
    "clients learn their drift and correct it, with control variates (Gao et al., 2022)",
    title="FedDC",
    paper="Gao et al., CVPR 2022, arXiv:2203.11751",
    hyperparameters=FedDCHyperParameters,
    color="#66C2A5",
    server_step="own",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
