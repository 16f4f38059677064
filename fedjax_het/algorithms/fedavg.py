"""FedAvg (McMahan et al., AISTATS 2017, arXiv:1602.05629)."""

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd


def fedavg(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedAvg: the server averages the models that clients train from its own (Algorithm 1).

        w <- w + server_lr sum_k p_k (w_k - w),  w_k from local training started at w.

    p_k is uniform over the round's clients or proportional to their samples (`averaging`).
    server_lr = 1 is the published method. Batch-norm statistics are averaged like weights.

    Traffic: one model down, one up. State: none, or the optimizer's state if the run keeps it.
    Cost: one gradient per minibatch.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    return build_federated_algorithm(training, plan, make_local_sgd(training))


SPEC = AlgorithmSpec(
    "fedavg",
    fedavg,
    "average of the clients' models (McMahan et al., 2017)",
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017, arXiv:1602.05629",
    color="#0072B2",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
