"""Ditto (Li et al., ICML 2021, arXiv:2012.04221)."""

from dataclasses import dataclass
from typing import Annotated

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.client_state import build_dual_model_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_training_step
from fedjax_het.core.training_variants import add_proximal_gradient
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange


@dataclass(frozen=True)
class DittoHyperParameters(Config):
    """Hyperparameters of Ditto."""

    ditto_lambda: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Weight of the pull to the global model."


def ditto(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Ditto: every client also trains a personal model, pulled to the global model (Algorithm 1).

    In addition to FedAvg's model, client k has a personal model v_k, which minimizes F_k(v) +
    (ditto_lambda / 2) ||v - w||^2. w is the received global model:

        v_k <- v_k - local_lr (grad f(v_k; minibatch) + ditto_lambda (v_k - w)).

    Both models see the same minibatches, as in the public code (litian96/ditto), so both have the
    same number of local epochs. ditto_lambda = 0 is Separate from a shared start. A large value
    keeps v_k at w; plain steps need local_lr * ditto_lambda < 2. The default 1 is the value in the
    public code's run scripts; the default of the code's --lam is 0. The pull is added to the
    gradient, so an adaptive optimizer rescales both.

    Evaluated: v_k. Traffic: one model down, one up. State: one model per client. Cost: two
    gradients per minibatch.

    Departure from the paper: lambda is not chosen by validation data, because a run has none.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """

    def adjust(context, gradient, local, batch):
        params, anchor = local.variables["params"], context.message.variables["params"]
        return add_proximal_gradient(gradient, params, anchor, context.hp["ditto_lambda"]), ()

    step = make_training_step(training, adjust)
    return build_dual_model_algorithm(
        training, plan, lambda context, local, new_local, batch: step(context, local.aux, batch)
    )


SPEC = AlgorithmSpec(
    "ditto",
    ditto,
    "FedAvg, and a personal model of each client, pulled to the global model (Li et al., 2021)",
    title="Ditto",
    paper="Li et al., ICML 2021, arXiv:2012.04221",
    hyperparameters=DittoHyperParameters,
    color="#5B8C1A",
    evaluated_models=("personal",),
)
