"""Accuracy and loss of a model on a set of labelled images, on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from fedjax_het.engine.plan import AXIS, BLOCK, Plan
from fedjax_het.engine.task import Task

BATCH = 250


class EvaluationSet(NamedTuple):
    """Labelled images cut into batches, in blocks as the plan's; padding has label -1."""

    images: jax.Array  # [D, batches, B, H, W, C]
    labels: jax.Array  # [D, batches, B]


def evaluation_set(plan: Plan, images: np.ndarray, labels: np.ndarray) -> EvaluationSet:
    """Place a test set on the plan's devices: a block on each, or all blocks on all."""
    count, blocks = len(labels), plan.blocks
    batch = min(BATCH, -(-count // blocks))
    batches = -(-count // (blocks * batch))
    short = blocks * batches * batch - count
    images = np.concatenate([images, np.zeros((short, *images.shape[1:]), images.dtype)])
    labels = np.concatenate([labels, np.full(short, -1, labels.dtype)]).astype(np.int32)
    shape = (blocks, batches, batch)
    parts = EvaluationSet(images.reshape(*shape, *images.shape[1:]), labels.reshape(shape))
    return plan.put(parts, BLOCK)


def evaluate(task: Task, plan: Plan, variables, data: EvaluationSet, num_batches=None):
    """-> (accuracy, mean cross-entropy in nats); of the first `num_batches` in each block."""
    total = data.labels.shape[1]
    num_batches = total if num_batches is None else num_batches

    def block(variables, images, labels, num_batches):
        def add(i, sums):
            known = labels[i] >= 0
            logits, _ = task.model.apply(variables, task.normalise(images[i]), train=False)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, abs(labels[i]))
            right = (logits.argmax(-1) == labels[i]).sum()
            return sums + jnp.stack(
                [right.astype(jnp.float32), (losses * known).sum(), known.sum(dtype=jnp.float32)]
            )

        return jax.lax.fori_loop(0, num_batches, add, jnp.zeros(3))

    if plan.spreads != AXIS:
        sums = jax.lax.map(lambda one: block(variables, *one, num_batches), tuple(data)).sum(0)
    else:
        sums = jax.shard_map(
            lambda v, x, y, n: jax.lax.psum(block(v, x[0], y[0], n), AXIS),
            mesh=plan.mesh,
            in_specs=(P(), P(AXIS), P(AXIS), P()),
            out_specs=P(),
            check_vma=False,
        )(variables, *data, num_batches)
    return sums[0] / sums[2], sums[1] / sums[2]
