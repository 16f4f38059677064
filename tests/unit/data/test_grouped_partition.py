"""FedAMP's settings of data: the pathological one, and the practical one of groups."""

import logging

import numpy as np
import pytest
from scipy import stats
from support.partitions import shuffled_labels

from fedjax_het.data import (
    DATASETS,
    compute_client_mixtures,
    get_client_groups,
    load_dataset,
    make_partition,
)
from fedjax_het.data.grouped_partition import CIFAR100_SUPERCLASSES
from fedjax_het.data.sampling import systematic_round
from fedjax_het.utils.errors import ConfigError

BYCLASS = tuple(DATASETS["emnist_byclass"].published.class_names)


def grouped(labels, num_classes=10, num_clients=20, seed=0, **settings):
    return make_partition(
        "grouped", labels, num_classes, num_clients=num_clients, seed=seed, **settings
    )


LABELS = shuffled_labels([500] * 10)


# --- whole numbers of examples


def test_systematic_round_is_unbiased():
    proportions = np.array([0.05, 0.4, 0.05, 0.0, 0.05, 0.4, 0.05])
    rngs = map(np.random.default_rng, range(4000))
    draws = np.array([systematic_round(rng, proportions, 33) for rng in rngs])
    np.testing.assert_array_equal(draws.sum(1), 33)
    expected = proportions * 33
    assert (draws >= np.floor(expected)).all() and (draws <= np.ceil(expected)).all()
    # 0.4 * 33 = 13.2, twice: 26.4 of the frequent ones in all, and 6.6 of the others.
    assert set(draws[:, [1, 5]].sum(1)) == {26, 27}
    error = np.sqrt((expected % 1) * (1 - expected % 1) / len(draws))
    assert (np.abs(draws.mean(0) - expected) <= 4.5 * error).all()


def test_systematic_round_draws_pairs():
    draws = [systematic_round(np.random.default_rng(s), np.full(4, 0.25), 2) for s in range(600)]
    pairs, counts = np.unique(draws, axis=0, return_counts=True)
    assert len(pairs) == 6 and stats.chisquare(counts).pvalue > 1e-3


def test_systematic_round_keeps_integers():
    for seed in range(200):
        counts = systematic_round(np.random.default_rng(seed), np.array([0.3, 0.1, 0.2, 0.4]), 10)
        assert counts.tolist() == [3, 1, 2, 4]


# --- pathological


def test_pathological_has_two_classes():
    labels = shuffled_labels([120] * 10)
    partition = make_partition("pathological", labels, 10, num_clients=20, seed=3)
    counts = partition.label_counts(labels, 10)
    np.testing.assert_array_equal(np.sort(counts, 1)[:, -3:], [[0, 30, 30]] * 20)
    np.testing.assert_array_equal((counts > 0).sum(0), 4)
    same = make_partition(
        "classes_per_client", labels, 10, num_clients=20, seed=3, classes_per_client=2
    )
    assert partition.digest() == same.digest()
    assert (partition.scheme, partition.parameters) == ("pathological", {})
    with pytest.raises(ConfigError, match="classes_per_client"):
        make_partition("pathological", np.zeros(9, int), 1, num_clients=2, seed=0)


# --- the practical setting, counted by hand


def test_grouped_by_hand():
    labels = shuffled_labels([40, 40, 40, 40])
    settings = {"clients_per_group": [2, 1], "group_sizes": [20, 10]}
    partition = grouped(labels, 4, 3, groups=[[0, 1], [3]], **settings)
    counts = partition.label_counts(labels, 4)
    # 80 % of 20 over two classes, 20 % over two; 80 % of 10 on one, 2 of 10 over three.
    assert counts[:2].tolist() == [[8, 8, 2, 2]] * 2
    assert counts[2, 3] == 8 and sorted(counts[2, :3]) == [0, 1, 1]
    assert get_client_groups(partition).tolist() == [0, 0, 1]
    np.testing.assert_allclose(
        compute_client_mixtures(partition, labels, 4),
        [[0.4, 0.4, 0.1, 0.1]] * 2 + [[0.2 / 3] * 3 + [0.8]],
    )


