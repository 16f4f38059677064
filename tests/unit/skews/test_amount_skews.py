"""Unequal sizes and long tails: their distributions, and that no example is lost or used twice."""

import numpy as np
import pytest

from fedjax_het import make_partition
from fedjax_het.data import partition_from_clients
from fedjax_het.skews import SKEW_SETTING, LongTail, PowerLaw, Quantity
from fedjax_het.skews.assignment import select_examples

NUM_CLASSES, NUM_CLIENTS = 5, 10
LABELS = np.repeat(np.arange(NUM_CLASSES), 2000)
IID = make_partition("iid", LABELS, NUM_CLASSES, num_clients=NUM_CLIENTS, seed=0)
SKEWED = make_partition(
    "dirichlet", LABELS, NUM_CLASSES, num_clients=NUM_CLIENTS, seed=0, alpha=0.3
)


def select(skew, partition=IID, seed=3):
    return select_examples([skew], partition, LABELS, NUM_CLASSES, seed)


def test_power_law_of_equal_clients():
    selected = select(PowerLaw(exponent=1.0))
    shares = 1 / np.arange(1, NUM_CLIENTS + 1)
    expected = len(LABELS) * shares / shares.sum()
    np.testing.assert_allclose(np.sort(selected.sizes)[::-1], expected, atol=NUM_CLASSES + 60)
    mixtures = selected.label_counts(LABELS, NUM_CLASSES) / selected.sizes[:, None]
    np.testing.assert_allclose(mixtures, 1 / NUM_CLASSES, atol=0.06)


@pytest.mark.parametrize("skew", [Quantity(alpha=0.5), PowerLaw(exponent=1.5)])
@pytest.mark.parametrize("partition", [IID, SKEWED], ids=["iid", "dirichlet"])
def test_size_skews_divide_all_examples(skew, partition):
    selected = select(skew, partition)
    np.testing.assert_array_equal(np.sort(selected.indices), np.arange(len(LABELS)))
    assert selected.scheme == partition.scheme and selected.num_clients == NUM_CLIENTS
    before, after = (part.label_counts(LABELS, NUM_CLASSES) for part in (partition, selected))
    assert not (after[before == 0]).any(), "a client receives only classes that it has"
    np.testing.assert_array_equal(before.sum(0), after.sum(0))


def test_sizes_follow_the_drawn_factors():
    """Within each class the shares are f_k n_kc / sum_j f_j n_jc."""
    skew, rng = PowerLaw(exponent=1.0), np.random.default_rng(5)
    clients = [SKEWED.client_indices(k) for k in range(NUM_CLIENTS)]
    selected = skew.select_examples(rng, clients, LABELS, NUM_CLASSES)
    factors = skew.draw_factors(np.random.default_rng(5), NUM_CLIENTS)
    before = SKEWED.label_counts(LABELS, NUM_CLASSES)
    after = partition_from_clients(selected).label_counts(LABELS, NUM_CLASSES)
    weights = factors[:, None] * before
    np.testing.assert_allclose(after, 2000 * weights / weights.sum(0), atol=1.0)


def test_quantity_is_more_unequal_for_small_alpha():
    ginis = [
        np.mean(
            [select(Quantity(alpha=a), seed=s).summarize(LABELS, 5).size_gini for s in range(5)]
        )
        for a in (0.1, 1.0, 100.0)
    ]
    assert ginis[0] > ginis[1] + 0.1 > ginis[2] + 0.2


def test_long_tail_keeps_geometric_shares():
    selected = select(LongTail(ratio=16.0))
    counts = selected.label_counts(LABELS, NUM_CLASSES).sum(0)
    assert counts.tolist() == [2000, 1000, 500, 250, 125]
    for k in range(NUM_CLIENTS):
        assert np.isin(selected.client_indices(k), IID.client_indices(k)).all()


def test_absent_skews_return_the_partition_itself():
    assert select_examples(SKEW_SETTING.parse({}), IID, LABELS, NUM_CLASSES, 0) is IID
