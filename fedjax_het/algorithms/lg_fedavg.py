"""LG-FedAvg (Liang et al., 2020, arXiv:2001.01523)."""

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.local_parameters import HeadOptions, select_body
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd


def lg_fedavg(training: LocalTraining, plan: ExecutionPlan, *, options: HeadOptions) -> Algorithm:
    """LG-FedAvg: FedAvg of the head, while every client keeps its own body (Algorithm 1).

        (theta_k, h_k) = LocalSGD(theta_k, h),
        h <- h + server_lr sum_k p_k (h_k - h).

    theta_k is the body of client k and h the head, by default the last fully connected layer. Body
    and head are trained together. All bodies start at the body of the initial network.

    Evaluated: (theta_k, h) on the own test of client k. There is no global model.

    Traffic: the head each way. State: the body of every client. Cost: FedAvg's.

    Departures from the paper: it averages with weights n_k / n; here the run sets weights. The
    paper's auxiliary losses of the local representations, such as adversarial fairness, are left
    out, as in PFLlib. The paper evaluates new devices by an ensemble of all local models; here only
    clients are evaluated. The authors' code starts from a model of FedAvg, which `init_from` loads,
    and shares the last two or three layers, which `head_layers` names.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the layers of the head.

    Returns:
      The method.
    """
    return build_federated_algorithm(training, plan, make_local_sgd(training))


SPEC = AlgorithmSpec(
    "lg_fedavg",
    lg_fedavg,
    "FedAvg of the head, clients keep their bodies (Liang et al., 2020)",
    title="LG-FedAvg",
    paper="Liang et al., 2020, arXiv:2001.01523",
    options=HeadOptions,
    color="#7F8FA9",
    local_parameters=select_body,
    has_global_model=False,
    evaluated_models=("personal",),
)
