"""Bounds of the papers' theorems, from the gradients that a run measured (`RunSpec.gradient_gaps`).

All computations are in NumPy on the host, in float64.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import require

_GRADIENT_CURVES = (
    "gradient_norm",
    "server_norm",
    "server_gap",
    "client_gap",
    "client_noise",
    "server_noise",
)


class GradientError(NamedTuple):
    """Constants of DynaFed's Assumption 3.

    The error of the server's gradient is at most delta ||grad F|| + epsilon.
    """

    delta: float
    epsilon: float
    relative: float
    """Largest ratio of the two lengths: delta if epsilon were 0."""


def fit_gradient_error(gaps: np.ndarray, norms: np.ndarray) -> GradientError:
    """Fit the nonnegative delta and epsilon that hold in all rounds with the lowest mean bound.

    Args:
      gaps: lengths of the differences of the gradients, `[R]` (`server_gap` is their square).
      norms: ||grad F||, `[R]`. Rounds with a NaN in either are left out.

    Returns:
      The constants.

    Raises:
      ConfigError: if no round is left.
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
    """Terms of FSL's Theorem 1, (12): a round's expected change of F~ divided by K_0 eta_0.

    The change is at most -descent + noise + drift.
    """

    step: float
    """K_0 eta_0 L."""
    descent_factor: float
    """h."""
    descent: np.ndarray
    """Descent in each round, `[R]`."""
    noise: np.ndarray
    """Gradient noise in each round, `[R]`."""
    drift: np.ndarray
    """Client drift in each round, `[R]`."""


def compute_progress_terms(
    curves: Mapping[str, np.ndarray],
    *,
    gamma: float,
    server_lr: float,
    num_clients: int,
    cohort_size: int,
    client_steps: float,
    server_steps: float,
    step: float | None = None,
) -> ProgressTerms:
    """Compute the terms, by default at the largest step that (13) and (11) allow.

    Measured gradients are in place of the constants that bound them. Divided by K_0 eta_0, the
    terms contain L only in K_0 eta_0 L, which (13) bounds by a number. Therefore L need not be
    known, and the guarantee is best at the largest step.

    Args:
      curves: `gradient_norm`, `server_norm`, `server_gap`, `client_gap`, `client_noise` and
        `server_noise` of a run, `[R]` each (`core.gradient_diagnostics`).
      gamma: weight of the server's objective.
      server_lr: eta_g.
      num_clients: N.
      cohort_size: S.
      client_steps: K.
      server_steps: K_0.
      step: K_0 eta_0 L (default: the largest that is allowed).

    Returns:
      The terms.
    """
    gradient_norm, server_norm, server_gap, client_gap, client_noise, server_noise = (
        np.asarray(curves[name], np.float64) for name in _GRADIENT_CURVES
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
    if step is None:
        max_first_step = min(server_lr, 1 / gamma if gamma else np.inf, 8 / 9) / 4  # (11)
        step = min(
            max_first_step, min(1, one_plus_gamma**2 / (2 * kappa)) / (8 * one_plus_gamma)
        )  # and (13)
    h = gamma + 0.5 - step * one_plus_gamma / 2 * (3 * gamma + 3 + 16 * kappa * step)
    return ProgressTerms(
        step,
        h,
        descent=h * mixed_squared_norm,
        noise=5 * step * psi,
        drift=8 * step**2 * (gamma * kappa / one_plus_gamma * server_gap + phi),
    )
