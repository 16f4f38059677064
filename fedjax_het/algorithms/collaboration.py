"""Who learns from whom: weights between clients' models, and the messages that they make.

Models of all clients are a pytree with leading axis K. Matrices are [K, K], row i what client i
receives. Products are taken at the highest precision: distances between nearby models are small
differences of large numbers.
"""

import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp

Tree = Any

Guard = Literal["step", "rows"]


def stacked(models: Tree) -> jax.Array:
    """[K, P]: every client's arrays, one after the other."""
    leaves = jax.tree.leaves(models)
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)


def unstacked(vector: jax.Array, like: Tree) -> Tree:
    """One client's [P] as arrays again, of the shapes in `like`."""
    leaves, structure = jax.tree.flatten(like)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = jnp.split(vector, list(ends)[:-1])
    arrays = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def squared_distances(vectors: jax.Array) -> jax.Array:
    """[K, K] ||w_i - w_j||^2 of `[K, P]`, by one Gram product. Cost: K^2 P multiplications.

    The mean is taken off first, which changes no distance and keeps the digits of small ones. (By a
    product too: on a CPU, XLA's sum over clients takes twice as long as the Gram product.)
    """
    count = len(vectors)
    mean = jnp.matmul(jnp.full((1, count), 1 / count), vectors, precision="highest")
    gram = _gram(vectors - mean)
    norms = jnp.diagonal(gram)
    distances = jnp.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)
    return distances * (1 - jnp.eye(len(vectors)))


def cosine_distances(vectors: jax.Array) -> jax.Array:
    """[K, K] 1 - cos(w_i, w_j) of `[K, P]`: half the squared distances of the unit vectors, which
    keeps the digits of cosines near 1. Between a vector of zeros and another: 1/2."""
    norms = jnp.linalg.norm(vectors, axis=1, keepdims=True)
    return squared_distances(vectors / jnp.maximum(norms, 1e-30)) / 2


def attention(distances: jax.Array, alpha, sigma, heard: jax.Array, *, guard: str) -> jax.Array:
    """FedAMP's weights (Eq. 5): xi_ij = alpha A'(d_ij) with A(t) = 1 - exp(-t / sigma), for j != i;
    xi_ii is what is left of 1.

    Args:
      distances: [K, K] squared.
      heard: [K] bool, whose models count.
      guard: what becomes of an alpha so large that a client's own weight would be negative. "step":
        the largest alpha for which none is, so that the matrix stays symmetric; "rows": in each row
        on its own, others' weights are scaled to sum to 1.
    Returns: [K, K], non-negative, rows sum to 1.
    """
    others = heard[None, :] & ~jnp.eye(len(distances), dtype=bool)
    weights = jnp.where(others, alpha / sigma * jnp.exp(-distances / sigma), 0)
    total = weights.sum(1, keepdims=True)
    bound = total if guard == "rows" else total.max()
    return _with_own(weights / jnp.maximum(bound, 1))


def softmax_attention(distances: jax.Array, sigma, self_weight, heard: jax.Array) -> jax.Array:
    """HeurFedAMP's weights (Eq. 8): xi_ii = self_weight; the rest is shared out among the others
    heard by a softmax of sigma * cos, which is that of -sigma * (1 - cos), with `distances` [K, K]
    1 - cos. Who hears nobody else has xi_ii = 1."""
    others = heard[None, :] & ~jnp.eye(len(distances), dtype=bool)
    scores = jnp.where(others, -sigma * distances, -jnp.inf)
    highest = scores.max(1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    shares = powers / jnp.maximum(powers.sum(1, keepdims=True), 1e-30)
    return _with_own((1 - self_weight) * shares)


def pass_messages(weights: jax.Array, vectors: jax.Array) -> jax.Array:
    """[K, P] u_i = sum_j xi_ij w_j of all clients, by one product with the stacked models."""
    return jnp.matmul(weights, vectors, precision="highest")


def median_pair(values: jax.Array, heard: jax.Array) -> jax.Array:
    """The median of `values` [K, K] over pairs of different clients heard; 0 without a pair."""
    pairs = heard[:, None] & heard[None, :] & ~jnp.eye(len(values), dtype=bool)
    median = jnp.nanmedian(jnp.where(pairs, values, jnp.nan))
    return jnp.where(pairs.any(), median, 0.0)


def _gram(vectors: jax.Array) -> jax.Array:
    return jnp.matmul(vectors, vectors.T, precision="highest")


def _with_own(weights: jax.Array) -> jax.Array:
    """The matrix with what is left of 1 in each row on its diagonal."""
    return weights + jnp.diag(jnp.maximum(1 - weights.sum(1), 0))
