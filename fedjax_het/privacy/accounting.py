"""Epsilon of the setting `privacy`, by the Renyi accountant of Google's dp-accounting."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedjax_het.utils.errors import ConfigError, display_name, format_value


def require_dp_accounting(argument: str, value: Any) -> None:
    """Check that the package dp-accounting is installed.

    Args:
      argument: the setting that needs it.
      value: value of the setting.

    Raises:
      ConfigError: if it is missing.
    """
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{display_name(argument)} = {format_value(value)}: expected the package "
            "dp-accounting; run `pip install 'fedjax_het[privacy]'`"
        ) from error


def compute_client_level_epsilons(
    *,
    noise_multiplier: float,
    delta: float,
    num_rounds: int,
    num_clients: int,
    cohort_size: float,
    sampling: Literal["fixed", "poisson"],
) -> np.ndarray:
    """Compute epsilon of the (epsilon, delta)-privacy of one client after each round.

    With Poisson sampling, and if all clients take part, neighboring federations differ by one
    client that joins or leaves; its examples count as one unit. With a fixed number of clients,
    drawn without replacement, one client is replaced by another. The sum of clipped changes then
    moves by twice the norm, so the accountant uses the multiplier noise_multiplier / 2.

    Args:
      noise_multiplier: standard deviation of the noise on the sum divided by the norm, z.
      delta: delta of the guarantee.
      num_rounds: number of rounds, R.
      num_clients: number of clients, K.
      cohort_size: number of clients of a round; with Poisson sampling the expected number.
      sampling: "fixed", a number of clients without replacement, or "poisson", each client with
        probability cohort_size / num_clients.

    Returns:
      Epsilon after each round, float64 `[R]`; infinite without noise.

    Raises:
      ConfigError: if dp-accounting is not installed.

    Example:
      >>> from fedjax_het.privacy import compute_client_level_epsilons
      >>> settings = {"noise_multiplier": 1.0, "delta": 1e-5, "num_clients": 1000}
      >>> settings |= {"num_rounds": 3, "cohort_size": 10, "sampling": "poisson"}
      >>> compute_client_level_epsilons(**settings).shape
      (3,)
    """
    require_dp_accounting("noise_multiplier", noise_multiplier)
    import dp_accounting

    counts = np.arange(1, num_rounds + 1)
    if not noise_multiplier:
        return np.full(num_rounds, np.inf)
    if cohort_size >= num_clients:
        return _compose(dp_accounting.GaussianDpEvent(noise_multiplier), counts, delta)
    if sampling == "poisson":
        query = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.PoissonSampledDpEvent(cohort_size / num_clients, query)
        return _compose(event, counts, delta)
    query = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    event = dp_accounting.SampledWithoutReplacementDpEvent(num_clients, int(cohort_size), query)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return _compose(event, counts, delta, relation)


def compute_example_level_epsilons(
    *, noise_multiplier: float, delta: float, num_passes: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Compute epsilon of the (epsilon, delta)-privacy of one example toward the server.

    A pass divides the examples of a client into minibatches, so each example is in one noisy
    gradient per pass. The order of the examples is not assumed to be secret: no amplification by
    sampling. Neighboring data sets differ by one example whose gradient is zero in one of them.

    Args:
      noise_multiplier: standard deviation of the noise divided by the norm of an example.
      delta: delta of the guarantee.
      num_passes: passes of a client over its examples until each round, integers `[R]`.

    Returns:
      Epsilon after each round, float64 `[R]`; infinite without noise, and 0 before the first pass.

    Raises:
      ConfigError: if dp-accounting is not installed.

    Example:
      >>> from fedjax_het.privacy import compute_example_level_epsilons
      >>> settings = {"noise_multiplier": 4.0, "delta": 1e-5}
      >>> first, second = compute_example_level_epsilons(num_passes=[1, 2], **settings)
      >>> 0 < first < second
      True
    """
    require_dp_accounting("noise_multiplier", noise_multiplier)
    import dp_accounting

    counts = np.asarray(num_passes)
    if not noise_multiplier:
        return np.where(counts > 0, np.inf, 0.0)
    return _compose(dp_accounting.GaussianDpEvent(noise_multiplier), counts, delta)


def _compose(event: Any, counts: np.ndarray, delta: float, relation: Any = None) -> np.ndarray:
    """Return epsilon of an event that takes place `counts` times, `[R]`."""
    return np.array([_compute_epsilon(event, int(count), delta, relation) for count in counts])


@functools.lru_cache(maxsize=10_000)  # the runs of a sweep have equal events
def _compute_epsilon(event: Any, count: int, delta: float, relation: Any) -> float:
    """Return epsilon of an event that takes place `count` times."""
    from dp_accounting import rdp

    if not count:
        return 0.0
    orders, divergences = _compute_divergences(event, relation)
    return float(rdp.compute_epsilon(orders, count * divergences, delta)[0])


@functools.lru_cache(maxsize=100)
def _compute_divergences(event: Any, relation: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders of the Renyi divergences of an event, and the divergences."""
    from absl import logging as absl_logging
    from dp_accounting import rdp

    arguments = {} if relation is None else {"neighboring_relation": relation}
    accountant = rdp.RdpAccountant(**arguments)
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # orders that do not converge are left out
    try:
        accountant.compose(event)
    finally:
        absl_logging.set_verbosity(verbosity)
    return accountant.orders, accountant.rdp
