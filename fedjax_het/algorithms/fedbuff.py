"""FedBuff (Nguyen et al., AISTATS 2022, arXiv:2106.06639)."""

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
from fedjax_het.utils.config import PositiveInt


@dataclass(frozen=True)
class FedBuffOptions(AsynchronousOptions):
    """Options of FedBuff."""

    buffer_size: PositiveInt | None = None
    """Updates that the server collects before it changes the model (default: half of the clients
    that train at a time)."""


def fedbuff(training: LocalTraining, plan: ExecutionPlan, options: FedBuffOptions) -> Algorithm:
    """FedBuff: clients train without waiting for each other, and the server buffers updates.

    A share `participation` of the clients trains at any time. A client that has sent its update
    becomes free, and the server sends its present model to a client that is free. With
    `buffer_size` updates the server changes the model (Algorithm 1):

        w <- w + server_lr sum_k p_k (1 + tau_k)^-a (w_k - w_received,k)

    tau_k is the staleness of an update: the number of changes of the model since the client
    received it. p_k are the weights of the run's `averaging`; the paper has 1 / `buffer_size`. a is
    `staleness_exponent`. A round is one change of the model, and `rounds` counts changes.

    The setting `system` gives clients their speed; without it a minibatch takes one second at every
    client. If all clients need equal times and `buffer_size` is the number of clients that train at
    a time, this is FedAvg. The server discards an update with a staleness above `max_staleness`. A
    client whose update is in the buffer does not train before the next change, so a buffer has one
    update per client. If no client is available, the server uses the updates that it has. Clients
    without examples never train.

    Defaults: a = 0.5 as in the paper. The paper has a buffer of 10 for 1,000 clients that train at
    a time. Its Algorithm 1 discards no update; the limit here bounds the models on the server.

    Traffic: one model down, one up. State: `max_staleness` + 1 models on the server. Cost: FedAvg's
    with `buffer_size` clients in a round.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: sizes of the buffer and of the server's history.

    Returns:
      The method.
    """
    schedule = AsynchronousSchedule(options.buffer_size, options.max_staleness)
    client = make_local_sgd(training)
    return build_asynchronous_algorithm(
        training, plan, client, schedule, measures_from_received=True
    )


SPEC = AlgorithmSpec(
    "fedbuff",
    fedbuff,
    "asynchronous FedAvg with a buffer of updates (Nguyen et al., 2022)",
    title="FedBuff",
    paper="Nguyen et al., AISTATS 2022, arXiv:2106.06639",
    options=FedBuffOptions,
    hyperparameters=AsynchronousHyperParameters,
    color="#5B2C83",
    evaluated_models=("global", "client"),
)
