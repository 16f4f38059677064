"""A round's client models as an ensemble on the server's examples, and a student of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.lanes import ClientModels
from fedjax_het.engine.server import minibatch_steps
from fedjax_het.engine.task import Task

Tree = Any

_PIECE = 128  # images of a forward pass


def logits_of(task: Task, variables: Tree, images: jax.Array) -> jax.Array:
    """`[n, C]` of stored images, of the network as it is evaluated; a few images at a time."""
    count = len(images)
    piece = min(_PIECE, count)
    padded = jnp.pad(images, ((0, -count % piece),) + ((0, 0),) * (images.ndim - 1))

    def forward(some):
        return task.model.apply(variables, task.normalise(some), train=False)[0]

    logits = jax.lax.map(forward, padded.reshape(-1, piece, *images.shape[1:]))
    return logits.reshape(-1, logits.shape[-1])[:count]


def sum_over_models(function: Callable[[Tree], jax.Array], models: ClientModels) -> jax.Array:
    """Sum of `function(variables)` over the models that are present; one model at a time."""

    def add(total, one):
        variables, present = one
        return total + jnp.where(present, function(variables), 0), None

    first = jax.tree.map(lambda a: a[0], models.variables)
    nothing = jnp.zeros_like(jax.eval_shape(function, first))
    return jax.lax.scan(add, nothing, (models.variables, models.present))[0]


def weighted_sum(weights: jax.Array, trees: Tree) -> Tree:
    """Sum over the leading axis `[S]` of the leaves, in full precision on every backend."""

    def one(leaf):
        return (weights.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0)

    return jax.tree.map(one, trees)


def distilled(
    task: Task,
    student: Tree,
    images: jax.Array,
    targets: jax.Array,
    key: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    num_steps: jax.Array | int,
    collects: Callable[[jax.Array], jax.Array] | None = None,
) -> Tree:
    """The student after minibatch steps on KL(targets || its predictions), mean over samples.

    Args:
      targets: `[n, C]` probabilities.
      key, optimizer: see `minibatch_steps`. num_steps: may be traced.
      collects: says of the number of steps done, from 1, whether the variables then reached are
        part of the mean that is returned (stochastic weight averaging); of those after the last
        step if none are, or `collects` is None.
    """
    # Their cross-entropy differs from the divergence by what does not depend on the student.
    steps = partial(
        minibatch_steps,
        *(task, student, images, targets, key),
        optimizer=optimizer,
        batch_size=min(batch_size, len(images)),
        last=num_steps,
    )
    if collects is None:
        return steps()[0]

    def collect(done, variables, collected):
        mean, count = collected
        due = collects(done)
        count += due
        share = jnp.where(due, 1 / jnp.maximum(count, 1), 0)
        return jax.tree.map(lambda m, v: m + share * (v - m), mean, variables), count

    last, (mean, count) = steps(watch=collect, seen=(student, jnp.int32(0)))
    return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, last)
