"""The mean logits of every client's classes, over all of its data."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.condensation.distribution import clip_rows
from fedjax_het.engine.lanes import Cohort
from fedjax_het.engine.plan import ExecutionPlan
from fedjax_het.engine.stretches import SOFT_LABELS, resumable_loop
from fedjax_het.engine.task import Task

Tree = Any


def compute_class_mean_logits(
    task: Task,
    plan: ExecutionPlan,
    variables: Tree,
    cohort: Cohort,
    num_clients: int,
    min_examples: int = 1,
    clip_norm: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Every client's mean logit of each of its classes, over all of its data (FedAF, Eq. 5).

    Args:
      clip: the norm that each example's logits are clipped to, if any.
    Returns: `[K, C, C]`, zero where a client has none of a class; which it owns, `[K, C]`: those of
    which it has `least` examples (one, in a trial, which sees a single batch); how many it has.
    Cost: one pass in evaluation mode over the data of the round's clients, shared by the devices.
    """
    num_classes = task.model.num_classes
    num_pairs = num_clients * num_classes
    schedule, examples = cohort.schedule, cohort.examples

    def sum_block(variables, images, trial, clip_norm, block_data):
        full_pass_indices, pair_indices = block_data

        def add_batch(i, sums):
            logits, _ = task.model.apply(
                variables, task.normalize(images[full_pass_indices[i]]), train=False
            )
            if clip_norm is not None:
                (logits,) = clip_rows((logits,), clip_norm)
            logits_and_count = jnp.concatenate([logits, jnp.ones((len(logits), 1))], axis=1)
            return sums.at[pair_indices[i]].add(
                logits_and_count, mode="drop"
            )  # padding is beyond the end

        num_batches = (pair_indices[:, 0] < num_pairs).sum()
        num_batches = jnp.where(trial, jnp.minimum(1, num_batches), num_batches)
        initial_sums, (max_batches, size) = (
            jnp.zeros((num_pairs, num_classes + 1)),
            full_pass_indices.shape,
        )
        max_batches_of_round = jnp.where(trial, jnp.minimum(1, max_batches), max_batches)
        return resumable_loop(
            SOFT_LABELS,
            num_batches,
            add_batch,
            initial_sums,
            max_total=max_batches_of_round,
            max_iterations=max_batches,
            samples_per_iteration=size / 3,
        )

    replicated_inputs = (variables, examples.images, schedule.is_verification, clip_norm)
    sums = plan.sum_over_blocks(
        sum_block, replicated_inputs, (schedule.full_pass_indices, schedule.full_pass_pair_ids)
    )
    count = sums[:, -1:]
    means = sums[:, :-1] / jnp.maximum(count, 1)
    table_shape = (num_clients, num_classes)
    is_owner = count >= jnp.where(schedule.is_verification, 1, min_examples)
    return (
        means.reshape(*table_shape, num_classes),
        is_owner.reshape(table_shape),
        count.reshape(table_shape),
    )
