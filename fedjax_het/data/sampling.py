"""Random streams, and sampling of examples by given numbers for each class and client."""

import bisect
import enum

import numpy as np


class DataStream(enum.IntEnum):
    """Random streams of one seed: a draw of one stream does not depend on other streams."""

    PARTITION = 0x5EED
    LOCAL_TESTS = 0x7E57
    HELD_OUT_CLIENTS = 0x4E1D
    SERVER_EXAMPLES = 0x5E12
    WITHHELD_EXAMPLES = 0x5E13
    VALIDATION_EXAMPLES = 0x7A11


def make_data_rng(seed: int, stream: DataStream) -> np.random.Generator:
    """Create the generator of a stream.

    Args:
      seed: seed of all streams, >= 0.
      stream: purpose of the draws.

    Returns:
      NumPy Generator.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))


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
    # The largest level whose sum does not exceed the total.
    levels = range(1, int(limits.max()) + 1)
    level = bisect.bisect(levels, total, key=lambda level: np.minimum(limits, level).sum())
    values = np.minimum(limits, level)
    below_limit = np.flatnonzero(limits > level)
    values[rng.permutation(below_limit)[: total - values.sum()]] += 1
    return values
