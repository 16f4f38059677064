"""How soon a curve rises: its running mean, its rise time, and when it reaches a value (FSL,
section IV-A)."""

import numpy as np

WINDOW = 20


def rolling_mean(curve: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """[rounds] the mean of the last `window` measured rounds, or of as many as there are so far.

    NaN where nothing was measured. A run evaluated every n rounds is smoothed over the `window`
    rounds that were measured, which is n times as long.
    """
    import pandas as pd

    rounds = pd.Series(np.asarray(curve, np.float64))
    measured = rounds[np.isfinite(rounds)]
    # Each mean of its own window: a running sum would carry the rounding of the rounds before.
    means = measured.rolling(window, min_periods=1).apply(np.mean, raw=True)
    return means.reindex(rounds.index).to_numpy()


def rise_time(curve: np.ndarray, window: int = WINDOW, fraction: float = 0.9) -> int | None:
    """The first round, from 1, at which the running mean reaches `share` of its last value.

    None of a curve that was never measured. A run that learns nothing rises in its first round:
    read a rise time beside its accuracy.
    """
    means = rolling_mean(curve, window)
    finite_means = means[np.isfinite(means)]
    return (
        rounds_to_reach(curve, fraction * finite_means[-1], window) if len(finite_means) else None
    )


def rounds_to_reach(curve: np.ndarray, value: float, window: int = WINDOW) -> int | None:
    """The first round, from 1, at which the running mean reaches `value`; None if it never does."""
    # Measured in float32, where what is exactly 0.88 may be a little less.
    reached = np.float32(rolling_mean(curve, window)) >= np.float32(value)
    return int(np.argmax(reached)) + 1 if reached.any() else None
