"""The class counts of the clients, an input of methods that correct the clients' losses by them."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from fedjax_het.algorithms.base import Algorithm, FederationData, RoundInput
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.core.client_algorithm import ClientContext, HyperParameters
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.task import per_sample_cross_entropy

_INPUT_NAME = "class_counts"
ABSENT_LOGIT = -1e9
"""Logit of a class that a client's softmax leaves out: e^-1e9 is 0, and 0 times it is no NaN."""


def _make_class_counts(federations: Sequence[FederationData]) -> list[np.ndarray]:
    """Return the number of examples of each class at each client, float32 `[K, C]`."""
    datasets = [(federation.partition, federation.dataset) for federation in federations]
    return [
        partition.label_counts(dataset.train_labels, dataset.num_classes).astype(np.float32)
        for partition, dataset in datasets
    ]


CLASS_COUNTS = RoundInput(_INPUT_NAME, _make_class_counts)
"""Input of `Algorithm.round_inputs`: class counts of all clients, float32 `[K, C]`."""


def make_class_counts_message(server: ServerMessage, cohort: Cohort) -> ServerMessage:
    """Return the server's message with the class counts, as `make_message` of a method.

    A client reads only its own row, so the counts are no traffic.

    Args:
      server: the server's state.
      cohort: the round's cohort, of a method with `round_inputs=(CLASS_COUNTS,)`.

    Returns:
      The message, whose `extra` are the counts, `[K, C]`.
    """
    return ServerMessage(server.variables, extra=cohort.inputs[_INPUT_NAME])


def get_class_counts(context: ClientContext) -> jax.Array:
    """Return the class counts of the client, float32 `[C]`.

    Args:
      context: context of a client whose message was made by `make_class_counts_message`.

    Returns:
      The number of examples of each class.
    """
    return context.message.extra[context.client.id]


def make_corrected_loss(
    training: LocalTraining,
    correct_logits: Callable[[HyperParameters, jax.Array, jax.Array], jax.Array],
) -> Callable:
    """Return the cross-entropy of logits that a client corrects by its class counts.

    Args:
      training: the choices of local training.
      correct_logits: `correct_logits(hp, counts, logits) -> logits` with the class counts `[C]` of
        the client and logits `[B, C]`. Corrected logits must be finite: a sample that fills up a
        minibatch may have a class that the client lacks, and its loss is multiplied by 0.

    Returns:
      `loss_and_gradient` of `make_local_sgd`.
    """

    def loss_and_gradient(context, local, batch):
        counts = get_class_counts(context)

        def sample_losses(network, images, labels):
            def corrected_network(images):
                logits, state = network(images)
                return correct_logits(context.hp, counts, logits), state

            return per_sample_cross_entropy(corrected_network, images, labels)

        return training.loss_and_gradient(
            context, local.variables, batch, sample_losses=sample_losses
        )

    return loss_and_gradient


def build_corrected_loss_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    correct_logits: Callable[[HyperParameters, jax.Array, jax.Array], jax.Array],
) -> Algorithm:
    """Return FedAvg with the loss of `make_corrected_loss`.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      correct_logits: see `make_corrected_loss`.

    Returns:
      The method.
    """
    loss_and_gradient = make_corrected_loss(training, correct_logits)
    client = make_local_sgd(training, loss_and_gradient=loss_and_gradient)
    return build_federated_algorithm(
        training, plan, client, make_message=make_class_counts_message
    )._replace(round_inputs=(CLASS_COUNTS,))
