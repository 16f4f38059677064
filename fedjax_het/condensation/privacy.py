"""Differential privacy of what is condensed: how much noise, and what it is worth."""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.common.errors import ConfigError, written


def require_privacy() -> None:
    """Raise ConfigError where the accountant's library is missing."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{written('private')} = True: expected the package dp-accounting; "
            "run `pip install 'fedjax_het[privacy]'`"
        ) from error


def noised_means(
    means: tuple[Array, ...], count: Array, key: Array, *, dp_noise: Array, dp_clip: Array
) -> tuple[Array, ...]:
    """Means over `count` examples, each clipped to `dp_clip`, with Gaussian noise of deviation
    dp_noise * dp_clip / count on every number: less, the more examples there are."""
    scale = dp_noise * dp_clip / jnp.maximum(count, 1)
    keys = jax.random.split(key, len(means))
    return tuple(
        mean + scale * jax.random.normal(own, mean.shape)
        for mean, own in zip(means, keys, strict=True)
    )


def gaussian_epsilon(
    *,
    dp_noise: float,
    delta: float,
    queries: int,
    examples: int,
    batch_size: int,
    whole_queries: int = 0,
) -> float:
    """The epsilon of (epsilon, delta)-privacy of one example of one class of one client.

    A query is the mean of examples' vectors, each clipped at some norm, with Gaussian noise of
    `dp_noise` times that norm over their number on every value. Another example in the place of one
    can turn its vector round, by twice the norm, so the accountant sees a multiplier of
    dp_noise / 2. Each of the `queries` reads `batch_size` of the class's `examples`, drawn without
    replacement, or all of them; `whole_queries` read all. Neighbours differ in one example of that
    class, whose number is no secret; what is made of a class depends on its own examples alone,
    given what the server sent, so classes and clients do not add up. Rounds do: the numbers are of
    all of them.

    Renyi accounting of Google's dp-accounting. The network that the server sends is a function of
    what clients sent and costs nothing more.
    """
    require_privacy()
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    whole = query = dp_accounting.GaussianDpEvent(dp_noise / 2)
    if examples > batch_size:
        query = dp_accounting.SampledWithoutReplacementDpEvent(examples, batch_size, whole)
    accountant.compose(dp_accounting.SelfComposedDpEvent(query, queries))
    if whole_queries:
        accountant.compose(dp_accounting.SelfComposedDpEvent(whole, whole_queries))
    return float(accountant.get_epsilon(delta))
