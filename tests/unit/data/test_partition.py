"""Partitions: invariants, the schemes' laws against independent oracles, files, bad input."""

import json
import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from scipy import stats
from support.partitions import group_arguments, required_parameters, shuffled_labels

from fedjax_het import register_partition
from fedjax_het.analysis import plot_partition
from fedjax_het.data import (
    PARTITIONS,
    Partition,
    load_dataset,
    make_partition,
    partition_from_clients,
)
from fedjax_het.data import partition_schemes as schemes_module
from fedjax_het.data.sampling import allocate_equal_counts
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import write_npz

LABELS = shuffled_labels([500] * 10)
SCHEMES = {name: required_parameters(name, alpha=0.1, classes_per_client=2) for name in PARTITIONS}
SCHEMES["dirichlet_capped"]["alpha"] = 0.5
# Examples that nobody holds.
LEAVE_SOME = ("classes_per_client", "pathological", "pathological_unequal", "grouped", "natural")


def make(scheme, labels=LABELS, num_classes=10, num_clients=20, seed=0, **parameters):
    parameters = SCHEMES[scheme] | group_arguments(scheme, len(labels), num_clients) | parameters
    return make_partition(
        scheme, labels, num_classes, num_clients=num_clients, seed=seed, **parameters
    )


# --- what holds for every scheme


@pytest.mark.parametrize(
    ("scheme", "num_clients"),
    [(name, k) for name in SCHEMES for k in (1, 7, 20) if (name, k) != ("grouped", 1)],
)
def test_clients_are_disjoint(scheme, num_clients):
    partition = make(scheme, num_clients=num_clients)
    assert partition.num_clients == num_clients == len(partition.sizes)
    clients = [partition.client_indices(k) for k in range(num_clients)]
    together = np.concatenate(clients)
    assert len(np.unique(together)) == len(together) == partition.sizes.sum()
    assert together.min() >= 0 and together.max() < len(LABELS)
    if scheme not in LEAVE_SOME:
        assert len(together) == len(LABELS)
    for client in clients:
        assert (np.diff(client) > 0).all()


@pytest.mark.parametrize("scheme", [n for n in SCHEMES if not PARTITIONS[n].clients_are_domains])
def test_partition_follows_seed(scheme):
    digest = make(scheme, seed=3).digest()
    np.random.default_rng(3).random(100)  # no hidden global state
    assert make(scheme, seed=3).digest() == digest
    assert make(scheme, seed=4).digest() != digest
    assert make(scheme, seed=2**70).digest() != digest


def test_digest_covers_examples_only():
    a = partition_from_clients([[2, 0], [1]], scheme="a", seed=1)
    assert a.digest() == partition_from_clients([[0, 2], [1]], scheme="b").digest()
    others = [[[0, 2], [3]], [[0], [1, 2]], [[0, 2, 1]], [[0, 2], [1], []]]
    digests = {partition_from_clients(clients).digest() for clients in others}
    assert len(digests | {a.digest()}) == 5


def test_summary_matches_loops():
    labels = np.array([0, 2, 2, 1, 0, 2, 1])
    partition = partition_from_clients([[0, 1, 2], [], [3, 6], [4]])
    counts = np.zeros((4, 3), int)
    for k in range(4):
        for index in partition.client_indices(k):
            counts[k, labels[index]] += 1
    np.testing.assert_array_equal(partition.label_counts(labels, 3), counts)
    summary = partition.summarize(labels, 3)
    assert (summary.size_min, summary.size_median, summary.size_max) == (0, 1.5, 3)
    assert (summary.num_clients, summary.num_examples, summary.num_unused) == (4, 6, 1)
    assert summary.num_empty == 1
    assert summary.size_mean == 6 / 4
    assert summary.classes_per_client == pytest.approx((2 + 1 + 1) / 3)
    assert summary.majority_share == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert "1 clients empty" in str(summary) and "1 examples unused" in str(summary)


# --- iid


def test_iid_sizes_and_class_counts():
    partition = make("iid", num_clients=7)
    assert partition.sizes.max() - partition.sizes.min() <= 1
    # Class counts of a random subset are hypergeometric; five deviations for 70 of them.
    counts, size = partition.label_counts(LABELS, 10), partition.sizes[:, None]
    law = stats.hypergeom(len(LABELS), 500, size)
    assert (np.abs(counts - law.mean()) < 5 * law.std()).all()


