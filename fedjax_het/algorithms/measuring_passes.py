"""Passes over a client's data in which its model is measured and does not change."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.core.client_algorithm import Batch, ClientAlgorithm, ClientContext, ClientInfo
from fedjax_het.core.local_training import LocalTraining

Tree = Any


def count_pass_steps(training: LocalTraining, client: ClientInfo) -> Any:
    """Return the number of minibatches in one pass over a client's data.

    Args:
      training: the choices of local training.
      client: the client.

    Returns:
      Minibatches of a pass, `[]` int32.

    Example:
      >>> from fedjax_het.algorithms.measuring_passes import count_pass_steps
      >>> from fedjax_het.methods import ClientInfo, LocalTraining
      >>> client = ClientInfo(id=0, num_samples=40, num_steps=12, init_inputs=())
      >>> int(count_pass_steps(LocalTraining(task=None, optimizer="sgd", batch_size=32), client))
      2
    """
    # The check of a compiled program runs one minibatch, which has to train.
    return jnp.minimum(-(-client.num_samples // training.batch_size), client.num_steps - 1)


def compute_batch_weight(batch: Batch, client: ClientInfo) -> jax.Array:
    """Return the share of a client's examples that a minibatch of one pass contains.

    The weights of a pass add up to 1: sum_b weight_b mean_b is the mean over all examples.

    Args:
      batch: the minibatch.
      client: the client.

    Returns:
      The share, `[]` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.measuring_passes import compute_batch_weight
      >>> from fedjax_het.methods import Batch, ClientInfo
      >>> batch = Batch(inputs=(), labels=(), mask=jnp.array([1.0, 1.0, 0.0]), step_index=0)
      >>> client = ClientInfo(id=0, num_samples=8, num_steps=4, init_inputs=())
      >>> float(compute_batch_weight(batch, client))
      0.25
    """
    return batch.mask.sum() / client.num_samples


def run_if(condition: jax.Array, function: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Return `function(value)` if a condition holds, else `value`.

    Vmapped lanes run the function only in steps in which the condition holds in some lane, whereas
    `jax.lax.cond` runs it in all steps.

    Args:
      condition: `[]` bool.
      function: a function that keeps structure, shapes and types.
      value: a pytree of arrays.

    Returns:
      The new value.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.measuring_passes import run_if
      >>> int(run_if(jnp.bool_(True), lambda count: count + 1, jnp.int32(1)))
      2
    """
    body = lambda state: (jnp.bool_(False), function(state[1]))  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0], body, (condition, value))[1]


def with_measuring_passes(
    client: ClientAlgorithm,
    training: LocalTraining,
    measure: Callable[[ClientContext, Any, Batch], tuple[Tree, jax.Array]],
    *,
    num_before: int = 0,
    num_after: int = 0,
) -> ClientAlgorithm:
    """Return a client that measures its model in whole passes over its data.

    The client trains in the other minibatches of the round, with the step indices and the number
    of steps of a round without measuring passes. Cost: each measuring pass costs a pass of local
    training, since lanes in different phases run in step.

    Args:
      client: a client algorithm whose `local` is a record with `aux`, see `make_local_sgd`.
      training: the choices of local training.
      measure: `measure(context, local, batch) -> (aux, loss)`: the new `local.aux` after a
        minibatch of a measuring pass, and the loss that the round reports for it.
      num_before: measuring passes before local training.
      num_after: measuring passes after local training.

    Returns:
      The client algorithm.
    """
    num_passes = num_before + num_after

    def step(context, local, batch):
        pass_steps = count_pass_steps(training, context.client)
        num_training_steps = context.client.num_steps - num_passes * pass_steps
        training_index = batch.step_index - num_before * pass_steps
        is_training = (training_index >= 0) & (training_index < num_training_steps)
        train_context = context._replace(
            client=context.client._replace(num_steps=num_training_steps)
        )
        trained, train_loss = client.step(
            train_context, local, batch._replace(step_index=training_index)
        )
        aux, measured_loss = measure(context, local, batch)
        measured = local._replace(aux=aux)
        select = lambda new, old: jnp.where(is_training, new, old)  # noqa: E731
        return jax.tree.map(select, trained, measured), select(train_loss, measured_loss)

    return client._replace(step=step, extra_passes=client.extra_passes + num_passes)
