"""Training of the global model on the synthetic images of all clients."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.distribution_matching import (
    divide_by_count,
    soft_label_matching_loss,
    sum_logits_by_class,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    BatchPlan,
    EpochRange,
    LossAndGradient,
    ServerTraining,
    shard_loss_and_gradient,
    train_on_examples,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model
from fedjax_het.nn.batch_axis import sum_over_shards, take_local_rows
from fedjax_het.utils.arrays import pad_rows

Tree = Any


class SyntheticPool(NamedTuple):
    """The synthetic images of all clients; a mask marks the images of the current round.

    Attributes:
      images: `[M, H, W, C]` float32, normalized.
      labels: `[M]` int32.
      is_valid: `[M]` bool, True for images that exist in the current round.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticPool
      >>> labels = jnp.zeros(6, jnp.int32)
      >>> SyntheticPool(jnp.zeros((6, 4, 4, 1)), labels, jnp.ones(6, bool)).images.shape
      (6, 4, 4, 1)
    """

    images: Array
    labels: Array
    is_valid: Array


class SoftLabelTargets(NamedTuple):
    """The clients' soft labels, averaged over the owners of each class.

    Attributes:
      soft_labels: `[C, C]`, a distribution over classes for each class.
      is_owned: `[C]` bool, True for classes that a client owns.
      weight: `[]`, factor of the matching loss relative to the cross-entropy (lambda_glob).
      tau: `[]`, temperature of the softmax.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SoftLabelTargets
      >>> weight, tau = jnp.float32(1.0), jnp.float32(2.0)
      >>> targets = SoftLabelTargets(jnp.eye(3), jnp.ones(3, bool), weight, tau)
      >>> targets.soft_labels.shape
      (3, 3)
    """

    soft_labels: Array
    is_owned: Array
    weight: Array
    tau: Array


def make_masked_shuffled_batches(key: jax.Array, present: jax.Array, batch_size: int) -> BatchPlan:
    """Plan epochs that visit the present examples in random orders.

    Args:
      key: an order depends on it and on the number of the epoch alone.
      present: `[n]` bool, True for the examples to visit; may be traced.
      batch_size: examples per step; at most n are used.

    Returns:
      The plan.
    """

    def order(epoch):
        draws = jax.random.uniform(jax.random.fold_in(key, epoch), present.shape)
        return jnp.argsort(jnp.where(present, draws, jnp.inf))

    return BatchPlan(order, present.sum(), min(batch_size, len(present)))


def train_on_synthetic_pool(
    model: Model,
    variables: Tree,
    pool: SyntheticPool,
    key: Array,
    *,
    epochs: int | Array,
    max_epochs: int | None = None,
    batch_size: int,
    lr: float | Array,
    momentum: float | Array,
    weight_decay: float | Array,
    soft_label_targets: SoftLabelTargets | None = None,
    exact_matching: bool = False,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Tree:
    """Train by SGD on the pool, starting at `variables`.

    An epoch is a permutation of the valid images in ceil(valid / batch_size) steps. The last batch
    is filled up with images of weight 0, which only batch norm sees. The update is PyTorch's SGD,
    with velocity 0 at the start of every call:

        velocity <- momentum * velocity + gradient + weight_decay * w,  w <- w - lr * velocity

    Cost: epochs * ceil(valid / batch_size) steps; `exact_matching` adds two passes over the pool to
    each step. With several devices, each step has one collective for its gradient. Batch norm adds
    one per layer, matching one per step, and `exact_matching` two per step.

    Args:
      model: the network.
      variables: its variables at the start.
      pool: the synthetic images.
      key: key of the permutations; the network draws no random numbers.
      epochs: number of epochs; may be traced.
      max_epochs: static upper bound of a traced `epochs`.
      batch_size: images per step.
      lr: learning rate; may be traced, like `momentum` and `weight_decay`.
      momentum: momentum of SGD.
      weight_decay: L2 coefficient.
      soft_label_targets: adds the soft-label matching loss, summed over classes, to the mean
        cross-entropy. The mean logit of a class is the mean over its images in the minibatch;
        classes without images in the minibatch add nothing.
      exact_matching: compute the mean logits over all images of the pool instead, in evaluation
        mode.
      server_parallelism: devices that share each batch and the passes over the pool.

    Returns:
      The trained variables.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.condensation import SyntheticPool, train_on_synthetic_pool
      >>> model = make_model("mlp", (2, 2, 1), 3, hidden=[4])
      >>> labels = jnp.arange(6) % 3
      >>> pool = SyntheticPool(jnp.ones((6, 2, 2, 1)), labels, jnp.ones(6, bool))
      >>> settings = {"epochs": 1, "batch_size": 3, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
      >>> variables, key = model.init(jax.random.key(0)), jax.random.key(1)
      >>> trained = train_on_synthetic_pool(model, variables, pool, key, **settings)
      >>> trained["params"]["head"]["kernel"].shape
      (4, 3)
    """
    batches = make_masked_shuffled_batches(key, pool.is_valid, batch_size)
    batch_loss = _make_batch_loss(model, None if exact_matching else soft_label_targets)
    loss_and_gradient = shard_loss_and_gradient(server_parallelism, batch_loss)
    samples_per_step = float(batches.size)
    if exact_matching and soft_label_targets is not None:
        samples_per_step += 4 / 3 * len(pool.images)
        loss_and_gradient = _add_exact_matching(
            loss_and_gradient, model, pool, soft_label_targets, batches.size, server_parallelism
        )
    training = ServerTraining(
        loss_and_gradient,
        optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=momentum)),
        # The devices share the batches already, in `loss_and_gradient`.
        parallelism=SINGLE_DEVICE._replace(loops=server_parallelism.loops),
    )
    examples, epoch_range = Examples(pool.images, pool.labels), EpochRange(epochs, 0, max_epochs)
    inputs = (variables, examples, batches, epoch_range)
    return train_on_examples(training, *inputs, samples_per_step=samples_per_step)[0]


def _make_batch_loss(
    model: Model, soft_label_targets: SoftLabelTargets | None = None
) -> LossAndGradient:
    """Return the mean cross-entropy of normalized images plus the batch's matching loss."""
    if soft_label_targets is not None:  # the term needs the whole batch, so no micro-batches
        model = model._replace(micro_batch=None)
    task = Task(model, mean=(0.0,), std=(1.0,))  # images are already normalized

    def compute_losses(batch_axis, network, images, labels, mask):
        logits, state = network(images)
        sample_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if soft_label_targets is not None:  # added to every sample, so the mean adds it once
            local_sums = sum_logits_by_class(logits, labels, mask, model.num_classes)
            sums, count = sum_over_shards(local_sums, batch_axis)
            sample_losses += _weighted_matching_loss(soft_label_targets, sums, count)
        return sample_losses, state

    def loss_and_gradient(variables, batch, key):
        return task.loss_and_gradient(
            variables,
            batch,
            key,
            sample_losses=partial(compute_losses, batch.axis),
            extra_sample_arrays=(batch.mask,),
        )

    return loss_and_gradient


def _weighted_matching_loss(
    soft_label_targets: SoftLabelTargets, sums: Array, count: Array
) -> Array:
    """Return the weighted matching loss for sums of logits by class `[C, C]` and counts `[C]`."""
    is_present = (count > 0) & soft_label_targets.is_owned
    means = divide_by_count(sums, count)
    loss = soft_label_matching_loss(
        means, is_present, soft_label_targets.soft_labels, soft_label_targets.tau
    )
    return soft_label_targets.weight * loss


def _add_exact_matching(
    batch_loss: LossAndGradient,
    model: Model,
    pool: SyntheticPool,
    soft_label_targets: SoftLabelTargets,
    batch_size: int,
    server_parallelism: ServerParallelism,
) -> LossAndGradient:
    """Add the gradient of the matching loss over the whole pool to `batch_loss`.

    The returned loss excludes the matching loss. The matching gradient uses the parameters before
    the batch and the statistics after it. Two passes over equal pieces compute it: the first
    computes the sums of logits, the second pulls their cotangents back piece by piece. The memory
    is therefore bounded by one batch.
    """

    def split(rows: Array) -> Array:
        rows = pad_rows(rows, -len(rows) % batch_size)
        return rows.reshape(-1, batch_size, *rows.shape[1:])

    def loss_and_gradient(variables, batch, key):
        params = variables["params"]
        loss, gradient, variables = batch_loss(variables, batch, key)
        # All devices must run the batch's collectives first.
        ordered_images = server_parallelism.order_after(loss, pool.images)
        local_pool = take_local_rows(
            pool._replace(images=ordered_images), server_parallelism.batch_axis
        )
        images, labels, is_valid = map(split, local_pool)
        pieces = images, labels, is_valid.astype(jnp.float32)

        def sum_logits(params, piece):
            images, labels, weights = piece
            state = variables["state"]
            logits, _ = model.apply({"params": params, "state": state}, images, train=False)
            return sum_logits_by_class(logits, labels, weights, model.num_classes)

        piece_sums = jax.lax.map(lambda piece: sum_logits(params, piece), pieces)
        totals = server_parallelism.sum_over_devices(jax.tree.map(lambda a: a.sum(0), piece_sums))
        matching_loss = partial(_weighted_matching_loss, soft_label_targets)
        cotangent = jax.grad(matching_loss)(*totals)

        def add_piece(total, piece):
            piece_gradient = jax.vjp(lambda p: sum_logits(p, piece)[0], params)[1](cotangent)[0]
            return jax.tree.map(jnp.add, total, piece_gradient), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        local_gradient = jax.lax.scan(add_piece, zeros, pieces)[0]
        pool_gradient = server_parallelism.sum_over_devices(local_gradient)
        return loss, jax.tree.map(jnp.add, gradient, pool_gradient), variables

    return loss_and_gradient
