"""The terms of the papers' theorems, from gradients that a run measured."""

import numpy as np
import pytest

from fedjax_het.papers.convergence_bounds import compute_progress_terms, fit_gradient_error
from fedjax_het.utils.errors import ConfigError

RNG = np.random.default_rng(0)


def test_gradient_error_is_lowest_valid_bound():
    norms = RNG.uniform(0.1, 3, 40)
    gaps = 0.3 * norms + 0.2 + RNG.uniform(-0.2, 0, 40)
    actual = fit_gradient_error(np.append(gaps, np.nan), np.append(norms, 1.0))
    assert (actual.delta * norms + actual.epsilon >= gaps - 1e-9).all()
    assert actual.relative == pytest.approx((gaps / norms).max())
    # Over a grid of pairs that hold, none has a lower mean.
    deltas = np.linspace(0, 2, 401)
    epsilons = np.maximum((gaps[:, None] - deltas * norms[:, None]).max(0), 0)
    lowest = (deltas * norms.mean() + epsilons).min()
    assert actual.delta * norms.mean() + actual.epsilon <= lowest + 1e-9


@pytest.mark.parametrize(
    ("gaps", "norms", "delta", "epsilon"),
    [
        ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 0.5, 0.0),  # in proportion
        ([0.7, 0.7], [1.0, 3.0], 0.0, 0.7),  # whatever the gradient
        ([0.0, 0.0], [1.0, 2.0], 0.0, 0.0),
        ([2.0, 1.0], [1.0, 2.0], 0.0, 2.0),  # never a negative delta
    ],
)
def test_gradient_error_in_simple_cases(gaps, norms, delta, epsilon):
    actual = fit_gradient_error(gaps, norms)
    assert (actual.delta, actual.epsilon) == pytest.approx((delta, epsilon), abs=1e-9)


def test_gradient_error_requires_measured_round():
    with pytest.raises(ConfigError, match="gaps = 'all NaN'"):
        fit_gradient_error([np.nan], [1.0])


@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.5])
def test_progress_terms_match_theorem(gamma):
    """Against (12) term by term, from gradients as vectors, with numbers for K_0 eta_0 and L."""
    whole, own = RNG.normal(size=(2, 7))
    between, noise, own_noise = 0.4, 0.9, 0.6
    server_lr, N, S, K, K0, L = 2.0, 10, 4, 12.0, 20.0, 3.7
    curves = {
        "gradient_norm": np.linalg.norm(whole),
        "server_norm": np.linalg.norm(own),
        "server_gap": ((whole - own) ** 2).sum(),
        "client_gap": between,
        "client_noise": noise,
        "server_noise": own_noise,
    }
    actual = compute_progress_terms(
        {name: np.array([value]) for name, value in curves.items()},
        gamma=gamma,
        server_lr=server_lr,
        num_clients=N,
        cohort_size=S,
        client_steps=K,
        server_steps=K0,
    )
    moved = actual.step / L  # K_0 eta_0
    kappa = max(4 * gamma**3, 2 * server_lr**-2 + 3 * gamma**2)
    assert moved <= min(server_lr, 1 / gamma, 8 / 9) / (4 * L) * (1 + 1e-12)
    limit = min(1, (gamma + 1) ** 2 / (2 * kappa)) / (8 * L * (gamma + 1))
    assert moved == pytest.approx(limit)
    h = gamma + 0.5 - moved * L * (1 + gamma) / 2 * (3 * gamma + 3 + 16 * kappa * moved * L)
    assert actual.descent_factor == pytest.approx(h)
    assert h >= (3 * gamma + 1) / 4  # as the paper says of (13)
    rho = (N - S) / (N - 1)
    psi = gamma**2 * own_noise / K0 + noise / (K * S) + rho * between / S
    phi = (
        gamma**2 * psi
        + 2 * gamma**2 / S * (noise / K + rho * between)
        + server_lr**-2 * (2 * between + noise / K)
    )
    mixed = whole / (1 + gamma) + gamma / (1 + gamma) * own
    xi = ((whole - own) ** 2).sum()
    whole_terms = np.array(
        [
            moved * h * mixed @ mixed,
            5 * moved**2 * L * psi,
            8 * moved**3 * L**2 * (gamma * kappa / (1 + gamma) * xi + phi),
        ]
    )
    np.testing.assert_allclose(np.ravel(actual[2:]), whole_terms / moved, rtol=1e-12)
