"""Sampling of examples by given numbers for each class and client."""

import numpy as np


def shuffle_by_class(rng, labels: np.ndarray, num_classes: int) -> list[np.ndarray]:
    """Shuffle the positions of the examples of each class.

    Args:
      rng: NumPy Generator.
      labels: integers `[N]`; values outside [0, num_classes) are ignored.
      num_classes: number of classes, C.

    Returns:
      C arrays of positions, int64, in random order.
    """
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]


def take_quota(classes: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Assign consecutive examples, `counts[c, k]` of class c, to each client k.

    Args:
      classes: positions of the examples of each of the C classes.
      counts: number of examples of each class and client, integers `[C, K]`.

    Returns:
      K arrays of positions.
    """
    class_splits = [
        np.split(members, np.cumsum(row)[:-1]) for members, row in zip(classes, counts, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*class_splits, strict=True)]


def systematic_round(rng, proportions: np.ndarray, total: int) -> np.ndarray:
    """Round `proportions * total` to integers that sum to `total`, each up or down.

    Systematic sampling over the classes, in descending order of proportion with ties in random
    order. Every count has its exact expectation, and so has the sum over equally likely classes, up
    to rounding. If 80 % are spread over some classes, these classes receive exactly 80 of 100.

    Args:
      rng: NumPy Generator.
      proportions: floats `[C]` that sum to 1.
      total: sum of the counts.

    Returns:
      Counts, int64 `[C]`.
    """
    order = rng.permutation(len(proportions))
    order = order[np.argsort(-proportions[order], kind="stable")]
    # Sums that should be integers must be exact, or the rounding below may be off by one.
    ends = np.round(np.cumsum(proportions[order]) * total, 9)
    counts = np.empty(len(proportions), np.int64)
    counts[order] = np.diff(np.floor(ends + rng.random()).astype(np.int64), prepend=0)
    return counts


def allocate_equal_counts(rng, limits: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` into integers that are as equal as their upper bounds allow.

    If the division leaves a remainder, the entries that are larger by one are drawn at random.

    Args:
      rng: NumPy Generator.
      limits: upper bound of each entry, integers `[C]` whose sum is at least `total`.
      total: sum of the entries.

    Returns:
      Counts, int64 `[C]`.
    """
    low, high = 0, int(limits.max())
    while low < high:  # the largest level whose sum does not exceed the total
        middle = (low + high + 1) // 2
        fits = np.minimum(limits, middle).sum() <= total
        low, high = (middle, high) if fits else (low, middle - 1)
    values = np.minimum(limits, low)
    below_limit = np.flatnonzero(limits > low)
    values[rng.permutation(below_limit)[: total - values.sum()]] += 1
    return values
