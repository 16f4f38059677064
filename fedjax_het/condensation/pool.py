"""Training of the global model on the synthetic images that clients sent."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.knowledge import class_sums, knowledge_matching, mean_of
from fedjax_het.engine.lanes import Examples
from fedjax_het.engine.server import LossAndGradient, fit, shared_among, shuffled_present
from fedjax_het.engine.sharing import ALONE, Sharing
from fedjax_het.engine.task import Task
from fedjax_het.nn import Model
from fedjax_het.nn.spread import over_whole_batch, own_rows

Tree = Any


class Pool(NamedTuple):
    """Synthetic images of all clients; which of them there are differs between rounds."""

    images: Array  # [M, H, W, C] normalised
    labels: Array  # [M] int32
    valid: Array  # [M] bool


class Knowledge(NamedTuple):
    """The clients' soft labels, averaged over the owners of each class."""

    soft_labels: Array  # [C, C]
    owned: Array  # [C] bool
    weight: Array  # [] of the matching term beside the cross-entropy (lambda_glob)
    tau: Array


def train_on_pool(
    model: Model,
    variables: Tree,
    pool: Pool,
    key: Array,
    *,
    epochs: int | Array,
    most_epochs: int | None = None,
    batch_size: int,
    lr: float | Array,
    momentum: float | Array,
    weight_decay: float | Array,
    knowledge: Knowledge | None = None,
    exact: bool = False,
    sharing: Sharing = ALONE,
) -> Tree:
    """SGD on the pool from `variables` on; the new variables.

    An epoch is a permutation of the valid images, in ceil(valid / batch_size) steps; the last
    batch is filled up with images of weight 0, which batch norm alone sees. PyTorch's SGD:
    velocity <- momentum * velocity + gradient + weight_decay * w, from rest in every call.

    Args:
      epochs: may be traced; most_epochs: then, at most so many.
      key: of the permutations; the network draws nothing.
      knowledge: adds the matching of soft labels, summed over classes, to the mean cross-entropy.
        The mean logit of a class is that of its images in the minibatch, and classes that are not
        in it add nothing; or of all its images in the pool, `exact`, in evaluation mode.
      sharing: the devices that share each batch, and the passes over the pool.
    Cost: epochs * ceil(valid / batch_size) steps; `exact` adds two passes over the pool to each.
      Shared as `fit` says: batch norm and the matching add a collective a layer and one for each
      step; two for the passes.
    """
    batches = shuffled_present(key, pool.valid, batch_size)
    of_batch = _mean_loss(model, None if exact else knowledge)
    loss_and_gradient, samples = shared_among(sharing, of_batch), float(batches.size)
    if exact and knowledge is not None:
        samples += 4 / 3 * len(pool.images)
        loss_and_gradient = _with_exact_matching(
            loss_and_gradient, model, pool, knowledge, batches.size, sharing
        )
    return fit(
        variables,
        Examples(pool.images, pool.labels),
        batches,
        loss_and_gradient,
        optimizer=optax.chain(
            optax.add_decayed_weights(weight_decay), optax.sgd(lr, momentum=momentum)
        ),
        epochs=epochs,
        most_epochs=most_epochs,
        samples=samples,
    )[0]


def _mean_loss(model: Model, knowledge: Knowledge | None = None) -> LossAndGradient:
    """The mean cross-entropy of normalised images, and the matching of the batch's mean logits."""
    if knowledge is not None:  # a term of the whole batch, which cannot be taken in pieces
        model = model._replace(micro_batch=None)
    task = Task(model, mean=(0.0,), std=(1.0,))  # pixels are left as they are

    def losses(network, images, labels, mask):
        logits, state = network(images)
        by_sample = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if knowledge is not None:  # to every sample, so that their mean leaves it as it is
            own = class_sums(logits, labels, mask, model.num_classes)
            sums, count = over_whole_batch(own)
            by_sample += _matching(knowledge, sums, count)
        return by_sample, state

    def loss_and_gradient(variables, batch, key):
        return task.loss_and_gradient(variables, batch, key, losses=losses, more=(batch.mask,))

    return loss_and_gradient


def _with_exact_matching(
    of_batch: LossAndGradient,
    model: Model,
    pool: Pool,
    knowledge: Knowledge,
    piece: int,
    sharing: Sharing,
) -> LossAndGradient:
    """`of_batch` and the gradient of the matching over the pool, whose loss is left out.

    The network's statistics are those after the batch, its parameters those before.
    """

    def loss_and_gradient(variables, batch, key):
        params = variables["params"]
        loss, gradient, variables = of_batch(variables, batch, key)
        matching = partial(_matching, knowledge)
        images = sharing.once_known(loss, pool.images)  # the batch's collectives come first
        ordered, state = pool._replace(images=images), variables["state"]
        of_pool = _exact_gradient(model, params, state, ordered, matching, piece, sharing)
        return loss, jax.tree.map(jnp.add, gradient, of_pool), variables

    return loss_and_gradient


def _matching(knowledge: Knowledge, sums: Array, count: Array) -> Array:
    """The weighted term of the sums of logits by class `[C, C]` and their numbers `[C]`."""
    present = (count > 0) & knowledge.owned
    means = mean_of(sums, count)
    term = knowledge_matching(means, present, knowledge.soft_labels, knowledge.tau)
    return knowledge.weight * term


def _exact_gradient(
    model: Model,
    params: Tree,
    state: Tree,
    pool: Pool,
    matching: Callable[[Array, Array], Array],
    batch_size: int,
    sharing: Sharing,
) -> Tree:
    """Gradient of `matching(sums of logits by class, counts)` over the whole pool.

    In two passes of equal pieces: the sums, then their cotangents pulled back piece by piece, so
    that memory is that of one batch.
    """
    with sharing.spread():
        pool = own_rows(pool)
    short = -len(pool.images) % batch_size
    images, labels, valid = (
        jnp.pad(a, ((0, short),) + ((0, 0),) * (a.ndim - 1)).reshape(-1, batch_size, *a.shape[1:])
        for a in pool
    )
    pieces = (images, labels, valid.astype(jnp.float32))

    def sums_of(params, piece):
        images, labels, weights = piece
        logits, _ = model.apply({"params": params, "state": state}, images, train=False)
        return class_sums(logits, labels, weights, model.num_classes)

    by_piece = jax.lax.map(lambda piece: sums_of(params, piece), pieces)
    totals = sharing.total(jax.tree.map(lambda a: a.sum(0), by_piece))
    cotangent = jax.grad(matching)(*totals)

    def add(total, piece):
        pulled = jax.vjp(lambda p: sums_of(p, piece)[0], params)[1](cotangent)[0]
        return jax.tree.map(jnp.add, total, pulled), None

    own = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), pieces)[0]
    return sharing.total(own)
