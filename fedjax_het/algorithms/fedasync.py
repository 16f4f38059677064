"""FedAsync (Xie et al., 2019, arXiv:1903.03934)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedjax_het.algorithms.asynchronous import (
    AsynchronousHyperParameters,
    AsynchronousOptions,
    build_asynchronous_algorithm,
    compute_hinge_weight,
)
from fedjax_het.algorithms.base import Algorithm, AsynchronousSchedule
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.core.training_variants import add_proximal_gradient
from fedjax_het.utils.config import NonNegativeFloat, SearchRange

_PAPERS_RHO = 0.005


@dataclass(frozen=True)
class FedAsyncOptions(AsynchronousOptions):
    """Options of FedAsync."""

    staleness_weight: Literal["polynomial", "hinge"] = "polynomial"
    """Weight of an update by its staleness: "polynomial", by `staleness_exponent`; "hinge", by
    `hinge_slope` and `hinge_delay`."""


@dataclass(frozen=True)
class FedAsyncHyperParameters(AsynchronousHyperParameters):
    """Hyperparameters of FedAsync."""

    server_lr: NonNegativeFloat = 0.6
    "Weight alpha of a client's model without staleness."
    prox_mu: Annotated[NonNegativeFloat, SearchRange(0.001, 1)] = _PAPERS_RHO
    "Weight rho of the proximal term, half the squared distance from the received model."
    hinge_slope: NonNegativeFloat = 10.0
    "a of the hinge weight."
    hinge_delay: NonNegativeFloat = 4.0
    "b of the hinge weight, the largest staleness with weight 1."


def fedasync(training: LocalTraining, plan: ExecutionPlan, options: FedAsyncOptions) -> Algorithm:
    """FedAsync: the server mixes each client's model into its own as soon as it arrives.

    A share `participation` of the clients trains at any time (Algorithm 1):

        w_k ~ argmin_v F_k(v) + (rho / 2) ||v - w_received,k||^2
        w <- (1 - alpha_k) w + alpha_k w_k,   alpha_k = alpha s(tau_k)

    alpha is `server_learning_rate`, and rho is `prox_mu`. tau_k is the staleness of the model: the
    number of changes of the server's model since the client received its model. The option
    `staleness_weight` chooses the weight:

    * "polynomial": s(t) = (1 + t)^-a with a = `staleness_exponent`. a = 0 is the constant weight.
    * "hinge": s(t) = 1 for t <= b, otherwise 1 / (a (t - b) + 1), with a = `hinge_slope` and b =
      `hinge_delay`.

    A round is one change of the model, and `rounds` counts changes. `fedbuff` describes
    the simulated time and the clients that train.

    Defaults from the paper's experiments: alpha 0.6, rho 0.005, a polynomial weight with a = 0.5,
    and a hinge weight with a = 10 and b = 4. The server discards a model with a staleness above
    `max_staleness`. The paper draws the staleness uniformly; here it follows from the clients'
    speeds.

    Traffic: one model down, one up. State: `max_staleness` + 1 models on the server. Cost: the
    training of one client in a round, which occupies one lane.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the weight, and the size of the server's history.

    Returns:
      The method.
    """

    def adjust(context, gradient, local, batch):
        params, anchor = local.variables["params"], context.message.variables["params"]
        return add_proximal_gradient(gradient, params, anchor, context.hp["prox_mu"]), ()

    schedule = AsynchronousSchedule(buffer_size=1, max_staleness=options.max_staleness)
    client = make_local_sgd(training, adjust=adjust)
    arguments = (training, plan, client, schedule)
    if options.staleness_weight == "polynomial":
        return build_asynchronous_algorithm(*arguments, measures_from_received=False)

    def compute_weight(hp, staleness):
        return compute_hinge_weight(staleness, hp["hinge_slope"], hp["hinge_delay"])

    return build_asynchronous_algorithm(
        *arguments, measures_from_received=False, compute_weight=compute_weight
    )


SPEC = AlgorithmSpec(
    "fedasync",
    fedasync,
    "asynchronous mixing of each client's model (Xie et al., 2019)",
    title="FedAsync",
    paper="Xie et al., 2019, arXiv:1903.03934",
    options=FedAsyncOptions,
    hyperparameters=FedAsyncHyperParameters,
    color="#0F7B6C",
    rules=(DefaultsRule(hp={"prox_mu": _PAPERS_RHO}),),  # the protocols' values are FedProx's
    evaluated_models=("global", "client"),
)
