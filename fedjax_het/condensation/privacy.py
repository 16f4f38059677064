"""Differential privacy of what is condensed: how much noise, and what it is worth."""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.utils.errors import ConfigError, display_name


def require_dp_accounting() -> None:
    """Raise ConfigError where the accountant's library is missing."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{display_name('private')} = True: expected the package dp-accounting; "
            "run `pip install 'fedjax_het[privacy]'`"
        ) from error


def add_noise_to_means(
    means: tuple[Array, ...], count: Array, key: Array, *, dp_noise: Array, dp_clip: Array
) -> tuple[Array, ...]:
    """Means over `count` examples, each clipped to `dp_clip`, with Gaussian noise of deviation
    dp_noise * dp_clip / count on every number: less, the more examples there are."""
    scale = dp_noise * dp_clip / jnp.maximum(count, 1)
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
    """The epsilon of (epsilon, delta)-privacy of one example of one class of one client.

    A query is the mean of examples' vectors, each clipped at some norm, with Gaussian noise of
    `dp_noise` times that norm over their number on every value. Another example in the place of one
    can turn its vector round, by twice the norm, so the accountant sees a multiplier of
    dp_noise / 2. Each of the `queries` reads `batch_size` of the class's `examples`, drawn without
    replacement, or all of them; `num_full_queries` read all. Neighbours differ in one example of that
    class, whose number is no secret; what is made of a class depends on its own examples alone,
    given what the server sent, so classes and clients do not add up. Rounds do: the numbers are of
    all of them.

    Renyi accounting of Google's dp-accounting. The network that the server sends is a function of
    what clients sent and costs nothing more.
    """
    require_dp_accounting()
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    full_batch_event = query_event = dp_accounting.GaussianDpEvent(dp_noise / 2)
    if num_examples > batch_size:
        query_event = dp_accounting.SampledWithoutReplacementDpEvent(
            num_examples, batch_size, full_batch_event
        )
    accountant.compose(dp_accounting.SelfComposedDpEvent(query_event, num_queries))
    if num_full_queries:
        accountant.compose(dp_accounting.SelfComposedDpEvent(full_batch_event, num_full_queries))
    return float(accountant.get_epsilon(delta))
