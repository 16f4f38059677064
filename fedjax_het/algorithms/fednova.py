"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.building import Counts, add_mean_change, federated, model_both_ways
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.errors import require
from fedjax_het.engine.contract import Upload
from fedjax_het.engine.local import LocalTraining, local_sgd, optimizer_steps
from fedjax_het.engine.plan import Plan

Tree = Any


class NovaMean(NamedTuple):
    """What is averaged over the round's clients."""

    change: Tree  # (w_i - w) / a_i; of batch-norm statistics without a_i
    effective_steps: jax.Array  # a_i


def fednova(training: LocalTraining, plan: Plan) -> Algorithm:
    """Changes are averaged per unit of local work, so that clients with more steps do not pull the
    objective to theirs:

        w <- w + server_lr tau_eff sum_i p_i (w_i - w) / a_i,   tau_eff = sum_i p_i a_i,

    p_i the run's `averaging` (the paper's is by samples), a_i the sum of the coefficients with
    which client i's tau_i minibatch gradients enter its change: tau_i for plain SGD, and with
    momentum r, whose buffer starts at zero,

        a_i = (tau_i - r (1 - r^tau_i) / (1 - r)) / (1 - r),

    with Nesterov's momentum tau_i + r times that. tau_i are steps of the optimiser, each of several
    minibatches where gradients are accumulated.
    A buffer kept across rounds would make that wrong, so momentum with optimizer_state "keep" is a
    `ConfigError`. The paper says nothing of Adam, whose steps are no sums of gradients: a_i =
    tau_i, the number of its steps. Where all make equally many steps this is FedAvg. Batch-norm
    statistics are averaged as in FedAvg. The paper's other variants (a proximal term, momentum at
    the server) are left out. Traffic: FedAvg's: the server knows a_i from the client's samples.
    """
    schedule = training.details.schedule
    require(schedule is None, "lr_step_schedule", schedule, "none: fednova's a_i are of one rate")
    require(
        not (training.optimizer in ("momentum", "nesterov") and training.keep_state),
        "optimizer_state",
        "keep",
        "'reset': fednova's weights are of momentum that starts at zero each round",
    )
    base = local_sgd(training)

    def end(hp, broadcast, local, state, client):
        upload, state, output = base.end(hp, broadcast, local, state, client)
        work = accumulated(training, hp, client.num_steps)
        params = jax.tree.map(lambda c: c / work, upload.mean["params"])
        return Upload(NovaMean({**upload.mean, "params": params}, work)), state, output

    def update(hp, server, upload: Upload, counts: Counts):
        mean: NovaMean = upload.mean
        params = jax.tree.map(lambda c: mean.effective_steps * c, mean.change["params"])
        return add_mean_change(hp, server, {**mean.change, "params": params})

    client = base._replace(end=end)
    return federated(training, plan, client, update=update)._replace(traffic=model_both_ways)


def accumulated(training: LocalTraining, hp, num_steps: jax.Array) -> jax.Array:
    """a_i after this many minibatches; 1 where there are none."""
    steps = jnp.maximum(optimizer_steps(training, num_steps), 1).astype(jnp.float32)
    if training.optimizer not in ("momentum", "nesterov"):
        return steps
    r = hp["local_momentum"]
    heavy = (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
    return heavy if training.optimizer == "momentum" else steps + r * heavy


ENTRY = Entry(
    "fednova",
    fednova,
    "FedAvg of changes per unit of local work (Wang et al., 2020)",
    paper="Wang et al., NeurIPS 2020, arXiv:2007.07481",
    colour="#A6761D",
    refinable="model",
    scored=("global", "client"),
)
