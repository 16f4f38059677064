"""Distribution matching: synthetic images whose mean embedding equals that of real images.

Source: Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023). FedDM (CVPR
2023) adds the logits. FedAF (CVPR 2024, Eqs. 6 and 10) adds the distance between the mean logit and
that of the other owners of the class, and draws the network anew in every step (Eq. 17).
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
    """Return the squared L2 distance of two mean embeddings, summed over features (FedAF, Eq. 4).

    Args:
      real_mean: mean embedding of real images, `[F]`.
      synthetic_mean: mean embedding of synthetic images, `[F]`.

    Returns:
      The distance, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import distribution_distance
      >>> float(distribution_distance(jnp.float32([1, 2]), jnp.float32([0, 0])))
      5.0
    """
    return jnp.square(real_mean - synthetic_mean).sum()


def sliced_wasserstein(u: Array, v: Array) -> Array:
    """Compute the exact squared sliced 2-Wasserstein distance of two points, |u - v|^2 / C.

    FedAF compares single vectors. Projected on a unit direction theta, their squared distance is
    (theta . (u - v))^2, whose mean over the sphere is |u - v|^2 / C. For single vectors, slicing
    only scales the squared error.

    Args:
      u: `[C]`.
      v: `[C]`.

    Returns:
      The distance, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import sliced_wasserstein
      >>> float(sliced_wasserstein(jnp.float32([2, 0]), jnp.float32([0, 0])))
      2.0
    """
    return jnp.square(u - v).mean()


def sampled_sliced_wasserstein(u: Array, v: Array, key: Array, num_projections: int = 50) -> Array:
    """Estimate `sliced_wasserstein` by the mean over random directions.

    The expectation equals the exact form, which has no variance and costs less. This function
    serves comparisons with code that samples.

    Args:
      u: `[C]`.
      v: `[C]`.
      key: key of the directions.
      num_projections: number of directions.

    Returns:
      The estimate, `[]`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import sampled_sliced_wasserstein
      >>> u, v = jnp.float32([2, 0]), jnp.float32([0, 0])
      >>> 1 < sampled_sliced_wasserstein(u, v, jax.random.key(0), num_projections=1000) < 3
      Array(True, dtype=bool)
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
    """Compute the mean features and logits of the images whose mask is 1.

    Args:
      embed: `images -> (features [B, F], logits [B, C])`, computed for each image independently.
      images: `[B, H, W, C]`.
      mask: `[B]`, 1 or 0.
      micro_batch_size: images that fit a CPU core's cache, see `choose_micro_batch_size`; None: all
        at once.

    Returns:
      Mean features `[F]` and mean logits `[C]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import mean_embedding
      >>> embed = lambda images: (images.reshape(len(images), -1), images.mean((1, 2)))
      >>> images, mask = jnp.ones((6, 2, 2, 3)), jnp.ones(6)
      >>> [mean.shape for mean in mean_embedding(embed, images, mask, None)]
      [(12,), (3,)]
    """

    def weighted_sums(micro_batch):
        images, mask = micro_batch
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
    """Interpolate parameters as FedAF's re-sampling does (Eq. 17).

    The result is gamma * received + (1 - gamma) * freshly initialized. Every step uses the received
    parameters. If each step used the previous result, as a literal reading of the equation
    suggests, the received parameters would vanish after a few steps (0.9^1000).

    Args:
      params: received parameters.
      fresh_params: freshly initialized parameters of the same structure.
      gamma: `[]`, weight of the received parameters.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import interpolate_params
      >>> print(interpolate_params({"w": jnp.ones(2)}, {"w": jnp.zeros(2)}, 0.25)["w"])
      [0.25 0.25]
    """
    return jax.tree.map(
        lambda received, fresh: gamma * received + (1 - gamma) * fresh, params, fresh_params
    )


def sample_on_ball(key: Array, params: Tree, rho: Array) -> Tree:
    """Sample parameters near the received ones as FedDM does: w + g * min(1, rho / |g|).

    g is standard normal, as in the public re-implementations. With 10^5 parameters |g| is far above
    rho = 5, so the sample has a uniform direction and the distance rho. It is not the truncated
    Gaussian of the paper's text.

    Args:
      key: key of g.
      params: received parameters, w.
      rho: `[]`, maximum distance.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import sample_on_ball
      >>> sample = sample_on_ball(jax.random.key(0), {"w": jnp.zeros(1000)}, 5.0)
      >>> round(float(jnp.linalg.norm(sample["w"])), 3)
      5.0
    """
    flat, unravel = ravel_pytree(params)
    noise = jax.random.normal(key, flat.shape)
    return unravel(flat + noise * jnp.minimum(1.0, rho / jnp.linalg.norm(noise)))


def clip_rows(rows: tuple[Array, ...], max_norm: Array) -> tuple[Array, ...]:
    """Scale each sample's arrays jointly to an L2 norm of at most `max_norm`.

    Args:
      rows: arrays `[B, F]` each, whose concatenation along F is clipped.
      max_norm: `[]`.

    Returns:
      The clipped arrays.
    """
    norms = jnp.sqrt(sum(jnp.square(row).sum(1) for row in rows) + 1e-12)
    return tuple(row * jnp.minimum(1.0, max_norm / norms)[:, None] for row in rows)


def clip_by_norm(gradient: Array, max_norm: Array) -> Array:
    """Scale a gradient to an L2 norm of at most `max_norm`.

    Args:
      gradient: an array of any shape.
      max_norm: `[]`.

    Returns:
      The clipped gradient.
    """
    return gradient * jnp.minimum(1.0, max_norm / jnp.maximum(jnp.linalg.norm(gradient), 1e-12))
