"""Training on synthetic data, differentiated: the inner loop of trajectory matching, and how far
from its target it ends.

Networks enter as `apply_params(params, images) -> logits [B, C]` on a parameter tree and as
`unravel(vector [P]) -> params`, the second half of `jax.flatten_util.ravel_pytree`: one flat vector
is carried through the loop. Where devices share a step, `apply_params` gets their `batch_axis` too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.condensation.augment import DSA_STRATEGY, augment
from fedjax_het.condensation.mixed_mode import DifferentiationMode, mixed_mode, run_sgd
from fedjax_het.condensation.synthetic_data import ApplyParams, SyntheticData, soft_cross_entropies
from fedjax_het.core.server_training import get_epoch_batch
from fedjax_het.nn.batch_axis import BatchAxis, make_axis_argument, take_local_rows

Tree = Any
Unravel = Callable[[Array], Tree]


class InnerBatch(NamedTuple):
    """Augmented images `[B, H, W, C]`, label logits `[B, num_classes]` and weights `[B]`, whose sum
    is 1, of one inner step; `axis` are the devices that share the step, if any."""

    images: Array
    label_logits: Array
    weights: Array
    axis: BatchAxis | None = None


def unroll(
    apply_params: ApplyParams,
    unravel: Unravel,
    vector: Array,
    synthetic: SyntheticData,
    key: Array,
    *,
    num_steps: int,
    batch_size: int | None = None,
    augment_strategy: str = DSA_STRATEGY,
    loss_scaling: str = "cross_entropy_over_classes",
    momentum: float = 0.0,
    differentiation: DifferentiationMode = mixed_mode,
) -> Array:
    """Train by SGD on synthetic data, differentiably: the inner loop A(X, y, w, s').

    `w <- w - step_size * grad loss(w; augment(images), labels)`, `num_steps` times.

    Args:
      vector: `[P]` parameters at the start.
      key: one augmentation per step, and the order of minibatches.
      batch_size: samples per step; an epoch visits each once, in a new order, its last batch being
        the remainder. None: all samples at every step, whose order is left alone since neither the
        mean nor the independent augmentations depend on it.
      momentum: of SGD; 0, as in paper and code, is plain SGD.
      differentiation: how the gradient of a step's gradient is taken; with micro-batches it is
        `partial(mixed_mode, micro_batch=...)`, and `reverse_mode` is the plain form. Values are the
        same.
    Returns:
      `[P]` parameters at the end; differentiable in `vector` and in every leaf of `synthetic`.
    Cost: `num_steps` gradients; backward about three times that. Memory: `num_steps` x P, and the
      activations of a (micro-)batch.
    """

    def select_samples(
        synthetic: SyntheticData, step: tuple[Array, Array], batch_axis: BatchAxis | None
    ) -> InnerBatch:
        key, step_index = step
        return select_inner_batch(
            synthetic, key, step_index, batch_size, augment_strategy, batch_axis
        )

    def loss_sum(vector: Array, batch: InnerBatch) -> Array:
        logits = apply_params(unravel(vector), batch.images, **make_axis_argument(batch.axis))
        losses = soft_cross_entropies(logits, batch.label_logits, scaling=loss_scaling)
        return (batch.weights * losses).sum()

    gradient = differentiation(loss_sum, select_samples)
    return run_sgd(
        vector,
        lambda vector, number: gradient(vector, synthetic, (key, number)),
        synthetic.step_size,
        num_steps=num_steps,
        momentum=momentum,
    )


def select_inner_batch(
    synthetic: SyntheticData,
    key: Array,
    step_index: Array,
    batch_size: int | None,
    augment_strategy: str,
    batch_axis: BatchAxis | None = None,
) -> InnerBatch:
    """What step `step_index`, counted over all epochs, trains on: all samples for `batch_size`
    None; of them this device's part, where devices share them (`batch_axis`)."""
    order_key, augment_key = jax.random.split(key)
    images, labels = synthetic.images, synthetic.label_logits
    if batch_size is not None and batch_size < len(images):
        index, mask = get_epoch_batch(order_key, step_index, len(images), batch_size)
        weights = mask.astype(images.dtype) / mask.sum()
        index, weights = take_local_rows((index, weights), batch_axis)
        images, labels = images[index], labels[index]
    else:
        weights = jnp.full(len(images), 1 / len(images), images.dtype)
        images, labels, weights = take_local_rows((images, labels, weights), batch_axis)
    images = augment(
        jax.random.fold_in(augment_key, step_index),
        images,
        strategy=augment_strategy,
        batch_axis=batch_axis,
    )
    return InnerBatch(images, labels, weights, batch_axis)


def matching_loss(
    end: Array, start: Array, target: Array, *, distance: str = "normalized_l2"
) -> Array:
    """How far training on synthetic data ended from where real training went; vectors `[P]`.

    "normalized_l2": `||end - target||^2 / ||start - target||^2`, 1 for a network that has not
    moved and 0 for one that arrived; the denominator is that of the (averaged) target, as in the
    code. "cosine": 1 minus the cosine between `end` and `target`, the measure of DynaFed's Fig. 6.
    """
    if distance == "normalized_l2":
        return jnp.square(end - target).sum() / jnp.square(start - target).sum()
    # Squares are rooted one by one: their product leaves the range of float32 sooner.
    norms = jnp.sqrt(jnp.square(end).sum()) * jnp.sqrt(jnp.square(target).sum())
    return 1 - (end * target).sum() / norms
