"""Rules of robust aggregation against float64 NumPy loops over clients and coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec
from fedjax_het.aggregation import (
    AGGREGATIONS,
    Bucketing,
    CenteredClipping,
    ClientUpdates,
    GeometricMedian,
    Krum,
    Median,
    NormClipping,
    RobustAggregation,
    TrimmedMean,
)

RNG = np.random.default_rng(0)
NUM_CLIENTS = 9
PRESENT = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
WEIGHTS = np.where(PRESENT, RNG.uniform(1, 3, NUM_CLIENTS), 0)
WEIGHTS /= WEIGHTS.sum()
CHANGES = {"w": RNG.normal(size=(NUM_CLIENTS, 3, 2)), "b": RNG.normal(size=(NUM_CLIENTS, 4))}
CHANGES["w"][4] *= 50  # an outlier
CHANGES["b"][~PRESENT] = 1e6  # of absent clients, which nothing may read


def make_updates(changes=CHANGES, weights=WEIGHTS, present=PRESENT):
    changes = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), changes)
    return ClientUpdates(changes, jnp.asarray(weights, jnp.float32), jnp.asarray(present))


def flatten(changes):
    """Rows of float64 numbers, one for each client."""
    leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(changes)]
    return np.concatenate([a.reshape(len(a), -1) for a in leaves], 1)


def combine(rule, updates):
    combined = jax.jit(rule.combine)(updates)
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(combined)])


def median_by_hand(rows, weights):
    return np.array([np.median(column) for column in rows.T])


def trimmed_mean_by_hand(rows, weights, fraction):
    count = int(fraction * len(rows))
    return np.array([np.sort(c)[count : len(c) - count].mean() for c in rows.T])


def geometric_median_by_hand(rows, weights, iterations):
    center = weights @ rows
    for _ in range(iterations):
        scaled = weights / np.maximum(np.linalg.norm(rows - center, axis=1), 1e-6)
        center = scaled @ rows / scaled.sum()
    return center


def krum_by_hand(rows, weights, fraction, selected):
    n = len(rows)
    num_neighbors = max(n - int(fraction * n) - 2, 1)
    scores = []
    for i in range(n):
        distances = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(distances[:num_neighbors]))
    return rows[np.argsort(scores)[: min(selected, n)]].mean(0)


def centered_clipping_by_hand(rows, weights, radius, iterations):
    center = np.zeros(rows.shape[1])
    for _ in range(iterations):
        norms = np.maximum(np.linalg.norm(rows - center, axis=1), 1e-30)
        steps = (rows - center) * np.minimum(1, radius / norms)[:, None]
        center = center + np.mean(steps, 0)
    return center


CASES = [
    (Median(), median_by_hand, {}),
    (TrimmedMean(fraction=0.3), trimmed_mean_by_hand, {"fraction": 0.3}),
    (TrimmedMean(fraction=0.1), trimmed_mean_by_hand, {"fraction": 0.1}),
    (GeometricMedian(iterations=20), geometric_median_by_hand, {"iterations": 20}),
    (Krum(fraction=0.3), krum_by_hand, {"fraction": 0.3, "selected": 1}),
    (Krum(fraction=0.15, selected=3), krum_by_hand, {"fraction": 0.15, "selected": 3}),
    (Krum(selected=100), krum_by_hand, {"fraction": 0.2, "selected": 100}),
    (
        CenteredClipping(radius=2.0, iterations=4),
        centered_clipping_by_hand,
        {"radius": 2.0, "iterations": 4},
    ),
]


@pytest.mark.parametrize("num_present", [7, 6, 3, 2, 1])
@pytest.mark.parametrize(
    ("rule", "by_hand", "settings"), CASES, ids=[str(rule) for rule, *_ in CASES]
)
def test_rule_equals_float64_loop(rule, by_hand, settings, num_present):
    present = PRESENT & (np.cumsum(PRESENT) <= num_present)
    weights = np.where(present, WEIGHTS, 0)
    weights /= weights.sum()
    actual = combine(rule, make_updates(weights=weights, present=present))
    expected = by_hand(flatten(CHANGES)[present], weights[present], **settings)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_no_client_gives_finite_numbers(name):
    rule = AGGREGATIONS[name].make()
    if isinstance(rule, RobustAggregation):
        nobody = np.zeros(NUM_CLIENTS)
        combined = combine(rule, make_updates(weights=nobody, present=nobody > 0))
        assert np.isfinite(combined).all()


@pytest.mark.parametrize(
    "rule", [Median(), TrimmedMean(fraction=0.45), GeometricMedian(iterations=60)], ids=str
)
def test_minority_cannot_move_the_result_far(rule):
    """Three of seven clients send huge updates: the result stays in the range of the others."""
    changes = jax.tree.map(np.array, CHANGES)
    honest = flatten(changes)[PRESENT & (np.arange(NUM_CLIENTS) != 4)]
    for k in (0, 1, 4):
        changes = jax.tree.map(
            lambda a, k=k: np.concatenate([a[:k], a[k : k + 1] * 0 + 1e4, a[k + 1 :]]), changes
        )
    equal = PRESENT / PRESENT.sum()
    actual = combine(rule, make_updates(changes, equal))
    assert np.abs(actual).max() < 4 * np.abs(honest).max()


def test_clipping_scales_to_the_largest_norm():
    factors = np.asarray(NormClipping(max_norm=2.5).compute_factors(make_updates()))
    norms = np.linalg.norm(flatten(CHANGES), axis=1)
    np.testing.assert_allclose(factors, np.minimum(1, 2.5 / norms), rtol=1e-5)
    assert (factors[norms < 2.5] == 1).all()  # to the bit


@pytest.mark.parametrize("size", [2, 3, 20])
def test_buckets_divide_the_present_clients(size):
    grouped = Bucketing(size=size).group(make_updates(), jax.random.key(3))
    count = int(PRESENT.sum())
    assert int(grouped.num_present) == -(-count // size)
    np.testing.assert_allclose(float(grouped.weights.sum()), 1, rtol=1e-6)
    rows, buckets = flatten(CHANGES)[PRESENT], flatten(grouped.changes)
    sizes = np.full(len(buckets), 0.0)
    sizes[: count // size] = size
    if count % size:
        sizes[count // size] = count % size
    np.testing.assert_allclose(sizes @ buckets, rows.sum(0), rtol=1e-4, atol=1e-4)
    other = Bucketing(size=size).group(make_updates(), jax.random.key(4))
    assert size == 20 or not np.allclose(flatten(other.changes), buckets)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("median", {"median": True}),
        ("trimmed_mean", {"trimmed_mean.fraction": 0.2}),
        (["krum:selected=3", "norm_clipping"], {"norm_clipping.max_norm": 1.0, "krum.fraction": 0.2, "krum.selected": 3}),
        ("norm_clipping:max_norm=inf", {}),
        ([Bucketing(size=2), Median()], {"bucketing.size": 2, "median": True}),
    ],
)  # fmt: skip
def test_canonical_setting(setting, expected):
    spec = RunSpec(model="mlp", aggregation=setting).resolved()
    assert spec.aggregation == expected
    assert RunSpec(model="mlp", aggregation=spec.aggregation).resolved() == spec


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mean", "aggregation = 'mean' is unknown: did you mean 'median'"),
        ("median:fraction=0.2", "aggregation median = 'fraction'"),
        ("trimmed_mean:fraction=0.5", r"aggregation trimmed_mean:fraction = 0.5: expected a number in \[0, 0.5\)"),
        (["median", "krum"], "aggregation = 'median, krum': expected one rule"),
        ("bucketing:size=2", "aggregation = 'bucketing': expected a rule for the buckets"),
        ("norm_clipping:max_norm=-1", "aggregation norm_clipping:max_norm = -1"),
    ],
)  # fmt: skip
def test_invalid_settings_are_one_line(setting, message):
    with pytest.raises(ConfigError, match=message) as error:
        RunSpec(model="mlp", aggregation=setting).resolved()
    assert "\n" not in str(error.value)
