"""A round's client models as an ensemble on the server's examples, and distillation of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.core.client_loop import Examples
from fedjax_het.core.client_rows import ClientModels, get_client_row
from fedjax_het.core.resumable_loops import TEACHERS, WHOLE_LOOPS, LoopRunner
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    EpochRange,
    ServerTraining,
    make_shuffled_batches,
    train_on_examples,
)
from fedjax_het.core.task import Task
from fedjax_het.utils.arrays import AnyArray, pad_rows

Tree = Any

_FORWARD_BATCH_SIZE = 128  # images of a forward pass


def compute_logits(task: Task, variables: Tree, images: AnyArray) -> jax.Array:
    """Compute logits in evaluation mode.

    Cost: one pass, with the activations of 128 images in memory.

    Args:
      task: network and normalization.
      variables: variables of the network.
      images: stored images, `[n, H, W, C]`.

    Returns:
      Logits, `[n, num_classes]`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.methods import Task, compute_logits
      >>> from fedjax_het.nn import make_model
      >>> task = Task(make_model("mlp", (4, 4, 1), 10), mean=(0.5,), std=(0.25,))
      >>> variables = task.model.init(jax.random.key(0))
      >>> compute_logits(task, variables, jnp.zeros((3, 4, 4, 1), jnp.uint8)).shape
      (3, 10)
    """
    # Whole batches: mapped image by image (`lax.map` with a batch size), networks with max pooling
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
        value = function(get_client_row(models.variables, i))
        return total + jnp.where(models.is_present[i], value, 0)

    first = jax.tree.map(lambda a: a[0], models.variables)
    zeros = jnp.zeros_like(jax.eval_shape(function, first))
    return loops.run(
        TEACHERS, len(models.is_present), add, zeros, samples_per_iteration=num_samples / 3
    )


def compute_weighted_sum(weights: jax.Array, trees: Tree) -> Tree:
    """Sum trees with weights, in full precision on every backend.

    Args:
      weights: `[S]`.
      trees: a tree of arrays, `[S, ...]`.

    Returns:
      A tree of arrays, `[...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.distillation import compute_weighted_sum
      >>> compute_weighted_sum(jnp.array([0.5, 2.0]), {"w": jnp.array([2.0, 3.0])})["w"].tolist()
      7.0
    """
    return jax.tree.map(
        lambda leaf: (weights.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf).sum(0), trees
    )


class StudentTraining(NamedTuple):
    """The choices of a student's training.

    Attributes:
      optimizer: starts with a new state.
      batch_size: images per step.
      epochs: the epochs.
      is_averaged_step: `number of steps, from 1 -> bool`, whether the variables after that step are
        part of the returned mean (stochastic weight averaging). None: no step is.
    """

    optimizer: optax.GradientTransformation
    batch_size: int
    epochs: EpochRange
    is_averaged_step: Callable[[jax.Array], jax.Array] | None = None


def distill_student(
    task: Task,
    student: Tree,
    examples: Examples,
    key: jax.Array,
    choices: StudentTraining,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """Train a student on the mean of KL(targets || its predictions).

    Cost: epochs * ceil(n / batch_size) steps, see `train_on_examples`.

    Args:
      task: network and normalization.
      student: variables of the student at the start.
      examples: stored images, `[n, H, W, C]`, and as labels probabilities, `[n, num_classes]`.
      key: an epoch's order and a step's dropout depend on it and on their number alone.
      choices: the choices of the student's training.
      server_parallelism: devices that share each batch.

    Returns:
      The mean of the averaged variables; the variables after the last step if there are none.
    """
    order_key, step_key = jax.random.split(key)
    # Cross-entropy differs from the divergence by a term that does not depend on the student.
    training = ServerTraining(
        task.loss_and_gradient, choices.optimizer, step_key, parallelism=server_parallelism
    )
    batches = make_shuffled_batches(order_key, len(examples.labels), choices.batch_size)
    inputs = (student, examples, batches, choices.epochs)
    is_averaged_step = choices.is_averaged_step
    if is_averaged_step is None:
        return train_on_examples(training, *inputs)[0]

    def update_average(step, variables, average_state):
        mean, count = average_state
        is_due = is_averaged_step(step)
        count += is_due
        weight = jnp.where(is_due, 1 / jnp.maximum(count, 1), 0)
        return jax.tree.map(lambda m, v: m + weight * (v - m), mean, variables), count

    training = training._replace(step_callback=update_average)
    final_variables, (mean, count) = train_on_examples(
        training, *inputs, callback_state=(student, jnp.int32(0))
    )
    return jax.tree.map(lambda m, v: jnp.where(count > 0, m, v), mean, final_variables)
