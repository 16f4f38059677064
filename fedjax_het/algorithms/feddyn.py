"""FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263)."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, model_traffic
from fedjax_het.algorithms.client_state import with_client_memory, zeros_like_params
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, PositiveFloat, SearchRange


@dataclass(frozen=True)
class FedDynHyperParameters(Config):
    """Hyperparameters of FedDyn."""

    feddyn_alpha: Annotated[PositiveFloat, SearchRange(0.001, 0.1)] = 0.01
    "Weight of the quadratic pull to the received model."


def feddyn(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedDyn: linear terms make the optima of all clients agree (Algorithm 1).

    Client i minimizes f_i(theta) - <h_i, theta> + alpha/2 ||theta - w||^2 from the received model
    w. Its local steps go along the minibatch gradient - h_i + alpha (theta - w). Then

        h_i <- h_i - alpha (theta_i - w)
        h   <- h - alpha sum over the round's clients of p_i (theta_i - w)
        w   <- w + server_lr (mean of the round's theta_i - h/alpha - w), with the new h.

    alpha is `feddyn_alpha`. All h start at zero. h stays sum_i p_i h_i over all clients that hold
    data. p_i are the weights of the run's `averaging`; the paper's weights are one over the number
    of clients. h_i and h are stored divided by alpha. At rest theta_i = w and h = 0: each h_i is
    the gradient of f_i at w, so w is stationary for sum_i p_i f_i. That holds for any server_lr;
    the paper has server_lr 1. Batch-norm statistics are averaged as in FedAvg. The correction is
    applied to the raw gradient, before the optimizer. A round in which no client has data changes
    nothing. Low participation needs a small local_lr, because h contains changes from many rounds
    ago.

    Traffic: one model down, one up. State: one model per client, one more on the server. Cost:
    FedAvg's.

    The method follows Algorithm 1. The public code (alpemreacar/FedDyn) divides alpha by K n_i / n
    of each client, and clips gradients to a norm of 10. It moves the quadratic into a weight decay
    of 0.001 + alpha. It plots the mean of all clients' last models, which it never broadcasts.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def adjust(context, gradient, local, batch):
        alpha, received = context.hp["feddyn_alpha"], context.message.variables["params"]
        adjusted = jax.tree.map(
            lambda g, theta, w, shift: g + alpha * (theta - w - shift),
            gradient,
            local.variables["params"],
            received,
            local.aux,
        )
        return adjusted, local.aux

    def end(context, local, shift, update):
        received = context.message.variables["params"]
        drift = jax.tree.map(jnp.subtract, local.variables["params"], received)
        return update, jax.tree.map(jnp.subtract, shift, drift)

    def init_server(hp, variables):
        return ServerMessage(variables, extra=zeros_like_params(hp, variables))

    def update_server(hp, server, client_update, counts):
        drift, share = client_update.mean["params"], counts.cohort_weight_share
        shift = jax.tree.map(lambda h, d: h - share * d, server.extra, drift)
        has_trained = counts.num_trained > 0
        params = jax.tree.map(lambda mean, h: mean - jnp.where(has_trained, h, 0), drift, shift)
        server = add_mean_change(hp, server, {**client_update.mean, "params": params})
        return server._replace(extra=shift)

    client = with_client_memory(
        make_local_sgd(training, adjust=adjust),
        init=zeros_like_params,  # h_i / alpha
        begin=lambda context, shift: shift,
        end=end,
    )
    return build_federated_algorithm(
        training, plan, client, init_server=init_server, update=update_server
    )._replace(traffic=model_traffic)


SPEC = AlgorithmSpec(
    "feddyn",
    feddyn,
    "linear terms in the clients' losses give all clients one optimum (Acar et al., 2021)",
    title="FedDyn",
    paper="Acar et al., ICLR 2021, arXiv:2111.04263",
    hyperparameters=FedDynHyperParameters,
    color="#117733",
    server_step="own",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
