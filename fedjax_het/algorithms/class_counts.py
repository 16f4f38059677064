"""The class counts of the clients, an input of methods that correct the clients' losses by them."""

from collections.abc import Sequence

import jax
import numpy as np

from fedjax_het.algorithms.base import FederationData, RoundInput
from fedjax_het.core.client_algorithm import ClientContext
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.local_training import ServerMessage

_INPUT_NAME = "class_counts"


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
