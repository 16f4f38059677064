"""Weights between clients' models by their distances, and mixtures of models by these weights.

Models of all clients are a pytree with leading axis K. Matrices are `[K, K]`; row i holds the
weights with which client i receives the models. Products have the highest precision: distances
between nearby models are small differences of large numbers.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.core.execution_plan import ExecutionPlan

Tree = Any
AttentionGuard = Literal["step", "rows"]

GRAM_BLOCK_SIZE = 512  # parameters of every client per Gram product
SCAD_A = 3.7  # Fan and Li (2001)
MCP_GAMMA = 3.0


class Attention(NamedTuple):
    """Weights of all pairs of clients."""

    weights: jax.Array
    "`[K, K]`: rows sum to 1."
    alpha: jax.Array
    "`[K]`: step alpha_k of each row."


def _exponential(t, sigma):
    return -jnp.expm1(-t / sigma), jnp.exp(-t / sigma) / sigma


def _scad(t, sigma):
    """Smoothly clipped absolute deviation."""
    x, a = t / sigma, SCAD_A
    clipped = jnp.minimum(x, a)
    middle = 1 + ((a - 1) ** 2 - (a - clipped) ** 2) / (2 * (a - 1))
    slope = jnp.where(x <= 1, 1.0, (a - clipped) / (a - 1))
    return jnp.where(x <= 1, x, middle), slope / sigma


def _mcp(t, sigma):
    """Minimax concave penalty."""
    clipped = jnp.minimum(t / sigma, MCP_GAMMA)
    return clipped - clipped**2 / (2 * MCP_GAMMA), (1 - clipped / MCP_GAMMA) / sigma


# Each function returns A(t) and A'(t) of a squared distance t >= 0 (Definition 1). A'(0) is
# 1 / sigma, the unit of t.
ATTENTION_FUNCTIONS = {"exponential": _exponential, "scad": _scad, "mcp": _mcp}


def compute_squared_distances(models: Tree, plan: ExecutionPlan | None = None) -> jax.Array:
    """Compute ||w_i - w_j||^2 over all arrays, by Gram products.

    The mean is subtracted first, which changes no distance and keeps the digits of small ones.
    Cost: K^2 P multiplications, shared by the devices of the plan; then one collective.

    Args:
      models: models of all clients, `[K, ...]`.
      plan: devices that share the work; None: no sharing.

    Returns:
      Squared distances, `[K, K]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.client_attention import compute_squared_distances
      >>> compute_squared_distances({"w": jnp.array([[0.0, 0.0], [3.0, 4.0]])}).tolist()
      [[0.0, 25.0], [25.0, 0.0]]
    """
    if plan is None:
        gram = _partial_gram(models, 0, 1)
    else:
        compute_part = partial(_partial_gram, num_parts=plan.blocks)
        gram = plan.sum_over_blocks(compute_part, (models,), jnp.arange(plan.blocks))
    norms = jnp.diagonal(gram)
    distances = jnp.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0)
    return distances * (1 - jnp.eye(len(gram)))


def compute_cosine_distances(models: Tree, plan: ExecutionPlan | None = None) -> jax.Array:
    """Compute 1 - cos(w_i, w_j) over all arrays: half the squared distances of the unit vectors.

    This form keeps the digits of cosines near 1. The distance of a model of zeros is 1/2.

    Args:
      models: models of all clients, `[K, ...]`.
      plan: devices that share the work; None: no sharing.

    Returns:
      Cosine distances, `[K, K]`.
    """
    rows = [_flatten_clients(leaf) for leaf in jax.tree.leaves(models)]
    norms = jnp.sqrt(sum(jnp.square(row).sum(1, keepdims=True) for row in rows))
    return compute_squared_distances([row / jnp.maximum(norms, 1e-30) for row in rows], plan) / 2


def compute_attention(
    distances: jax.Array,
    alpha: Any,
    sigma: Any,
    is_included: jax.Array,
    *,
    guard: AttentionGuard,
    function: str = "exponential",
) -> Attention:
    """Compute FedAMP's weights (Eq. 5): xi_ij = alpha A'(d_ij) for j != i; xi_ii is the rest of 1.

    Args:
      distances: squared distances, `[K, K]`.
      alpha: step along the pair terms.
      sigma: width of the attention.
      is_included: `[K]` bool, whether a client's model counts.
      guard: treatment of an alpha so large that a client's own weight would be negative. "step":
        the largest alpha without negative weights, so that the matrix stays symmetric; "rows": the
        largest alpha of each row.
      function: name in `ATTENTION_FUNCTIONS`.

    Returns:
      Non-negative weights whose rows sum to 1, and the alpha of each row.
    """
    _, derivatives = ATTENTION_FUNCTIONS[function](distances, sigma)
    weights = jnp.where(_is_other(is_included), alpha * derivatives, 0)
    total = weights.sum(1)
    bound = jnp.maximum(total if guard == "rows" else total.max(), 1)
    scale = jnp.broadcast_to(1 / bound, total.shape)
    return Attention(_fill_diagonal(weights * scale[:, None]), alpha * scale)


def compute_softmax_attention(
    distances: jax.Array, sigma: Any, self_weight: Any, is_included: jax.Array
) -> jax.Array:
    """Compute HeurFedAMP's weights (Eq. 8).

    xi_ii = self_weight. The other included clients share the rest by a softmax of sigma * cos,
    which equals the softmax of -sigma * (1 - cos). A client without others has xi_ii = 1.

    Args:
      distances: cosine distances 1 - cos, `[K, K]`.
      sigma: sharpness of the softmax.
      self_weight: a client's weight of its own model.
      is_included: `[K]` bool, whether a client's model counts.

    Returns:
      Weights, `[K, K]`.
    """
    scores = jnp.where(_is_other(is_included), -sigma * distances, -jnp.inf)
    highest = scores.max(1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    softmax_weights = powers / jnp.maximum(powers.sum(1, keepdims=True), 1e-30)
    return _fill_diagonal((1 - self_weight) * softmax_weights)


def mix_models(weights: jax.Array, models: Tree) -> Tree:
    """Compute u_i = sum_j xi_ij w_j of all clients, by a product for each array.

    Args:
      weights: xi, `[K, K]`.
      models: models of all clients, `[K, ...]`.

    Returns:
      The mixtures, a tree like `models`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.client_attention import mix_models
      >>> mix_models(jnp.array([[0.5, 0.5], [0.0, 1.0]]), jnp.array([[0.0], [2.0]])).tolist()
      [[1.0], [2.0]]
    """

    def mix_leaf(leaf):
        return jnp.matmul(weights, _flatten_clients(leaf), precision="highest").reshape(leaf.shape)

    return jax.tree.map(mix_leaf, models)


def median_over_pairs(values: jax.Array, is_included: jax.Array) -> jax.Array:
    """Compute the median over pairs of different included clients.

    Args:
      values: `[K, K]`.
      is_included: `[K]` bool, whether a client counts.

    Returns:
      The median, `[]`; 0 without a pair.
    """
    is_pair = is_included[:, None] & _is_other(is_included)
    median = jnp.nanmedian(jnp.where(is_pair, values, jnp.nan))
    return jnp.where(is_pair.any(), median, 0.0)


def _is_other(is_included: jax.Array) -> jax.Array:
    """Return `[K, K]`: whether the column is an included client other than the row's."""
    return is_included[None, :] & ~jnp.eye(len(is_included), dtype=bool)


def _flatten_clients(leaf: jax.Array) -> jax.Array:
    """Return `[K, n]` of an array `[K, ...]`."""
    return leaf.reshape(leaf.shape[0], -1)


def _partial_gram(models: Tree, part_index: jax.Array | int, num_parts: int) -> jax.Array:
    """Return the sum over every `num_parts`-th block of columns, from `part_index` on.

    Blocks stay in a core's cache and are read once. A product of whole rows takes twice as long,
    and a copy of all models doubles the time again. The mean of each column is subtracted.
    """

    def gram_of_columns(columns: jax.Array) -> jax.Array:
        columns = jax.lax.optimization_barrier(columns - columns.mean(0))
        return jnp.matmul(columns, columns.T, precision="highest")

    def gram_of_array(rows: jax.Array) -> jax.Array:
        num_blocks, num_remaining = divmod(rows.shape[1], GRAM_BLOCK_SIZE)
        remainder = gram_of_columns(rows[:, rows.shape[1] - num_remaining :])
        remainder = jnp.where(part_index == 0, remainder, 0)
        if not num_blocks:
            return remainder

        def add_block(iteration, total):
            first = (part_index + iteration * num_parts) * GRAM_BLOCK_SIZE
            columns = jax.lax.dynamic_slice_in_dim(rows, first, GRAM_BLOCK_SIZE, 1)
            return total + gram_of_columns(columns)

        num_iterations = (num_blocks - part_index + num_parts - 1) // num_parts
        return jax.lax.fori_loop(0, num_iterations, add_block, remainder)

    grams = [gram_of_array(_flatten_clients(leaf)) for leaf in jax.tree.leaves(models)]
    return jax.tree.reduce(jnp.add, grams)


def _fill_diagonal(weights: jax.Array) -> jax.Array:
    """Return the matrix with the rest of 1 in each row on its diagonal."""
    return weights + jnp.diag(jnp.maximum(1 - weights.sum(1), 0))
