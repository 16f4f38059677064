"""FedNova (Wang et al., NeurIPS 2020, arXiv:2007.07481)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm, model_traffic
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.core.training_variants import count_optimizer_steps
from fedjax_het.utils.errors import require

Tree = Any


class FedNovaUpdate(NamedTuple):
    """Upload of a client, averaged over the round's clients."""

    change: Tree
    "(w_i - w) / a_i; the change of batch-norm statistics is not divided."
    effective_steps: jax.Array
    "`[]` float32: a_i."


def fednova(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedNova: the server averages changes per unit of local work (Eq. 7).

    Clients with more steps then do not dominate the objective:

        w <- w + server_lr tau_eff sum_i p_i (w_i - w) / a_i,   tau_eff = sum_i p_i a_i.

    p_i are the weights of the run's `averaging`; the paper weights by samples. a_i is the sum of
    the coefficients with which client i's tau_i minibatch gradients enter its change. Plain SGD has
    a_i = tau_i. Momentum r, whose buffer starts at zero, has

        a_i = (tau_i - r (1 - r^tau_i) / (1 - r)) / (1 - r),

    and Nesterov's momentum tau_i + r times that number. tau_i counts steps of the optimizer, each
    of several minibatches if gradients are accumulated. If all clients make equally many steps,
    this is FedAvg. Batch-norm statistics are averaged as in FedAvg.

    Traffic: one model down, one up: the server knows a_i from the client's samples. State and cost:
    FedAvg's.

    Departures from the paper: the steps of Adam are no sums of gradients, and the paper does not
    treat them; here a_i is their number. The variants with a proximal term and with momentum at the
    server are left out, because other methods have them.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.

    Raises:
      ConfigError: for a learning rate that changes within a round, and for a momentum buffer that
        is kept across rounds. The formulas for a_i hold for neither.
    """
    schedule = training.options.lr_schedule
    require(schedule is None, "lr_step_schedule", schedule, "none: fednova's a_i assume one rate")
    keeps_momentum = training.optimizer in ("momentum", "nesterov") and training.keep_state
    reason = "'reset': fednova's weights assume that momentum starts at zero in each round"
    require(not keeps_momentum, "optimizer_state", "keep", reason)
    base = make_local_sgd(training)

    def end(context, local, state):
        update, state, output = base.end(context, local, state)
        steps = compute_effective_steps(training, context.hp, context.client.num_steps)
        params = jax.tree.map(lambda c: c / steps, update.mean["params"])
        mean = FedNovaUpdate({**update.mean, "params": params}, steps)
        return ClientUpdate(mean), state, output

    def update_server(hp, server, client_update, counts):
        change, steps = client_update.mean
        params = jax.tree.map(lambda c: steps * c, change["params"])
        return add_mean_change(hp, server, {**change, "params": params})

    client = base._replace(end=end)
    algorithm = build_federated_algorithm(training, plan, client, update=update_server)
    return algorithm._replace(traffic=model_traffic)


def compute_effective_steps(
    training: LocalTraining, hp: dict[str, jax.Array], num_steps: jax.Array
) -> jax.Array:
    """Compute a_i, see `fednova`.

    Args:
      training: the choices of local training, with the optimizer.
      hp: values of the hyperparameters, with `local_momentum` if the optimizer has momentum.
      num_steps: `[]` int32, minibatches of the client in the round.

    Returns:
      a_i, `[]` float32; 1 for a client without minibatches.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.fednova import compute_effective_steps
      >>> from fedjax_het.methods import LocalTraining
      >>> training = LocalTraining(task=None, optimizer="momentum")
      >>> float(compute_effective_steps(training, {"local_momentum": 0.5}, jnp.int32(2)))
      2.5
    """
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
    title="FedNova",
    paper="Wang et al., NeurIPS 2020, arXiv:2007.07481",
    color="#A6761D",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
