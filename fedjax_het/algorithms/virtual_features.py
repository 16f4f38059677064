"""Draws from a Gaussian of each class's features, pooled over the data of all clients."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import FederationData, RoundInput
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.resumable_loops import FEATURES
from fedjax_het.core.task import Task
from fedjax_het.utils.arrays import pad_rows, set_row, take_row
from fedjax_het.utils.input_kinds import take_rows

_INPUT_NAME = "class_batches"
_MAX_BATCH_SIZE = 128  # examples of a forward pass


class ClassBatches(NamedTuple):
    """All clients' examples in batches of one class each; clients without an order."""

    positions: np.ndarray
    "`[M, B]` int32: positions in the training set; a batch is filled up with its first entry."
    sizes: np.ndarray
    "`[M]` int32: number of examples that count; 0 for batches that fill up the array."
    labels: np.ndarray
    "`[M]` int32: class of the batch."


def _make_class_batches(federations: Sequence[FederationData]) -> list[ClassBatches]:
    """Return the batches of every federation, with equal shapes."""
    classes = []  # of each federation: the positions of each class
    for federation in federations:
        positions = federation.partition.indices
        labels = np.asarray(federation.dataset.train_labels)[positions]
        num_classes = federation.dataset.num_classes
        classes.append([positions[labels == c] for c in range(num_classes)])
    size = max(1, *(len(members) for federation in classes for members in federation))
    size = min(size, _MAX_BATCH_SIZE)
    batches = [
        [
            (members[start : start + size], c)
            for c, members in enumerate(federation)
            for start in range(0, len(members), size)
        ]
        for federation in classes
    ]
    num_batches = max(1, *map(len, batches))
    return [_stack_batches(federation, num_batches, size) for federation in batches]


def _stack_batches(batches: list[tuple[np.ndarray, int]], num_batches: int, size: int):
    """Return batches and their classes as arrays of `num_batches` batches of `size` examples."""
    stacked = ClassBatches(
        np.zeros((num_batches, size), np.int32),
        np.zeros(num_batches, np.int32),
        np.zeros(num_batches, np.int32),
    )
    for i, (positions, label) in enumerate(batches):
        stacked.positions[i] = positions[0]
        stacked.positions[i, : len(positions)] = positions
        stacked.sizes[i], stacked.labels[i] = len(positions), label
    return stacked


CLASS_BATCHES = RoundInput(_INPUT_NAME, _make_class_batches)
"""Input of `Algorithm.round_inputs`: the `ClassBatches` of all clients' examples."""


def draw_virtual_features(
    task: Task, plan: ExecutionPlan, variables, cohort: Cohort, key: jax.Array, num_draws: int
) -> tuple[jax.Array, jax.Array]:
    """Draw from N(mu_c, Sigma_c), the mean and covariance of the features of each class c.

    The features are the inputs of the last layer, of the network in evaluation mode, for the
    examples of all clients. With these features z_i and noise e_i from N(0, 1), a draw is

        mu_c + (n_c - 1)^(-1/2) sum_i e_i (z_i - mu_c),

    whose covariance is Sigma_c = (n_c - 1)^(-1) sum_i (z_i - mu_c) (z_i - mu_c)^T. No covariance is
    computed or factored, so that singular covariances need no correction. A class of one example
    has Sigma_c = 0.

    Cost: a forward pass over all clients' data, which the devices share, and `num_draws`
    multiplications for each feature. Memory: the draws for every block of lanes.

    Args:
      task: network with `embed`, and normalization.
      plan: the devices.
      variables: variables of the network.
      cohort: a round of a method with the input `CLASS_BATCHES`. A verification run reads one
        batch of each block.
      key: PRNG key; the noise of an example depends on it and on the example's place alone.
      num_draws: draws for each class, M.

    Returns:
      The draws, float32 `[C, M, F]`, zero for classes without examples, and the number of examples
      of each class, float32 `[C]`.
    """
    embed, num_classes = task.model.embed, task.model.num_classes
    assert embed is not None
    batches = ClassBatches(*cohort.inputs[_INPUT_NAME])
    num_features = jax.eval_shape(
        lambda v, x: embed(v, task.normalize(x), train=False)[0],
        variables,
        take_rows(cohort.examples.inputs, slice(1)),
    ).shape[-1]

    def sum_block(loops, variables, examples, key, is_verification, block):
        batches, ids = block

        def add_batch(i, sums):
            index, size, label = (take_row(values, i) for values in batches)
            z = embed(variables, task.normalize(examples.take_by_owner(index)), train=False)[0]
            mask = (jnp.arange(len(index)) < size).astype(z.dtype)
            noise_key = jax.random.fold_in(key, take_row(ids, i))
            noise = jax.random.normal(noise_key, (num_draws, len(index)))
            # The last row sums the features, the last column sums the weights.
            weights = jnp.concatenate([noise, jnp.ones_like(mask)[None]]) * mask
            columns = jnp.concatenate([z, jnp.ones_like(mask)[:, None]], axis=1)
            sums_of_batch = jnp.matmul(weights, columns, precision="highest")
            return set_row(sums, take_row(sums, label) + sums_of_batch, label)

        num_batches = len(ids)
        zeros = jnp.zeros((num_classes, num_draws + 1, num_features + 1))
        return loops.run(
            FEATURES,
            jnp.where(is_verification, 1, num_batches),
            add_batch,
            zeros,
            max_iterations=num_batches,
            samples_per_iteration=batches.positions.shape[1] / 3,
        )

    # Batches go to the blocks in turn, so that blocks have about equally many examples.
    num_batches = -(-len(batches.sizes) // plan.blocks)
    padded = jax.tree.map(lambda a: pad_rows(a, num_batches * plan.blocks - len(a)), batches)
    blocks = jax.tree.map(
        lambda a: a.reshape(num_batches, plan.blocks, *a.shape[1:]).swapaxes(0, 1),
        (padded, jnp.arange(num_batches * plan.blocks)),
    )
    inputs = (variables, cohort.examples, key, cohort.schedule.is_verification)
    sums = plan.sum_over_blocks(sum_block, inputs, blocks, loops=cohort.loops)
    count = sums[:, -1, -1]
    mean = sums[:, -1, :-1] / jnp.maximum(count, 1)[:, None]
    centered = sums[:, :-1, :-1] - sums[:, :-1, -1:] * mean[:, None]
    scale = jax.lax.rsqrt(jnp.maximum(count - 1, 1))
    return mean[:, None] + scale[:, None, None] * centered, count
