"""Metrics over clients, by hand."""

import itertools

import numpy as np
import pytest

from fedjax_het.metrics.personal import (
    best_mean_accuracy,
    compute_group_contrast,
    compute_group_weights,
    mean_accuracies,
    wilcoxon,
    worst_decile,
)
from fedjax_het.utils.errors import ConfigError

NAN = float("nan")


def test_best_mean_accuracy():
    accuracies = np.array([[0.2, 0.9, 0.4], [0.6, 0.6, 0.6], [0.9, 0.1, 0.8], [0.6, 0.5, 0.7]])
    best = best_mean_accuracy(accuracies)
    assert best.accuracy == pytest.approx(0.6) and best.round == 2
    np.testing.assert_allclose(mean_accuracies(accuracies), [0.5, 0.6, 0.6, 0.6])


def test_mean_accuracies_skip_nan():
    accuracies = np.array([[NAN, NAN, NAN], [0.5, NAN, 0.7], [0.9, NAN, NAN], [0.4, NAN, 0.2]])
    # The second client has no test; the third round lacks one that the others have.
    np.testing.assert_allclose(mean_accuracies(accuracies), [NAN, 0.6, NAN, 0.3])
    best = best_mean_accuracy(accuracies)
    assert best.accuracy == pytest.approx(0.6) and best.round == 2
    with pytest.raises(ConfigError, match="at least one measured round"):
        best_mean_accuracy(np.full((2, 3), NAN))


@pytest.mark.parametrize(
    ("num_clients", "expected"), [(1, 0.0), (9, 0.0), (19, 0.0), (20, 0.5), (62, 2.5)]
)
def test_worst_decile(num_clients, expected):
    """Clients of accuracy 0, 1, 2, ... (in percent): the mean of the first tenth."""
    accuracies = np.random.default_rng(0).permutation(num_clients) / 100
    assert worst_decile(accuracies) == pytest.approx(expected / 100)
    assert worst_decile(np.append(accuracies, NAN)) == pytest.approx(expected / 100)


def exact_p(difference):
    """Two-sided p by all 2^n signs of the ranks: how often a sum is as far from its mean."""
    ranks = np.argsort(np.argsort(np.abs(difference))) + 1
    mean = ranks.sum() / 2
    distance = abs(ranks[difference > 0].sum() - mean)
    sums = [sum(chosen) for chosen in itertools.product(*[(0, rank) for rank in ranks])]
    return np.mean([abs(total - mean) >= distance for total in sums])


def test_wilcoxon_exact_p_value():
    a = np.array([0.80, 0.75, 0.90, 0.60, 0.85, 0.70])
    b = a - np.array([0.01, 0.02, 0.03, -0.04, 0.05, 0.06])
    actual = wilcoxon(a, b)
    # Of 64 signs, those whose smaller rank sum is at most 4: 1 + 1 + 1 + 2 + 2 on either side.
    assert actual.p_value == pytest.approx(14 / 64) == exact_p(a - b)
    assert (actual.statistic, actual.num_pairs, actual.num_ties) == (4, 6, 0)
    assert actual.median_difference == pytest.approx(0.025)
    assert wilcoxon(b, a).p_value == actual.p_value
    assert wilcoxon(a, b, alternative="greater").p_value == pytest.approx(7 / 64)
    assert wilcoxon(a, b, alternative="less").p_value == pytest.approx(1 - 5 / 64)


@pytest.mark.parametrize("zero_method", ["wilcox", "pratt", "zsplit"])
@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("num_clients", [1, 8, 62])
def test_wilcoxon_of_equal_methods(num_clients, alternative, zero_method):
    a = np.random.default_rng(0).random(num_clients)
    actual = wilcoxon(a, a.copy(), alternative=alternative, zero_method=zero_method)
    assert (actual.p_value, actual.num_ties) == (1.0, num_clients)


def test_wilcoxon_zero_methods():
    a = np.linspace(0.5, 0.9, 8)
    b = a - np.array([0, 0.01, 0.02, 0.03, 0, 0.04, 0.05, 0.06])
    actual = wilcoxon(a, b)
    assert (actual.num_pairs, actual.num_ties, actual.statistic) == (8, 2, 0)
    assert actual.p_value == pytest.approx(2 / 2**6)
    # Ranked too, the two have 1.5 each, one on either side.
    assert wilcoxon(a, b, zero_method="zsplit").statistic == 1.5


