"""Attacks against float64 NumPy formulas, and the choice of the malicious clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_het.aggregation import ClientUpdates
from fedjax_het.attacks import (
    ALIE,
    ATTACKS,
    GaussianUpdate,
    InnerProduct,
    LabelFlip,
    ScaledUpdate,
    SignFlip,
)

RNG = np.random.default_rng(0)
CHANGES = {"w": RNG.normal(size=(6, 5)), "b": RNG.normal(size=(6, 2, 2))}
PRESENT = np.array([1, 1, 1, 1, 0, 1], bool)
WEIGHTS = np.where(PRESENT, RNG.uniform(1, 2, 6), 0)
WEIGHTS /= WEIGHTS.sum()
MALICIOUS = np.array([0, 1, 0, 1, 1, 0], bool)  # one of them is absent


def forge(attack, key=0):
    changes = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), CHANGES)
    updates = ClientUpdates(changes, jnp.asarray(WEIGHTS, jnp.float32), jnp.asarray(PRESENT))
    forged = attack.forge(updates, jnp.asarray(MALICIOUS), jax.random.key(key))
    return jax.tree.map(lambda a: np.asarray(a, np.float64), forged)


@pytest.mark.parametrize(("attack", "factor"), [(SignFlip(scale=2), -2), (ScaledUpdate(), 10)])
def test_multiples_of_the_update(attack, factor):
    for actual, change in zip(*map(jax.tree.leaves, (forge(attack), CHANGES)), strict=True):
        np.testing.assert_allclose(actual, factor * change, rtol=1e-6)


def test_gaussian_updates_have_their_deviation():
    draws = np.concatenate([forge(GaussianUpdate(std=3), key)["w"].ravel() for key in range(20)])
    assert scipy.stats.kstest(draws / 3, "norm").pvalue > 1e-3
    first = forge(GaussianUpdate())
    assert not np.allclose(first["w"][0], first["w"][1])


@pytest.mark.parametrize("z", [None, 0.7])
def test_alie_is_the_shifted_mean_of_the_malicious(z):
    known = MALICIOUS & PRESENT
    n, m = PRESENT.sum(), known.sum()
    shift = scipy.stats.norm.ppf((n - (n // 2 + 1 - m)) / n) if z is None else z
    for actual, change in zip(*map(jax.tree.leaves, (forge(ALIE(z=z)), CHANGES)), strict=True):
        expected = change[known].mean(0) - shift * change[known].std(0)
        np.testing.assert_allclose(actual, np.broadcast_to(expected, actual.shape), rtol=1e-4)


def test_inner_product_is_the_negative_mean_of_the_others():
    weights = np.where(MALICIOUS, 0, WEIGHTS)
    weights /= weights.sum()
    forged = forge(InnerProduct(scale=1.5))
    for actual, change in zip(*map(jax.tree.leaves, (forged, CHANGES)), strict=True):
        expected = -1.5 * np.tensordot(weights, change, 1)
        np.testing.assert_allclose(
            actual, np.broadcast_to(expected, actual.shape), rtol=1e-4, atol=1e-6
        )


def test_label_flips():
    assert LabelFlip().make_label_map(5).tolist() == [4, 3, 2, 1, 0]
    assert LabelFlip(labels="next").make_label_map(3).tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_clients(name):
    make = ATTACKS[name].make
    chosen = make(fraction=0.3).choose_clients(10, seed=5)
    assert chosen.sum() == 3 and chosen.dtype == bool
    np.testing.assert_array_equal(chosen, SignFlip(fraction=0.3).choose_clients(10, seed=5))
    more = make(fraction=0.6).choose_clients(10, seed=5)
    assert more.sum() == 6 and more[chosen].all()
    others = [make(fraction=0.3).choose_clients(10, seed).tolist() for seed in range(5)]
    assert len({tuple(other) for other in others}) > 1
    assert make(fraction=0.2, choice="first").choose_clients(5, 0).tolist() == [True] + 4 * [False]
