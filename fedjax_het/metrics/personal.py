"""Measures of personalised learning, from the accuracies of clients on their own tests.

Accuracies are shares, [rounds, K] or [K]; NaN is what was not measured: a round without an
evaluation, or a client without a local test. NumPy on the host.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.utils.errors import ConfigError, require, require_name


class BestMeanAccuracy(NamedTuple):
    """accuracy: the highest mean over clients. round: the first, from 1, that reached it."""

    accuracy: float
    round: int


class PairedTest(NamedTuple):
    """statistic, p_value: of Wilcoxon's signed-rank test. num_pairs: clients compared.
    num_ties: those of them that both methods serve equally well. median_difference: of a - b.
    """

    statistic: float
    p_value: float
    num_pairs: int
    num_ties: int
    median_difference: float


class GroupContrast(NamedTuple):
    """Mean weights of a collaboration matrix.

    inside: between different clients of a group. between: of clients of different groups. ratio:
    of the two. own: of clients' own models. NaN where there is no such pair.
    """

    inside: float
    between: float
    ratio: float
    own: float


class GroupWeights(NamedTuple):
    """Mean weights by group of a collaboration matrix.

    names: [G] of the groups, in order of their first client. weights: [G, G], row g what a client
    of g takes from a client of each, its own model left out; NaN where there is no such pair.
    """

    names: np.ndarray
    weights: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """[G] what a client takes from one of its own group, over what it takes from one of the
        other group that it takes most from. 1: the two are as one; inf: it takes from no other."""
        others = np.where(np.eye(len(self.names), dtype=bool), -np.inf, self.weights)
        strongest = np.where(np.isinf(others.max(1)), np.nan, others.max(1))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.divide(self.weights.diagonal(), strongest)


def compute_group_weights(weights: np.ndarray, groups: np.ndarray) -> GroupWeights:
    """Who takes from whom, by group. Arguments and errors are those of `compute_group_contrast`."""
    weights, groups = _validate_groups(weights, groups)
    names = np.array(list(dict.fromkeys(groups.tolist())))
    membership = (groups == names[:, None]).astype(np.float64)
    off_diagonal = weights * ~np.eye(len(weights), dtype=bool)
    num_pairs = np.outer(membership.sum(1), membership.sum(1)) - np.diag(membership.sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return GroupWeights(names, np.divide(membership @ off_diagonal @ membership.T, num_pairs))


def compute_group_contrast(weights: np.ndarray, groups: np.ndarray) -> GroupContrast:
    """How much more clients take from their own group than from others.

    weights: [K, K], row i what client i takes from each. groups: [K] names of groups, see
    `get_client_groups`. `ratio` is inf where nothing passes between groups. ConfigError for shapes
    that do not fit.
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
    ok = weights.ndim == 2 and weights.shape[0] == weights.shape[1] > 0
    require(ok, "shape of weights", weights.shape, "[K, K], a row for each client")
    require(
        groups.shape == weights.shape[:1], "shape of groups", groups.shape, f"({len(weights)},)"
    )
    return weights, groups


def mean_accuracies(accuracies: np.ndarray) -> np.ndarray:
    """[R] the unweighted mean over clients in each round, of accuracies [R, K].

    Clients that were never measured are left out; a round in which another one was not is NaN.
    """
    accuracies = _validate_accuracies("accuracies", accuracies, 2)
    is_measured = ~np.isnan(accuracies).all(0)
    if not is_measured.any():
        return np.full(len(accuracies), np.nan)
    return accuracies[:, is_measured].mean(1)


def best_mean_accuracy(accuracies: np.ndarray) -> BestMeanAccuracy:
    """BMTA, best mean testing accuracy (FedAMP, section 7), of accuracies [R, K].

    The maximum over rounds of the unweighted mean over clients: one round for all of them, not
    each client's best. Raises `ConfigError` where no round was measured.
    """
    means = mean_accuracies(accuracies)
    require(not np.isnan(means).all(), "accuracies", "all NaN", "at least one measured round")
    best = int(np.nanargmax(means))
    return BestMeanAccuracy(float(means[best]), best + 1)


def worst_decile(accuracies: np.ndarray) -> float:
    """The mean over the worst tenth of the clients, of accuracies [K].

    A tenth is rounded down (6 of 62) and is at least one client. Clients without a measurement are
    left out; raises `ConfigError` where that leaves none.
    """
    accuracies = _validate_accuracies("accuracies", accuracies, 1)
    accuracies = np.sort(accuracies[~np.isnan(accuracies)])
    require(len(accuracies) > 0, "accuracies", "all NaN", "at least one measured client")
    return float(accuracies[: max(1, len(accuracies) // 10)].mean())


def wilcoxon(
    a: np.ndarray,
    b: np.ndarray,
    *,
    alternative: str = "two-sided",
    zero_method: str = "wilcox",
) -> PairedTest:
    """Wilcoxon's signed-rank test of whether clients are served equally well by methods a and b.

    a, b: [K] accuracies of the same clients. Pairs that neither method measured are left out.
    alternative: "two-sided"; "greater": a is above b; "less": a is below b.
    zero_method: what becomes of ties: "wilcox" drops them, "pratt" ranks and then drops them,
        "zsplit" splits their ranks between the two signs.

    FedAMP reports p < 1e-4 of such tests without saying which of these it chose; two-sided with
    "wilcox" is chosen here. By `scipy.stats.wilcoxon`, except that methods which tie on every
    client give p = 1, not an error. Differences are rounded to six decimals: the same number of
    examples apart must be the same rank, in spite of floating point.

    The test takes pairs as independent; those of local tests that share examples are less so.
    """
    from scipy import stats

    require_name("alternative", alternative, ("two-sided", "greater", "less"))
    require_name("zero_method", zero_method, ("wilcox", "pratt", "zsplit"))
    a, b = _validate_accuracies("a", a, 1), _validate_accuracies("b", b, 1)
    require(len(a) == len(b), "len(b)", len(b), f"len(a) = {len(a)}: the same clients")
    is_missing = np.isnan(a)
    if (is_missing != np.isnan(b)).any():
        client = int((is_missing != np.isnan(b)).argmax())
        raise ConfigError(
            f"a[{client}], b[{client}] = {a[client]}, {b[client]}: expected both measured or none"
        )
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
    ok = values.ndim == rank and values.size > 0 and np.issubdtype(values.dtype, np.number)
    require(ok, f"shape of {argument}", values.shape, axes)
    values = values.astype(np.float64)
    require(not np.isinf(values).any(), argument, "infinite", "finite numbers, or NaN")
    return values