# --- Dirichlet


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
def test_log_dirichlet_marginals(alpha):
    num_clients = 8
    draws = schemes_module._log_dirichlet(np.random.default_rng(0), alpha, 4000, num_clients)
    np.testing.assert_allclose(np.exp(draws).sum(1), 1, rtol=1e-12)
    for client in (0, num_clients - 1):  # each coordinate is Beta(alpha, (K - 1) alpha)
        law = stats.beta(alpha, (num_clients - 1) * alpha)
        assert stats.kstest(np.exp(draws[:, client]), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [1e-6, 1e-4])
def test_log_dirichlet_with_tiny_alpha(alpha):
    draws = schemes_module._log_dirichlet(np.random.default_rng(0), alpha, 500, 80)
    assert np.isfinite(draws).all() and draws.min() < np.log(np.finfo(np.float64).tiny)


def test_dirichlet_class_variance():
    labels, num_clients, alpha = shuffled_labels([1000] * 100), 10, 0.3
    draws = [make("dirichlet", labels, 100, num_clients, seed, alpha=alpha) for seed in range(10)]
    shares = np.concatenate([draw.label_counts(labels, 100).T for draw in draws]) / 1000
    np.testing.assert_allclose(shares.mean(0), 1 / num_clients, atol=5 * 0.15 / 1000**0.5)
    expected = (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)
    np.testing.assert_allclose(shares.var(), expected, rtol=0.1)


def test_dirichlet_leaves_clients_empty():
    summary = make("dirichlet", num_clients=80, alpha=0.01).summarize(LABELS, 10)
    assert summary.num_empty > 10 and summary.size_max > 400


# --- dirichlet_balanced (DynaFed)


def dynafed_counts(draws, class_size):
    """[K, C] counts by DynaFed's splitter, step by step, from a C x K matrix of float64 draws."""
    matrix = draws.astype(np.float64)
    for _ in range(1000):
        matrix = matrix / matrix.sum(0)
        matrix = matrix / matrix.sum(1, keepdims=True)
    counts = np.zeros(matrix.T.shape, int)
    for label, row in enumerate(matrix):
        ends = np.floor(np.cumsum(row) * class_size).astype(int)
        ends = [0, *np.minimum(ends[:-1], class_size), class_size]
        for client in range(len(row)):
            counts[client, label] = ends[client + 1] - ends[client]
    return counts


def compare_means(ours, theirs):
    """Return the difference of the means over draws, its standard error and the expected means."""
    ours, theirs = np.array(ours), np.array(theirs)
    error = np.sqrt((ours.var(0, ddof=1) + theirs.var(0, ddof=1)) / len(ours))
    return np.abs(ours.mean(0) - theirs.mean(0)), error, theirs.mean(0)


def describe(counts):
    sizes = counts.sum(1)
    share = (counts.max(1) / sizes).mean()
    return np.array([(counts > 0).sum(1).mean(), share, sizes.min(), sizes.max()])


