"""Gradients of DP-SGD: clipped gradients of single examples, and noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_algorithm import Batch, ClientContext
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.task import Task
from fedjax_het.privacy import ExampleLevel
from fedjax_het.utils.errors import make_value_error

Tree = Any


@dataclass(frozen=True)
class PrivateStep:
    """A step of local training that reads the minibatch by `compute_private_gradient` alone."""

    step: Callable
    "`step(context, local, batch) -> (local, loss)`."

    def __call__(self, context: ClientContext, local: Any, batch: Batch) -> tuple[Any, jax.Array]:
        """Make the step."""
        return self.step(context, local, batch)


def compute_private_gradient(
    task: Task, mechanism: ExampleLevel, variables: Tree, batch: Batch, key: jax.Array
) -> tuple[jax.Array, Tree, Tree]:
    """Compute the mean of the examples' clipped gradients, with noise (Abadi et al., 2016).

    Args:
      task: the task.
      mechanism: largest norm and noise.
      variables: variables of the model, `{"params": ..., "state": ...}`.
      batch: the minibatch.
      key: PRNG key of the step.

    Returns:
      The mean loss without noise, the gradient, and the variables.

    Raises:
      ConfigError: for a network with batch norm, which mixes the examples of a batch.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.private_gradients import compute_private_gradient
      >>> from fedjax_het.methods import Batch, Task
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.privacy import ExampleLevel
      >>> task, key = Task(make_model("mlp", (2, 2, 1), 3), (0.5,), (0.5,)), jax.random.key(0)
      >>> batch = Batch(jnp.ones((4, 2, 2, 1)), jnp.zeros(4, jnp.int32), jnp.ones(4), jnp.int32(0))
      >>> mechanism = ExampleLevel(noise_multiplier=0, clip_norm=0.1)
      >>> _, gradient, _ = compute_private_gradient(
      ...     task, mechanism, task.model.init(key), batch, key
      ... )
      >>> norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
      >>> round(float(norm), 3)
      0.1
    """
    if jax.tree.leaves(variables["state"]):
        expected = "a network without batch norm, such as group norm"
        raise make_value_error("privacy", mechanism.name, expected)

    def compute_one(example: Batch, key: jax.Array) -> tuple[jax.Array, Tree]:
        single = jax.tree.map(lambda a: a[None], example)._replace(step_index=batch.step_index)
        return task.loss_and_gradient(variables, single, key)[:2]

    num_examples = batch.labels.shape[0]
    examples = batch._replace(step_index=jnp.broadcast_to(batch.step_index, (num_examples,)))
    losses, gradients = jax.vmap(compute_one)(examples, jax.random.split(key, num_examples))
    leaves, structure = jax.tree.flatten(gradients)
    sums, _ = optax.per_example_global_norm_clip(leaves, mechanism.clip_norm)
    if mechanism.noise_multiplier:
        std = mechanism.noise_multiplier * mechanism.clip_norm
        noise = optax.tree.random_like(fold_in_purpose(key, Purpose.PRIVACY), sums)
        sums = [a + std * n for a, n in zip(sums, noise, strict=True)]
    count = jnp.maximum(batch.mask.sum(), 1)
    gradient = jax.tree.unflatten(structure, [a / count for a in sums])
    return losses.sum() / count, gradient, variables
