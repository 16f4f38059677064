"""What made-up images give away of the clients' own: membership inference, and nearest neighbours.

NumPy on the host. A score says how much an image looks like one of the clients' (`members`) to an
attacker who has the made-up images alone; others are images that no client holds (the test split).
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import require

FALSE_POSITIVE_RATE = 0.001
_BLOCK_SIZE = 2**24  # distances at a time


class AttackResult(NamedTuple):
    """How well scores tell members from others.

    auc: the chance that a member scores above another image; 0.5 is a guess. p_value: of
    Mann and Whitney's test that it is one. found: the share of members above the score that one in
    a thousand others reach (`FALSE_POSITIVE_RATE`), which a guess puts at that thousandth.
    """

    auc: float
    p_value: float
    found: float


def evaluate_membership_attack(members: np.ndarray, others: np.ndarray) -> AttackResult:
    """From the scores [N] of members and [M] of others; ConfigError where either has none or one
    that is not finite."""
    from scipy import stats

    members, others = (np.asarray(scores, np.float64) for scores in (members, others))
    for name, scores in (("members", members), ("others", others)):
        ok = scores.ndim == 1 and len(scores) > 0 and bool(np.isfinite(scores).all())
        require(ok, name, f"{scores.shape}", "finite scores, at least one")
    test_result = stats.mannwhitneyu(members, others)
    threshold = np.quantile(others, 1 - FALSE_POSITIVE_RATE, method="higher")
    auc = float(test_result.statistic) / (len(members) * len(others))
    return AttackResult(auc, float(test_result.pvalue), float((members > threshold).mean()))


class NeighborComparison(NamedTuple):
    """Where made-up images have their nearest real ones, of members and of as many others.

    members, others: [M] distances to the nearest of each. share: of those whose nearest is a
    member, ties counting half; 0.5 where membership says nothing. p_value: of the binomial test
    that it is 0.5, ties left out.
    """

    members: np.ndarray
    others: np.ndarray
    share: float
    p_value: float


def compare_neighbors(
    synthetic: np.ndarray, members: np.ndarray, others: np.ndarray
) -> NeighborComparison:
    """Of made-up images [M, ...]; ConfigError unless there are as many members as others, without
    which the larger side has the nearer neighbours."""
    from scipy import stats

    require(len(members) == len(others), "members", len(members), f"{len(others)}, as many others")
    member_distances, other_distances = (
        nearest_distances(synthetic, members),
        nearest_distances(synthetic, others),
    )
    num_closer, num_farther = (
        int((member_distances < other_distances).sum()),
        int((member_distances > other_distances).sum()),
    )
    num_decided = num_closer + num_farther
    p_value = stats.binomtest(num_closer, num_decided).pvalue if num_decided else 1.0
    member_share = (num_closer + (len(member_distances) - num_decided) / 2) / len(member_distances)
    return NeighborComparison(
        member_distances, other_distances, float(member_share), float(p_value)
    )


def nearest_distances(images: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """[M] the distance of each image [M, ...] to the nearest candidate [N, ...]: the root of the
    mean squared difference of their values.

    Cost: M N products; memory of a block of them.
    """
    require(len(candidates) > 0, "candidates", 0, "at least one image")
    images, candidates = (
        np.asarray(a, np.float32).reshape(len(a), -1) for a in (images, candidates)
    )
    squared_norms, distances = np.square(candidates).sum(1), []
    for block in np.array_split(images, max(1, len(images) * len(candidates) // _BLOCK_SIZE)):
        products = squared_norms - 2 * block @ candidates.T
        best = candidates[products.argmin(1)]
        # From the difference itself: that of the products would be rounding where both are alike.
        distances.append(np.sqrt(np.square(block - best).mean(1, dtype=np.float64)))
    return np.concatenate(distances)
