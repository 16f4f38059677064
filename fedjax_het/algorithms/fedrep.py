"""FedRep (Collins et al., ICML 2021, arXiv:2102.07078)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.local_parameters import (
    HeadOptions,
    apply_shared_gradient,
    init_shared_optimizer,
    select_head,
    split_parameters,
)
from fedjax_het.algorithms.measuring_passes import count_pass_steps
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    make_local_sgd,
    select_kept_optimizer_state,
)
from fedjax_het.utils.config import NonNegativeInt

Tree = Any


@dataclass(frozen=True)
class FedRepOptions(HeadOptions):
    """Choices of FedRep."""

    head_epochs: NonNegativeInt = 10
    "Epochs of each round in which a client trains its head, before the epochs of the body."


class PartOptimizers(NamedTuple):
    """States of the local optimizers of the two parts of a network."""

    head: Tree
    "State of the optimizer of the head."
    body: Tree
    "State of the optimizer of the body."


def fedrep(training: LocalTraining, plan: ExecutionPlan, *, options: FedRepOptions) -> Algorithm:
    """FedRep: every client trains its own head, then the shared body (Algorithm 1).

        h_k     <- LocalSGD(h_k; theta)  for `head_epochs` epochs,
        theta_k <- LocalSGD(theta; h_k)  for the local epochs,
        theta   <- theta + server_lr sum_k p_k (theta_k - theta).

    theta is the body and h_k the head of client k, by default the last fully connected layer. The
    part that does not train is constant: momentum, weight decay and clipping act on the other part
    only. Each part has its own optimizer. With `gradient_accumulation` the last step of each part
    has the remaining minibatches. `local_steps` counts the steps of the body. Batch-norm statistics
    follow all minibatches, as in PFLlib. head_epochs = 0 trains the body of FedBABU.

    Evaluated: (theta, h_k) on the own test of client k. There is no global model.

    Traffic: the body each way. State: the head of every client. Cost: FedAvg's with `head_epochs`
    more epochs.

    Defaults: 10 epochs of the head, as in the paper's experiments, whose clients train the body for
    1 or 5 epochs with momentum 0.5. PFLlib has 1 epoch of the head.

    Departures from the paper: it averages with equal weights; here the run sets weights. Its
    clients draw their own heads; here they share one draw, as in PFLlib. Its code has one optimizer
    for both parts; here the parts have one optimizer each, as in PFLlib.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the layers of the head, and its epochs.

    Returns:
      The method.
    """
    selection = partial(select_head, options=options)
    body = split_parameters(training.task.model, selection)  # its shared parameters are the body
    head = body.get_complement()
    base, head_epochs = make_local_sgd(training), options.head_epochs

    def init_optimizers(hp, variables):
        parts = (init_shared_optimizer(training, hp, variables, part) for part in (head, body))
        return PartOptimizers(*parts)

    def init(hp, variables):
        return select_kept_optimizer_state(training, init_optimizers(hp, variables))

    def begin(context, kept_state):
        variables = context.message.variables
        is_kept = training.keep_state
        optimizers = kept_state if is_kept else init_optimizers(context.hp, variables)
        return ClientTrainState(variables, optimizers, ())

    def step(context, local, batch):
        client, optimizers = context.client, local.optimizer_state
        loss, gradient, variables = training.task.loss_and_gradient(
            local.variables, batch, context.key
        )

        def train_part(split, optimizer, first_step, num_steps):
            # The part's own count of steps: its last step applies an accumulated gradient.
            part_context = context._replace(client=client._replace(num_steps=num_steps))
            part_batch = batch._replace(step_index=batch.step_index - first_step)
            return apply_shared_gradient(
                training, part_context, variables, gradient, optimizer, part_batch, split
            )

        num_head_steps = 0
        if head_epochs:
            num_head_steps = head_epochs * count_pass_steps(training, client)
        num_body_steps = client.num_steps - num_head_steps
        trained, optimizer = train_part(body, optimizers.body, num_head_steps, num_body_steps)
        after_body = ClientTrainState(trained, optimizers._replace(body=optimizer), ())
        if not head_epochs:
            return after_body, loss
        trained, optimizer = train_part(head, optimizers.head, 0, num_head_steps)
        after_head = ClientTrainState(trained, optimizers._replace(head=optimizer), ())
        trains_head = batch.step_index < num_head_steps
        select = lambda new_head, new_body: jnp.where(trains_head, new_head, new_body)  # noqa: E731
        return jax.tree.map(select, after_head, after_body), loss

    client = base._replace(init=init, begin=begin, step=step, extra_passes=head_epochs)
    return build_federated_algorithm(training, plan, client)


SPEC = AlgorithmSpec(
    "fedrep",
    fedrep,
    "clients train their heads, then the shared body (Collins et al., 2021)",
    title="FedRep",
    paper="Collins et al., ICML 2021, arXiv:2102.07078",
    options=FedRepOptions,
    color="#1B7837",
    local_parameters=select_head,
    has_global_model=False,
    evaluated_models=("personal",),
)
