"""The privacy budget of a run: epsilon after each round."""

import numpy as np

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.schedule import Scheduler
from fedjax_het.privacy import (
    ClientLevel,
    compute_client_level_epsilons,
    compute_example_level_epsilons,
    get_privacy_mechanism,
)
from fedjax_het.runtime.history import Curves
from fedjax_het.systems import compute_expected_cohort_size, has_poisson_sampling


def build_privacy_curves(spec: RunSpec, scheduler: Scheduler, num_rounds: int) -> Curves:
    """Return epsilon after each round of a run with the setting `privacy`.

    Args:
      spec: the resolved settings of the run.
      scheduler: the schedule of the clients.
      num_rounds: number of rounds that took place; later rounds are NaN.

    Returns:
      `epsilon`, float64 `[R]`; empty for other runs.
    """
    mechanism = get_privacy_mechanism(spec)
    if mechanism is None:
        return {}
    epsilons = np.full(scheduler.settings.num_rounds, np.nan)
    budget = {"noise_multiplier": mechanism.noise_multiplier, "delta": mechanism.delta}
    if isinstance(mechanism, ClientLevel):
        num_clients = scheduler.partition.num_clients
        epsilons[:num_rounds] = compute_client_level_epsilons(
            num_rounds=num_rounds,
            num_clients=num_clients,
            cohort_size=compute_expected_cohort_size(spec),
            sampling="poisson" if has_poisson_sampling(spec) else "fixed",
            **budget,
        )
    else:
        num_passes = _count_passes(scheduler, num_rounds)
        epsilons[:num_rounds] = compute_example_level_epsilons(num_passes=num_passes, **budget)
    return {"epsilon": epsilons}


def summarize_privacy(spec: RunSpec, curves: Curves, num_rounds: int) -> dict[str, float | None]:
    """Return the guarantee of the final model.

    Args:
      spec: the resolved settings of the run.
      curves: `build_privacy_curves` of the run.
      num_rounds: number of rounds that took place.

    Returns:
      `epsilon`, None if it is infinite, and `delta`; empty for runs without privacy and before the
      first round.
    """
    mechanism = get_privacy_mechanism(spec)
    if mechanism is None or not num_rounds:
        return {}
    epsilon = float(curves["epsilon"][num_rounds - 1])
    return {"epsilon": epsilon if np.isfinite(epsilon) else None, "delta": mechanism.delta}


def _count_passes(scheduler: Scheduler, num_rounds: int) -> np.ndarray:
    """Return the largest number of passes of any client until each round, `[R]`."""
    totals, largest = np.zeros(scheduler.partition.num_clients, np.int64), []
    for r in range(num_rounds):
        cohort = scheduler.draw_cohort(r)
        totals[cohort] += scheduler.count_passes(r)[cohort]
        largest.append(totals.max(initial=0))
    return np.array(largest, np.int64)
