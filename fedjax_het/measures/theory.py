"""What the papers' theorems say of a run, from the gradients that it measured
(`RunSpec.gradient_gaps`). NumPy on the host, float64."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_het.common.errors import require


class GradientError(NamedTuple):
    """DynaFed's Assumption 3: the server's gradient is off by at most delta ||grad F|| + epsilon.

    relative: the largest ratio of the two lengths, delta if epsilon were 0.
    """

    delta: float
    epsilon: float
    relative: float


def gradient_error(gaps: np.ndarray, norms: np.ndarray) -> GradientError:
    """The delta and epsilon, neither negative, that hold in all measured rounds and whose bound is
    lowest on their average.

    gaps: [R] lengths of the differences of the gradients (`server_gap` is their square). norms: [R]
    of ||grad F||. Rounds in which either is NaN are left out; ConfigError where that leaves none.
    """
    from scipy.optimize import linprog

    gaps, norms = np.asarray(gaps, np.float64), np.asarray(norms, np.float64)
    known = np.isfinite(gaps) & np.isfinite(norms)
    require(bool(known.any()), "gaps", "all NaN", "a measured round")
    gaps, norms = gaps[known], norms[known]
    bound = np.stack([norms, np.ones_like(norms)], axis=1)
    found = linprog(bound.mean(0), A_ub=-bound, b_ub=-gaps, bounds=(0, None))
    delta, epsilon = found.x
    return GradientError(float(delta), float(epsilon), float((gaps / norms).max()))


class ProgressTerms(NamedTuple):
    """FSL's Theorem 1, (12), each term of a round's expected change of F~ divided by K_0 eta_0.

    step: K_0 eta_0 L. The change is at most -descent + noise + drift, [R] each.
    """

    step: float
    descent: np.ndarray
    noise: np.ndarray
    drift: np.ndarray


def progress_terms(
    curves: Mapping[str, np.ndarray],
    *,
    gamma: float,
    server_lr: float,
    num_clients: int,
    sampled: int,
    client_steps: float,
    server_steps: float,
) -> ProgressTerms:
    """The terms at the largest step that (13) and (11) allow, with the measured gradients in place
    of the constants that bound them.

    Divided by K_0 eta_0 they hold L only in K_0 eta_0 L, which (13) bounds by a number: so nothing
    need be known of L, and the largest step is the one at which the theorem promises most.

    Args:
      curves: `gradient_norm`, `server_norm`, `server_gap`, `client_gap`, `client_noise` and
        `server_noise` [R] of a run (`engine.gradient_gaps`).
      server_lr: eta_g. num_clients, sampled: N and S. client_steps, server_steps: K and K_0.
    """
    whole, own, apart, between, noise, own_noise = (
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
    more = 1 + gamma
    both = (whole**2 + own**2 - apart) / 2  # <grad F, grad f_0>
    mixed = (whole**2 + 2 * gamma * both + gamma**2 * own**2) / more**2
    drawn = (num_clients - sampled) / max(num_clients - 1, 1)  # rho_s
    kappa = max(4 * gamma**3, 2 / server_lr**2 + 3 * gamma**2)
    psi = gamma**2 * own_noise / server_steps + (noise / client_steps + drawn * between) / sampled
    phi = (
        gamma**2 * psi
        + 2 * gamma**2 / sampled * (noise / client_steps + drawn * between)
        + (2 * between + noise / client_steps) / server_lr**2
    )
    first = min(server_lr, 1 / gamma if gamma else np.inf, 8 / 9) / 4  # (11)
    step = min(first, min(1, more**2 / (2 * kappa)) / (8 * more))  # and (13)
    h = gamma + 0.5 - step * more / 2 * (3 * gamma + 3 + 16 * kappa * step)
    return ProgressTerms(
        step,
        descent=h * mixed,
        noise=5 * step * psi,
        drift=8 * step**2 * (gamma * kappa / more * apart + phi),
    )
