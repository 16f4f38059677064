"""FedAvg (McMahan et al., AISTATS 2017, arXiv:1602.05629)."""

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry
from fedjax_het.engine.local import LocalTraining, local_sgd
from fedjax_het.engine.plan import Plan


def fedavg(training: LocalTraining, plan: Plan) -> Algorithm:
    """w <- w + server_lr * sum_k p_k (w_k - w), with w_k from local training started at w.

    p_k is uniform over the round's clients or proportional to their samples (`averaging`);
    server_lr = 1 is the published method. Traffic: one model each way.
    """
    return federated(training, plan, local_sgd(training))


ENTRY = Entry(
    "fedavg",
    fedavg,
    "average of the clients' models (McMahan et al., 2017)",
    paper="McMahan et al., AISTATS 2017, arXiv:1602.05629",
    colour="#0072B2",
    refinable="average",
    scored=("global", "client"),
)
