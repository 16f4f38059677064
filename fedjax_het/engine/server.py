"""Training at the server, on examples of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.contract import Batch
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.task import Task

Tree = Any


def train_on_server(
    task: Task,
    variables: Tree,
    examples: Examples,
    key: jax.Array,
    *,
    batch_size: int,
    lr: jax.Array,
    epochs: jax.Array,
    first_epoch: jax.Array | int = 0,
) -> Tree:
    """Variables after `epochs` epochs of plain minibatch SGD, each a shuffle of its own.

    Args:
      key: see `minibatch_steps`.
      lr, epochs: may be traced. first_epoch: the number of the first, where others went before.
    Cost: epochs * ceil(n_0 / batch_size) steps, one after the other, on every device of a plan.
    """
    num_examples = len(examples.labels)
    batch_size = min(batch_size, num_examples)
    per_epoch = steps_per_epoch(num_examples, batch_size)
    first = first_epoch * per_epoch
    return minibatch_steps(
        task,
        variables,
        *(examples.images, examples.labels, key),
        optimizer=optax.sgd(lr),
        batch_size=batch_size,
        first=first,
        last=first + epochs * per_epoch,
    )[0]


def minibatch_steps(
    task: Task,
    variables: Tree,
    images: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    first: jax.Array | int = 0,
    last: jax.Array | int,
    watch: Callable[[jax.Array, Tree, Tree], Tree] = lambda done, variables, seen: seen,
    seen: Tree = (),
) -> tuple[Tree, Tree]:
    """(variables, seen) after the steps `first` to `last` - 1, whose bounds may be traced.

    Args:
      labels: `[n]` classes, or `[n, C]` probabilities.
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      optimizer: starts afresh. batch_size: at most n.
      watch(done, variables, seen) -> seen, after each step; `done` counts them from 1.
    """
    order_key, step_key = jax.random.split(key)

    def step(number, carry):
        variables, moments, seen = carry
        index, mask = epoch_batch(order_key, number, len(labels), batch_size)
        batch = Batch(images[index], labels[index], mask, number)
        key = jax.random.fold_in(step_key, number)
        _, gradient, variables = task.loss_and_gradient(variables, batch, key)
        updates, moments = optimizer.update(gradient, moments, variables["params"])
        variables = {**variables, "params": optax.apply_updates(variables["params"], updates)}
        return variables, moments, watch(number + 1, variables, seen)

    start = (variables, optimizer.init(variables["params"]), seen)
    variables, _, seen = jax.lax.fori_loop(first, last, step, start)
    return variables, seen


def epoch_batch(
    key: jax.Array, step: jax.Array, num_samples: int, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Which samples step `step` uses: indices and weights `[batch_size]`.

    Each epoch is a permutation of its own. Its last batch is filled up with samples of weight 0.
    """
    per_epoch = steps_per_epoch(num_samples, batch_size)
    order = jax.random.permutation(jax.random.fold_in(key, step // per_epoch), num_samples)
    place = (step % per_epoch) * batch_size + jnp.arange(batch_size)
    return order[place % num_samples], (place < num_samples).astype(jnp.float32)


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)
