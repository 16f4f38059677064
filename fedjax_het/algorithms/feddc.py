"""FedDC (Gao et al., CVPR 2022, arXiv:2203.11751)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic
from fedjax_het.algorithms.builders import (
    CohortCounts,
    add_mean_change,
    build_federated_algorithm,
    num_bytes,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, NonNegativeFloat

Tree = Any


@dataclass(frozen=True)
class FedDCHyperParameters(Config):
    feddc_alpha: NonNegativeFloat = 0.01
    "Of the quadratic."


class FedDCClientState(NamedTuple):
    """What a client keeps: its drift h_i, its gradient g_i, and its optimiser's state, if kept."""

    drift: Tree
    gradient: Tree
    optimizer: Tree


class FedDCServerState(NamedTuple):
    """The means of all K clients' h_i and g_i."""

    drift: Tree
    gradient: Tree


class FedDCUpdate(NamedTuple):
    """What a client sends: how its model and its g_i changed."""

    model: Tree
    gradient: Tree


class _FedDCAux(NamedTuple):
    """A client's state during a round, and the g_i that it is measuring for the next."""

    drift: Tree
    gradient: Tree
    next_gradient: Tree


def feddc(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Client i minimises f_i(theta) + alpha/2 ||theta - (w - h_i)||^2 + <theta, g - g_i> from the
    model w that it received, h_i being how far its models have drifted so far; then

        h_i <- h_i + theta_i - w,    g_i <- g_i - g + (w - theta_i) / (tau_i local_lr),
        w   <- w + server_lr (mean of the round's theta_i + mean of all K h_i - w),

    with the new h_i, and g the mean of all K g_i, all three means by the weights of the run's
    `averaging` (of all clients, or of the round's among themselves). All start at zero. Under SGD
    the new g_i is the mean of the round's tau_i slopes of f_i and the quadratic, without
    <theta, g - g_i>; that is what is measured here, since it also makes sense under Adam (as in
    `scaffold`). The slope is corrected before the optimiser.

    alpha 0.01 as in the public code (gaoliang13/FedDC), whose other settings are not part of the
    method: alpha and g scaled by each client's share of the samples, which is left out, and a
    weight decay of 0.001, gradients clipped to a norm of 10 and local_lr times 0.998 each round,
    which are local_weight_decay, local_clip_norm and lr_schedule exponential. Batch-norm statistics
    are averaged as in FedAvg. A round in which no client has data changes nothing.

    Traffic: twice FedAvg's, w and g down, theta_i and g_i up. State: two models per client, and
    two more on the server.
    """
    base = make_local_sgd(training, adjust=_adjust_gradient)

    def init_client_state(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return FedDCClientState(zeros, zeros, base.init(hp, variables))

    def begin(context, state):
        local = base.begin(context, state.optimizer)
        zeros = jax.tree.map(jnp.zeros_like, state.gradient)
        return local._replace(aux=_FedDCAux(state.drift, state.gradient, zeros))

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        drift = jax.tree.map(
            jnp.subtract, local.variables["params"], context.message.variables["params"]
        )
        gradient = local.aux.next_gradient
        gradient_change = jax.tree.map(jnp.subtract, gradient, state.gradient)
        client_state = FedDCClientState(
            jax.tree.map(jnp.add, state.drift, drift), gradient, optimizer
        )
        return (
            ClientUpdate(mean=FedDCUpdate(client_update.mean, gradient_change)),
            client_state,
            output,
        )

    def init_server(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return ServerMessage(variables, extra=FedDCServerState(zeros, zeros))

    def update_server(hp, server, client_update: ClientUpdate, counts: CohortCounts):
        model, gradient_change = client_update.mean
        drift, gradient = (
            jax.tree.map(lambda mean, new: mean + counts.cohort_weight_share * new, old, round_mean)
            for old, round_mean in zip(
                server.extra, (model["params"], gradient_change), strict=True
            )
        )
        has_trained = counts.num_trained > 0
        params = jax.tree.map(
            lambda mean, h: mean + jnp.where(has_trained, h, 0), model["params"], drift
        )
        server = add_mean_change(hp, server, {**model, "params": params})
        return server._replace(extra=FedDCServerState(drift, gradient))

    def traffic(hp, state):
        variables = state.server.variables
        model_and_gradient_bytes = num_bytes(variables) + num_bytes(variables["params"])
        return Traffic(model_and_gradient_bytes, model_and_gradient_bytes)

    client_algorithm = ClientAlgorithm(init_client_state, begin, base.step, end)
    return build_federated_algorithm(
        training, plan, client_algorithm, init_server=init_server, update=update_server
    )._replace(traffic=traffic)


def _adjust_gradient(context, gradient, local, batch):
    """The slope of f_i and the quadratic, to be measured; and that plus g - g_i, to be taken."""
    aux: _FedDCAux = local.aux
    unadjusted_gradient = jax.tree.map(
        lambda g, theta, w, h: g + context.hp["feddc_alpha"] * (theta - w + h),
        gradient,
        local.variables["params"],
        context.message.variables["params"],
        aux.drift,
    )
    step_weight = 1 / context.client.num_steps
    next_gradient = jax.tree.map(
        lambda total, s: total + step_weight * s, aux.next_gradient, unadjusted_gradient
    )
    adjusted_gradient = jax.tree.map(
        lambda s, client_gradient, g: s - client_gradient + g,
        unadjusted_gradient,
        aux.gradient,
        context.message.extra.gradient,
    )
    return adjusted_gradient, aux._replace(next_gradient=next_gradient)


SPEC = AlgorithmSpec(
    "feddc",
    feddc,
    "clients' drift is learned and taken off, besides control variates (Gao et al., 2022)",
    paper="Gao et al., CVPR 2022, arXiv:2203.11751",
    hyperparameters=FedDCHyperParameters,
    color="#66C2A5",
    server_step="own",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
