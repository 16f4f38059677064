"""Measures of a split against their definitions, written as loops over pairs of clients."""

import math

import numpy as np
import pytest

from fedjax_het import RunSpec, make_partition, simulate
from fedjax_het.data import partition_from_clients

LABELS = np.random.default_rng(0).integers(0, 5, 400)


def hellinger(rows):
    """FedArtML's definition: the mean over pairs of squared distances of the roots."""
    n = len(rows)
    total = sum(
        sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p, q, strict=True))
        for p in rows
        for q in rows
    )
    return math.sqrt(total / (2 * n * (n - 1)))


def entropy(row):
    return -sum(p * math.log2(p) for p in row if p > 0)


def jensen_shannon(rows):
    """FedArtML's definition: a divisor of log2 n for more than two distributions."""
    n = len(rows)
    mean = [sum(column) / n for column in zip(*rows, strict=True)]
    divergence = entropy(mean) - sum(map(entropy, rows)) / n
    return math.sqrt(divergence / (math.log2(n) if n > 2 else 1))


def gini(values):
    """Half the mean absolute difference of all pairs by the mean."""
    n = len(values)
    return sum(abs(a - b) for a in values for b in values) / (2 * n * sum(values))


@pytest.mark.parametrize("num_clients", [2, 3, 9])
@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_measures_equal_their_definitions(num_clients, alpha):
    partition = make_partition("dirichlet", LABELS, 5, num_clients=num_clients, seed=1, alpha=alpha)
    clients = [LABELS[partition.client_indices(k)] for k in range(num_clients)]
    rows = [[float(np.mean(own == c)) for c in range(5)] for own in clients if len(own)]
    everyone = [float(np.mean(c == LABELS)) for c in range(5)]
    summary = partition.summarize(LABELS, 5)
    assert summary.label_hellinger == pytest.approx(hellinger(rows), abs=1e-7)
    assert summary.label_jensen_shannon == pytest.approx(jensen_shannon(rows), abs=1e-7)
    variations = [sum(abs(a - b) for a, b in zip(row, everyone, strict=True)) / 2 for row in rows]
    assert summary.label_total_variation == pytest.approx(np.mean(variations))
    assert summary.effective_classes == pytest.approx(np.mean([2 ** entropy(r) for r in rows]))
    assert summary.size_gini == pytest.approx(gini([len(own) for own in clients]))


def test_extreme_splits():
    labels = np.repeat(np.arange(4), 6)
    apart = partition_from_clients(np.arange(24).reshape(4, 6)).summarize(labels, 4)
    assert apart.label_hellinger == pytest.approx(1)
    assert apart.label_jensen_shannon == pytest.approx(1)
    assert (apart.label_total_variation, apart.effective_classes) == (0.75, 1)
    equal = partition_from_clients(np.arange(24).reshape(4, 6).T).summarize(labels, 4)
    measures = (equal.label_hellinger, equal.label_jensen_shannon, equal.label_total_variation)
    assert measures == pytest.approx((0, 0, 0), abs=1e-7) and equal.size_gini == 0
    assert equal.effective_classes == pytest.approx(4)


def test_single_client_and_empty_clients():
    one = partition_from_clients([[0, 1]]).summarize(LABELS, 5)
    assert (one.label_hellinger, one.label_jensen_shannon, one.size_gini) == (0, 0, 0)
    some = partition_from_clients([[0, 1], [], [], [2, 3]]).summarize(LABELS, 5)
    assert some.size_gini == 0.5 and np.isfinite(some.label_hellinger)


def test_run_records_measures():
    result = simulate(RunSpec(model="mlp", num_clients=4, rounds=1, alpha=0.1, local_epochs=1))
    assert 0.3 < result.summary["split"]["label_hellinger"] < 1
