"""The inner loop of trajectory matching: differentiable training on synthetic data, and its loss.

A network is a function `apply_params(params, images) -> logits [B, C]` on a parameter tree, and
`unravel(vector [P]) -> params`, the second result of `jax.flatten_util.ravel_pytree`. The loop
carries one flat vector. If devices share a step, `apply_params` also receives their `batch_axis`.
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
    """The samples of one inner step.

    Attributes:
      images: augmented, `[B, H, W, C]`.
      label_logits: `[B, num_classes]`.
      weights: `[B]`, with sum 1.
      axis: the devices that share the step; None for a step of one device.
    """

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

    The update, `num_steps` times, is

        w <- w - step_size * grad loss(w; augment(images), labels)

    Cost: `num_steps` gradients; the backward pass costs about three times as much. Memory:
    `num_steps` * P numbers, and the activations of a (micro-)batch.

    Args:
      apply_params: `(params, images) -> logits [B, C]`.
      unravel: `vector [P] -> params`.
      vector: `[P]`, parameters at the start.
      synthetic: the synthetic data.
      key: key of one augmentation per step and of the order of minibatches.
      num_steps: number of SGD steps, s'.
      batch_size: samples per step. An epoch visits each sample once, in a new order; its last batch
        is the remainder. None: all samples at every step, in their stored order, since neither the
        mean nor the independent augmentations depend on it.
      augment_strategy: augmentation families, see `augment`.
      loss_scaling: see `soft_cross_entropies`.
      momentum: momentum of SGD; paper and code use 0, plain SGD.
      differentiation: how a step's gradient is differentiated; does not affect the values. Use
        `partial(mixed_mode, micro_batch=...)` for micro-batches; `reverse_mode` is the plain form.

    Returns:
      Parameters at the end, `[P]`, differentiable in `vector` and in every leaf of `synthetic`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticData, unroll
      >>> apply_params = lambda w, images: images.reshape(len(images), -1) @ w
      >>> unravel = lambda vector: vector.reshape(4, 3)
      >>> data = SyntheticData(jnp.ones((6, 2, 2, 1)), jnp.zeros((6, 3)), jnp.float32(0.04))
      >>> unroll(apply_params, unravel, jnp.ones(12), data, jax.random.key(0), num_steps=2).shape
      (12,)
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
        lambda vector, step_index: gradient(vector, synthetic, (key, step_index)),
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
    """Select and augment the samples of one inner step.

    Args:
      synthetic: the synthetic data.
      key: key of the order and the augmentations.
      step_index: number of the step, counted over all epochs.
      batch_size: samples per step; None: all.
      augment_strategy: augmentation families, see `augment`.
      batch_axis: the devices that share the step; only the local samples are returned. None for a
        step of one device.

    Returns:
      The samples of the step.
    """
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
    """Compute the distance between the end of training on synthetic data and the target.

    Args:
      end: parameters after training on synthetic data, `[P]`.
      start: parameters before, `[P]`.
      target: parameters after training on real data, `[P]`.
      distance: "normalized_l2": `||end - target||^2 / ||start - target||^2`, which is 1 for a
        network that did not move and 0 at the target. The denominator uses the (averaged) target,
        as in the code. "cosine": 1 minus the cosine between `end` and `target`, the measure of
        DynaFed's Fig. 6.

    Returns:
      The loss, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import matching_loss
      >>> float(matching_loss(jnp.float32([1, 0]), jnp.float32([0, 0]), jnp.float32([2, 0])))
      0.25
    """
    if distance == "normalized_l2":
        return jnp.square(end - target).sum() / jnp.square(start - target).sum()
    # One root per norm: the product of the squares would overflow float32 earlier.
    norms = jnp.sqrt(jnp.square(end).sum()) * jnp.sqrt(jnp.square(target).sum())
    return 1 - (end * target).sum() / norms