def test_grouped_with_all_parameters():
    partition = grouped(
        LABELS, groups=[range(3), (5, 6)], group_sizes=(60, np.int64(50)), dominating_share=0.5
    )
    counts = partition.label_counts(LABELS, 10)
    assert partition.parameters == {
        "groups": [[0, 1, 2], [5, 6]],
        "clients_per_group": [12, 8],
        "group_sizes": [60, 50],
        "dominating_share": 0.5,
    }
    assert (counts[:12, :3] == 10).all() and (counts[12:, [5, 6]] >= 12).all()
    np.testing.assert_array_equal(counts[12:, [5, 6]].sum(1), 25)
    np.testing.assert_array_equal(partition.sizes, [60] * 12 + [50] * 8)


def test_grouped_with_dominating_share_one():
    partition = grouped(LABELS, dominating_share=1, groups=[[0], range(10)], group_sizes=[50, 50])
    counts = partition.label_counts(LABELS, 10)
    groups = get_client_groups(partition)
    assert (counts[groups == 0, 0] == 50).all() and (counts[groups == 1] == 5).all()


# --- the declared choices


def emnist_labels():
    """EMNIST ByClass is about this unequal: digits abound, some lower-case letters are rare."""
    return shuffled_labels([3800] * 10 + [1200] * 26 + [500] * 26)


