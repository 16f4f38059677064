"""FedNTD (Lee et al., NeurIPS 2022, arXiv:2106.03097)."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, make_local_sgd
from fedjax_het.core.task import per_sample_cross_entropy
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveFloat, SearchRange

EXCLUDED_LOGIT = -1e9  # its softmax is 0, and its differences are no NaN


@dataclass(frozen=True)
class FedNTDHyperParameters(Config):
    """Hyperparameters of FedNTD."""

    fedntd_beta: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    """Weight of the distillation, the divergence from the probabilities of the received model over
    the classes that are not true; 0 is FedAvg."""
    fedntd_tau: PositiveFloat = 1.0
    "Temperature tau, by which the distillation divides logits."


def fedntd(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedNTD: clients also learn the received model's logits of the classes that are not true.

        loss(z, y) = CE(z, y) + beta tau^2 KL(q^g || q),
        q = softmax of z_c / tau over c != y,  q^g = softmax of z^g_c / tau over c != y,
        w <- w + server_lr sum_k p_k (w_k - w).

    z are the logits of a sample of class y in the model of the client, and z^g in the received
    model, a constant. beta = `fedntd_beta` and tau = `fedntd_tau`. The softmax of C - 1 classes
    leaves out the true class, so the distillation does not oppose the cross-entropy. beta = 0 is
    FedAvg. With two classes the divergence is 0. The reported training loss is the whole loss.

    The received model is in evaluation mode: running batch-norm statistics, no dropout. In the
    authors' code (Lee-Gihun/FedNTD) its mode is the mode that the model had before the round,
    evaluation mode except for the first client of the first round.

    Evaluated: w. Traffic and state: FedAvg's. Cost: one gradient and one more forward pass per
    minibatch.

    Defaults: beta 1 and tau 1, of the authors' configurations.

    Final accuracy on digits (`mlp`, alpha 0.1, 10 clients, 30 rounds, seeds 0 to 2): FedAvg 94, 92,
    92 %; FedNTD 92, 90, 88 %.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.
    """
    model = training.task.model

    def loss_and_gradient(context, local, batch):
        beta, tau = context.hp["fedntd_beta"], context.hp["fedntd_tau"]

        def sample_losses(network, inputs, labels):
            logits, state = network(inputs)
            received = model.apply(context.message.variables, inputs, train=False)[0]
            losses, _ = per_sample_cross_entropy(lambda inputs: (logits, state), inputs, labels)
            return losses + beta * compute_distillation_losses(logits, received, labels, tau), state

        return training.loss_and_gradient(
            context, local.variables, batch, sample_losses=sample_losses
        )

    client = make_local_sgd(training, loss_and_gradient=loss_and_gradient)
    return build_federated_algorithm(training, plan, client)


def compute_distillation_losses(
    logits: jax.Array, received: jax.Array, labels: jax.Array, tau: jax.Array | float
) -> jax.Array:
    """Compute tau^2 KL(received || logits) over the classes that are not true.

    Args:
      logits: logits of the trained model, `[B, C]`.
      received: logits of the received model, `[B, C]`.
      labels: classes, int32 `[B]`.
      tau: temperature.

    Returns:
      Losses `[B]`, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.fedntd import compute_distillation_losses
      >>> logits, received = jnp.array([[5.0, 1.0, 2.0]]), jnp.array([[0.0, 1.0, 2.0]])
      >>> float(compute_distillation_losses(logits, received, jnp.array([0]), 1.0)[0])
      0.0
    """
    is_true = labels[:, None] == jnp.arange(logits.shape[-1])

    def log_softmax(values: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(jnp.where(is_true, EXCLUDED_LOGIT, values / tau))

    targets = log_softmax(received)
    divergences = jnp.exp(targets) * (targets - log_softmax(logits))
    return tau**2 * jnp.where(is_true, 0, divergences).sum(-1)


SPEC = AlgorithmSpec(
    "fedntd",
    fedntd,
    "distillation of the received model's logits of classes that are not true (Lee et al., 2022)",
    title="FedNTD",
    paper="Lee et al., NeurIPS 2022, arXiv:2106.03097",
    hyperparameters=FedNTDHyperParameters,
    color="#FA0357",
    wrappable_as="average",
    evaluated_models=("global", "client"),
    needs_classes=True,
)
