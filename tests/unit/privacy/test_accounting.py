"""Epsilon of private runs: integrals, closed forms, another accountant, a published value."""

import math
from itertools import pairwise

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from scipy.integrate import quad

from fedjax_het.privacy import compute_client_level_epsilons, compute_example_level_epsilons

SETTINGS = {"noise_multiplier": 1.0, "delta": 1e-5, "num_rounds": 20, "num_clients": 200}


def integrate_divergence(q, z, order):
    """Return the Renyi divergence of (1 - q) N(0, z^2) + q N(1, z^2) from N(0, z^2)."""

    def integrand(x):
        log_likelihood = (2 * x - 1) / (2 * z**2)
        log_ratio = log_likelihood if q == 1 else math.log1p(q * math.expm1(log_likelihood))
        return math.exp(order * log_ratio - x**2 / (2 * z**2)) / (z * math.sqrt(2 * math.pi))

    value, _ = quad(integrand, -20 * z, 20 * z + order, limit=500, points=[0, 1, order])
    return math.log(value) / (order - 1)


def convert(divergence, order, delta):
    """Return epsilon of a Renyi divergence (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


@pytest.mark.parametrize("cohort_size", [10, 50])
def test_poisson_sampling_is_the_best_order_of_an_integral(cohort_size):
    epsilons = compute_client_level_epsilons(
        **SETTINGS, cohort_size=cohort_size, sampling="poisson"
    )
    orders = [1 + x / 10 for x in range(2, 100)] + list(range(11, 40))
    divergences = [integrate_divergence(cohort_size / 200, 1.0, order) for order in orders]
    for rounds in (1, 5, 20):
        bounds = [
            convert(rounds * d, order, 1e-5) for d, order in zip(divergences, orders, strict=True)
        ]
        # The accountant leaves out orders whose series does not converge.
        assert 1 - 1e-6 < epsilons[rounds - 1] / min(bounds) < 1.005


def test_all_clients_are_the_gaussian_mechanism():
    for sampling in ("poisson", "fixed"):
        epsilons = compute_client_level_epsilons(**SETTINGS, cohort_size=200, sampling=sampling)
        orders = np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64)])
        bounds = [convert(20 * order / 2, order, 1e-5) for order in orders]
        assert epsilons[-1] == pytest.approx(min(bounds), rel=1e-6)


@pytest.mark.parametrize("cohort_size", [10, 50])
def test_epsilon_is_an_upper_bound_of_the_privacy_loss_distribution(cohort_size):
    ours = compute_client_level_epsilons(**SETTINGS, cohort_size=cohort_size, sampling="poisson")
    accountant = pld.PLDAccountant()
    event = dp_accounting.GaussianDpEvent(1.0)
    event = dp_accounting.PoissonSampledDpEvent(cohort_size / 200, event)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 20))
    tight = accountant.get_epsilon(1e-5)
    assert tight < ours[-1] < 1.5 * tight


def test_moments_accountant_of_abadi_et_al():
    """CCS 2016, section 3.2: q = 0.01, sigma = 4, delta = 1e-5 and 10,000 steps give 1.26."""
    orders = range(2, 65)
    divergences = [integrate_divergence(0.01, 4.0, order) for order in orders]
    published = min(
        10_000 * d + math.log(1e5) / (order - 1)
        for d, order in zip(divergences, orders, strict=True)
    )
    assert published == pytest.approx(1.26, abs=0.005)
    # The conversion of Canonne et al. is tighter than the one of the paper.
    settings = {"noise_multiplier": 4.0, "delta": 1e-5, "num_rounds": 10_000, "num_clients": 100}
    ours = compute_client_level_epsilons(**settings, cohort_size=1, sampling="poisson")[-1]
    assert 0.75 * published < ours < published


def test_a_fixed_number_of_clients_has_the_weaker_guarantee():
    sampled = {
        sampling: compute_client_level_epsilons(**SETTINGS, cohort_size=20, sampling=sampling)
        for sampling in ("poisson", "fixed")
    }
    assert (sampled["fixed"] > sampled["poisson"]).all()
    for epsilons in sampled.values():
        assert all(a < b for a, b in pairwise(epsilons))


def test_sampling_without_replacement_is_within_its_general_bound():
    """Wang, Balle and Kasiviswanathan (AISTATS 2019), Theorem 9, at the integer order 2.

    exp(D_2') <= 1 + q^2 min(4 (exp(D_2) - 1), 2 exp(D_2)), with D_2 = 2 / (2 (z / 2)^2) as two
    clients differ by twice the norm.
    """
    epsilons = compute_client_level_epsilons(
        **{**SETTINGS, "noise_multiplier": 8.0}, cohort_size=20, sampling="fixed"
    )
    divergence, q = 2 / (2 * 4.0**2), 0.1
    bound = math.log1p(q**2 * min(4 * math.expm1(divergence), 2 * math.exp(divergence)))
    assert epsilons[0] <= convert(bound, 2, 1e-5)


def test_no_noise_has_an_infinite_epsilon():
    settings = {**SETTINGS, "noise_multiplier": 0.0}
    epsilons = compute_client_level_epsilons(**settings, cohort_size=20, sampling="fixed")
    assert np.isinf(epsilons).all()
    budget = {"noise_multiplier": 0.0, "delta": 1e-5}
    assert compute_example_level_epsilons(num_passes=[0, 2], **budget).tolist() == [0, math.inf]


def test_examples_compose_over_passes():
    budget = {"noise_multiplier": 2.0, "delta": 1e-6}
    epsilons = compute_example_level_epsilons(num_passes=[0, 1, 1, 4], **budget)
    orders = np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64)])
    for count, epsilon in zip([1, 4], epsilons[[1, 3]], strict=True):
        bounds = [convert(count * order / (2 * 2.0**2), order, 1e-6) for order in orders]
        assert epsilon == pytest.approx(min(bounds), rel=1e-6)
    assert epsilons[0] == 0 and epsilons[1] == epsilons[2]