@pytest.mark.parametrize("seed", [0, 1])
def test_grouped_emnist_matches_paper(seed):
    labels = emnist_labels()
    partition = grouped(labels, 62, 62, seed, class_names=BYCLASS)
    counts = partition.label_counts(labels, 62)
    blocks = {(0, 10): 1000, (10, 36): 700, (36, 62): 400}
    for (low, high), size in blocks.items():
        mine = counts[low:high]
        np.testing.assert_array_equal(mine.sum(1), size)
        np.testing.assert_array_equal(mine[:, low:high].sum(1), size * 4 // 5)
        dominating, rest = mine[:, low:high], np.delete(mine, range(low, high), axis=1)
        for part in (dominating, rest):  # uniformly: none more than one from another
            np.testing.assert_array_equal(
                part.max(1) - part.min(1), part.sum(1) % part.shape[1] > 0
            )
    assert (counts > 0).all()  # "every client has data from all classes"
    assert np.bincount(get_client_groups(partition)).tolist() == [10, 26, 26]


def test_grouped_remainder_is_uniform():
    labels = emnist_labels()
    extra = np.zeros(26)
    for seed in range(6):
        counts = grouped(labels, 62, 62, seed, class_names=BYCLASS).label_counts(labels, 62)
        extra += (counts[10:36, 10:36] == 22).sum(0)  # 560 / 26 = 21.5
    assert extra.sum() == 6 * 26 * 14
    # Each of 156 clients' draws has a class among its 14 of 26: binomial, five deviations.
    law = stats.binom(6 * 26, 14 / 26)
    assert np.abs(extra - law.mean()).max() < 5 * law.std()


def test_grouped_default_groups(caplog):
    labels = shuffled_labels([6000] * 10)
    with caplog.at_level(logging.WARNING):
        partition = grouped(labels, num_clients=50, class_names=[str(c) for c in range(10)])
    assert partition.parameters["groups"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert partition.parameters["clients_per_group"] == [10] * 5
    assert partition.parameters["group_sizes"] == [1000, 700, 400, 1000, 700]
    assert not caplog.records
    odd = grouped(shuffled_labels([6000] * 7), 7, 7).parameters
    assert odd["groups"] == [[0, 1], [2, 3], [4], [5], [6]]
    assert odd["clients_per_group"] == [2, 2, 1, 1, 1]


def test_grouped_clients_per_group():
    """The next client goes where it stands for most classes: 3/2, 3/3, ... against 1/2, ..."""
    uneven = grouped(LABELS, num_clients=10, groups=[[0], [1, 2, 3]], group_sizes=[5, 5])
    assert uneven.parameters["clients_per_group"] == [2, 8]
    exact = grouped(LABELS, num_clients=20, groups=[[0], [1, 2, 3], [4]], group_sizes=[5] * 3)
    assert exact.parameters["clients_per_group"] == [4, 12, 4]


def test_grouped_cifar100_superclasses():
    names = sorted(name for fine in CIFAR100_SUPERCLASSES.values() for name in fine)
    assert len(set(names)) == 100 and len(CIFAR100_SUPERCLASSES) == 20
    labels = shuffled_labels([500] * 100)
    partition = grouped(labels, 100, 60, class_names=names)
    groups = partition.parameters["groups"]
    assert [names[label] for label in groups[15]] == list(CIFAR100_SUPERCLASSES["reptiles"])
    assert sorted(label for group in groups for label in group) == list(range(100))
    assert partition.parameters["clients_per_group"] == [3] * 20


@pytest.mark.parametrize("num_clients", [5, 10, 20])
def test_grouped_scales_sizes(num_clients, caplog):
    labels = load_dataset("digits").train_labels
    with caplog.at_level(logging.WARNING):
        partition = grouped(labels, num_clients=num_clients)
    sizes = np.array(partition.parameters["group_sizes"])
    percent = sizes[0] // 10
    np.testing.assert_array_equal(sizes, np.array([1000, 700, 400, 1000, 700]) * percent // 100)
    assert f"sizes scaled to {percent} %" in caplog.text
    for seed in range(1, 6):  # whatever is drawn, they suffice, and they are the same
        again = grouped(labels, num_clients=num_clients, seed=seed)
        assert again.parameters == partition.parameters
    with pytest.raises(ConfigError, match="clients need"):  # no more than a little too careful
        grouped(labels, num_clients=num_clients, group_sizes=sizes * 4 // 3)


def test_loaded_partition_has_groups(tmp_path):
    partition = grouped(LABELS, seed=3)
    loaded = type(partition).load(partition.save(tmp_path / "split.npz"))
    np.testing.assert_array_equal(
        compute_client_mixtures(loaded, LABELS, 10), compute_client_mixtures(partition, LABELS, 10)
    )
    assert get_client_groups(loaded).tolist() == np.repeat(range(5), 4).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": [[0, 1], []]}, r"groups\[1\] = \[\]: expected at least one class"),
        ({"groups": []}, r"groups = \[\]"),
        ({"groups": 3}, "groups = 3"),
        ({"groups": [3, 4]}, r"groups\[0\] = 3"),
        ({"groups": [[0], [10]]}, r"groups\[1\] = \[10\]: expected classes in \[0, 10\)"),
        ({"groups": [[0, 0]]}, r"groups\[0\] = \[0, 0\]: expected each class once"),
        ({"groups": [[0], range(10)]}, r"groups\[1\].*fewer than all 10 classes"),
        ({"num_clients": 1}, "num_clients = 1: expected at least 2"),
        ({"num_clients": 4}, "num_clients = 4: expected at least 5, one for each group"),
        ({"clients_per_group": [4] * 4}, "clients_per_group = .*expected 5 whole numbers"),
        ({"clients_per_group": [0, 5, 5, 5, 5]}, r"clients_per_group\[0\] = 0: .*>= 1"),
        ({"clients_per_group": [4, 4, 4, 4, 5]}, "clients_per_group = .*sum of num_clients = 20"),
        ({"group_sizes": [100, 100]}, "group_sizes = .*expected 5 whole numbers"),
        ({"group_sizes": 100}, r"group_sizes = 100: expected a list"),
        ({"group_sizes": [100, 100, 100, 100, -1]}, r"group_sizes\[4\] = -1"),
        (
            {"group_sizes": [500] * 5},
            r"group_sizes = \[500, 500, 500, 500, 500\]: clients need 1\d\d\d examples of class",
        ),
        ({"dominating_share": 1.1}, "dominating_share = 1.1"),
        ({"dominating_share": float("nan")}, "dominating_share = nan"),
        ({"dominating_share": True}, "dominating_share = True"),
        ({"labels": np.arange(9).repeat(300)}, "num_clients = 20.*class 9 than its 0 examples"),
        ({"labels": np.arange(10), "num_clients": 10}, "num_clients = 10: even one percent"),
    ],
)
def test_grouped_rejects_invalid_parameters(arguments, message):
    arguments = {"labels": LABELS} | arguments
    with pytest.raises(ConfigError, match=message) as error:
        grouped(**arguments)
    assert "\n" not in str(error.value)


def test_client_groups_require_grouped():
    with pytest.raises(ConfigError, match=r"partition.parameters = .*'grouped'"):
        get_client_groups(make_partition("iid", LABELS, 10, num_clients=2, seed=0))
