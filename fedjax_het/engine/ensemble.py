"""A round's client models as an ensemble on the server's examples, and a student of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.lanes import Batch, ClientModels
from fedjax_het.engine.server import epoch_batch
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
      optimizer: starts afresh. key: an epoch's shuffle and a step's dropout depend on it and on
        their number alone.
      num_steps: may be traced.
      collects: says of the number of steps done, from 1, whether the variables then reached are
        part of the mean that is returned (stochastic weight averaging); of those after the last
        step if none are, or `collects` is None.
    """
    order_key, step_key = jax.random.split(key)
    batch_size = min(batch_size, len(images))

    def step(number, carry):
        variables, moments, mean, count = carry
        index, mask = epoch_batch(order_key, number, len(images), batch_size)
        # The cross-entropy differs from the divergence by what does not depend on the student.
        batch = Batch(images[index], targets[index], mask, number)
        key = jax.random.fold_in(step_key, number)
        _, gradient, variables = task.loss_and_gradient(variables, batch, key)
        updates, moments = optimizer.update(gradient, moments, variables["params"])
        variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
        if collects is not None:
            due = collects(number + 1)
            count += due
            share = jnp.where(due, 1 / jnp.maximum(count, 1), 0)
            mean = jax.tree.map(lambda m, v: m + share * (v - m), mean, variables)
        return variables, moments, mean, count

    mean = () if collects is None else student
    start = (student, optimizer.init(student["params"]), mean, jnp.int32(0))
    last, _, mean, count = jax.lax.fori_loop(0, num_steps, step, start)
    if collects is None:
        return last
    return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, last)
