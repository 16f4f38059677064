"""FedDC (Gao et al., CVPR 2022, arXiv:2203.11751)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import Counts, add_mean_change, federated, num_bytes
from fedjax_het.algorithms.contract import Algorithm, Traffic
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.records import NonNegative, Record
from fedjax_het.engine.contract import ClientMethod, Upload
from fedjax_het.engine.local import Broadcast, LocalTraining, local_sgd
from fedjax_het.engine.plan import Plan

Tree = Any


@dataclass(frozen=True)
class FedDCNumbers(Record):
    feddc_alpha: NonNegative = 0.01
    "Of the quadratic."


class FedDCClient(NamedTuple):
    """What a client keeps: its drift h_i, its gradient g_i, and its optimiser's state, if kept."""

    drift: Tree
    gradient: Tree
    optimizer: Tree


class FedDCServer(NamedTuple):
    """The means of all K clients' h_i and g_i."""

    drift: Tree
    gradient: Tree


class FedDCChange(NamedTuple):
    """What a client sends: how its model and its g_i changed."""

    model: Tree
    gradient: Tree


class _Training(NamedTuple):
    """A client's state during a round, and the g_i that it is measuring for the next."""

    drift: Tree
    gradient: Tree
    next: Tree


def feddc(training: LocalTraining, plan: Plan) -> Algorithm:
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
    base = local_sgd(training, adjust=_correct)

    def init_client(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return FedDCClient(zeros, zeros, base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state.optimizer, client)
        zeros = jax.tree.map(jnp.zeros_like, state.gradient)
        return local._replace(memory=_Training(state.drift, state.gradient, zeros))

    def end(hp, broadcast, local, state, client):
        upload, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        drift = jax.tree.map(jnp.subtract, local.variables["params"], broadcast.variables["params"])
        gradient = local.memory.next
        moved = jax.tree.map(jnp.subtract, gradient, state.gradient)
        kept = FedDCClient(jax.tree.map(jnp.add, state.drift, drift), gradient, optimizer)
        return Upload(mean=FedDCChange(upload.mean, moved)), kept, output

    def init(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return Broadcast(variables, extra=FedDCServer(zeros, zeros))

    def update(hp, server, upload: Upload, counts: Counts):
        model, moved = upload.mean
        drift, gradient = (
            jax.tree.map(lambda mean, new: mean + counts.share * new, old, of_round)
            for old, of_round in zip(server.extra, (model["params"], moved), strict=True)
        )
        anyone = counts.trained > 0
        params = jax.tree.map(
            lambda mean, h: mean + jnp.where(anyone, h, 0), model["params"], drift
        )
        server = add_mean_change(hp, server, {**model, "params": params})
        return server._replace(extra=FedDCServer(drift, gradient))

    def traffic(hp, state):
        variables = state.server.variables
        both = num_bytes(variables) + num_bytes(variables["params"])
        return Traffic(both, both)

    client = ClientMethod(init_client, begin, base.step, end)
    return federated(training, plan, client, init=init, update=update)._replace(traffic=traffic)


def _correct(hp, gradient, local, broadcast, batch, client):
    """The slope of f_i and the quadratic, to be measured; and that plus g - g_i, to be taken."""
    memory: _Training = local.memory
    slope = jax.tree.map(
        lambda g, theta, w, h: g + hp["feddc_alpha"] * (theta - w + h),
        gradient,
        local.variables["params"],
        broadcast.variables["params"],
        memory.drift,
    )
    share = 1 / client.num_steps
    measured = jax.tree.map(lambda total, s: total + share * s, memory.next, slope)
    corrected = jax.tree.map(
        lambda s, own, g: s - own + g, slope, memory.gradient, broadcast.extra.gradient
    )
    return corrected, memory._replace(next=measured)


ENTRY = Entry(
    "feddc",
    feddc,
    "clients' drift is learned and taken off, besides control variates (Gao et al., 2022)",
    paper="Gao et al., CVPR 2022, arXiv:2203.11751",
    numbers=FedDCNumbers,
    colour="#66C2A5",
    server_step="own",
    refinable="average",
    scored=("global", "client"),
)
