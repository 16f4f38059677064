"""Training of the global model on the synthetic images that clients sent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.knowledge import class_sums, knowledge_matching, mean_of
from fedjax_het.nn import Model, micro_batched_value_and_grad

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
    batch_size: int,
    lr: Array,
    momentum: Array,
    weight_decay: Array,
    knowledge: Knowledge | None = None,
    exact: bool = False,
) -> Tree:
    """SGD on the pool from `variables` on; the new variables.

    An epoch is a permutation of the valid images, in ceil(valid / batch_size) steps; the last
    batch is filled up with images of weight 0, which batch norm alone sees. PyTorch's SGD:
    velocity <- momentum * velocity + gradient + weight_decay * w, from rest in every call.

    Args:
      knowledge: adds the matching of soft labels, summed over classes, to the mean cross-entropy.
        The mean logit of a class is that of its images in the minibatch, and classes that are not
        in it add nothing; or of all its images in the pool, `exact`, in evaluation mode.
    Cost: epochs * ceil(valid / batch_size) steps; `exact` adds two passes over the pool to each.
    """
    size = len(pool.images)
    batch_size = min(batch_size, size)
    count = pool.valid.sum()
    per_epoch = -(-count // batch_size)

    coupled = knowledge is not None and not exact

    def gradient_of(params, state, samples):
        def loss_sum(params, samples):
            logits, new = model.apply(
                {"params": params, "state": state}, samples["images"], train=True
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, samples["labels"])
            total = (losses * samples["weights"]).sum()
            if coupled:  # a term of the whole batch: weighed so that dividing leaves it as it is
                sums, seen = class_sums(
                    logits, samples["labels"], samples["weights"], model.num_classes
                )
                total += samples["weights"].sum() * matching(sums, seen)
            return total, new

        piece = None if coupled else model.micro_batch
        both = micro_batched_value_and_grad(loss_sum, piece, has_aux=True)
        (_, state), gradient = both(params, samples)
        weight = jnp.maximum(samples["weights"].sum(), 1)
        return state, jax.tree.map(lambda g: g / weight, gradient)

    def matching(sums, seen):
        present = (seen > 0) & knowledge.owned
        means = mean_of(sums, seen)
        return knowledge.weight * knowledge_matching(
            means, present, knowledge.soft_labels, knowledge.tau
        )

    def step(i, carry):
        params, state, velocity, order = carry
        place = i * batch_size + jnp.arange(batch_size)
        index = order[place % jnp.maximum(count, 1)]
        samples = {
            "images": pool.images[index],
            "labels": pool.labels[index],
            "weights": (place < count).astype(jnp.float32),
        }
        state, gradient = gradient_of(params, state, samples)
        if knowledge is not None and exact:
            more = _exact_gradient(model, params, state, pool, matching, batch_size)
            gradient = jax.tree.map(jnp.add, gradient, more)
        velocity = jax.tree.map(
            lambda v, g, w: momentum * v + g + weight_decay * w, velocity, gradient, params
        )
        params = jax.tree.map(lambda w, v: w - lr * v, params, velocity)
        return params, state, velocity, order

    def epoch(e, carry):
        params, state, velocity = carry
        draws = jax.random.uniform(jax.random.fold_in(key, e), (size,))
        order = jnp.argsort(jnp.where(pool.valid, draws, jnp.inf))
        return jax.lax.fori_loop(0, per_epoch, step, (params, state, velocity, order))[:3]

    rest = jax.tree.map(jnp.zeros_like, variables["params"])
    start = (variables["params"], variables["state"], rest)
    params, state, _ = jax.lax.fori_loop(0, epochs, epoch, start)
    return {"params": params, "state": state}


def _exact_gradient(
    model: Model, params: Tree, state: Tree, pool: Pool, matching: Callable, batch_size: int
) -> Tree:
    """Gradient of `matching(sums of logits by class, counts)` over the whole pool.

    In two passes of equal pieces: the sums, then their cotangents pulled back piece by piece, so
    that memory is that of one batch.
    """
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
    cotangent = jax.grad(matching)(*(total.sum(0) for total in by_piece))

    def add(total, piece):
        pulled = jax.vjp(lambda p: sums_of(p, piece)[0], params)[1](cotangent)[0]
        return jax.tree.map(jnp.add, total, pulled), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), pieces)[0]
