"""Who learns from whom: weights between clients' models, and the messages that they make.

Models of all clients are a pytree with leading axis K. Matrices are [K, K], row i what client i
receives. Products are taken at the highest precision: distances between nearby models are small
differences of large numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.core.execution_plan import ExecutionPlan

Tree = Any

AttentionGuard = Literal["step", "rows"]

GRAM_BLOCK_SIZE = 512  # parameters of every client per Gram product


class Attention(NamedTuple):
    """Weights [K, K], and the alpha_k [K] that each row was made with."""

    weights: jax.Array
    alpha: jax.Array


class AttentionFunction(NamedTuple):
    """An attention-inducing function A of a squared distance t >= 0 (Definition 1) and its
    derivative, both `(t, sigma)`; A'(0) = 1 / sigma, in whose units t is measured."""

    value: Callable
    derivative: Callable


SCAD_A = 3.7  # Fan and Li (2001)
MCP_GAMMA = 3.0


def _scad(t, sigma):
    """A of the smoothly clipped absolute deviation, and its derivative by t / sigma."""
    x, a = t / sigma, SCAD_A
    clipped_x = jnp.minimum(x, a)
    middle = 1 + ((a - 1) ** 2 - (a - clipped_x) ** 2) / (2 * (a - 1))
    return jnp.where(x <= 1, x, middle), jnp.where(x <= 1, 1.0, (a - clipped_x) / (a - 1))


def _mcp(t, sigma):
    """The same of the minimax concave penalty."""
    clipped_x = jnp.minimum(t / sigma, MCP_GAMMA)
    return clipped_x - clipped_x**2 / (2 * MCP_GAMMA), 1 - clipped_x / MCP_GAMMA


ATTENTION_FUNCTIONS = {
    "exponential": AttentionFunction(
        lambda t, sigma: -jnp.expm1(-t / sigma), lambda t, sigma: jnp.exp(-t / sigma) / sigma
    ),
    "scad": AttentionFunction(
        lambda t, sigma: _scad(t, sigma)[0], lambda t, sigma: _scad(t, sigma)[1] / sigma
    ),
    "mcp": AttentionFunction(
        lambda t, sigma: _mcp(t, sigma)[0], lambda t, sigma: _mcp(t, sigma)[1] / sigma
    ),
}


def compute_squared_distances(models: Tree, plan: ExecutionPlan | None = None) -> jax.Array:
    """[K, K] ||w_i - w_j||^2 of all arrays, by Gram products. Cost: K^2 P multiplications, of which
    each of a plan's devices takes its part; then one collective.

    The mean is taken off first, which changes no distance and keeps the digits of small ones.
    """
    gram = _compute_gram(models, plan)
    norms = jnp.diagonal(gram)
    distances = jnp.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)
    return distances * (1 - jnp.eye(len(gram)))


def compute_cosine_distances(models: Tree, plan: ExecutionPlan | None = None) -> jax.Array:
    """[K, K] 1 - cos(w_i, w_j) of all arrays: half the squared distances of the unit vectors, which
    keeps the digits of cosines near 1. Between models of zeros and others: 1/2."""
    rows = [_flatten_clients(leaf) for leaf in jax.tree.leaves(models)]
    norms = jnp.sqrt(sum(jnp.square(row).sum(1, keepdims=True) for row in rows))
    return compute_squared_distances([row / jnp.maximum(norms, 1e-30) for row in rows], plan) / 2


def compute_attention(
    distances: jax.Array,
    alpha,
    sigma,
    is_included: jax.Array,
    *,
    guard: str,
    function: str = "exponential",
) -> Attention:
    """FedAMP's weights (Eq. 5): xi_ij = alpha A'(d_ij) for j != i; xi_ii is what is left of 1.

    Args:
      distances: [K, K] squared.
      heard: [K] bool, whose models count.
      guard: what becomes of an alpha so large that a client's own weight would be negative. "step":
        the largest alpha for which none is, so that the matrix stays symmetric; "rows": in each row
        on its own, so that each has an alpha of its own.
      function: A, of `ATTENTION_FUNCTIONS`.
    Returns: weights that are non-negative and whose rows sum to 1.
    """
    is_other = is_included[None, :] & ~jnp.eye(len(distances), dtype=bool)
    derivatives = ATTENTION_FUNCTIONS[function].derivative(distances, sigma)
    weights = jnp.where(is_other, alpha * derivatives, 0)
    total = weights.sum(1)
    bound = jnp.maximum(total if guard == "rows" else total.max(), 1)
    scale = jnp.broadcast_to(1 / bound, total.shape)
    return Attention(_fill_diagonal(weights * scale[:, None]), alpha * scale)


