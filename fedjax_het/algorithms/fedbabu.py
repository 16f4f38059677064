"""FedBABU (Oh, Kim and Yun, ICLR 2022, arXiv:2106.06042)."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from fedjax_het.algorithms.base import Algorithm, FineTuning
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.local_parameters import (
    HeadOptions,
    ParameterSplit,
    apply_shared_gradient,
    init_shared_optimizer,
    select_head_weights,
    split_parameters,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import ClientAlgorithm
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    make_local_sgd,
    select_kept_optimizer_state,
)
from fedjax_het.core.training_variants import make_local_model_training
from fedjax_het.utils.config import NonNegativeInt


@dataclass(frozen=True)
class FedBABUOptions(HeadOptions):
    """Choices of FedBABU."""

    tuning_epochs: NonNegativeInt = 5
    """Epochs of fine-tuning: in an evaluation each client trains a copy of the global model on its
    own data, and the copy is tested; 0: the global model is tested."""
    tuned_part: Literal["network", "body", "head"] = "network"
    """Part of the copy that fine-tuning trains: the whole network, its head or its body (all layers
    but the head)."""


def fedbabu(training: LocalTraining, plan: ExecutionPlan, *, options: FedBABUOptions) -> Algorithm:
    """FedBABU: FedAvg of the body with a constant head, fine-tuned for evaluation (Algorithm 1).

        theta_k <- LocalSGD(theta; h_0),
        theta   <- theta + server_lr sum_k p_k (theta_k - theta).

    theta is the body, and h_0 the head of the initial network, by default the last fully connected
    layer. The head is constant: momentum, weight decay and clipping act on the body only. For
    evaluation every client trains a copy of the global model (theta, h_0) by the local optimizer
    for `tuning_epochs` epochs, and discards it after the evaluation.

    tuned_part: the part of the copy that is trained: the "network" as in the paper's main results,
      or the "body" or the "head", its ablations.

    Evaluated: the copies on the clients' own tests, and (theta, h_0) on the global test. The latter
    is the paper's initial accuracy.

    Traffic: the body each way; all clients have the initial head. State: none. Cost: FedAvg's
    without the gradient of the head; every evaluation trains all clients and holds one model of
    each.

    Defaults: 5 epochs of fine-tuning as in the paper; PFLlib has 10. The paper trains by SGD with
    momentum 0.9.

    Departures from the paper: it averages with weights n_k / n; here the run sets weights. The
    paper tunes after the last round; here every evaluation tunes. Running statistics of
    normalization layers in the head are averaged with the body.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the layers of the head, and choices of fine-tuning.

    Returns:
      The method.

    Raises:
      ConfigError: if a layer of the head does not exist, or the network has no head.
    """
    select = partial(select_head_weights, options=options)
    body = split_parameters(training.task.model, select)  # its shared parameters are the body
    base = make_local_sgd(training)

    def init(hp, variables):
        optimizer = init_shared_optimizer(training, hp, variables, body)
        return select_kept_optimizer_state(training, optimizer)

    def begin(context, kept_state):
        local = _begin_part_training(training, body, context)
        return local._replace(optimizer_state=kept_state) if training.keep_state else local

    step = partial(_step_part, training, body)
    client = base._replace(init=init, begin=begin, step=step)
    algorithm = build_federated_algorithm(training, plan, client, unsent=body)
    if not options.tuning_epochs:
        return algorithm
    splits = {"network": None, "body": body, "head": body.get_complement()}
    tuning_client = _make_tuning_client(training, splits[options.tuned_part])
    return algorithm._replace(fine_tuning=FineTuning(tuning_client, options.tuning_epochs))


def _begin_part_training(training: LocalTraining, split: ParameterSplit, context):
    """Return a client at the received model that trains the shared parameters of a split."""
    variables = context.message.variables
    optimizer = init_shared_optimizer(training, context.hp, variables, split)
    return ClientTrainState(variables, optimizer, ())


def _step_part(training: LocalTraining, split: ParameterSplit, context, local, batch):
    """Make a step of local training on the shared parameters of a split."""
    loss, gradient, variables = training.task.loss_and_gradient(local.variables, batch, context.key)
    variables, optimizer = apply_shared_gradient(
        training, context, variables, gradient, local.optimizer_state, batch, split
    )
    return ClientTrainState(variables, optimizer, ()), loss


def _make_tuning_client(training: LocalTraining, split: ParameterSplit | None) -> ClientAlgorithm:
    """Return a client that trains its copy of the global model, or the shared part of a split."""
    client = make_local_model_training(training)
    if split is None:
        return client

    def begin(context, state):
        return _begin_part_training(training, split, context)

    return client._replace(begin=begin, step=partial(_step_part, training, split))


SPEC = AlgorithmSpec(
    "fedbabu",
    fedbabu,
    "FedAvg of the body with a constant head, then fine-tuning (Oh et al., 2022)",
    title="FedBABU",
    paper="Oh, Kim and Yun, ICLR 2022, arXiv:2106.06042",
    options=FedBABUOptions,
    color="#D4A5C9",
    evaluated_models=("tuned",),
)
