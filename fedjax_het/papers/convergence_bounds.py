"""What the papers' theorems say of a run, from the gradients that it measured
(`RunSpec.gradient_gaps`). NumPy on the host, float64."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import require


class GradientError(NamedTuple):
    """DynaFed's Assumption 3: the server's gradient is off by at most delta ||grad F|| + epsilon.

    relative: the largest ratio of the two lengths, delta if epsilon were 0.
    """

    delta: float
    epsilon: float
    relative: float


def fit_gradient_error(gaps: np.ndarray, norms: np.ndarray) -> GradientError:
    """The delta and epsilon, neither negative, that hold in all measured rounds and whose bound is
    lowest on their average.

    gaps: [R] lengths of the differences of the gradients (`server_gap` is their square). norms: [R]
    of ||grad F||. Rounds in which either is NaN are left out; ConfigError where that leaves none.
    """
    from scipy.optimize import linprog

    gaps, norms = np.asarray(gaps, np.float64), np.asarray(norms, np.float64)
    is_measured = np.isfinite(gaps) & np.isfinite(norms)
    require(bool(is_measured.any()), "gaps", "all NaN", "a measured round")
    gaps, norms = gaps[is_measured], norms[is_measured]
    bound = np.stack([norms, np.ones_like(norms)], axis=1)
    solution = linprog(bound.mean(0), A_ub=-bound, b_ub=-gaps, bounds=(0, None))
    delta, epsilon = solution.x
    return GradientError(float(delta), float(epsilon), float((gaps / norms).max()))


class ProgressTerms(NamedTuple):
    """FSL's Theorem 1, (12), each term of a round's expected change of F~ divided by K_0 eta_0.

    step: K_0 eta_0 L. The change is at most -descent + noise + drift, [R] each.
    """

    step: float
    descent: np.ndarray
    noise: np.ndarray
    drift: np.ndarray


def compute_progress_terms(
    curves: Mapping[str, np.ndarray],
    *,
    gamma: float,
    server_lr: float,
    num_clients: int,
    cohort_size: int,
    client_steps: float,
    server_steps: float,
) -> ProgressTerms:
    """The terms at the largest step that (13) and (11) allow, with the measured gradients in place
    of the constants that bound them.

    Divided by K_0 eta_0 they hold L only in K_0 eta_0 L, which (13) bounds by a number: so nothing
    need be known of L, and the largest step is the one at which the theorem promises most.

    Args:
      curves: `gradient_norm`, `server_norm`, `server_gap`, `client_gap`, `client_noise` and
        `server_noise` [R] of a run (`core.gradient_diagnostics`).
      server_lr: eta_g. num_clients, sampled: N and S. client_steps, server_steps: K and K_0.
    """
    gradient_norm, server_norm, server_gap, client_gap, client_noise, server_noise = (
        np.asarray(curves[name], np.float64)
        for name in (
            "gradient_norm",
            "server_norm",
            "server_gap",
            "client_gap",
            "client_noise",
            "server_noise",
        )
    )
    one_plus_gamma = 1 + gamma
    inner_product = (gradient_norm**2 + server_norm**2 - server_gap) / 2  # <grad F, grad f_0>
    mixed_squared_norm = (
        gradient_norm**2 + 2 * gamma * inner_product + gamma**2 * server_norm**2
    ) / one_plus_gamma**2
    sampling_factor = (num_clients - cohort_size) / max(num_clients - 1, 1)  # rho_s
    kappa = max(4 * gamma**3, 2 / server_lr**2 + 3 * gamma**2)
    psi = (
        gamma**2 * server_noise / server_steps
        + (client_noise / client_steps + sampling_factor * client_gap) / cohort_size
    )
    phi = (
        gamma**2 * psi
        + 2 * gamma**2 / cohort_size * (client_noise / client_steps + sampling_factor * client_gap)
        + (2 * client_gap + client_noise / client_steps) / server_lr**2
    )
    max_first_step = min(server_lr, 1 / gamma if gamma else np.inf, 8 / 9) / 4  # (11)
    step = min(
        max_first_step, min(1, one_plus_gamma**2 / (2 * kappa)) / (8 * one_plus_gamma)
    )  # and (13)
    h = gamma + 0.5 - step * one_plus_gamma / 2 * (3 * gamma + 3 + 16 * kappa * step)
    return ProgressTerms(
        step,
        descent=h * mixed_squared_norm,
        noise=5 * step * psi,
        drift=8 * step**2 * (gamma * kappa / one_plus_gamma * server_gap + phi),
    )
