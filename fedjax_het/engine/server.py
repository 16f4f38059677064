"""Training at the server: plain SGD on examples of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.lanes import Batch, Examples
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
    """Variables after `epochs` epochs of minibatch SGD, each a shuffle of its own.

    Args:
      key: an epoch's shuffle and a step's dropout depend on it and on their number alone.
      lr, epochs: may be traced. first_epoch: the number of the first, where others went before.
    Cost: epochs * ceil(n_0 / batch_size) steps, one after the other, on every device of a plan.
    """
    order_key, step_key = jax.random.split(key)
    num_examples = len(examples.labels)
    batch_size = min(batch_size, num_examples)
    per_epoch = steps_per_epoch(num_examples, batch_size)
    optimizer = optax.sgd(lr)

    def step(number, variables):
        index, mask = epoch_batch(order_key, number, num_examples, batch_size)
        batch = Batch(examples.images[index], examples.labels[index], mask, number)
        key = jax.random.fold_in(step_key, number)
        _, gradient, variables = task.loss_and_gradient(variables, batch, key)
        updates, _ = optimizer.update(gradient, optimizer.init(variables["params"]))
        return {**variables, "params": optax.apply_updates(variables["params"], updates)}

    first = first_epoch * per_epoch
    return jax.lax.fori_loop(first, first + epochs * per_epoch, step, variables)


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
