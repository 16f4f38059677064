"""Label noise and concept shift: how many labels change, and to which classes."""

import numpy as np
import pytest

from fedjax_het.skews import ConceptShift, LabelNoise

NUM_CLASSES, NUM_CLIENTS, SIZE = 5, 4, 3000
LABELS = np.random.default_rng(0).integers(0, NUM_CLASSES, NUM_CLIENTS * SIZE)
CLIENTS = list(np.arange(NUM_CLIENTS * SIZE).reshape(NUM_CLIENTS, SIZE))


def change(skew, seed=1):
    return skew.change_labels(np.random.default_rng(seed), CLIENTS, LABELS, NUM_CLASSES)


def count_transitions(changed, positions):
    """Share of each new class among the examples of each class, `[C, C]`."""
    cells = LABELS[positions] * NUM_CLASSES + changed[positions]
    counts = np.bincount(cells, minlength=NUM_CLASSES**2).reshape(NUM_CLASSES, -1)
    return counts / counts.sum(1, keepdims=True)


def test_symmetric_noise_has_equal_wrong_classes():
    changed = change(LabelNoise(rate=0.4))
    expected = np.full((NUM_CLASSES, NUM_CLASSES), 0.4 / (NUM_CLASSES - 1))
    np.fill_diagonal(expected, 0.6)
    actual = count_transitions(changed, np.arange(len(LABELS)))
    np.testing.assert_allclose(actual, expected, atol=0.03)  # five deviations of 2400 draws


def test_pair_noise_has_the_next_class():
    actual = count_transitions(change(LabelNoise(rate=0.3, kind="pair")), np.arange(len(LABELS)))
    expected = 0.7 * np.eye(NUM_CLASSES) + 0.3 * np.roll(np.eye(NUM_CLASSES), 1, axis=1)
    np.testing.assert_allclose(actual, expected, atol=0.05)


def test_rates_by_client():
    changed = change(LabelNoise(rate=0.8, levels="ramp"))
    rates = [(changed[own] != LABELS[own]).mean() for own in CLIENTS]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.8], atol=0.045)


def test_noise_is_one_draw_of_the_seed():
    noise = LabelNoise(rate=0.5)
    np.testing.assert_array_equal(change(noise), change(noise))
    assert (change(noise) != change(noise, seed=2)).any()


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("groups", [2, 4])
def test_concepts_permute_classes_by_group(share, groups):
    skew, rng = ConceptShift(share=share, groups=groups), np.random.default_rng(1)
    changed, maps = change(skew), skew.make_label_maps(rng, NUM_CLIENTS, NUM_CLASSES)
    for own, label_map in zip(CLIENTS, maps, strict=True):
        np.testing.assert_array_equal(changed[own], label_map[LABELS[own]])
        assert sorted(label_map) == list(range(NUM_CLASSES))
    moved = [(label_map != np.arange(NUM_CLASSES)).sum() for label_map in maps]
    num_plain = NUM_CLIENTS // groups
    assert sorted(moved) == [0] * num_plain + [round(share * NUM_CLASSES)] * (
        NUM_CLIENTS - num_plain
    )


def test_other_clients_examples_do_not_change():
    some = CLIENTS[:2]
    for skew in (LabelNoise(rate=1.0), ConceptShift(groups=1), ConceptShift()):
        changed = skew.change_labels(np.random.default_rng(0), some, LABELS, NUM_CLASSES)
        np.testing.assert_array_equal(changed[2 * SIZE :], LABELS[2 * SIZE :])
