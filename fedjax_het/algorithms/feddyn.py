"""FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import (
    CohortCounts,
    add_mean_change,
    build_federated_algorithm,
    model_traffic,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, PositiveFloat

Tree = Any


@dataclass(frozen=True)
class FedDynHyperParameters(Config):
    feddyn_alpha: PositiveFloat = 0.01
    "Of the quadratic."


class FedDynClientState(NamedTuple):
    """What a client keeps: h_i / alpha, and its optimiser's state, if kept."""

    shift: Tree
    optimizer: Tree


def feddyn(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Client i minimises f_i(theta) - <h_i, theta> + alpha/2 ||theta - w||^2 from the model w that
    it received, by local steps along the minibatch gradient - h_i + alpha (theta - w); then

        h_i <- h_i - alpha (theta_i - w)
        h   <- h - alpha sum over the round's clients of p_i (theta_i - w)
        w   <- w + server_lr (mean of the round's theta_i - h/alpha - w), with the new h.

    alpha is `feddyn_alpha`. All h start at zero, and h stays sum_i p_i h_i over all clients that
    hold data, with the weights of the run's `averaging`, which the mean takes among the round's: in
    the paper one over their number.
    h_i and h are held divided by alpha, so that nothing is. Where all rest, theta_i = w and h = 0:
    each h_i is the gradient of f_i at w, so that w is stationary for sum_i p_i f_i. That holds for
    any server_lr; the paper's is 1. Batch-norm statistics are averaged as in FedAvg. The correction
    is applied to the raw gradient, before the optimiser. A round in which no client has data
    changes nothing.

    The public code (alpemreacar/FedDyn) differs: alpha is divided by K n_i / n of each client, the
    quadratic goes into a weight decay of 0.001 + alpha, gradients are clipped to a norm of 10, and
    the model it plots is the mean of all clients' last models, which is never broadcast. None of
    that is in the paper's Algorithm 1.

    Traffic: FedAvg's, as h stays with the server. State: one model per client, and one more on the
    server. Low participation needs a small local_lr: h is of models up to many rounds old.
    """
    base = make_local_sgd(training, adjust=_adjust_gradient)

    def init_client_state(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return FedDynClientState(zeros, base.init(hp, variables))

    def begin(context, state):
        local = base.begin(context, state.optimizer)
        return local._replace(aux=state.shift)

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        received = context.message.variables["params"]
        drift = jax.tree.map(jnp.subtract, local.variables["params"], received)
        shift = jax.tree.map(jnp.subtract, state.shift, drift)
        return client_update, FedDynClientState(shift, optimizer), output

    def init_server(hp, variables):
        return ServerMessage(variables, extra=jax.tree.map(jnp.zeros_like, variables["params"]))

    def update_server(hp, server, client_update: ClientUpdate, counts: CohortCounts):
        drift = client_update.mean["params"]  # theta_i - w
        shift = jax.tree.map(lambda h, d: h - counts.cohort_weight_share * d, server.extra, drift)
        has_trained = counts.num_trained > 0
        params = jax.tree.map(lambda mean, h: mean - jnp.where(has_trained, h, 0), drift, shift)
        server = add_mean_change(hp, server, {**client_update.mean, "params": params})
        return server._replace(extra=shift)

    client_algorithm = ClientAlgorithm(init_client_state, begin, base.step, end)
    algorithm = build_federated_algorithm(
        training, plan, client_algorithm, init_server=init_server, update=update_server
    )
    return algorithm._replace(traffic=model_traffic)


def _adjust_gradient(context, gradient, local, batch):
    """The minibatch gradient - h_i + alpha (theta - w)."""
    adjusted_gradient = jax.tree.map(
        lambda g, theta, w, shift: g + context.hp["feddyn_alpha"] * (theta - w - shift),
        gradient,
        local.variables["params"],
        context.message.variables["params"],
        local.aux,
    )
    return adjusted_gradient, local.aux


SPEC = AlgorithmSpec(
    "feddyn",
    feddyn,
    "each client's loss shifted so that all have one optimum in common (Acar et al., 2021)",
    paper="Acar et al., ICLR 2021, arXiv:2111.04263",
    hyperparameters=FedDynHyperParameters,
    color="#117733",
    server_step="own",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
