"""FedLC (Zhang et al., ICML 2022, arXiv:2209.00189)."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.class_counts import ABSENT_LOGIT, build_corrected_loss_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import HyperParameters
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange


@dataclass(frozen=True)
class FedLCHyperParameters(Config):
    """Hyperparameters of FedLC."""

    fedlc_tau: Annotated[NonNegativeFloat, SearchRange(0.01, 1)] = 0.1
    """Strength tau of the calibration, which lowers the logit of a class with n examples at the
    client by tau n^(-1/4) in the loss; 0 is FedAvg."""


def fedlc(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedLC: FedAvg with logits that every client calibrates by its class counts (Eq. 7).

        loss(z, y) = -log(e^{z_y - tau n_ky^(-1/4)} / sum_c e^{z_c - tau n_kc^(-1/4)}),
        w_k ~ argmin_v mean loss of client k,
        w <- w + server_lr sum_k p_k (w_k - w).

    z are the logits of a sample of class y, n_kc the number of examples of class c at client k, and
    tau = `fedlc_tau`. A rare class gets a larger margin. The margin of a class without examples is
    infinite: the softmax of the client leaves this class out, as in the public code, and the loss
    does not push its logit down. tau = 0 is FedAvg with all classes, so the step from 0 to a small
    tau is a jump for clients that lack classes. The reported training loss is the calibrated loss.

    Evaluated: w. Traffic, state and cost: FedAvg's; the counts stay at the clients.

    Default: the paper states no tau; 0.1 is the value of public code (bytedance/FedDecorr). As in
    that code the sum runs over all classes of the client, the class y included, so that a tau near
    0 gives the cross-entropy over these classes.

    Where clients lack classes, FedLC can end below FedAvg. Final accuracy on digits (`mlp`, alpha
    0.1, 10 clients, 30 rounds, seeds 0 to 2): FedAvg 94, 92, 92 %; FedLC 89, 76, 81 %. Flower's
    baseline on CIFAR-10 with alpha 0.05 has the same order, FedAvg 68.1 and FedLC 62.5 %.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    return build_corrected_loss_algorithm(training, plan, _calibrate_logits)


def _calibrate_logits(hp: HyperParameters, counts: jax.Array, logits: jax.Array) -> jax.Array:
    tau = hp["fedlc_tau"]
    margins = tau * jnp.maximum(counts, 1) ** -0.25
    return jnp.where((counts == 0) & (tau > 0), ABSENT_LOGIT, logits - margins)


SPEC = AlgorithmSpec(
    "fedlc",
    fedlc,
    "FedAvg with logits calibrated by the class counts of each client (Zhang et al., 2022)",
    title="FedLC",
    paper="Zhang et al., ICML 2022, arXiv:2209.00189",
    hyperparameters=FedLCHyperParameters,
    color="#1B7F5C",
    wrappable_as="average",
    evaluated_models=("global", "client"),
    needs_classes=True,
)
