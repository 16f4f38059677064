"""From numbers of examples for each class and client to the examples themselves."""

import numpy as np


def shuffled_classes(rng, labels: np.ndarray, num_classes: int) -> list[np.ndarray]:
    """For each class, the positions of its examples in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]


def deal(classes: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Give client k the k-th run of `counts[c, k]` examples of each class c."""
    runs = [
        np.split(members, np.cumsum(row)[:-1]) for members, row in zip(classes, counts, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def whole_counts(rng, proportions: np.ndarray, total: int) -> np.ndarray:
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
