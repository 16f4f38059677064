"""The mean logits of every client's classes, over all of its data."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.condensation.distribution import clipped_rows
from fedjax_het.engine.lanes import Cohort
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.stretches import SOFT_LABELS, loop
from fedjax_het.engine.task import Task

Tree = Any


def class_mean_logits(
    task: Task,
    plan: Plan,
    variables: Tree,
    cohort: Cohort,
    num_clients: int,
    least: int = 1,
    clip: jax.Array | None = None,
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

    def block(variables, images, trial, clip, part):
        census, pairs = part

        def add(i, sums):
            logits, _ = task.model.apply(variables, task.normalise(images[census[i]]), train=False)
            if clip is not None:
                (logits,) = clipped_rows((logits,), clip)
            counted = jnp.concatenate([logits, jnp.ones((len(logits), 1))], axis=1)
            return sums.at[pairs[i]].add(counted, mode="drop")  # padding is beyond the end

        batches = (pairs[:, 0] < num_pairs).sum()
        batches = jnp.where(trial, jnp.minimum(1, batches), batches)
        start, (most, size) = jnp.zeros((num_pairs, num_classes + 1)), census.shape
        longest = jnp.where(trial, jnp.minimum(1, most), most)
        return loop(SOFT_LABELS, batches, add, start, longest=longest, most=most, samples=size / 3)

    shared = (variables, examples.images, schedule.trial, clip)
    sums = plan.sum_over_blocks(block, shared, (schedule.census, schedule.census_pairs))
    count = sums[:, -1:]
    means = sums[:, :-1] / jnp.maximum(count, 1)
    square = (num_clients, num_classes)
    owns = count >= jnp.where(schedule.trial, 1, least)
    return means.reshape(*square, num_classes), owns.reshape(square), count.reshape(square)
