"""What clients tell of their classes besides images, and how the server learns from it.

Source: FedAF (CVPR 2024), Eqs. 5, 8 and 11 to 15.

The mean logits of every client's classes, over all of its data.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.condensation.distribution_matching import clip_rows
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.resumable_loops import SOFT_LABELS
from fedjax_het.core.task import Task


def average_over_owners(values: Array, is_owner: Array) -> tuple[Array, Array]:
    """Mean over the clients that own a class: `[K, C, F]`, `[K, C]` -> (`[C, F]`, owned `[C]`).

    Deviation from Eqs. 8 and 12, which divide by all K clients and say nothing of those without
    the class: with zeros for them soft labels would not add up to 1. Classes that nobody owns are
    zero, and marked.
    """
    weights = is_owner.astype(values.dtype)
    total = jnp.einsum("kc,kcf->cf", weights, jnp.where(is_owner[..., None], values, 0))
    count = weights.sum(0)
    return divide_by_count(total, count), count > 0


def compute_soft_labels(mean_logits: Array, tau: Array) -> Array:
    """softmax(v / tau): of the *mean* logit, not the mean of softmaxes (Eq. 11)."""
    return jax.nn.softmax(mean_logits / tau, axis=-1)


def symmetric_kl(log_p: Array, log_q: Array) -> Array:
    """(KL(p || q) + KL(q || p)) / 2 in nats over the last axis (Eq. 15)."""
    return 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(-1)


def sum_logits_by_class(
    logits: Array, labels: Array, weights: Array, num_classes: int
) -> tuple[Array, Array]:
    """Weighted sum of the logits of every class, `[B, C]` -> (`[num_classes, C]`, and of the
    weights, `[num_classes]`)."""
    class_weights = jax.nn.one_hot(labels, num_classes) * weights[:, None]
    return class_weights.T @ logits, class_weights.sum(0)


def divide_by_count(sums: Array, count: Array) -> Array:
    """`[C, F]` sums over `[C]` counts; zero where there is none."""
    return sums / jnp.maximum(count, 1)[:, None]


def soft_label_matching_loss(
    mean_logits: Array, is_present: Array, soft_labels: Array, tau: Array
) -> Array:
    """Local-global knowledge matching: symmetric KL of softmax(mean logit / tau) from the clients'
    soft labels, summed over the classes that are `present` `[C]` (Eq. 15).

    Args: mean_logits `[C, C]` of the synthetic images by class; targets `[C, C]` soft labels.
    """
    log_t = jax.nn.log_softmax(mean_logits / tau, axis=-1)
    log_r = jnp.log(jnp.maximum(soft_labels, 1e-30))
    return (is_present * symmetric_kl(log_r, log_t)).sum()


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

    def sum_block(loops, variables, images, trial, clip_norm, block_data):
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
        return loops.run(
            SOFT_LABELS,
            num_batches,
            add_batch,
            initial_sums,
            max_total=max_batches_of_round,
            max_iterations=max_batches,
            samples_per_iteration=size / 3,
        )

    replicated_inputs = (variables, examples.images, schedule.is_verification, clip_norm)
    sums = plan.sum_loops_over_blocks(
        cohort.loops,
        sum_block,
        replicated_inputs,
        (schedule.full_pass_indices, schedule.full_pass_pair_ids),
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
