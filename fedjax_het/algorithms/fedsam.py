"""FedSAM and MoFedSAM (Qu et al., ICML 2022, arXiv:2206.02618)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import jax
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.fedcm import build_client_momentum_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.utils.config import Config, DecayFactor, NonNegativeFloat, SearchRange

_MIN_NORM = 1e-16  # as in debcaldarola/fedsam: a gradient of zero has no direction


@dataclass(frozen=True)
class FedSAMHyperParameters(Config):
    """Hyperparameters of FedSAM."""

    fedsam_rho: Annotated[NonNegativeFloat, SearchRange(0.01, 1)] = 0.1
    """Radius rho of sharpness-aware minimization: each step follows the gradient at weights that
    are moved uphill by this distance, the Euclidean norm over all parameters; 0 is FedAvg."""


@dataclass(frozen=True)
class MoFedSAMHyperParameters(FedSAMHyperParameters):
    """Hyperparameters of MoFedSAM."""

    mofedsam_beta: Annotated[DecayFactor, SearchRange(0.03, 1)] = 0.1
    """Weight beta of the client's gradient in its local steps. The weight of the global direction,
    the clients' mean step of the last round, is 1 - beta; 1 is FedSAM."""


def fedsam(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedSAM: clients train by sharpness-aware minimization (Algorithm 1).

        g = grad F_k(y),  g' = grad F_k(y + rho g / ||g||),
        y <- y - local_lr g'                                    local steps, from y = w
        w <- w + server_lr sum_k p_k (w_k - w).

    rho is `fedsam_rho`, and both gradients of a step have the same minibatch and dropout mask. The
    norm is over all parameters. The local optimizer receives g', so that clipping and weight decay
    act on the step, not on the perturbation. rho 0 is FedAvg. The reported training loss is F_k(y).

    Running statistics of batch norm include the pass at y only: they belong to y, with which the
    network is evaluated. The public code (debcaldarola/fedsam) includes both passes.

    Default: rho 0.1, from that code's runs of CIFAR-10.

    Traffic and state: FedAvg's. Cost: two gradients per minibatch.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    client = make_local_sgd(training, loss_and_gradient=_make_sam_gradient(training))
    return build_federated_algorithm(training, plan, client)


def mofedsam(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """MoFedSAM: FedSAM, whose clients mix the last global direction into their steps.

        y <- y - local_lr (beta g' + (1 - beta) d)              local steps, from y = w

    with g' of FedSAM, beta `mofedsam_beta`, and the direction d, the server's step and the traffic
    of FedCM. beta 1 is FedSAM, rho 0 is FedCM. Departure from the paper: d is the last change of
    the server per local step and rate, as in FedCM and FL-Simulator, so that it has the scale of a
    gradient. Default: beta 0.1, the value of FL-Simulator.

    State: one more model on the server. Cost: two gradients per minibatch.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    gradient = _make_sam_gradient(training)
    return build_client_momentum_algorithm(training, plan, "mofedsam_beta", gradient)


def _make_sam_gradient(training: LocalTraining) -> Callable:
    """Return the `loss_and_gradient` of sharpness-aware minimization, see `make_training_step`."""

    def loss_and_gradient(context, local, batch):
        variables = local.variables
        loss, gradient, new_variables = training.loss_and_gradient(context, variables, batch)
        scale = context.hp["fedsam_rho"] / (optax.tree.norm(gradient) + _MIN_NORM)
        params = jax.tree.map(lambda w, g: w + scale * g, variables["params"], gradient)
        ahead = {**variables, "params": params}
        _, gradient, _ = training.loss_and_gradient(context, ahead, batch)
        return loss, gradient, new_variables

    return loss_and_gradient


FEDSAM = AlgorithmSpec(
    "fedsam",
    fedsam,
    "FedAvg with sharpness-aware minimization at the clients (Qu et al., 2022)",
    title="FedSAM",
    paper="Qu et al., ICML 2022, arXiv:2206.02618",
    hyperparameters=FedSAMHyperParameters,
    color="#BF812D",
    wrappable_as="average",
    evaluated_models=("global", "client"),
)
MOFEDSAM = replace(
    FEDSAM,
    name="mofedsam",
    title="MoFedSAM",
    build=mofedsam,
    description="FedSAM whose clients mix the last global direction into their steps (Qu et al., 2022)",
    hyperparameters=MoFedSAMHyperParameters,
    color="#80796B",
)
