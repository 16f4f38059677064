"""A round's client models as an ensemble on the server's examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.core.client_loop import Examples
from fedjax_het.core.client_rows import ClientModels, get_client_row
from fedjax_het.core.resumable_loops import TEACHERS, WHOLE_LOOPS, LoopRunner
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.task import Task
from fedjax_het.utils.arrays import expand_like, pad_rows, set_row
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_arguments
from fedjax_het.utils.input_kinds import count_rows, map_arrays

Tree = Any

_FORWARD_BATCH_SIZE = 128  # examples of a forward pass


@accept_former_arguments("compute_logits", FORMER_INPUT_NAMES)
def compute_logits(task: Task, variables: Tree, inputs: Any) -> jax.Array:
    """Compute logits in evaluation mode.

    Cost: one pass, with the activations of 128 examples in memory.

    Args:
      task: network and normalization.
      variables: variables of the network.
      inputs: stored inputs, `[n, ...]`, or arrays by name.

    Returns:
      Logits, `[n, num_classes]`, or `[n, T, num_tokens]` for sequences.

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
    # Whole batches: mapped example by example (`lax.map` with a batch size), networks with max
    # pooling took up to twice the time on CPU.
    num_examples = count_rows(inputs)
    batch_size = min(_FORWARD_BATCH_SIZE, num_examples)

    def split(array):
        padded = pad_rows(array, -num_examples % batch_size)
        return padded.reshape(-1, batch_size, *array.shape[1:])

    def logits(batch):
        return task.model.apply(variables, task.normalize(batch), train=False)[0]

    batch_logits = jax.lax.map(logits, map_arrays(split, inputs))
    return batch_logits.reshape(-1, *batch_logits.shape[2:])[:num_examples]


def score_models(
    task: Task,
    score: Callable[[jax.Array, jax.Array], jax.Array],
    parallelism: ServerParallelism,
    models: Tree,
    examples: Examples,
) -> jax.Array:
    """Score several models on examples; the devices share the examples.

    Cost: one pass of each model over the examples, and one collective.

    Args:
      task: network and normalization.
      score: `score(outputs, labels) -> [n]`, such as the losses or the correct predictions.
      parallelism: devices that share the work.
      models: variables of the networks, `[S, ...]`.
      examples: the examples, `[n, ...]`.

    Returns:
      Scores, float32 `[n, S]`.
    """

    def score_shard(examples: Examples) -> jax.Array:
        labels, count = jnp.asarray(examples.labels), len(jax.tree.leaves(models)[0])

        def add_model(i, scores):
            outputs = compute_logits(task, get_client_row(models, i), examples.inputs)
            return set_row(scores, score(outputs, labels), i)

        args = (TEACHERS, count, add_model, jnp.zeros((count, len(labels)), jnp.float32))
        return parallelism.loops.run(*args, samples_per_iteration=len(labels) / 3).T

    return parallelism.map_samples(score_shard, examples)


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
    return jax.tree.map(lambda leaf: (expand_like(weights, leaf) * leaf).sum(0), trees)