def test_wilcoxon_ranks_in_any_precision():
    """62 clients with 100 tests each, as shares in single and double precision, and swapped."""
    rng = np.random.default_rng(0)
    right = rng.integers(70, 95, 62)
    other = right - rng.integers(-2, 5, 62)
    double = wilcoxon(right / 100, other / 100)
    single = wilcoxon((right / 100).astype(np.float32), (other / 100).astype(np.float32))
    percent = wilcoxon(right.astype(float), other.astype(float))
    assert double.p_value == pytest.approx(single.p_value) == pytest.approx(percent.p_value)
    assert double.statistic == percent.statistic and double.num_ties == (right == other).sum()
    assert double.p_value < 1e-4


def test_wilcoxon_skips_nan():
    a, b = np.array([0.5, NAN, 0.7, 0.9]), np.array([0.4, NAN, 0.5, 0.6])
    assert wilcoxon(a, b) == wilcoxon(a[[0, 2, 3]], b[[0, 2, 3]])
    with pytest.raises(ConfigError, match=r"a\[1\], b\[1\] = \(nan, 0.3\): expected both measured"):
        wilcoxon(a, np.array([0.4, 0.3, 0.5, 0.6]))


def test_group_contrast():
    weights = np.array([[0.5, 0.3, 0.2], [0.4, 0.6, 0.0], [0.1, 0.1, 0.8]])
    actual = compute_group_contrast(weights, np.array([7, 7, 2]))  # any names, not only 0, 1, 2
    assert actual.inside == pytest.approx((0.3 + 0.4) / 2)
    assert actual.between == pytest.approx((0.2 + 0.0 + 0.1 + 0.1) / 4)
    assert actual.ratio == pytest.approx(0.35 / 0.1)
    assert actual.own == pytest.approx((0.5 + 0.6 + 0.8) / 3)
    reversed_groups = compute_group_contrast(weights[::-1, ::-1], np.array(["b", "a", "a"]))
    assert reversed_groups == pytest.approx(actual)


def test_group_contrast_without_pairs():
    apart = compute_group_contrast(np.array([[0.9, 0.1], [0.2, 0.8]]), [0, 1])
    assert np.isnan(apart.inside) and apart.between == pytest.approx(0.15)
    together = compute_group_contrast(np.array([[0.9, 0.1], [0.2, 0.8]]), [1, 1])
    assert together.inside == pytest.approx(0.15) and np.isnan(together.between)
    blocks = np.kron(np.eye(2), np.full((2, 2), 0.5))
    assert compute_group_contrast(blocks, [0, 0, 1, 1]).ratio == np.inf


def test_group_weights():
    weights = np.array([[0.5, 0.3, 0.2], [0.4, 0.6, 0.0], [0.1, 0.3, 0.6]])
    actual = compute_group_weights(weights, np.array([7, 7, 2]))
    assert actual.names.tolist() == [7, 2]
    np.testing.assert_allclose(actual.weights, [[0.35, 0.1], [0.2, np.nan]])
    np.testing.assert_allclose(actual.ratios, [3.5, np.nan])  # one client has no other


def test_group_weight_ratios():
    inside = np.kron(np.array([[1.0, 1, 0], [1, 1, 0], [0, 0, 4]]), np.ones((2, 2)))
    groups = np.repeat([0, 1, 2], 2)
    np.testing.assert_allclose(compute_group_weights(inside, groups).ratios, [1, 1, np.inf])
    assert compute_group_contrast(inside, groups).ratio == pytest.approx(2 / (1 / 3))
    order = np.array([5, 0, 2, 4, 1, 3])  # of the clients changes nothing
    shuffled = compute_group_weights(inside[np.ix_(order, order)], groups[order])
    assert dict(zip(shuffled.names, shuffled.ratios, strict=True)) == {2: np.inf, 0: 1, 1: 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_group_contrast(np.ones((2, 3)), [0, 1]), r"shape of weights = \(2, 3\)"),
        (lambda: compute_group_contrast(np.eye(3), [0, 1]), r"groups = \(2,\): expected \(3,\)"),
        (lambda: best_mean_accuracy(np.zeros(3)), r"accuracies = \(3,\): expected \[rounds, K\]"),
        (lambda: worst_decile(np.zeros((2, 3))), r"accuracies = \(2, 3\): expected \[K\]"),
        (lambda: worst_decile([]), r"accuracies = \(0,\)"),
        (lambda: worst_decile([NAN]), "at least one measured client"),
        (lambda: worst_decile([float("inf")]), "accuracies = 'infinite'"),
        (lambda: wilcoxon([0.5], [0.5, 0.6]), r"len\(b\) = 2: expected len\(a\) = 1"),
        (lambda: wilcoxon([NAN], [NAN]), "at least one measured client"),
        (lambda: wilcoxon([0.5], [0.6], alternative="both"), "alternative = 'both' is unknown"),
        (lambda: wilcoxon([0.5], [0.6], zero_method="drop"), "zero_method = 'drop' is unknown"),
    ],
)
def test_metrics_reject_invalid_input(call, message):
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
