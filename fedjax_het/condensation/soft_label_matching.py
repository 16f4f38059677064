"""Soft labels: the mean logits of the clients' classes, and how the server learns from them.

Source: FedAF (CVPR 2024), Eqs. 5, 8 and 11 to 15.
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
    """Average over the clients that own a class.

    Deviation from Eqs. 8 and 12, which divide by all K clients and do not define the values of
    clients without the class. With zeros for them soft labels would not add up to 1.

    Args:
      values: `[K, C, F]`, a vector for each client and class.
      is_owner: `[K, C]` bool.

    Returns:
      The mean `[C, F]`, zero for classes without an owner, and whether a class has an owner, `[C]`.
    """
    weights = is_owner.astype(values.dtype)
    total = jnp.einsum("kc,kcf->cf", weights, jnp.where(is_owner[..., None], values, 0))
    count = weights.sum(0)
    return divide_by_count(total, count), count > 0


def compute_soft_labels(mean_logits: Array, tau: Array) -> Array:
    """Return softmax(v / tau) of the *mean* logit v, not the mean of softmaxes (Eq. 11).

    Args:
      mean_logits: `[..., C]`.
      tau: `[]`, temperature.

    Returns:
      Soft labels, `[..., C]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import compute_soft_labels
      >>> print(compute_soft_labels(jnp.zeros((2, 4)), 2.0)[0])
      [0.25 0.25 0.25 0.25]
    """
    return jax.nn.softmax(mean_logits / tau, axis=-1)


def symmetric_kl(log_p: Array, log_q: Array) -> Array:
    """Return (KL(p || q) + KL(q || p)) / 2 over the last axis, in nats (Eq. 15).

    Args:
      log_p: log-probabilities, `[..., C]`.
      log_q: log-probabilities, `[..., C]`.

    Returns:
      `[...]`.
    """
    return 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(-1)


def sum_logits_by_class(
    logits: Array, labels: Array, weights: Array, num_classes: int
) -> tuple[Array, Array]:
    """Sum the weighted logits of each class.

    Args:
      logits: `[B, F]`.
      labels: `[B]` int.
      weights: `[B]`.
      num_classes: number of classes, C.

    Returns:
      Sums of the weighted logits, `[C, F]`, and of the weights, `[C]`.
    """
    class_weights = jax.nn.one_hot(labels, num_classes) * weights[:, None]
    return class_weights.T @ logits, class_weights.sum(0)


def divide_by_count(sums: Array, count: Array) -> Array:
    """Divide sums by counts; the result is zero where the count is zero.

    Args:
      sums: `[C, F]`.
      count: `[C]`.

    Returns:
      `[C, F]`.
    """
    return sums / jnp.maximum(count, 1)[:, None]


def soft_label_matching_loss(
    mean_logits: Array, is_present: Array, soft_labels: Array, tau: Array
) -> Array:
    """Compute the local-global knowledge matching loss (Eq. 15).

    The loss is the symmetric KL divergence between softmax(mean logit / tau) and the clients' soft
    label, in nats, summed over the present classes.

    Args:
      mean_logits: `[C, C]`, mean logit of the synthetic images of each class.
      is_present: `[C]` bool, True for the classes to sum over.
      soft_labels: `[C, C]`, the clients' soft labels.
      tau: `[]`, temperature.

    Returns:
      The loss, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import compute_soft_labels, soft_label_matching_loss
      >>> logits, is_present = jnp.eye(3), jnp.ones(3, bool)
      >>> loss = soft_label_matching_loss(logits, is_present, compute_soft_labels(logits, 2.0), 2.0)
      >>> bool(loss < 1e-6)
      True
    """
    log_probabilities = jax.nn.log_softmax(mean_logits / tau, axis=-1)
    log_soft_labels = jnp.log(jnp.maximum(soft_labels, 1e-30))
    return (is_present * symmetric_kl(log_soft_labels, log_probabilities)).sum()


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
    """Compute each client's mean logit of each of its classes over all of its data (FedAF, Eq. 5).

    Cost: one pass in evaluation mode over the data of the round's clients, shared by the devices.

    Args:
      task: network and normalization.
      plan: placement of the clients on the devices.
      variables: variables of the network.
      cohort: the round's clients, their schedule and examples.
      num_clients: number of clients in the cohort, K.
      min_examples: examples that a client needs to own a class; 1 in a verification run, which
        reads a single batch.
      clip_norm: maximum L2 norm of each example's logits; None: no clipping.

    Returns:
      Mean logits, `[K, C, C]`, zero for classes without examples; whether the client owns the
      class, `[K, C]`; and the number of examples, `[K, C]`.
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
            )  # padding has an index beyond the end

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