# Classes, examples per class, and for each alpha: mean classes per client and majority share as
# published for seed 4 of NumPy's legacy generator; then the sizes over all four alphas.
PUBLISHED = {
    "cifar10": (10, 5000, {0.01: (1.8, 93), 0.04: (3.2, 80), 0.08: (4.9, 69), 0.16: (6.8, 57)}),
    "fashion_mnist": (10, 6000, {}),  # sizes only
    "cifar100": (100, 500, {0.01: (8.9, 51), 0.04: (22, 30), 0.08: (33, 21), 0.16: (50, 14)}),
}
SIZES = {"cifar10": (622, 634), "fashion_mnist": (746, 758), "cifar100": (601, 701)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_balanced_oracle_matches_published_table(name):
    """The oracle below meets the known table to its last printed digit, so it can be trusted."""
    num_classes, class_size, table = PUBLISHED[name]
    smallest, largest = [], []
    for alpha in (0.01, 0.04, 0.08, 0.16):
        rng = np.random.RandomState(4)
        counts = dynafed_counts(rng.dirichlet([alpha] * 80, num_classes), class_size)
        classes, share, low, high = describe(counts)
        smallest.append(low)
        largest.append(high)
        if alpha in table:
            unit = 0.05 if num_classes == 10 or alpha == 0.01 else 0.5
            assert classes == pytest.approx(table[alpha][0], abs=unit + 1e-9)
            assert 100 * share == pytest.approx(table[alpha][1], abs=0.5)
    assert (min(smallest), max(largest)) == SIZES[name]


@pytest.mark.parametrize("alpha", [0.01, 0.04, 0.08, 0.16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_balanced_statistics(name, alpha):
    """Classes per client, majority share, smallest and largest size, against the oracle.

    Means over draws of two independent generators, so the tolerance is 4.5 standard errors of
    their difference (48 comparisons; a false alarm once in 3,000 runs), plus a thousandth.
    """
    num_classes, class_size, _ = PUBLISHED[name]
    draws = 16 if num_classes == 10 else 8
    labels = np.repeat(np.arange(num_classes), class_size)
    ours, theirs = [], []
    for seed in range(draws):
        partition = make("dirichlet_balanced", labels, num_classes, 80, seed, alpha=alpha)
        ours.append(describe(partition.label_counts(labels, num_classes)))
        matrix = np.random.default_rng([seed, 99]).dirichlet([alpha] * 80, num_classes)
        theirs.append(describe(dynafed_counts(matrix, class_size)))
    gap, error, expected = compare_means(ours, theirs)
    assert (gap < 4.5 * error + 1e-3 * expected).all(), (gap, error)
    # A floor errs by less than one example for each class.
    sizes, mean = np.array(ours)[:, 2:], num_classes * class_size / 80
    assert np.abs(sizes - mean).max() < num_classes + 0.01 * mean


@pytest.mark.parametrize("alpha", [0.01, 0.16])
def test_balanced_matches_oracle_on_same_draws(alpha, monkeypatch):
    """Logarithms and single precision move no cut that is not at a whole number anyway."""
    drawn = []
    original = schemes_module._log_dirichlet

    def record(*arguments):
        drawn.append(original(*arguments))
        return drawn[-1].copy()

    monkeypatch.setattr(schemes_module, "_log_dirichlet", record)
    labels = shuffled_labels([6000] * 10)
    partition = make("dirichlet_balanced", labels, 10, 80, alpha=alpha)
    counts = partition.label_counts(labels, 10)
    expected = dynafed_counts(np.exp(drawn[0]), 6000)
    cuts, expected_cuts = np.cumsum(counts, 0), np.cumsum(expected, 0)
    assert np.abs(cuts - expected_cuts).max() <= 1
    # Where they differ, the exact cut is a whole number: the end of the class.
    assert set(np.maximum(cuts, expected_cuts)[cuts != expected_cuts]) <= {6000}
    assert (cuts != expected_cuts).mean() < 0.5


def test_balanced_preserves_order():
    owners = np.empty(len(LABELS), int)
    for scheme, in_order in (("dirichlet_balanced", True), ("dirichlet", False)):
        partition = make(scheme)
        owners[partition.indices] = np.repeat(np.arange(20), partition.sizes)
        steps = np.concatenate([np.diff(owners[label == LABELS]) for label in range(10)])
        assert (steps >= 0).all() == in_order


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1e-3])
def test_balanced_with_underflow(alpha):
    summary = make("dirichlet_balanced", num_clients=80, alpha=alpha).summarize(LABELS, 10)
    assert summary.num_examples == len(LABELS) and summary.num_empty == 0
    assert summary.classes_per_client < 2
    if alpha == 1e-3:
        assert summary.size_min > 0.8 * 62.5 and summary.size_max < 1.2 * 62.5


def test_balanced_with_rare_classes_leaves_clients_empty():
    """Numbers in the docstring: the matrix balances classes, not examples."""
    labels = np.repeat(np.arange(4), [500, 500, 5, 5])
    partition = make("dirichlet_balanced", labels, 4, num_clients=80, alpha=0.01)
    assert partition.summarize(labels, 4).num_empty == 29
    docstring = " ".join(schemes_module.dirichlet_balanced.__doc__.split())
    assert "80 clients and alpha 0.01, a third of the clients hold no example" in docstring


# --- dirichlet_capped (MOON, NIID-Bench)


def capped_counts(rng, alpha, num_clients, num_classes, class_size, min_size=10):
    """[K, C] counts by NIID-Bench's splitter, written as its description reads."""
    total = num_classes * class_size
    while True:
        counts = np.zeros((num_clients, num_classes), int)
        for label in range(num_classes):
            shares = rng.dirichlet([alpha] * num_clients)
            shares = shares * (counts.sum(1) < total / num_clients)
            if shares.sum() == 0:
                break
            ends = (np.cumsum(shares / shares.sum()) * class_size).astype(int)
            counts[:, label] = np.diff([0, *ends[:-1], class_size])
        if counts.sum() == total and counts.sum(1).min() >= min_size:
            return counts


@pytest.mark.parametrize("num_classes,class_size", [(10, 5000), (100, 500)])
@pytest.mark.parametrize("alpha", [0.02, 0.05, 0.1])
def test_capped_statistics(alpha, num_classes, class_size):
    """Classes with 50 examples or more, and sizes; 4.5 standard errors of two sets of draws."""
    draws = 60 if num_classes == 10 else 20
    labels = np.repeat(np.arange(num_classes), class_size)
    rng = np.random.default_rng(17)

    def describe_capped(counts):
        sizes = counts.sum(1)
        return (counts >= 50).sum(1).mean(), (counts > 0).sum(1).mean(), sizes.std(), sizes.max()

    ours, theirs = [], []
    for seed in range(draws):
        partition = make("dirichlet_capped", labels, num_classes, 10, seed, alpha=alpha)
        ours.append(describe_capped(partition.label_counts(labels, num_classes)))
        counts = capped_counts(rng, alpha, 10, num_classes, class_size)
        theirs.append(describe_capped(counts))
    gap, error, _ = compare_means(ours, theirs)
    assert (gap < 4.5 * error).all()


def test_capped_min_size_and_cap():
    for seed in range(20):
        partition = make("dirichlet_capped", num_clients=10, seed=seed, alpha=0.1, min_size=60)
        assert partition.sizes.min() >= 60
        counts = partition.label_counts(LABELS, 10)
        before = np.cumsum(counts, axis=1) - counts  # held when the class was dealt
        late = np.where(before >= len(LABELS) / 10, counts, 0)
        assert late[:-1].max() == 0
        assert late[-1].max() <= 1  # what floors leave over goes to the last client


def test_capped_rejects_infeasible_settings():
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"none of 1000 draws.*larger alpha.*fewer clients"):
        make("dirichlet_capped", num_clients=80, alpha=0.01)
    assert time.perf_counter() - started < 30
    with pytest.raises(ConfigError, match=r"none of 5 draws"):
        make("dirichlet_capped", num_clients=80, alpha=0.01, max_draws=5)
    with pytest.raises(ConfigError, match=r"min_size = 63: expected at most 62"):
        make("dirichlet_capped", num_clients=80, min_size=63)


