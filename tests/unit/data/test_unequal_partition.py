"""PFLlib's pathological partition against a transcription of its code."""

import math

import numpy as np
import pytest
from support.partitions import shuffled_labels

from fedjax_het.data import PARTITIONS, make_partition
from fedjax_het.utils.errors import ConfigError

CASES = {
    "leaderboard": ([6000] * 10, 20, 2),
    "uneven": ([300] * 10, 7, 3),  # one class stays unused
    "few classes": ([400] * 4, 5, 3),  # the last client has one class
    "small": ([40] * 10, 20, 2),  # the smallest part is determined by the smallest size
    "unequal classes": ([500, 200, 900, 350], 8, 2),
}


def pfllib_counts(labels, num_clients, per_client, least_samples, rng):
    """Numbers of examples [K, C] by the loops of PFLlib, with another generator."""
    num_classes = int(labels.max()) + 1
    least_samples = min(least_samples, len(labels) / num_clients / 2)
    remaining = [per_client] * num_clients
    counts = np.zeros((num_clients, num_classes), int)
    for label in range(num_classes):
        selected = [client for client in range(num_clients) if remaining[client] > 0]
        if not selected:
            break
        selected = selected[: math.ceil(round(num_clients / num_classes * per_client, 9))]
        num_examples = int((labels == label).sum())
        num_per = num_examples / len(selected)
        low, high = max(num_per / 10, least_samples / num_classes), num_per
        sizes = rng.integers(int(low), int(high), len(selected) - 1).tolist()
        sizes.append(num_examples - sum(sizes))
        for client, size in zip(selected, sizes, strict=True):
            counts[client, label] += size
            remaining[client] -= 1
    return counts


@pytest.mark.parametrize("case", CASES)
def test_counts_match_public_code(case):
    sizes, num_clients, per_client = CASES[case]
    labels = shuffled_labels(sizes)
    split, options = PARTITIONS["pathological_unequal"].split, {"min_size": 30}
    for seed in range(3):
        clients = split(
            np.random.default_rng(seed), labels, len(sizes), num_clients,
            classes_per_client=per_client, **options,
        )  # fmt: skip
        expected = pfllib_counts(labels, num_clients, per_client, 30, np.random.default_rng(seed))
        actual = [np.bincount(labels[client], minlength=len(sizes)) for client in clients]
        np.testing.assert_array_equal(actual, expected)


def test_leaderboard_clients_share_pairs_of_classes():
    labels = shuffled_labels([5250] * 10)
    partition = make_partition("pathological_unequal", labels, 10, num_clients=20, seed=0)
    counts = partition.label_counts(labels, 10)
    assert partition.parameters == {"classes_per_client": 2, "min_size": 30}
    for client, row in enumerate(counts):
        assert np.flatnonzero(row).tolist() == [client // 4 * 2, client // 4 * 2 + 1]
    groups = counts.reshape(5, 4, 10).sum(2)
    assert (groups[:, -1] == groups.max(1)).all() and (counts.sum(0) == 5250).all()
    assert counts[counts > 0].min() >= 131 and partition.sizes.min() < 0.5 * partition.sizes.mean()


def test_examples_of_class_are_shuffled():
    labels = np.repeat(np.arange(10), 200)
    clients = [
        make_partition(
            "pathological_unequal", labels, 10, num_clients=20, seed=seed
        ).client_indices(0)
        for seed in (0, 1)
    ]
    assert (np.diff(clients[0]) > 1).any() and not np.array_equal(*clients)


@pytest.mark.parametrize(
    ("labels", "num_clients", "classes", "message"),
    [
        ([0, 1] * 50, 4, 3, "at most the number of classes with examples, 2"),
        ([0, 1] * 10, 20, 1, "class 0 has 10 examples for 10 clients"),
    ],
)
def test_bad_input(labels, num_clients, classes, message):
    with pytest.raises(ConfigError, match=message):
        make_partition(
            "pathological_unequal", labels, 2, num_clients=num_clients, seed=0, classes=classes
        )
