"""Differential privacy of condensed inputs: clipping, Gaussian noise and its epsilon."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.utils.errors import ConfigError, display_name


def require_dp_accounting() -> None:
    """Check that the package dp-accounting is installed.

    Raises:
      ConfigError: if it is missing.
    """
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{display_name('private')} = True: expected the package dp-accounting; "
            "run `pip install 'fedjax_het[privacy]'`"
        ) from error


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


def add_noise_to_means(
    hp: Mapping[str, Array], means: tuple[Array, ...], count: Array, key: Array
) -> tuple[Array, ...]:
    """Add Gaussian noise to means of clipped vectors.

    The noise of every number has the standard deviation dp_noise * dp_clip / count.

    Args:
      hp: values of the hyperparameters, with `dp_noise`, the noise multiplier, and `dp_clip`, the
        largest L2 norm of an example's vector.
      means: means over `count` examples, each clipped to the norm `dp_clip`.
      count: number of examples.
      key: key of the noise.

    Returns:
      The noisy means, of the same shapes.
    """
    scale = hp["dp_noise"] * hp["dp_clip"] / jnp.maximum(count, 1)
    keys = jax.random.split(key, len(means))
    return tuple(
        mean + scale * jax.random.normal(noise_key, mean.shape)
        for mean, noise_key in zip(means, keys, strict=True)
    )


def compute_gaussian_epsilon(
    *,
    dp_noise: float,
    delta: float,
    num_queries: int,
    num_examples: int,
    batch_size: int,
    num_full_queries: int = 0,
) -> float:
    """Compute epsilon of the (epsilon, delta)-privacy of one example of one class of one client.

    A query is the mean of the examples' vectors, each clipped to a norm. Every number has Gaussian
    noise of `dp_noise` * norm / count. Replacing one example can reverse its vector, a
    change of twice the norm, so the accountant uses the multiplier dp_noise / 2. Neighboring data
    sets differ in one example of the class; the class size is public. The result for a class
    depends on its own examples alone, given the server's message, so classes and clients do not add
    up. Rounds do: count the queries of all rounds. The server's network is a function of the
    clients' messages and costs no additional privacy.

    The accountant is the Renyi accountant of Google's dp-accounting.

    Args:
      dp_noise: noise multiplier.
      delta: delta of the guarantee.
      num_queries: number of queries, each on `batch_size` examples of the class without
        replacement, or on all if the class is not larger.
      num_examples: number of examples of the class.
      batch_size: examples per query.
      num_full_queries: number of additional queries on all examples.

    Returns:
      Epsilon.

    Raises:
      ConfigError: if dp-accounting is not installed.

    Example:
      >>> from fedjax_het.condensation import compute_gaussian_epsilon
      >>> settings = {"delta": 1e-5, "num_queries": 10, "num_examples": 100, "batch_size": 10}
      >>> weak, strong = (compute_gaussian_epsilon(dp_noise=n, **settings) for n in (5.0, 20.0))
      >>> 0 < strong < weak
      True
    """
    require_dp_accounting()
    import dp_accounting
    from dp_accounting import rdp

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    full_batch_event = query_event = dp_accounting.GaussianDpEvent(dp_noise / 2)
    if num_examples > batch_size:
        query_event = dp_accounting.SampledWithoutReplacementDpEvent(
            num_examples, batch_size, full_batch_event
        )
    accountant.compose(dp_accounting.SelfComposedDpEvent(query_event, num_queries))
    if num_full_queries:
        accountant.compose(dp_accounting.SelfComposedDpEvent(full_batch_event, num_full_queries))
    return float(accountant.get_epsilon(delta))