def test_capped_with_absent_classes():
    """All clients may be full before the last class, which then has no examples."""
    labels, sizes = np.repeat(np.arange(2), 5), []
    with np.errstate(all="raise"):
        one = make("dirichlet_capped", np.repeat(np.arange(4), 25), 5, 1, alpha=0.5)
        for seed in range(50):
            partition = make("dirichlet_capped", labels, 4, 2, seed, alpha=0.5, min_size=1)
            sizes.append(partition.sizes.tolist())
    assert one.sizes.tolist() == [100]
    # About 40 % of the draws, as without the absent classes.
    assert 10 <= sizes.count([5, 5]) <= 30 and all(sum(pair) == 10 for pair in sizes)


@pytest.mark.parametrize("absent", [0, 4, 9])
@pytest.mark.parametrize("scheme", [n for n in SCHEMES if n != "grouped"])  # needs all classes
def test_schemes_with_absent_class(scheme, absent):
    labels = LABELS[absent != LABELS]
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            partition = make(scheme, labels, num_clients=5, seed=seed)
            assert partition.sizes.sum() > 0.5 * len(labels)


# --- classes_per_client (FSL)


@pytest.mark.parametrize(
    "num_classes,class_size,num_clients,per_client",
    [(10, 5000, 10, 1), (10, 5000, 1000, 2), (45, 2400, 45, 3), (45, 2400, 450, 5)],
)
def test_classes_per_client_uses_all_examples(num_classes, class_size, num_clients, per_client):
    labels = shuffled_labels([class_size] * num_classes)
    partition = make(
        "classes_per_client", labels, num_classes, num_clients, classes_per_client=per_client
    )
    counts = partition.label_counts(labels, num_classes)
    np.testing.assert_array_equal((counts > 0).sum(1), per_client)
    shard = num_classes * class_size // (num_clients * per_client)
    assert set(np.unique(counts)) == {0, shard}
    np.testing.assert_array_equal((counts > 0).sum(0), num_clients * per_client // num_classes)


@pytest.mark.parametrize("per_client", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("num_clients", [3, 7, 20])
def test_classes_per_client_counts(num_clients, per_client):
    partition = make("classes_per_client", num_clients=num_clients, classes_per_client=per_client)
    counts = partition.label_counts(LABELS, 10)
    np.testing.assert_array_equal((counts > 0).sum(1), per_client)
    assert len(set(partition.sizes)) == 1
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1


def test_classes_per_client_with_unequal_classes():
    labels = np.repeat(np.arange(5), (40, 100, 250, 90, 20))
    partition = make("classes_per_client", labels, 5, 10, classes_per_client=2)
    counts = partition.label_counts(labels, 5)
    assert set(np.unique(counts)) == {0, 20}  # 2 + 5 + 10 + 4 + 1 shards of 20 are enough for 20
    np.testing.assert_array_equal((counts > 0).sum(1), 2)
    assert (counts > 0).any(0).all()
    few = np.repeat(np.arange(4), (9, 1, 9, 9))
    with pytest.raises(ConfigError, match=r"classes_per_client = 4.*shards"):
        make("classes_per_client", few, 4, 8, classes_per_client=4)


def test_largest_shard_size():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = rng.integers(0, 30, 6)
        num_clients, needed = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        present = [size for size in sizes if size > 0]
        fitting = [
            shard
            for shard in range(1, 31)
            if sum(min(size // shard, num_clients) for size in sizes) >= needed
            and (needed < len(present) or shard <= min(present))
        ]
        if present:
            actual = schemes_module._find_largest_shard_size(sizes, num_clients, needed)
            assert actual == max(fitting, default=0)


def test_allocate_equal_counts():
    rng = np.random.default_rng(0)
    for _ in range(300):
        limits = rng.integers(0, 9, 6)
        total = int(rng.integers(0, limits.sum() + 1))
        values = allocate_equal_counts(rng, limits, total)
        assert values.sum() == total and (values >= 0).all() and (values <= limits).all()
        room = values < limits
        if room.any():  # nobody stands more than one above someone who could still take more
            assert values.max() <= values[room].min() + 1


# --- by_domain

DOMAINS = np.array([2, 0, 0, 1, 2, 0])


def by_domain(num_clients=3, domains=DOMAINS, **settings):
    settings = {"num_clients": num_clients, "seed": 0, "domains": domains} | settings
    return make_partition("by_domain", np.zeros(len(DOMAINS), int), 2, **settings)


def test_by_domain():
    partition = by_domain()
    assert [partition.client_indices(k).tolist() for k in range(3)] == [[1, 2, 5], [3], [0, 4]]
    assert partition.digest() == by_domain(seed=5).digest()
    assert partition.parameters == {}  # what the data say is no parameter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clients": 2}, "num_clients = 2: expected 3, one for each domain"),
        ({"num_clients": 4}, "num_clients = 4: expected 3"),
        (
            {"num_clients": 4, "domain_names": ("a", "b", "c", "new")},
            "training examples of 'new' = 0: expected at least one",
        ),
        ({"domains": np.array([0, 0, 0, 2, 2, 2])}, "training examples of 1 = 0"),
        ({"domains": None}, "partition = 'by_domain': expected a data set whose examples have"),
        ({"domains": DOMAINS[:4]}, r"len\(domains\) = 4: expected 6, the length of labels"),
        ({"domains": DOMAINS - 1}, r"domains\[1\] = -1: expected a domain"),
        ({"alpha": 0.1}, r"no parameter 'alpha' \(it takes none\)"),
    ],
)
def test_by_domain_rejects_invalid_domains(arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        by_domain(**arguments)
    assert "\n" not in str(error.value)


# --- bad input


BAD = {
    "name": ({"scheme": "dirichlet_balance"}, "did you mean 'dirichlet_balanced'"),
    "clients": ({"num_clients": 0}, "num_clients = 0"),
    "clients type": ({"num_clients": 2.0}, r"num_clients = 2\.0"),
    "too many clients": ({"num_clients": 5001}, r"num_clients = 5001.*5000"),
    "seed": ({"seed": -1}, "seed = -1"),
    "alpha zero": ({"alpha": 0.0}, r"alpha = 0\.0"),
    "alpha below": ({"alpha": -1}, "alpha = -1"),
    "alpha nan": ({"alpha": float("nan")}, "alpha = nan"),
    "alpha text": ({"alpha": "0.1"}, "alpha = '0.1'"),
    "unknown parameter": ({"beta": 1}, r"no parameter 'beta' \(it takes alpha"),
    "parameter of another": ({"scheme": "iid", "alpha": 0.1}, r"'alpha' \(it takes none\)"),
    **{
        f"{count} classes": (
            {"scheme": "classes_per_client", "classes_per_client": count},
            f"classes_per_client = {count}",
        )
        for count in (0, 11)
    },
    "min_size": ({"scheme": "dirichlet_capped", "alpha": 1.0, "min_size": -1}, "min_size = -1"),
    "label above": ({"labels": np.array([0, 1, 10])}, r"labels\[2\] = 10"),
    "label below": ({"labels": np.array([0, -1])}, r"labels\[1\] = -1"),
    "label type": ({"labels": np.array([0.0, 1.0])}, "labels = 'float64"),
    "no labels": ({"labels": np.zeros(0, int)}, "labels = "),
}


@pytest.mark.parametrize("case", BAD)
def test_make_partition_rejects_invalid_arguments(case):
    changes, message = BAD[case]
    arguments = {"scheme": "dirichlet", "labels": LABELS, "num_clients": 2, "seed": 0} | changes
    if arguments["scheme"].startswith("dirichlet"):
        arguments = {"alpha": 0.1} | arguments
    with pytest.raises(ConfigError, match=message) as error:
        make_partition(arguments.pop("scheme"), arguments.pop("labels"), 10, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet_balanced", "dirichlet_capped"])
def test_dirichlet_requires_positive_alpha(scheme):
    with pytest.raises(ConfigError, match="alpha = 0"):
        make(scheme, alpha=0)
    with pytest.raises(ConfigError, match=f"'{scheme}' needs alpha"):
        make_partition(scheme, LABELS, 10, num_clients=2, seed=0)


@pytest.mark.parametrize(
    "indices,offsets",
    [
        *(([0, 1], ends) for ends in ([0, 1], [1, 2], [0, 2, 1, 2])),
        ([0, -1], [0, 2]),
        ([0.5], [0, 1]),
    ],
)
def test_partition_rejects_inconsistent_offsets(indices, offsets):
    with pytest.raises(ConfigError):
        Partition("user", 0, {}, np.array(indices), np.array(offsets))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (3, "clients = 3: expected a list"),
        ({0: [1]}, "clients = {0"),
        ("ab", "clients = 'ab'"),
        ([], "at least one client"),
        ([[0], [0.5]], r"clients\[1\] = 'float64 \(1,\)'"),
        ([[0], [True, False]], r"clients\[1\] = 'bool"),
        ([[0], 1], r"clients\[1\] = 'int64 \(\)'"),
        ([[0], [-2, 4]], r"clients\[1\] = '-2, ...': expected positions >= 0"),
        ([[0], [[1], [2, 3]]], r"clients\[1\]: items of shapes"),
        ([["a"]], r"clients\[0\] = '<U1"),
    ],
)
def test_partition_from_clients_rejects_invalid_clients(clients, message):
    with pytest.raises(ConfigError, match=message) as error:
        partition_from_clients(clients)
    assert "\n" not in str(error.value)


def test_partition_from_generator():
    result = partition_from_clients(np.arange(k) for k in range(3))
    np.testing.assert_array_equal(result.sizes, [0, 1, 2])


@pytest.mark.parametrize("dtypes", [("uint64", "int64"), ("uint8", "uint64"), (">i4", "<u8")])
def test_partition_from_mixed_integer_types(dtypes):
    made = partition_from_clients([np.array([7, 1], dtypes[0]), np.array([2], dtypes[1]), []])
    assert made.indices.tolist() == [1, 7, 2] and made.indices.dtype == np.int64


def test_partition_rejects_invalid_arguments():
    with pytest.raises(ConfigError, match="client_names = 'ab'"):
        partition_from_clients([[0], [1]], client_names="ab")
    with pytest.raises(ConfigError, match="k = 20"):
        make("iid").client_indices(20)
    with pytest.raises(ConfigError, match="another data set"):
        make("iid").summarize(LABELS[:4000], 10)


# --- files


def test_partition_save_and_load(tmp_path):
    partition = make("dirichlet_capped", alpha=np.float32(0.5))
    loaded = Partition.load(partition.save(tmp_path / "new" / "folder" / "split.npz"))
    assert loaded.digest() == partition.digest()
    assert (loaded.scheme, loaded.seed) == ("dirichlet_capped", 0)
    assert loaded.parameters == partition.parameters
    assert loaded.parameters == {"alpha": 0.5, "min_size": 10, "max_draws": 1000}
    json.dumps(partition.parameters)
    with pytest.raises(ValueError, match="read-only"):
        loaded.indices[0] = 1


def test_load_rejects_damaged_files(tmp_path):
    path = make("iid").save(tmp_path / "split.npz")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConfigError, match="damaged"):
        Partition.load(path)
    write_npz(path, {"x": np.arange(3)}, {})
    with pytest.raises(ConfigError, match="holds no partition"):
        Partition.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Partition.load(tmp_path / "nowhere.npz")


# --- the bubble plot


def test_plot_partition_areas(monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    original = Axes.scatter

    def scatter(self, x, y, s, **options):
        drawn.append((np.array(x), np.array(y), np.array(s)))
        return original(self, x, y, s=s, **options)

    monkeypatch.setattr(Axes, "scatter", scatter)
    partition = make("dirichlet", num_clients=10, alpha=0.3)
    figure = plot_partition(partition, LABELS, 10, title="a title")
    assert figure.axes[0].get_title(loc="left") == "a title"
    clients, classes, areas = drawn[0]
    counts = partition.label_counts(LABELS, 10)
    np.testing.assert_allclose(areas / areas.max(), counts[clients, classes] / counts.max())
    assert len(areas) == (counts > 0).sum()
    assert 2 <= len(drawn) - 1 <= 3  # and the key


@pytest.mark.parametrize("num_clients,num_classes", [(1, 2), (80, 10), (10, 100), (300, 100)])
def test_plot_partition_size(num_clients, num_classes):
    labels = shuffled_labels([100] * num_classes)
    partition = make("dirichlet", labels, num_classes, num_clients)
    width, height = plot_partition(partition, labels, num_classes).get_size_inches()
    assert 2.5 < width < 50 and 1.5 < height < 15


def test_plot_partition_rejects_class_names():
    with pytest.raises(ConfigError, match="class_names"):
        plot_partition(make("iid"), LABELS, 10, class_names=["one"])


@pytest.mark.slow
def test_plot_partition_without_pyplot(tmp_path):
    code = (
        "import sys, numpy as np; from fedjax_het.data import *; from fedjax_het.analysis.figures.data_plots import plot_partition; "
        "p = partition_from_clients([[0, 1], [2]]); "
        f"plot_partition(p, np.array([0, 1, 0]), 2).savefig({str(tmp_path / 'x.svg')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert "<svg" in (tmp_path / "x.svg").read_text()[:2000]


# --- a whole data set


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_split_digits(scheme):
    labels = load_dataset("digits").train_labels
    summary = make(scheme, labels, 10, 10).summarize(labels, 10)
    assert summary.num_clients == 10
    assert summary.num_examples > (0.7 if scheme == "grouped" else 0.9) * len(labels)


def test_failure_inside_a_users_scheme_names_it():
    """Both in a function and in a generator."""

    def fail(rng, labels, *, num_clients):
        return np.split(labels, [1, 2], axis=5)

    def fail_late(rng, labels, *, num_clients):
        yield from (labels[:1], labels.missing)

    for scheme in (fail, fail_late):
        register_partition("failing", scheme)
        with pytest.raises(
            ConfigError, match=r"^partition 'failing' fails \((\w+)Error: "
        ) as error:
            make_partition("failing", LABELS, 10, num_clients=2, seed=0)
        assert "\n" not in str(error.value) and error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("default", "valid", "invalid"),
    [
        (0.5, 1, ([0.1, 0.3], "0.3", True, None)),
        (2, 0.3, ((1, 2), "2", False)),
        ("even", "odd", (1, ["odd"])),
        (False, True, (1, "True")),
    ],
)
def test_options_are_of_the_kind_of_their_default(default, valid, invalid):
    def split(rng, labels, num_classes, num_clients, *, option=default):
        return np.array_split(np.arange(len(labels)), num_clients)

    register_partition("optional", split)
    scheme = PARTITIONS["optional"]
    assert scheme.validate_parameters({"option": valid}) == {"option": valid}
    for value in invalid:
        with pytest.raises(ConfigError, match=r"option = .*: expected .*, like the default"):
            scheme.validate_parameters({"option": value})
