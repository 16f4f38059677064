"""FedProx (Li et al., MLSys 2020, arXiv:1812.06127)."""

from dataclasses import dataclass

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, add_proximal_gradient, make_local_sgd
from fedjax_het.utils.config import Config, NonNegativeFloat


@dataclass(frozen=True)
class FedProxHyperParameters(Config):
    prox_mu: NonNegativeFloat = 0.002
    "Of the pull to the model received."


def fedprox(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Clients minimise F_k(w) + (prox_mu / 2) ||w - w_t||^2, w_t the model they received.

    The pull prox_mu * (w - w_t) is added to the gradient, so an adaptive optimiser rescales it
    with the gradient, as in DynaFed's code (which writes lambda ||w - w_t||^2: prox_mu =
    2 lambda). prox_mu = 0 is FedAvg. Stragglers that do fewer epochs are not modelled.
    """

    def adjust_gradient(context, gradient, local, batch):
        params, anchor = (state.variables["params"] for state in (local, context.message))
        return add_proximal_gradient(gradient, params, anchor, context.hp["prox_mu"]), ()

    return build_federated_algorithm(
        training, plan, make_local_sgd(training, adjust=adjust_gradient)
    )


SPEC = AlgorithmSpec(
    "fedprox",
    fedprox,
    "FedAvg with a proximal pull to the global model (Li et al., 2020)",
    paper="Li et al., MLSys 2020, arXiv:1812.06127",
    hyperparameters=FedProxHyperParameters,
    # FedAF, section 5.1.
    rules=(DefaultsRule(("fedaf", "feddm"), hp={"prox_mu": 0.001}),),
    color="#C98500",
    dashes=(0, (4, 1.5)),
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
