"""Training of the global model on the synthetic images that clients sent."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.soft_label_matching import (
    divide_by_count,
    soft_label_matching_loss,
    sum_logits_by_class,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import (
    LossAndGradient,
    make_masked_shuffled_batches,
    shard_loss_and_gradient,
    train_on_examples,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model
from fedjax_het.nn.batch_axis import sum_over_shards, take_local_rows

Tree = Any


class SyntheticPool(NamedTuple):
    """Synthetic images of all clients; which of them there are differs between rounds."""

    images: Array  # [M, H, W, C] normalised
    labels: Array  # [M] int32
    is_valid: Array  # [M] bool


class SoftLabelTargets(NamedTuple):
    """The clients' soft labels, averaged over the owners of each class."""

    soft_labels: Array  # [C, C]
    is_owned: Array  # [C] bool
    weight: Array  # [] of the matching term beside the cross-entropy (lambda_glob)
    tau: Array


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
    """SGD on the pool from `variables` on; the new variables.

    An epoch is a permutation of the valid images, in ceil(valid / batch_size) steps; the last
    batch is filled up with images of weight 0, which batch norm alone sees. PyTorch's SGD:
    velocity <- momentum * velocity + gradient + weight_decay * w, from rest in every call.

    Args:
      epochs: may be traced; max_epochs: then, at most so many.
      key: of the permutations; the network draws nothing.
      knowledge: adds the matching of soft labels, summed over classes, to the mean cross-entropy.
        The mean logit of a class is that of its images in the minibatch, and classes that are not
        in it add nothing; or of all its images in the pool, `exact`, in evaluation mode.
      sharing: the devices that share each batch, and the passes over the pool.
    Cost: epochs * ceil(valid / batch_size) steps; `exact` adds two passes over the pool to each.
      Shared as `fit` says: batch norm and the matching add a collective a layer and one for each
      step; two for the passes.
    """
    batches = make_masked_shuffled_batches(key, pool.is_valid, batch_size)
    batch_loss = _make_batch_loss(model, None if exact_matching else soft_label_targets)
    loss_and_gradient, samples_per_step = (
        shard_loss_and_gradient(server_parallelism, batch_loss),
        float(batches.size),
    )
    if exact_matching and soft_label_targets is not None:
        samples_per_step += 4 / 3 * len(pool.images)
        loss_and_gradient = _add_exact_matching(
            loss_and_gradient, model, pool, soft_label_targets, batches.size, server_parallelism
        )
    return train_on_examples(
        variables,
        Examples(pool.images, pool.labels),
        batches,
        loss_and_gradient,
        optimizer=optax.chain(
            optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=momentum)
        ),
        epochs=epochs,
        max_epochs=max_epochs,
        samples_per_step=samples_per_step,
        # The devices share the batches already, in `loss_and_gradient`.
        server_parallelism=SINGLE_DEVICE._replace(loops=server_parallelism.loops),
    )[0]


def _make_batch_loss(
    model: Model, soft_label_targets: SoftLabelTargets | None = None
) -> LossAndGradient:
    """The mean cross-entropy of normalised images, and the matching of the batch's mean logits."""
    if soft_label_targets is not None:  # a term of the whole batch, which cannot be taken in pieces
        model = model._replace(micro_batch=None)
    task = Task(model, mean=(0.0,), std=(1.0,))  # pixels are left as they are

    def compute_losses(batch_axis, network, images, labels, mask):
        logits, state = network(images)
        sample_losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if soft_label_targets is not None:  # to every sample, so that their mean leaves it as it is
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


def _add_exact_matching(
    batch_loss: LossAndGradient,
    model: Model,
    pool: SyntheticPool,
    soft_label_targets: SoftLabelTargets,
    batch_size: int,
    server_parallelism: ServerParallelism,
) -> LossAndGradient:
    """`of_batch` and the gradient of the matching over the pool, whose loss is left out.

    The network's statistics are those after the batch, its parameters those before.
    """

    def loss_and_gradient(variables, batch, key):
        params = variables["params"]
        loss, gradient, variables = batch_loss(variables, batch, key)
        matching_loss = partial(_weighted_matching_loss, soft_label_targets)
        images = server_parallelism.order_after(
            loss, pool.images
        )  # the batch's collectives come first
        ordered_pool, state = pool._replace(images=images), variables["state"]
        pool_gradient = _exact_gradient(
            model, params, state, ordered_pool, matching_loss, batch_size, server_parallelism
        )
        return loss, jax.tree.map(jnp.add, gradient, pool_gradient), variables

    return loss_and_gradient


def _weighted_matching_loss(
    soft_label_targets: SoftLabelTargets, sums: Array, count: Array
) -> Array:
    """The weighted term of the sums of logits by class `[C, C]` and their numbers `[C]`."""
    is_present = (count > 0) & soft_label_targets.is_owned
    means = divide_by_count(sums, count)
    loss = soft_label_matching_loss(
        means, is_present, soft_label_targets.soft_labels, soft_label_targets.tau
    )
    return soft_label_targets.weight * loss


def _exact_gradient(
    model: Model,
    params: Tree,
    state: Tree,
    pool: SyntheticPool,
    matching_loss: Callable[[Array, Array], Array],
    batch_size: int,
    server_parallelism: ServerParallelism,
) -> Tree:
    """Gradient of `matching(sums of logits by class, counts)` over the whole pool.

    In two passes of equal pieces: the sums, then their cotangents pulled back piece by piece, so
    that memory is that of one batch.
    """
    pool = take_local_rows(pool, server_parallelism.batch_axis)
    num_padding = -len(pool.images) % batch_size
    images, labels, valid = (
        jnp.pad(a, ((0, num_padding),) + ((0, 0),) * (a.ndim - 1)).reshape(
            -1, batch_size, *a.shape[1:]
        )
        for a in pool
    )
    batches = (images, labels, valid.astype(jnp.float32))

    def sum_batch_logits(params, batch):
        images, labels, weights = batch
        logits, _ = model.apply({"params": params, "state": state}, images, train=False)
        return sum_logits_by_class(logits, labels, weights, model.num_classes)

    batch_sums = jax.lax.map(lambda piece: sum_batch_logits(params, piece), batches)
    totals = server_parallelism.sum_over_devices(jax.tree.map(lambda a: a.sum(0), batch_sums))
    cotangent = jax.grad(matching_loss)(*totals)

    def add_batch_gradient(total, batch):
        batch_gradient = jax.vjp(lambda p: sum_batch_logits(p, batch)[0], params)[1](cotangent)[0]
        return jax.tree.map(jnp.add, total, batch_gradient), None

    local_gradient = jax.lax.scan(
        add_batch_gradient, jax.tree.map(jnp.zeros_like, params), batches
    )[0]
    return server_parallelism.sum_over_devices(local_gradient)
