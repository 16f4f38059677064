"""A round's client models as an ensemble on the server's examples, and a student of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.common.arrays import AnyArray, with_rows_of_zeros
from fedjax_het.engine.lanes import ClientModels, Examples, client_row
from fedjax_het.engine.server import fit, shuffled
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.engine.stretches import TEACHERS, loop
from fedjax_het.engine.task import Task

Tree = Any

_AT_ONCE = 128  # images of a forward pass


def logits_of(task: Task, variables: Tree, images: AnyArray) -> jax.Array:
    """`[n, C]` of stored images `[n, H, W, C]`, of the network as it is evaluated.

    Cost: one pass, with the activations of `_AT_ONCE` images in memory.
    """

    # Whole pieces: mapped image by image (`lax.map` with a batch size), networks with max pooling
    # took up to twice the time on CPU.
    count = len(images)
    size = min(_AT_ONCE, count)
    padded = with_rows_of_zeros(images, -count % size)

    def logits(piece):
        return task.model.apply(variables, task.normalise(piece), train=False)[0]

    by_piece = jax.lax.map(logits, padded.reshape(-1, size, *images.shape[1:]))
    return by_piece.reshape(-1, by_piece.shape[-1])[:count]


def sum_over_models(
    function: Callable[[Tree], jax.Array], models: ClientModels, samples: int
) -> jax.Array:
    """Sum of `function(variables)`, an array, over the models that are present, one at a time;
    `samples`: that it looks at."""

    def add(i, total):
        return total + jnp.where(models.present[i], function(client_row(models.variables, i)), 0)

    first = jax.tree.map(lambda a: a[0], models.variables)
    nothing = jnp.zeros_like(jax.eval_shape(function, first))
    return loop(TEACHERS, len(models.present), add, nothing, samples=samples / 3)


def weighted_sum(weights: jax.Array, trees: Tree) -> Tree:
    """Sum of leaves `[S, ...]`, weighted by `[S]`, in full precision on every backend."""
    return jax.tree.map(
        lambda leaf: (weights.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0), trees
    )


def distilled(
    task: Task,
    student: Tree,
    images: AnyArray,
    targets: jax.Array,
    key: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    epochs: jax.Array | int,
    most_epochs: int | None = None,
    collects: Callable[[jax.Array], jax.Array] | None = None,
    sharing: Sharing = ALONE,
) -> Tree:
    """The student after minibatch steps on KL(targets || its predictions), mean over samples.

    Args:
      images: `[n, H, W, C]` as stored. targets: `[n, C]` probabilities.
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      optimizer: starts afresh. epochs: over the images; may be traced: then at most `most_epochs`.
      collects: says of the number of steps done, from 1, whether the variables then reached are
        part of the mean that is returned (stochastic weight averaging); of those after the last
        step if none are, or `collects` is None.
    Cost: epochs * ceil(n / batch_size) steps, shared as `fit` says.
    """
    order_key, step_key = jax.random.split(key)
    # Their cross-entropy differs from the divergence by what does not depend on the student.
    learn = partial(
        fit,
        student,
        Examples(images, targets),
        shuffled(order_key, len(images), batch_size),
        task.loss_and_gradient,
        optimizer=optimizer,
        epochs=epochs,
        most_epochs=most_epochs,
        key=step_key,
        sharing=sharing,
    )
    if collects is None:
        return learn()[0]

    def collect(done, variables, collected):
        mean, count = collected
        due = collects(done)
        count += due
        share = jnp.where(due, 1 / jnp.maximum(count, 1), 0)
        return jax.tree.map(lambda m, v: m + share * (v - m), mean, variables), count

    last, (mean, count) = learn(watch=collect, watched=(student, jnp.int32(0)))
    return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, last)
