"""A round's client models as an ensemble on the server's examples, and a student of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_loop import ClientModels, Examples
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.resumable_loops import TEACHERS, WHOLE_LOOPS, LoopRunner
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import make_shuffled_batches, train_on_examples
from fedjax_het.core.task import Task
from fedjax_het.utils.arrays import AnyArray, pad_rows

Tree = Any

_FORWARD_BATCH_SIZE = 128  # images of a forward pass


def compute_logits(task: Task, variables: Tree, images: AnyArray) -> jax.Array:
    """`[n, C]` of stored images `[n, H, W, C]`, of the network as it is evaluated.

    Cost: one pass, with the activations of `_AT_ONCE` images in memory.
    """

    # Whole pieces: mapped image by image (`lax.map` with a batch size), networks with max pooling
    # took up to twice the time on CPU.
    num_images = len(images)
    batch_size = min(_FORWARD_BATCH_SIZE, num_images)
    padded = pad_rows(images, -num_images % batch_size)

    def logits(batch):
        return task.model.apply(variables, task.normalize(batch), train=False)[0]

    batch_logits = jax.lax.map(logits, padded.reshape(-1, batch_size, *images.shape[1:]))
    return batch_logits.reshape(-1, batch_logits.shape[-1])[:num_images]


def sum_over_models(
    function: Callable[[Tree], jax.Array],
    models: ClientModels,
    num_samples: int,
    loops: LoopRunner = WHOLE_LOOPS,
) -> jax.Array:
    """Sum an array over the models that are present, one model at a time.

    Args:
      function: `function(variables)` returns the array of one model.
      models: the models of a round's clients.
      num_samples: samples that `function` evaluates.
      loops: runs the long loops of the round.

    Returns:
      The sum; zero if no model is present.
    """

    def add(i, total):
        return total + jnp.where(
            models.is_present[i], function(get_client_row(models.variables, i)), 0
        )

    first = jax.tree.map(lambda a: a[0], models.variables)
    zeros = jnp.zeros_like(jax.eval_shape(function, first))
    return loops.run(
        TEACHERS, len(models.is_present), add, zeros, samples_per_iteration=num_samples / 3
    )


def compute_weighted_sum(weights: jax.Array, trees: Tree) -> Tree:
    """Sum of leaves `[S, ...]`, weighted by `[S]`, in full precision on every backend."""
    return jax.tree.map(
        lambda leaf: (weights.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0), trees
    )


def distill_student(
    task: Task,
    student: Tree,
    images: AnyArray,
    targets: jax.Array,
    key: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    epochs: jax.Array | int,
    max_epochs: int | None = None,
    is_averaged_step: Callable[[jax.Array], jax.Array] | None = None,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """The student after minibatch steps on KL(targets || its predictions), mean over samples.

    Args:
      images: `[n, H, W, C]` as stored. targets: `[n, C]` probabilities.
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      optimizer: starts afresh. epochs: over the images; may be traced: then at most `max_epochs`.
      collects: says of the number of steps done, from 1, whether the variables then reached are
        part of the mean that is returned (stochastic weight averaging); of those after the last
        step if none are, or `collects` is None.
    Cost: epochs * ceil(n / batch_size) steps, shared as `fit` says.
    """
    order_key, step_key = jax.random.split(key)
    # Their cross-entropy differs from the divergence by what does not depend on the student.
    train = partial(
        train_on_examples,
        student,
        Examples(images, targets),
        make_shuffled_batches(order_key, len(images), batch_size),
        task.loss_and_gradient,
        optimizer=optimizer,
        epochs=epochs,
        max_epochs=max_epochs,
        key=step_key,
        server_parallelism=server_parallelism,
    )
    if is_averaged_step is None:
        return train()[0]

    def update_average(step, variables, average_state):
        mean, count = average_state
        is_due = is_averaged_step(step)
        count += is_due
        weight = jnp.where(is_due, 1 / jnp.maximum(count, 1), 0)
        return jax.tree.map(lambda m, v: m + weight * (v - m), mean, variables), count

    final_variables, (mean, count) = train(
        step_callback=update_average, callback_state=(student, jnp.int32(0))
    )
    return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, final_variables)
