"""FedAsync (Xie et al., 2019, arXiv:1903.03934)."""

from dataclasses import dataclass

from fedjax_het.algorithms.asynchronous import (
    AsynchronousHyperParameters,
    AsynchronousOptions,
    build_asynchronous_algorithm,
)
from fedjax_het.algorithms.base import Algorithm, AsynchronousSchedule
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.core.training_variants import add_proximal_gradient
from fedjax_het.utils.config import NonNegativeFloat


@dataclass(frozen=True)
class FedAsyncHyperParameters(AsynchronousHyperParameters):
    """Hyperparameters of FedAsync."""

    server_lr: NonNegativeFloat = 0.6
    "Weight alpha of a client's model without staleness."
    prox_mu: NonNegativeFloat = 0.005
    "Weight rho of the proximal term, half the squared distance from the received model."


def fedasync(
    training: LocalTraining, plan: ExecutionPlan, options: AsynchronousOptions
) -> Algorithm:
    """FedAsync: the server mixes each client's model into its own as soon as it arrives.

    A share `participation` of the clients trains at any time (Algorithm 1):

        w_k ~ argmin_v F_k(v) + (rho / 2) ||v - w_received,k||^2
        w <- (1 - alpha_k) w + alpha_k w_k,   alpha_k = alpha (1 + tau_k)^-a

    alpha is `server_learning_rate`, rho is `prox_mu`, and a is `staleness_exponent`. tau_k is the
    staleness of the model: the number of changes of the server's model since the client received
    its model. A round is one change of the model, and `rounds` counts changes. `fedbuff` describes
    the simulated time and the clients that train.

    Defaults from the paper's experiments: alpha 0.6, rho 0.005, and a polynomial weight with a =
    0.5. The server discards a model with a staleness above `max_staleness`. The paper draws the
    staleness uniformly; here it follows from the clients' speeds. `staleness_exponent` 0 is the
    paper's constant weight. The paper's hinge weight, 1 / (a (tau_k - b) + 1) above a staleness of
    b, is left out: FedAsync and FedBuff share one weight.

    Traffic: one model down, one up. State: `max_staleness` + 1 models on the server. Cost: the
    training of one client in a round, which occupies one lane.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: size of the server's history.

    Returns:
      The method.
    """

    def adjust(context, gradient, local, batch):
        params, anchor = local.variables["params"], context.message.variables["params"]
        return add_proximal_gradient(gradient, params, anchor, context.hp["prox_mu"]), ()

    schedule = AsynchronousSchedule(buffer_size=1, max_staleness=options.max_staleness)
    client = make_local_sgd(training, adjust=adjust)
    return build_asynchronous_algorithm(
        training, plan, client, schedule, measures_from_received=False
    )


SPEC = AlgorithmSpec(
    "fedasync",
    fedasync,
    "asynchronous mixing of each client's model (Xie et al., 2019)",
    title="FedAsync",
    paper="Xie et al., 2019, arXiv:1903.03934",
    options=AsynchronousOptions,
    hyperparameters=FedAsyncHyperParameters,
    color="#0F7B6C",
    evaluated_models=("global", "client"),
)
