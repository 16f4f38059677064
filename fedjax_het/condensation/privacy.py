"""Differential privacy of what is condensed with clipped and noised gradients."""

from fedjax_het.common.errors import ConfigError


def require_privacy() -> None:
    """Raise ConfigError where the accountant's library is missing."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "option private = True: expected the package dp-accounting; "
            "run `pip install 'fedjax_het[privacy]'`"
        ) from error


def gaussian_epsilon(
    *, dp_noise: float, delta: float, queries: int, examples: int, batch_size: int
) -> float:
    """The epsilon of (epsilon, delta)-privacy of one example of one class of one client.

    A query is one gradient of a class's images: clipped as a whole at some norm, with Gaussian
    noise of `dp_noise` times that norm on every value. Another example in the place of one can turn
    a clipped gradient round, by twice the norm, so the accountant sees a multiplier of
    dp_noise / 2. Each query reads `batch_size` of the class's `examples`, drawn without
    replacement, or all of them. Neighbours differ in one example of that class; a class's images
    depend on its own examples alone, given what the server sent, so classes and clients do not add
    up. Rounds do: `queries` counts the steps of all of them.

    Renyi accounting of Google's dp-accounting. The network that the server sends is a function of
    what clients sent and costs nothing more.
    """
    require_privacy()
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    query = dp_accounting.GaussianDpEvent(dp_noise / 2)
    if examples > batch_size:
        query = dp_accounting.SampledWithoutReplacementDpEvent(examples, batch_size, query)
    accountant.compose(dp_accounting.SelfComposedDpEvent(query, queries))
    return float(accountant.get_epsilon(delta))
