"""The class counts of the clients, an input of methods that correct the clients' losses by them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import Algorithm, FederationData, RoundInput
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.core.client_algorithm import ClientContext, HyperParameters
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.task import per_sample_cross_entropy
from fedjax_het.skews.assignment import Drift
from fedjax_het.utils.arrays import AnyArray

_INPUT_NAME = "class_counts"
ABSENT_LOGIT = -1e9
"""Logit of a class that a client's softmax leaves out: e^-1e9 is 0, and 0 times it is no NaN."""


class _PhaseCounts(NamedTuple):
    """Class counts of all clients in the phases of a drift; one phase for a run without drift."""

    counts: AnyArray
    "`[P, K, C]` float32: number of examples of each class at each client in each phase."
    rounds: AnyArray
    "`[]` int32: rounds of the drift."


def _make_class_counts(federations: Sequence[FederationData]) -> list[_PhaseCounts]:
    """Return the class counts of each federation; all have the largest number of phases."""
    inputs = []
    for federation in federations:
        labels, num_classes = federation.dataset.train_labels, federation.dataset.num_classes
        drift = federation.drift or Drift((federation.partition,), rounds=1)
        counts = [part.label_counts(labels, num_classes) for part in drift.partitions]
        inputs.append(
            _PhaseCounts(np.stack(counts).astype(np.float32), np.array(drift.rounds, np.int32))
        )
    num_phases = max((len(phases.counts) for phases in inputs), default=1)
    return [
        phases._replace(counts=np.repeat(phases.counts, num_phases, axis=0))
        if len(phases.counts) < num_phases
        else phases
        for phases in inputs
    ]


CLASS_COUNTS = RoundInput(_INPUT_NAME, _make_class_counts)
"""Input of `Algorithm.round_inputs`: class counts of all clients, which `select_class_counts`
reads."""


def select_class_counts(cohort: Cohort) -> jax.Array:
    """Return the class counts of the clients' active examples in a round.

    Args:
      cohort: the round's cohort, of a method with `round_inputs=(CLASS_COUNTS,)`.

    Returns:
      Counts of all clients, float32 `[K, C]`.
    """
    counts, rounds = _PhaseCounts(*cohort.inputs[_INPUT_NAME])
    num_phases = len(counts)
    if num_phases == 1:
        return counts[0]
    # As `skews.assignment.Drift.get_phase`.
    return counts[jnp.minimum(cohort.schedule.round * num_phases // rounds, num_phases - 1)]


def make_class_counts_message(server: ServerMessage, cohort: Cohort) -> ServerMessage:
    """Return the server's message with the class counts, as `make_message` of a method.

    A client reads only its own row, so the counts are no traffic.

    Args:
      server: the server's state.
      cohort: the round's cohort, of a method with `round_inputs=(CLASS_COUNTS,)`.

    Returns:
      The message, whose `extra` are the counts, `[K, C]`.
    """
    return ServerMessage(server.variables, extra=select_class_counts(cohort))


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

        def sample_losses(network, inputs, labels):
            def corrected_network(inputs):
                logits, state = network(inputs)
                return correct_logits(context.hp, counts, logits), state

            return per_sample_cross_entropy(corrected_network, inputs, labels)

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
