"""FedProx (Li et al., MLSys 2020, arXiv:1812.06127)."""

from dataclasses import dataclass

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.common.records import NonNegative, Record
from fedjax_het.engine.local import LocalTraining, local_sgd, pulled
from fedjax_het.engine.plan import Plan


@dataclass(frozen=True)
class FedProxNumbers(Record):
    prox_mu: NonNegative = 0.002
    "Of the pull to the model received."


def fedprox(training: LocalTraining, plan: Plan) -> Algorithm:
    """Clients minimise F_k(w) + (prox_mu / 2) ||w - w_t||^2, w_t the model they received.

    The pull prox_mu * (w - w_t) is added to the gradient, so an adaptive optimiser rescales it
    with the gradient, as in DynaFed's code (which writes lambda ||w - w_t||^2: prox_mu =
    2 lambda). prox_mu = 0 is FedAvg. Stragglers that do fewer epochs are not modelled.
    """

    def pull(hp, gradient, local, broadcast, batch, client):
        here, anchor = (part.variables["params"] for part in (local, broadcast))
        return pulled(gradient, here, anchor, hp["prox_mu"]), ()

    return federated(training, plan, local_sgd(training, adjust=pull))


ENTRY = Entry(
    "fedprox",
    fedprox,
    "FedAvg with a proximal pull to the global model (Li et al., 2020)",
    paper="Li et al., MLSys 2020, arXiv:1812.06127",
    numbers=FedProxNumbers,
    # FedAF, section 5.1.
    rules=(Rule(("fedaf", "feddm"), hp={"prox_mu": 0.001}),),
    colour="#C98500",
    dashes=(0, (4, 1.5)),
    refinable="average",
    scored=("global", "client"),
)
