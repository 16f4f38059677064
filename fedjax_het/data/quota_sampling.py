"""From numbers of examples for each class and client to the examples themselves."""

import numpy as np


def shuffle_by_class(rng, labels: np.ndarray, num_classes: int) -> list[np.ndarray]:
    """For each class, the positions of its examples in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]


def take_quota(classes: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Give client k the k-th run of `counts[c, k]` examples of each class c."""
    class_splits = [
        np.split(members, np.cumsum(row)[:-1]) for members, row in zip(classes, counts, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*class_splits, strict=True)]


def systematic_round(rng, proportions: np.ndarray, total: int) -> np.ndarray:
    """[C] whole numbers that sum to `total`, each `proportions[c] * total` rounded up or down.

    Systematic sampling over classes in descending order of their proportions, ties in random
    order: every count has its exact expectation, and so has the sum over equally likely classes,
    up to rounding. With 80 % spread over some classes, these get exactly 80 of 100.
    """
    order = rng.permutation(len(proportions))
    order = order[np.argsort(-proportions[order], kind="stable")]
    # Sums that are whole numbers must be so exactly, or the rounding below may miss by one.
    ends = np.round(np.cumsum(proportions[order]) * total, 9)
    counts = np.empty(len(proportions), np.int64)
    counts[order] = np.diff(np.floor(ends + rng.random()).astype(np.int64), prepend=0)
    return counts


def allocate_equal_counts(rng, limits: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to `total`, as equal as `limits` (their upper bounds) allow.

    Those that are one larger than others with room are drawn at random.
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
