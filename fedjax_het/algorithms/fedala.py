"""FedALA (Zhang et al., AAAI 2023, arXiv:2212.01197)."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import (
    add_mean_change,
    build_federated_algorithm,
    model_traffic,
)
from fedjax_het.algorithms.client_state import with_client_memory
from fedjax_het.algorithms.local_parameters import (
    HeadOptions,
    select_head_weights,
    split_parameters,
)
from fedjax_het.algorithms.measuring_passes import count_pass_steps, run_if
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveInt, SearchRange, UnitInterval

Tree = Any
_NUM_LOSSES = 10  # of the public code: losses of the last passes, whose deviation is compared


@dataclass(frozen=True)
class FedALAOptions(HeadOptions):
    """Choices of FedALA."""

    initial_epochs: PositiveInt = 15
    """Largest number of epochs in which a client first learns the weights of its mixture. The
    mixture (1 - W) own head + W global head is elementwise, with a weight W in [0, 1] for each
    parameter of the head."""


@dataclass(frozen=True)
class FedALAHyperParameters(Config):
    """Hyperparameters of FedALA."""

    ala_lr: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Learning rate of the weights W of the mixture."
    ala_share: UnitInterval = 0.8
    "Share of a client's examples on which it learns the weights W."
    ala_threshold: NonNegativeFloat = 0.1
    """The first learning of W ends when the losses of the last ten epochs have a standard deviation
    below this value, in nats."""


class AggregationMemory(NamedTuple):
    """Memory of a client between rounds."""

    variables: Tree
    "Variables of the client's model after its last local training."
    weights: tuple[jax.Array, ...]
    "Weights of the global head in the client's mixture, from 0 to 1."
    has_learned: jax.Array
    "`[]` int32: 1 if the client has learned the weights, else 0."


class _Learning(NamedTuple):
    """A client that learns its weights in a round."""

    own_head: tuple[jax.Array, ...]
    weights: tuple[jax.Array, ...]
    num_passes: jax.Array  # [] int32: passes in which the client learns
    losses: jax.Array  # [_NUM_LOSSES] of the last passes
    pass_loss: jax.Array  # [] mean loss of the pass so far, over all examples that it uses
    has_converged: jax.Array  # [] bool


def fedala(training: LocalTraining, plan: ExecutionPlan, *, options: FedALAOptions) -> Algorithm:
    """FedALA: clients start from a learned mixture of their own and the global model (Algorithm 1).

    Client k receives the global model w = (theta, h) and starts from its body theta and from

        h_k + (h - h_k) * W_k,    W_k <- clip(W_k - ala_lr grad * (h - h_k), 0, 1).

    h_k is the client's own head after its last local training, by default the last fully connected
    layer. The products are elementwise, W_k has the shape of the head and starts at 1, and grad is
    the gradient of the loss by the mixed head. Each minibatch of a pass over `ala_share` of the
    examples updates W_k. Then the whole model trains from the mixture, and the server averages the
    clients' models as FedAvg does. A client keeps its model and W_k. ala_lr = 0 is FedAvg.

    A client first learns W_k after the first round, until the losses of the last ten passes have a
    standard deviation below `ala_threshold`, and at most for `initial_epochs` passes. In its later
    rounds it makes one pass. The reported training loss is the loss of local training.

    Evaluated: the client's model after its last local training. It is the initial model before.

    Traffic: one model each way. State: one model and the weights of the head per client. Cost:
    FedAvg's with one more pass over `ala_share` of the examples. Every round has `initial_epochs`
    passes, of which the passes without learning compute no gradient.

    Defaults: rate 1, share 0.8 and one layer as in the paper; threshold 0.1 over ten losses as in
    the public code (TsingZ0/PFLlib), which stops after eleven passes at the earliest.

    Departures from the paper and its code: the number of passes is bounded, because the schedule of
    a round is fixed before it. Each pass draws its share of the examples anew instead of once in a
    round. The losses are means of passes instead of losses of the last minibatch, since the
    minibatches of the passes differ. Only participants learn their weights; in the code all clients
    do. PFLlib evaluates the mixture before local training. The run sets the weights of the average.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: the layers of the head, and the bound of the first learning.

    Returns:
      The method.

    Raises:
      ConfigError: if a layer of the head does not exist, or the network has no head.
    """
    selection = partial(select_head_weights, options=options)
    split = split_parameters(training.task.model, selection)  # its local parameters are the head
    base, max_passes = make_local_sgd(training), options.initial_epochs

    def mix(variables, received_head, learning):
        heads = zip(learning.own_head, received_head, learning.weights, strict=True)
        mixture = tuple(own + (received - own) * weight for own, received, weight in heads)
        return split.join(split.drop_local(variables), mixture)

    def init(hp, variables):
        weights = jax.tree.map(jnp.ones_like, split.get_local(variables))
        return AggregationMemory(variables, weights, jnp.int32(0))

    def begin_learning(context, memory):
        num_passes = jnp.where(memory.has_learned > 0, 1, max_passes)
        is_first_round = context.message.extra == 0  # the client's model is the received one
        return _Learning(
            split.get_local(memory.variables),
            memory.weights,
            jnp.where(is_first_round, 0, num_passes).astype(jnp.int32),
            jnp.zeros(_NUM_LOSSES, jnp.float32),
            jnp.float32(0),
            jnp.bool_(False),
        )

    def begin(context, state):
        local = client.begin(context, state)
        received_head = split.get_local(local.variables)
        return local._replace(variables=mix(local.variables, received_head, local.aux))

    def step(context, local, batch):
        info, hp, batch_size = context.client, context.hp, len(batch.mask)
        pass_steps = jnp.maximum(count_pass_steps(training, info), 1)
        pass_index, pass_step = jnp.divmod(batch.step_index, pass_steps)
        num_used = jnp.maximum((hp["ala_share"] * info.num_samples).astype(jnp.int32), 1)
        position = pass_step * batch_size  # of the minibatch in the pass
        num_training_steps = info.num_steps - max_passes * pass_steps
        num_full, num_rest = jnp.divmod(num_training_steps, pass_steps)
        num_trained = num_full * info.num_samples + num_rest * batch_size
        # The other steps report a loss of 0, and the round divides by the samples of all steps.
        loss_scale = 1 + max_passes * info.num_samples / jnp.maximum(num_trained, 1)

        def learn(local):
            learning, variables = local.aux, local.variables
            mask = batch.mask * (position + jnp.arange(batch_size) < num_used)
            loss, gradient, _ = training.task.loss_and_gradient(
                variables, batch._replace(mask=mask), context.key
            )
            received_head = split.get_local(context.message.variables)
            head_gradient = split.get_local({**variables, "params": gradient})
            lr = jnp.where(learning.has_converged, 0, hp["ala_lr"])
            learning = learning._replace(
                weights=tuple(
                    jnp.clip(weight - lr * g * (received - own), 0, 1)
                    for own, received, weight, g in zip(
                        learning.own_head,
                        received_head,
                        learning.weights,
                        head_gradient,
                        strict=True,
                    )
                ),
                pass_loss=learning.pass_loss + (loss * mask.sum() / num_used).astype(jnp.float32),
            )
            is_last = position + batch_size >= num_used
            learning = _end_pass(learning, is_last, pass_index + 1, hp["ala_threshold"])
            return local._replace(variables=mix(variables, received_head, learning), aux=learning)

        def train(carry):
            training_context = context._replace(client=info._replace(num_steps=num_training_steps))
            training_batch = batch._replace(step_index=batch.step_index - max_passes * pass_steps)
            local, loss = base.step(training_context, carry[0], training_batch)
            return local, (loss * loss_scale).astype(jnp.float32)

        is_learning = (pass_index < local.aux.num_passes) & (position < num_used)
        local = run_if(is_learning, learn, local)
        return run_if(pass_index >= max_passes, train, (local, jnp.float32(0)))

    def end(context, local, memory, update):
        has_learned = jnp.maximum(memory.has_learned, jnp.minimum(local.aux.num_passes, 1))
        return update, AggregationMemory(local.variables, local.aux.weights, has_learned)

    def update_server(hp, server, client_update, counts):
        has_trained = (counts.num_trained > 0).astype(jnp.int32)
        server = add_mean_change(hp, server, client_update.mean)
        return server._replace(extra=jnp.maximum(server.extra, has_trained))

    client = with_client_memory(base, init=init, begin=begin_learning, end=end)
    return build_federated_algorithm(
        training,
        plan,
        client._replace(begin=begin, step=step, extra_passes=max_passes),
        # 1 after the first round with clients, else 0.
        init_server=lambda hp, variables: ServerMessage(variables, extra=jnp.int32(0)),
        update=update_server,
    )._replace(
        traffic=model_traffic,
        personal_variables=lambda hp, state, k: get_client_row(state.clients.memory.variables, k),
    )


def _end_pass(learning: _Learning, is_last: Any, num_passes: Any, threshold: Any) -> _Learning:
    """Return the client after the last minibatch of a pass, or unchanged at other minibatches."""
    losses = jnp.roll(learning.losses, -1).at[-1].set(learning.pass_loss)
    has_converged = (num_passes > _NUM_LOSSES) & (jnp.std(losses) < threshold)
    ended = learning._replace(
        losses=losses,
        pass_loss=jnp.zeros_like(learning.pass_loss),
        has_converged=learning.has_converged | has_converged,
    )
    return jax.tree.map(lambda new, old: jnp.where(is_last, new, old), ended, learning)


SPEC = AlgorithmSpec(
    "fedala",
    fedala,
    "clients start from a learned mixture of their own and the global model (Zhang et al., 2023)",
    title="FedALA",
    paper="Zhang et al., AAAI 2023, arXiv:2212.01197",
    options=FedALAOptions,
    hyperparameters=FedALAHyperParameters,
    color="#3B4A54",
    evaluated_models=("personal",),
)
