"""Ditto (Li et al., ICML 2021, arXiv:2012.04221)."""

from dataclasses import dataclass

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_dual_model_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, add_proximal_gradient, make_training_step
from fedjax_het.utils.config import Config, NonNegativeFloat


@dataclass(frozen=True)
class DittoHyperParameters(Config):
    ditto_lambda: NonNegativeFloat = 1.0
    "Of the pull to the global model."


def ditto(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """Algorithm 1: besides FedAvg's model, client k minimises F_k(v) + (ditto_lambda / 2)
    ||v - w||^2 over a model v_k of its own, w the global model that it received:

        v_k <- v_k - local_lr (grad f(v_k; minibatch) + ditto_lambda (v_k - w)).

    Both models see the same minibatches, as in the public code (litian96/ditto), so v_k has as many
    local epochs as w. ditto_lambda = 0 is Separate from a shared start; a large one keeps v_k at w
    (plain steps need local_lr * ditto_lambda < 2). Default 1, that of the public code's run
    scripts, whose --lam is otherwise 0; the choice of lambda by validation data is left out. The
    pull is added to the gradient, so an adaptive optimiser rescales both.

    Scored: v_k. Traffic: FedAvg's. State: one model per client. Cost: two gradients a step.
    """

    def adjust_gradient(context, gradient, local, batch):
        params, anchor = (state.variables["params"] for state in (local, context.message))
        return add_proximal_gradient(gradient, params, anchor, context.hp["ditto_lambda"]), ()

    step = make_training_step(training, adjust_gradient)

    def step_personal_model(context, local, new_local, batch):
        return step(context, local.aux, batch)

    return build_dual_model_algorithm(training, plan, step_personal_model)


SPEC = AlgorithmSpec(
    "ditto",
    ditto,
    "FedAvg, and a model of each client's own that is pulled to it (Li et al., 2021)",
    paper="Li et al., ICML 2021, arXiv:2012.04221",
    hyperparameters=DittoHyperParameters,
    protocol="fedamp",
    color="#5B8C1A",
    evaluated_models=("personal",),
)
