"""q-FedAvg (Li, Sanjabi, Beirami and Smith, ICLR 2020, arXiv:1905.10497)."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm
from fedjax_het.algorithms.measuring_passes import compute_batch_weight, with_measuring_passes
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.core.training_variants import require_constant_lr
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange

Tree = Any
_MIN_LOSS = 1e-10  # added to losses, as in litian96/fair_flearn
_MIN_DIVISOR = 1e-30  # of rounds in which all powers of losses are 0 in float32


@dataclass(frozen=True)
class QFedAvgHyperParameters(Config):
    """Hyperparameters of q-FedAvg."""

    qfedavg_q: Annotated[NonNegativeFloat, SearchRange(0.0001, 1)] = 0.001
    "Exponent of the clients' losses; a larger number makes losses more equal; 0 is FedAvg."


class QFedAvgUpdate(NamedTuple):
    """Upload of a client, averaged over the round's clients."""

    change: Tree
    "F_k^q D_k; the change of batch-norm statistics is not multiplied."
    divisor: jax.Array
    "`[]` float32: local_lr h_k."


def qfedavg(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """q-FedAvg: clients with larger losses weigh more in the server's step (Algorithm 2).

        D_k = w_k - w,  h_k = q F_k^(q - 1) ||D_k||^2 / local_lr^2 + F_k^q / local_lr,
        w <- w + server_lr sum_k p_k (F_k^q D_k / local_lr) / sum_k p_k h_k.

    F_k is the loss of client k over its data at the received model w, in evaluation mode. It is
    measured in a pass before local training. q is `qfedavg_q`. The steps approximate descent on
    sum_k p_k F_k^(q + 1) / (q + 1). 1 / local_lr is the paper's estimate of a Lipschitz constant,
    from which h_k follows. q 0 is FedAvg.

    p_k are the weights of the run's `averaging`. The paper adds up clients that it samples with
    probability p_k; its code samples uniformly and has equal weights, as `averaging` uniform.
    server_lr is 1 in the paper. Batch-norm statistics are averaged as in FedAvg. If all F_k^q are 0
    in float32, the round makes no step. The reported training loss includes the measuring pass.

    The paper tunes q for each task: 5 for Vehicle, 1 for synthetic data and Sent140, 0.001 for
    Shakespeare, which is the default. A larger q shortens the server's steps, in particular with
    momentum: local changes are then up to 1 / (1 - momentum) times as long as the estimate assumes.
    Final accuracy in percent, mean of five seeds, digits, `mlp`, alpha 0.1, participation 0.5, 30
    rounds of 5 epochs:

    | local_optimizer, local_lr | q = 0 | 0.001 | 0.01 | 0.1 | 1 |
    |---|---:|---:|---:|---:|---:|
    | sgd, 0.1 | 87.2 | 87.2 | 87.0 | 85.5 | 62.6 |
    | momentum, 0.01 | 86.5 | 86.1 | 82.0 | 50.9 | 17.5 |

    Traffic: one model down, one and a number up. State: FedAvg's. Cost: FedAvg's and a measuring
    pass.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.

    Raises:
      ConfigError: for a learning rate that changes within a round or is not known.
    """
    require_constant_lr(training, "qfedavg's server divides by this rate")
    base = make_local_sgd(training)

    def begin(context, state):
        return base.begin(context, state)._replace(aux=jnp.zeros(()))

    def measure(context, local, batch):
        loss, _, _ = training.task.loss_and_gradient(local.variables, batch, None, train=False)
        weight = compute_batch_weight(batch, context.client)
        return (local.aux + weight * loss).astype(local.aux.dtype), loss

    def end(context, local, state):
        update, state, output = base.end(context, local, state)
        change, loss, q = update.mean, local.aux + _MIN_LOSS, context.hp["qfedavg_q"]
        scale, lr = loss**q, jnp.maximum(context.hp["local_lr"], _MIN_DIVISOR)
        squared_norm = optax.tree.norm(change["params"], squared=True)
        divisor = q * loss ** (q - 1) * squared_norm / lr + scale
        params = jax.tree.map(lambda d: scale * d, change["params"])
        return ClientUpdate(QFedAvgUpdate({**change, "params": params}, divisor)), state, output

    def update_server(hp, server, client_update, counts):
        change, divisor = client_update.mean
        divisor = jnp.maximum(divisor, _MIN_DIVISOR)
        params = jax.tree.map(lambda d: d / divisor, change["params"])
        return add_mean_change(hp, server, {**change, "params": params})

    client = base._replace(begin=begin, end=end)
    client = with_measuring_passes(client, training, measure, num_before=1)
    return build_federated_algorithm(training, plan, client, update=update_server)


SPEC = AlgorithmSpec(
    "qfedavg",
    qfedavg,
    "clients with larger losses weigh more in the server's step (Li et al., 2020)",
    title="q-FedAvg",
    paper="Li, Sanjabi, Beirami and Smith, ICLR 2020, arXiv:1905.10497",
    hyperparameters=QFedAvgHyperParameters,
    color="#35978F",
    server_step="own",
    wrappable_as="model",
    evaluated_models=("global", "client"),
)
