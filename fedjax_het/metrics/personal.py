"""Metrics of personalized learning, from the accuracies of clients on their own tests.

Accuracies are fractions, `[rounds, K]` or `[K]`. NaN marks a missing measurement: a round without
an evaluation, or a client without a local test. NumPy on the host.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import require, require_name


class BestMeanAccuracy(NamedTuple):
    """Highest mean accuracy of a run, and its round.

    Attributes:
      accuracy: highest mean over clients, a fraction.
      round: first round, from 1, that reached it.

    Example:
      >>> from fedjax_het.metrics.personal import BestMeanAccuracy
      >>> BestMeanAccuracy(accuracy=0.75, round=2).round
      2
    """

    accuracy: float
    round: int


class PairedTest(NamedTuple):
    """Result of Wilcoxon's signed-rank test of two methods a and b.

    Attributes:
      statistic: the test statistic.
      p_value: the p-value.
      num_pairs: number of clients compared.
      num_ties: number of those clients with equal accuracy under both methods.
      median_difference: median over clients of accuracy a minus accuracy b.

    Example:
      >>> from fedjax_het.metrics.personal import PairedTest
      >>> PairedTest(0.0, 0.03, 6, 0, 0.05).p_value
      0.03
    """

    statistic: float
    p_value: float
    num_pairs: int
    num_ties: int
    median_difference: float


class GroupContrast(NamedTuple):
    """Mean weights within and between groups of a collaboration matrix.

    A mean is NaN if there is no such pair of clients.

    Attributes:
      inside: mean weight between different clients of one group.
      between: mean weight between clients of different groups.
      ratio: `inside / between`.
      own: mean weight of a client's own model.

    Example:
      >>> from fedjax_het.metrics.personal import GroupContrast
      >>> GroupContrast(inside=0.2, between=0.1, ratio=2.0, own=0.5).ratio
      2.0
    """

    inside: float
    between: float
    ratio: float
    own: float


class GroupWeights(NamedTuple):
    """Mean weights of a collaboration matrix for each pair of groups.

    Attributes:
      names: names of the groups, `[G]`, in the order of their first client.
      weights: `[G, G]`; row g, column h is the mean weight that a client of g gives to a client of
        h, without its own model. NaN if there is no such pair.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import GroupWeights
      >>> GroupWeights(np.array([0, 1]), np.array([[0.4, 0.1], [0.2, 0.2]])).ratios
      array([4., 1.])
    """

    names: np.ndarray
    weights: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """Ratio of the weight within each group to its strongest weight for another group, `[G]`.

        A ratio of 1 means that the two groups collaborate like one group. A ratio of inf means that
        the group's clients give no weight to other groups.
        """
        others = np.where(np.eye(len(self.names), dtype=bool), -np.inf, self.weights)
        strongest = np.where(np.isinf(others.max(1)), np.nan, others.max(1))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.divide(self.weights.diagonal(), strongest)


def compute_group_weights(weights: np.ndarray, groups: np.ndarray) -> GroupWeights:
    """Average a collaboration matrix over each pair of groups.

    Args:
      weights: `[K, K]`; row i holds the weights that client i gives to each client.
      groups: name of each client's group, `[K]`, see `fedjax_het.data.get_client_groups`.

    Returns:
      Mean weights by group.

    Raises:
      ConfigError: if the shapes do not fit together.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import compute_group_weights
      >>> weights = np.array([[0.5, 0.4, 0.1], [0.4, 0.5, 0.1], [0.3, 0.3, 0.4]])
      >>> compute_group_weights(weights, np.array(["a", "a", "b"])).weights
      array([[0.4, 0.1],
             [0.3, nan]])
    """
    weights, groups = _validate_groups(weights, groups)
    names = np.array(list(dict.fromkeys(groups.tolist())))
    membership = (groups == names[:, None]).astype(np.float64)
    off_diagonal = weights * ~np.eye(len(weights), dtype=bool)
    num_pairs = np.outer(membership.sum(1), membership.sum(1)) - np.diag(membership.sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return GroupWeights(names, np.divide(membership @ off_diagonal @ membership.T, num_pairs))


def compute_group_contrast(weights: np.ndarray, groups: np.ndarray) -> GroupContrast:
    """Compare the weights that clients give to their own group with those for other groups.

    Args:
      weights: `[K, K]`; row i holds the weights that client i gives to each client.
      groups: name of each client's group, `[K]`, see `fedjax_het.data.get_client_groups`.

    Returns:
      Mean weights within and between groups. `ratio` is inf if all weights between groups are zero.

    Raises:
      ConfigError: if the shapes do not fit together.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import compute_group_contrast
      >>> weights = np.array([[0.5, 0.4, 0.1], [0.4, 0.5, 0.1], [0.2, 0.2, 0.6]])
      >>> contrast = compute_group_contrast(weights, np.array(["a", "a", "b"]))
      >>> round(contrast.inside, 3), round(contrast.between, 3)
      (0.4, 0.15)
    """
    weights, groups = _validate_groups(weights, groups)
    is_same_group = groups[:, None] == groups
    is_self = np.eye(len(weights), dtype=bool)
    inside, between = (
        float(weights[pairs].mean()) if pairs.any() else float("nan")
        for pairs in (is_same_group & ~is_self, ~is_same_group)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(np.divide(inside, between))
    return GroupContrast(inside, between, ratio, float(weights[is_self].mean()))


def _validate_groups(weights: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights, groups = np.asarray(weights, np.float64), np.asarray(groups)
    is_valid = weights.ndim == 2 and weights.shape[0] == weights.shape[1] > 0
    require(is_valid, "shape of weights", weights.shape, "[K, K], a row for each client")
    expected = f"({len(weights)},)"
    require(groups.shape == weights.shape[:1], "shape of groups", groups.shape, expected)
    return weights, groups


def mean_accuracies(accuracies: np.ndarray) -> np.ndarray:
    """Average accuracies over clients without weights, in each round.

    Clients without any measurement are excluded. A round in which another client was not measured
    is NaN.

    Args:
      accuracies: fractions `[rounds, K]`; NaN marks a missing measurement.

    Returns:
      Mean accuracies, float64 `[rounds]`.

    Raises:
      ConfigError: if the shape is wrong or a value is infinite.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import mean_accuracies
      >>> mean_accuracies(np.array([[0.25, 0.75, np.nan], [0.5, 1.0, np.nan]]))
      array([0.5 , 0.75])
    """
    accuracies = _validate_accuracies("accuracies", accuracies, 2)
    is_measured = ~np.isnan(accuracies).all(0)
    if not is_measured.any():
        return np.full(len(accuracies), np.nan)
    return accuracies[:, is_measured].mean(1)


def best_mean_accuracy(accuracies: np.ndarray) -> BestMeanAccuracy:
    """Compute the best mean testing accuracy, BMTA (FedAMP, section 7).

    BMTA is the maximum over rounds of the unweighted mean over clients: one round for all clients,
    not the best round of each client.

    Args:
      accuracies: fractions `[rounds, K]`; NaN marks a missing measurement.

    Returns:
      The accuracy and its round.

    Raises:
      ConfigError: if no round was measured.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import best_mean_accuracy
      >>> best_mean_accuracy(np.array([[0.25, 0.75], [0.5, 1.0], [1.0, 0.0]]))
      BestMeanAccuracy(accuracy=0.75, round=2)
    """
    means = mean_accuracies(accuracies)
    require(not np.isnan(means).all(), "accuracies", "all NaN", "at least one measured round")
    best = int(np.nanargmax(means))
    return BestMeanAccuracy(float(means[best]), best + 1)


def worst_decile(accuracies: np.ndarray) -> float:
    """Average the accuracies of the worst tenth of the clients.

    A tenth is rounded down (6 of 62) and is at least one client. Clients without a measurement are
    excluded.

    Args:
      accuracies: fractions `[K]`; NaN marks a missing measurement.

    Returns:
      The mean accuracy.

    Raises:
      ConfigError: if no client was measured.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import worst_decile
      >>> worst_decile(np.array([0.9, 0.5, np.nan, 0.7]))
      0.5
    """
    accuracies = _validate_accuracies("accuracies", accuracies, 1)
    accuracies = np.sort(accuracies[~np.isnan(accuracies)])
    require(len(accuracies) > 0, "accuracies", "all NaN", "at least one measured client")
    return float(accuracies[: max(1, len(accuracies) // 10)].mean())


def wilcoxon(
    a: np.ndarray, b: np.ndarray, *, alternative: str = "two-sided", zero_method: str = "wilcox"
) -> PairedTest:
    """Test whether two methods serve the clients equally well, by Wilcoxon's signed-rank test.

    FedAMP reports p < 1e-4 for such tests without naming the variant; here the default is two-sided
    with "wilcox". The values equal `scipy.stats.wilcoxon`, except that methods with equal accuracy
    on every client give p = 1 instead of an error. Differences are rounded to six decimals:
    differences of one number of examples must have one rank, in spite of floating-point errors.

    The test assumes independent pairs. Local tests that share examples violate this assumption to
    some extent.

    Args:
      a: accuracies of method a, `[K]`; NaN for a client that neither method measured.
      b: accuracies of method b for the clients of `a`, `[K]`.
      alternative: "two-sided"; "greater": a is above b; "less": a is below b.
      zero_method: treatment of ties: "wilcox" drops them, "pratt" ranks and then drops them,
        "zsplit" splits their ranks between the two signs.

    Returns:
      Statistic, p-value and counts.

    Raises:
      ConfigError: if an argument is invalid, or if only one method measured a client.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.personal import wilcoxon
      >>> a = np.array([0.7, 0.8, 0.9, 0.6, 0.75, 0.5])
      >>> test = wilcoxon(a, a - np.array([0.1, 0.2, 0.05, 0.15, 0.3, 0.0]))
      >>> test.p_value, test.num_pairs, test.num_ties
      (0.0625, 6, 1)
    """
    from scipy import stats

    require_name("alternative", alternative, ("two-sided", "greater", "less"))
    require_name("zero_method", zero_method, ("wilcox", "pratt", "zsplit"))
    a, b = _validate_accuracies("a", a, 1), _validate_accuracies("b", b, 1)
    expected = f"len(a) = {len(a)}, since both have the same clients"
    require(len(a) == len(b), "len(b)", len(b), expected)
    is_missing = np.isnan(a)
    differs = is_missing != np.isnan(b)
    k = int(differs.argmax())
    expected = "both measured or both NaN"
    require(not differs.any(), f"a[{k}], b[{k}]", (float(a[k]), float(b[k])), expected)
    difference = np.round(a[~is_missing] - b[~is_missing], 6)
    require(len(difference) > 0, "a", "all NaN", "at least one measured client")
    ties = int((difference == 0).sum())
    statistic, p_value = 0.0, 1.0
    if ties < len(difference):
        test_result = stats.wilcoxon(difference, alternative=alternative, zero_method=zero_method)
        statistic, p_value = float(test_result.statistic), float(test_result.pvalue)
    return PairedTest(statistic, p_value, len(difference), ties, float(np.median(difference)))


def _validate_accuracies(argument: str, values, rank: int) -> np.ndarray:
    values = np.asarray(values)
    axes = {1: "[K], one for each client", 2: "[rounds, K]"}[rank]
    is_valid = values.ndim == rank and values.size > 0 and np.issubdtype(values.dtype, np.number)
    require(is_valid, f"shape of {argument}", values.shape, axes)
    values = values.astype(np.float64)
    require(not np.isinf(values).any(), argument, "infinite", "finite numbers, or NaN")
    return values
