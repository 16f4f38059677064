"""Distribution matching: synthetic images whose mean embedding is that of real ones.

Source: Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023); FedDM (CVPR
2023) adds the logits; FedAF (CVPR 2024, Eqs. 6 and 10) adds the distance of the mean logit from
that of the class's other owners, and draws the network anew in every step (Eq. 17).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_het.nn import choose_micro_batch_size

Tree = Any


def distribution_distance(real_mean: Array, synthetic_mean: Array) -> Array:
    """Squared L2 distance of two mean embeddings `[F]`, summed over features (FedAF, Eq. 4)."""
    return jnp.square(real_mean - synthetic_mean).sum()


def sliced_wasserstein(u: Array, v: Array) -> Array:
    """The squared sliced 2-Wasserstein distance of two points `[C]`, without a root: exactly.

    FedAF compares single vectors. Projected on a unit direction theta, their distance is
    (theta . (u - v))^2, whose mean over the sphere is |u - v|^2 / C: slicing does no more than
    scale the squared error.
    """
    return jnp.square(u - v).mean()


def sampled_sliced_wasserstein(u: Array, v: Array, key: Array, num_projections: int = 50) -> Array:
    """The same as a mean over random directions; equal to `sliced_wasserstein` in expectation.

    For comparison with code that samples: the exact form has no variance and costs less.
    """
    directions = jax.random.normal(key, (num_projections, u.size))
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    return jnp.square(jnp.matmul(directions, u - v, precision="highest")).mean()


def mean_embedding(
    embed: Callable[[Array], tuple[Array, Array]],
    images: Array,
    mask: Array,
    micro_batch_size: int | None,
) -> tuple[Array, Array]:
    """Mean features `[F]` and logits `[C]` of the images whose mask `[B]` is 1.

    Args:
      embed: images -> (features [B, F], logits [B, C]), each of its own image alone.
      piece: images that fit a core's cache, see `choose_micro_batch_size`; None: all at once.
    """

    def weighted_sums(piece):
        images, mask = piece
        return tuple((values * mask[:, None]).sum(0) for values in embed(images))

    micro_batch_size = choose_micro_batch_size(len(images), micro_batch_size)
    if micro_batch_size == len(images):
        sums = weighted_sums((images, mask))
    else:
        micro_batches = (
            images.reshape(-1, micro_batch_size, *images.shape[1:]),
            mask.reshape(-1, micro_batch_size),
        )
        sums = tuple(total.sum(0) for total in jax.lax.map(weighted_sums, micro_batches))
    return tuple(total / jnp.maximum(mask.sum(), 1) for total in sums)


def interpolate_params(params: Tree, fresh_params: Tree, gamma: Array) -> Tree:
    """FedAF's re-sampling (Eq. 17): gamma * received + (1 - gamma) * freshly initialised.

    Always of the parameters that were received: assigned over and over, as the equation reads at
    its face, the received ones would be gone after a few steps (0.9^1000).
    """
    return jax.tree.map(lambda w, r: gamma * w + (1 - gamma) * r, params, fresh_params)


def sample_on_ball(key: Array, params: Tree, rho: Array) -> Tree:
    """FedDM's sampling near the received parameters: w + g * min(1, rho / |g|), g standard normal.

    As the public re-implementations have it: with 10^5 parameters |g| is far above rho = 5, so it
    is a uniform direction of length rho, not the truncated Gaussian of the paper's text.
    """
    flat, unravel = ravel_pytree(params)
    noise = jax.random.normal(key, flat.shape)
    return unravel(flat + noise * jnp.minimum(1.0, rho / jnp.linalg.norm(noise)))


def clip_rows(rows: tuple[Array, ...], max_norm: Array) -> tuple[Array, ...]:
    """Each sample's arrays `[B, ...]`, scaled down together to at most this L2 norm."""
    norms = jnp.sqrt(sum(jnp.square(row).sum(1) for row in rows) + 1e-12)
    return tuple(row * jnp.minimum(1.0, max_norm / norms)[:, None] for row in rows)


def clip_by_norm(gradient: Array, max_norm: Array) -> Array:
    """The gradient, scaled down to at most this L2 norm."""
    return gradient * jnp.minimum(1.0, max_norm / jnp.maximum(jnp.linalg.norm(gradient), 1e-12))
