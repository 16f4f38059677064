"""FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, Traffic, add_mean_change, federated, num_bytes
from fedjax_het.common.errors import require
from fedjax_het.engine.lanes import ClientMethod
from fedjax_het.engine.local import Broadcast, LocalTraining, local_sgd
from fedjax_het.engine.plan import Plan

Tree = Any

FEDDYN_HP = {"feddyn_alpha": 0.01}


class FedDynClient(NamedTuple):
    """What a client keeps: h_i / alpha, and its optimiser's state, if kept."""

    shift: Tree
    optimizer: Tree


class FedDynUpload(NamedTuple):
    """Summed over the round's clients, of which each sends its model."""

    change: Tree  # weight * (theta_i - w), over all variables
    drift: Tree  # theta_i - w, of the parameters
    weight: jax.Array  # 1 in total; 0 where no client has taken part


def feddyn(training: LocalTraining, plan: Plan) -> Algorithm:
    """Client i minimises f_i(theta) - <h_i, theta> + alpha/2 ||theta - w||^2 from the model w that
    it received, by local steps along the minibatch gradient - h_i + alpha (theta - w); then, with
    K clients of which S have trained,

        h_i <- h_i - alpha (theta_i - w)
        h   <- h - alpha/K sum over the S of (theta_i - w)
        w   <- w + server_lr (mean of the S theta_i - h/alpha - w), with the new h.

    alpha is `feddyn_alpha`. All h start at zero, and h stays the mean of all K h_i. h_i and h are
    held divided by alpha, so that nothing is. Where all rest, theta_i = w and h = 0: each h_i is
    the gradient of f_i at w, whose mean is 0, so that w is stationary for the mean of the f_i.
    That holds for any server_lr; the paper's is 1. The mean of the theta_i takes the run's
    `averaging`, of which the paper has "uniform"; h counts clients alike in any case, without which
    it would not be the mean of the h_i. Batch-norm statistics are averaged as in FedAvg. The
    correction is applied to the raw gradient, before the optimiser. A round in which no client has
    data changes nothing.

    The public code (alpemreacar/FedDyn) differs: alpha is divided by K n_i / n of each client, the
    quadratic goes into a weight decay of 0.001 + alpha, gradients are clipped to a norm of 10, and
    the model it plots is the mean of all clients' last models, which is never broadcast. None of
    that is in the paper's Algorithm 1.

    Traffic: FedAvg's, as h stays with the server. State: one model per client, and one more on the
    server. Low participation needs a small local_lr: h is of models up to many rounds old.
    """
    base = local_sgd(training, adjust=_pull)

    def init_client(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return FedDynClient(zeros, base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state.optimizer, client)
        return local._replace(memory=state.shift)

    def end(hp, broadcast, local, state, client):
        change, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        received = broadcast.variables["params"]
        drift = jax.tree.map(jnp.subtract, local.variables["params"], received)
        shift = jax.tree.map(jnp.subtract, state.shift, drift)
        return FedDynUpload(change, drift, client.weight), FedDynClient(shift, optimizer), output

    def init(hp, variables):
        return Broadcast(variables, extra=jax.tree.map(jnp.zeros_like, variables["params"]))

    def update(hp, server, upload: FedDynUpload, num_clients):
        shift = jax.tree.map(lambda h, d: h - d / num_clients, server.extra, upload.drift)
        anyone = upload.weight > 0
        params = jax.tree.map(
            lambda mean, h: mean - jnp.where(anyone, h, 0), upload.change["params"], shift
        )
        server = add_mean_change(hp, server, {**upload.change, "params": params}, num_clients)
        return server._replace(extra=shift)

    def traffic(hp, state):
        model = num_bytes(state.server.variables)
        return Traffic(model, model)

    client = ClientMethod(init_client, begin, base.step, end)
    return federated(training, plan, client, init=init, update=update)._replace(traffic=traffic)


def check_feddyn_hp(hp: dict[str, float]) -> None:
    """Raise ConfigError unless alpha is positive."""
    require(hp["feddyn_alpha"] > 0, "hp feddyn_alpha", hp["feddyn_alpha"], "a number > 0")


def _pull(hp, gradient, local, broadcast, batch, client):
    """The minibatch gradient - h_i + alpha (theta - w)."""
    pulled = jax.tree.map(
        lambda g, theta, w, shift: g + hp["feddyn_alpha"] * (theta - w - shift),
        gradient,
        local.variables["params"],
        broadcast.variables["params"],
        local.memory,
    )
    return pulled, local.memory
