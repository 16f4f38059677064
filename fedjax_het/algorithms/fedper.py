"""FedPer (Arivazhagan et al., 2019, arXiv:1912.00818)."""

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.local_parameters import HeadOptions, select_head
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd


def fedper(training: LocalTraining, plan: ExecutionPlan, *, options: HeadOptions) -> Algorithm:
    """FedPer: FedAvg of the body, while every client keeps its own head (Algorithms 1 and 2).

        (theta_k, h_k) = LocalSGD(theta, h_k),
        theta <- theta + server_lr sum_k p_k (theta_k - theta).

    theta is the body and h_k the head of client k, by default the last fully connected layer. Body
    and head are trained together. All heads start at the head of the initial network.

    Evaluated: (theta, h_k) on the own test of client k. There is no global model.

    Traffic: the body each way. State: the head of every client. Cost: FedAvg's.

    Departures from the paper: it averages with weights n_k / n over all clients; here the run sets
    weights and participation. Its clients draw their own heads; here they share one draw, as in
    PFLlib.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the layers of the head.

    Returns:
      The method.
    """
    return build_federated_algorithm(training, plan, make_local_sgd(training))


SPEC = AlgorithmSpec(
    "fedper",
    fedper,
    "FedAvg of the body, clients keep their heads (Arivazhagan et al., 2019)",
    title="FedPer",
    paper="Arivazhagan et al., 2019, arXiv:1912.00818",
    options=HeadOptions,
    color="#00695C",
    local_parameters=select_head,
    has_global_model=False,
    evaluated_models=("personal",),
)
