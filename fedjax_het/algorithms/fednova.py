"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481)."""

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
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, count_optimizer_steps, make_local_sgd
from fedjax_het.utils.errors import require

Tree = Any


class FedNovaUpdate(NamedTuple):
    """What is averaged over the round's clients."""

    change: Tree  # (w_i - w) / a_i; of batch-norm statistics without a_i
    effective_steps: jax.Array  # a_i


def fednova(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
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
    schedule = training.options.lr_schedule
    require(schedule is None, "lr_step_schedule", schedule, "none: fednova's a_i are of one rate")
    require(
        not (training.optimizer in ("momentum", "nesterov") and training.keep_state),
        "optimizer_state",
        "keep",
        "'reset': fednova's weights are of momentum that starts at zero each round",
    )
    base = make_local_sgd(training)

    def end(context, local, state):
        client_update, state, output = base.end(context, local, state)
        effective_steps = compute_effective_steps(training, context.hp, context.client.num_steps)
        params = jax.tree.map(lambda c: c / effective_steps, client_update.mean["params"])
        return (
            ClientUpdate(FedNovaUpdate({**client_update.mean, "params": params}, effective_steps)),
            state,
            output,
        )

    def update_server(hp, server, client_update: ClientUpdate, counts: CohortCounts):
        mean: FedNovaUpdate = client_update.mean
        params = jax.tree.map(lambda c: mean.effective_steps * c, mean.change["params"])
        return add_mean_change(hp, server, {**mean.change, "params": params})

    client_algorithm = base._replace(end=end)
    return build_federated_algorithm(
        training, plan, client_algorithm, update=update_server
    )._replace(traffic=model_traffic)


def compute_effective_steps(training: LocalTraining, hp, num_steps: jax.Array) -> jax.Array:
    """a_i after this many minibatches; 1 where there are none."""
    steps = jnp.maximum(count_optimizer_steps(training, num_steps), 1).astype(jnp.float32)
    if training.optimizer not in ("momentum", "nesterov"):
        return steps
    r = hp["local_momentum"]
    momentum_steps = (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
    return momentum_steps if training.optimizer == "momentum" else steps + r * momentum_steps


SPEC = AlgorithmSpec(
    "fednova",
    fednova,
    "FedAvg of changes per unit of local work (Wang et al., 2020)",
    paper="Wang et al., NeurIPS 2020, arXiv:2007.07481",
    color="#A6761D",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
