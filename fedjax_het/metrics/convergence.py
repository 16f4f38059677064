"""Speed of convergence: running mean, rise time and rounds to a value (FSL, section IV-A)."""

import numpy as np

WINDOW = 20


def rolling_mean(curve: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Average a curve over the last `window` measured rounds.

    A run that is evaluated every n rounds is averaged over `window` measured rounds, which span n
    times as many rounds.

    Args:
      curve: a measure in each round, floats `[rounds]`; NaN in rounds without an evaluation.
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
    import pandas as pd

    values = pd.Series(np.asarray(curve, np.float64))
    measured_values = values[np.isfinite(values)]
    # Each mean is computed from its window: a running sum would accumulate rounding errors.
    means = measured_values.rolling(window, min_periods=1).apply(np.mean, raw=True)
    return means.reindex(values.index).to_numpy()


def rise_time(curve: np.ndarray, window: int = WINDOW, fraction: float = 0.9) -> int | None:
    """Find the first round in which the running mean reaches a fraction of its last value.

    A run that learns nothing rises in its first round: read a rise time together with the accuracy.

    Args:
      curve: a measure in each round, floats `[rounds]`; NaN in rounds without an evaluation.
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
    return (
        rounds_to_reach(curve, fraction * finite_means[-1], window) if len(finite_means) else None
    )


def rounds_to_reach(curve: np.ndarray, value: float, window: int = WINDOW) -> int | None:
    """Find the first round in which the running mean reaches a value.

    Args:
      curve: a measure in each round, floats `[rounds]`; NaN in rounds without an evaluation.
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
