"""Speed of convergence (FSL, section IV-A), and the cost of reaching an accuracy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

WINDOW = 20


def rolling_mean(curve: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Average a curve over the last `window` measured rounds.

    A run that is evaluated every n rounds is averaged over `window` measured rounds, which span n *
    `window` rounds.

    Args:
      curve: a metric in each round, floats `[rounds]`; NaN in rounds without an evaluation.
      window: number of measured rounds in the mean. The first rounds are averaged over the measured
        rounds so far.

    Returns:
      The running mean, float64 `[rounds]`; NaN in rounds without an evaluation.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.convergence import rolling_mean
      >>> rolling_mean(np.array([1.0, np.nan, 3.0, 5.0]), window=2)
      array([ 1., nan,  2.,  4.])
    """
    values = np.asarray(curve, np.float64)
    is_measured = np.isfinite(values)
    measured_values, means = values[is_measured], np.full(len(values), np.nan)
    # Each mean is computed from its window: a running sum would accumulate rounding errors.
    means[is_measured] = [
        measured_values[max(end - window, 0) : end].mean()
        for end in range(1, len(measured_values) + 1)
    ]
    return means


def rise_time(curve: np.ndarray, window: int = WINDOW, fraction: float = 0.9) -> int | None:
    """Find the first round in which the running mean reaches a fraction of its last value.

    A run that learns nothing rises in its first round: read a rise time together with the accuracy.

    Args:
      curve: a metric in each round, floats `[rounds]`; NaN in rounds without an evaluation.
      window: number of measured rounds in the running mean.
      fraction: fraction of the last value of the running mean.

    Returns:
      The round, from 1, or None for a curve without measurements.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.convergence import rise_time
      >>> rise_time(np.array([0.1, 0.5, 0.95, 1.0]), window=1)
      3
    """
    means = rolling_mean(curve, window)
    finite_means = means[np.isfinite(means)]
    if not len(finite_means):
        return None
    return rounds_to_reach(curve, fraction * finite_means[-1], window)


def rounds_to_reach(curve: np.ndarray, value: float, window: int = WINDOW) -> int | None:
    """Find the first round in which the running mean reaches a value.

    Args:
      curve: a metric in each round, floats `[rounds]`; NaN in rounds without an evaluation.
      value: the value to reach, in the unit of the curve.
      window: number of measured rounds in the running mean.

    Returns:
      The round, from 1, or None if the value is never reached.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.convergence import rounds_to_reach
      >>> rounds_to_reach(np.array([0.1, 0.5, 0.9]), 0.5, window=1)
      2
    """
    # Curves are measured in float32, in which 0.88 may be slightly less than in float64.
    is_reached = np.float32(rolling_mean(curve, window)) >= np.float32(value)
    return int(np.argmax(is_reached)) + 1 if is_reached.any() else None


class TrainingCost(NamedTuple):
    """Cost of a run up to and including a round.

    Attributes:
      rounds: number of rounds.
      bytes_up: bytes that all clients sent.
      bytes_down: bytes that all clients received.
      client_samples: number of samples on which clients trained, counted once per use.
      flops: floating-point operations of that training, counted by its matrix products, without the
        server's work; None if unknown.
      seconds: time without compilation: the mean duration of a round times `rounds`, plus the run's
        server work between rounds.
      simulated_seconds: simulated time of the clients; None for a run without.

    Example:
      >>> from fedjax_het.metrics.convergence import TrainingCost
      >>> TrainingCost(2, 3e6, 4e6, 1000.0, None, 0.5).bytes_up
      3000000.0
    """

    rounds: int
    bytes_up: float
    bytes_down: float
    client_samples: float
    flops: float | None
    seconds: float
    simulated_seconds: float | None = None


def cost_to_reach(
    metrics: Mapping[str, np.ndarray], summary: Mapping[str, Any], accuracy: float, curve: str
) -> TrainingCost | None:
    """Compute the cost of a run until a curve first reaches an accuracy.

    Args:
      metrics: metrics of the run by name, arrays `[rounds]`: the curve, `bytes_up`, `bytes_down`
        and `client_samples`.
      summary: summary of the run by name: `rounds`, `round_seconds`, `server_seconds` and, if
        known, `sample_flops`.
      accuracy: the accuracy to reach, a fraction in [0, 1].
      curve: name of the accuracy curve in `metrics`.

    Returns:
      The cost, or None if the curve never reaches the accuracy.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.convergence import cost_to_reach
      >>> curves = {name: np.ones(3) for name in ("bytes_up", "bytes_down", "client_samples")}
      >>> curves["test_accuracy"] = np.array([0.2, 0.6, 0.7])
      >>> summary = {"rounds": 3, "round_seconds": 1.5, "server_seconds": 0.0}
      >>> cost = cost_to_reach(curves, summary, 0.5, "test_accuracy")
      >>> cost.rounds, cost.bytes_up, cost.seconds
      (2, 2.0, 1.0)
    """
    rounds_above = np.flatnonzero(metrics[curve] >= accuracy)
    if not len(rounds_above):
        return None
    rounds = int(rounds_above[0]) + 1
    bytes_up, bytes_down, client_samples = (
        float(metrics[name][:rounds].sum()) for name in ("bytes_up", "bytes_down", "client_samples")
    )
    sample_flops = summary.get("sample_flops")
    flops = None if sample_flops is None else sample_flops * client_samples
    seconds = rounds / summary["rounds"] * summary["round_seconds"] + summary["server_seconds"]
    simulated_seconds = None
    if "simulated_seconds" in metrics:
        simulated_seconds = float(metrics["simulated_seconds"][:rounds].sum())
    costs = (bytes_up, bytes_down, client_samples, flops, seconds, simulated_seconds)
    return TrainingCost(rounds, *costs)