def compute_softmax_attention(
    distances: jax.Array, sigma, self_weight, is_included: jax.Array
) -> jax.Array:
    """HeurFedAMP's weights (Eq. 8): xi_ii = self_weight; the rest is shared out among the others
    heard by a softmax of sigma * cos, which is that of -sigma * (1 - cos), with `distances` [K, K]
    1 - cos. Who hears nobody else has xi_ii = 1."""
    is_other = is_included[None, :] & ~jnp.eye(len(distances), dtype=bool)
    scores = jnp.where(is_other, -sigma * distances, -jnp.inf)
    highest = scores.max(1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    softmax_weights = powers / jnp.maximum(powers.sum(1, keepdims=True), 1e-30)
    return _fill_diagonal((1 - self_weight) * softmax_weights)


def mix_models(weights: jax.Array, models: Tree) -> Tree:
    """u_i = sum_j xi_ij w_j of all clients, by a product for each array."""

    def mix_leaf(leaf):
        return jnp.matmul(weights, _flatten_clients(leaf), precision="highest").reshape(leaf.shape)

    return jax.tree.map(mix_leaf, models)


def median_over_pairs(values: jax.Array, is_included: jax.Array) -> jax.Array:
    """The median of `values` [K, K] over pairs of different clients heard; 0 without a pair."""
    is_pair = is_included[:, None] & is_included[None, :] & ~jnp.eye(len(values), dtype=bool)
    median = jnp.nanmedian(jnp.where(is_pair, values, jnp.nan))
    return jnp.where(is_pair.any(), median, 0.0)


def _flatten_clients(leaf: jax.Array) -> jax.Array:
    """[K, n] of an array [K, ...]."""
    return leaf.reshape(leaf.shape[0], -1)


def _compute_gram(models: Tree, plan: ExecutionPlan | None) -> jax.Array:
    """[K, K] of all clients' weights, those of a place having their mean taken off."""
    if plan is None:
        return _partial_gram(models, 0, 1)
    part_indices = jnp.arange(plan.blocks)
    return plan.sum_over_blocks(
        partial(_partial_gram, num_parts=plan.blocks), (models,), part_indices
    )


def _partial_gram(models: Tree, part_index: jax.Array | int, num_parts: int) -> jax.Array:
    """The sum over every `parts`-th block of columns, from `part` on.

    In blocks that stay in a core's cache, which are read once: a product of whole rows takes twice
    as long, and a copy of all models as long again.
    """

    def gram_of_columns(columns: jax.Array) -> jax.Array:
        columns = jax.lax.optimization_barrier(columns - columns.mean(0))
        return jnp.matmul(columns, columns.T, precision="highest")

    def gram_of_array(rows: jax.Array) -> jax.Array:
        num_blocks, num_remaining = divmod(rows.shape[1], GRAM_BLOCK_SIZE)
        remainder_gram = jnp.where(
            part_index == 0, gram_of_columns(rows[:, rows.shape[1] - num_remaining :]), 0
        )
        if not num_blocks:
            return remainder_gram

        def add_block(iteration, total):
            first = (part_index + iteration * num_parts) * GRAM_BLOCK_SIZE
            columns = jax.lax.dynamic_slice_in_dim(rows, first, GRAM_BLOCK_SIZE, 1)
            return total + gram_of_columns(columns)

        num_iterations = (num_blocks - part_index + num_parts - 1) // num_parts
        return jax.lax.fori_loop(0, num_iterations, add_block, remainder_gram)

    return jax.tree.reduce(
        jnp.add, jax.tree.map(lambda leaf: gram_of_array(_flatten_clients(leaf)), models)
    )


def _fill_diagonal(weights: jax.Array) -> jax.Array:
    """The matrix with what is left of 1 in each row on its diagonal."""
    return weights + jnp.diag(jnp.maximum(1 - weights.sum(1), 0))
