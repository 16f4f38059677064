"""Membership leakage of synthetic images."""

import numpy as np
import pytest

from fedjax_het.analysis.membership import FALSE_POSITIVE_RATE, evaluate_membership_attack
from fedjax_het.papers.leakage import (
    compare_neighbors,
    nearest_distances,
)
from fedjax_het.utils.errors import ConfigError

RNG = np.random.default_rng(0)


def test_auc_by_pairs():
    members, others = RNG.normal(0.5, 1, 60), np.round(RNG.normal(0, 1, 80), 1)
    members[:20] = np.round(members[:20], 1)  # ties count half
    pairs = members[:, None] - others
    expected = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert evaluate_membership_attack(members, others).auc == pytest.approx(expected)


def test_attack_on_equal_and_separate_scores():
    same = evaluate_membership_attack(RNG.normal(size=4000), RNG.normal(size=4000))
    assert abs(same.auc - 0.5) < 0.03 and same.p_value > 1e-3
    assert same.found < 0.01
    apart = evaluate_membership_attack(np.arange(100) + 1000, np.arange(5000) / 5000)
    assert apart.auc == 1.0 and apart.found == 1.0 and apart.p_value < 1e-20


def test_found_members_at_false_positive_rate():
    others = np.arange(10_000.0)
    members = np.array([9_988.5, 9_990.5, 9_995.0, 5.0])
    above = (members > np.sort(others)[::-1][int(FALSE_POSITIVE_RATE * len(others)) - 1]).mean()
    assert evaluate_membership_attack(members, others).found == pytest.approx(above)


@pytest.mark.parametrize("blocks", [1, 7])
def test_nearest_distances(blocks, monkeypatch):
    monkeypatch.setattr("fedjax_het.papers.leakage._BLOCK_SIZE", 30 * 40 // blocks)
    images, candidates = RNG.normal(size=(30, 4, 4, 2)), RNG.normal(size=(40, 4, 4, 2))
    candidates[3] = images[5]
    squares = np.square(images[:, None] - candidates[None]).mean((2, 3, 4))
    actual = nearest_distances(images, candidates)
    np.testing.assert_allclose(actual, np.sqrt(squares.min(1)), rtol=1e-5)
    assert actual[5] == 0  # the same image, in spite of rounding


def test_neighbors_of_copies_and_strangers():
    members, others = RNG.normal(size=(2, 300, 6, 6, 1))
    copied = compare_neighbors(
        members[:50] + 0.01 * RNG.normal(size=(50, 6, 6, 1)), members, others
    )
    assert copied.share == 1.0 and copied.p_value < 1e-10
    assert np.median(copied.members) < 0.02 < np.median(copied.others)
    strange = compare_neighbors(RNG.normal(size=(400, 6, 6, 1)), members, others)
    assert 0.4 < strange.share < 0.6 and strange.p_value > 1e-3
    # A pair alike to both sides is half.
    tied = compare_neighbors(members[:10], members, members)
    assert tied.share == 0.5 and tied.p_value == 1.0


def test_leakage_rejects_bad_input():
    with pytest.raises(ConfigError, match="members"):
        evaluate_membership_attack(np.array([np.nan]), np.zeros(3))
    with pytest.raises(ConfigError, match="equal to others"):
        compare_neighbors(np.zeros((1, 2)), np.zeros((3, 2)), np.zeros((4, 2)))
    with pytest.raises(ConfigError, match="candidates"):
        nearest_distances(np.zeros((1, 2)), np.zeros((0, 2)))
