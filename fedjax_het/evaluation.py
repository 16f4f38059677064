"""Accuracy and loss of a model on a set of labelled images, on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.engine.plan import BLOCK, Plan
from fedjax_het.engine.task import Task

BATCH = 250


class EvaluationSet(NamedTuple):
    """Labelled images cut into batches, in blocks as the plan's; padding has label -1."""

    images: jax.Array  # [D, batches, B, H, W, C]
    labels: jax.Array  # [D, batches, B]
    domains: jax.Array | None  # [D, batches, B]; None for a set without domains


class Evaluation(NamedTuple):
    """What was measured of a model; float32."""

    accuracy: jax.Array  # []
    loss: jax.Array  # [] mean cross-entropy in nats
    domain_accuracy: jax.Array | None  # [G] of each domain's images; None without domains

    @classmethod
    def missing(cls, num_domains: int) -> "Evaluation":
        """NaN everywhere: nothing was measured."""
        nan = jnp.float32(jnp.nan)
        return cls(nan, nan, jnp.full(num_domains, nan) if num_domains else None)


def evaluation_set(
    plan: Plan, images: np.ndarray, labels: np.ndarray, domains: np.ndarray | None = None
) -> EvaluationSet:
    """Place a test set on the plan's devices: a block on each, or all blocks on all."""
    count, blocks = len(labels), plan.blocks
    batch = min(BATCH, -(-count // blocks))
    batches = -(-count // (blocks * batch))
    short = blocks * batches * batch - count
    images = np.concatenate([images, np.zeros((short, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.full(short, -1, labels.dtype)]).astype(np.int32)
    shape = (blocks, batches, batch)
    if domains is not None:
        domains = np.concatenate([domains, np.zeros(short, domains.dtype)]).astype(np.int32)
        domains = domains.reshape(shape)
    images = images.reshape(*shape, *images.shape[1:])
    return plan.put(EvaluationSet(images, labels.reshape(shape), domains), BLOCK)


def evaluate(
    task: Task,
    plan: Plan,
    variables,
    data: EvaluationSet,
    num_batches: jax.Array | int | None = None,
    *,
    num_domains: int = 0,
) -> Evaluation:
    """Accuracy and loss on the first `num_batches` in each block, and accuracy per domain.

    `num_domains` is that of the data set, and static. A domain of which those batches have no image
    gets NaN.
    """
    assert bool(num_domains) == (data.domains is not None)
    total = data.labels.shape[1]
    num_batches = total if num_batches is None else num_batches

    def block(variables, num_batches, data):
        images, labels, domains = data

        def add(i, sums):
            known = labels[i] >= 0
            logits, _ = task.model.apply(variables, task.normalise(images[i]), train=False)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, abs(labels[i]))
            right = logits.argmax(-1) == labels[i]
            counts = jnp.stack(
                [
                    right.sum().astype(jnp.float32),
                    (losses * known).sum(),
                    known.sum(dtype=jnp.float32),
                ]
            )
            if domains is None:
                return sums + counts
            member = domains[i][:, None] == jnp.arange(num_domains)
            of_domains = [(member & there[:, None]).sum(0) for there in (right, known)]
            return sums + jnp.concatenate([counts, *of_domains])

        return jax.lax.fori_loop(0, num_batches, add, jnp.zeros(3 + 2 * num_domains))

    sums = plan.sum_over_blocks(block, (variables, num_batches), data)
    right, members = sums[3 : 3 + num_domains], sums[3 + num_domains :]
    domain_accuracy = right / members if num_domains else None
    return Evaluation(sums[0] / sums[2], sums[1] / sums[2], domain_accuracy)
