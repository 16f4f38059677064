"""The backdoor's trigger, choice of examples and success, against NumPy loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.attacks import Backdoor
from fedjax_het.attacks.backdoor import BackdoorTrigger
from fedjax_het.attacks.base import MaliciousLabels


@pytest.mark.parametrize("poisoned", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("seed", [0, 2**31 + 7])
def test_poisoned_examples_are_a_share_on_host_and_device(poisoned, seed):
    attack, positions = Backdoor(poisoned=poisoned), np.arange(20_000)
    chosen = attack.select_poisoned(positions, seed)
    assert abs(chosen.mean() - poisoned) <= 4 * np.sqrt(poisoned * (1 - poisoned) / 20_000)
    on_device = attack.select_poisoned(jnp.asarray(positions, jnp.int32), seed)
    np.testing.assert_array_equal(chosen, on_device)
    # Neighbors are independent of each other, and of the draws of another seed.
    others = attack.select_poisoned(positions, seed + 1)
    for pair in ((chosen[1:], chosen[:-1]), (chosen, others)):
        assert abs(np.mean(pair[0] & pair[1]) - poisoned**2) < 0.015


def test_the_trigger_is_a_square_in_the_corner():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (2, 7, 9, 3)).astype(np.uint8)
    expected = images.copy()
    for i in range(7):
        for j in range(9):
            if 4 <= i <= 5 and 6 <= j <= 7:
                expected[:, i, j] = 255
    attack = Backdoor(size=2)
    np.testing.assert_array_equal(attack.stamp(jnp.asarray(images)), expected)
    floats = attack.stamp(jnp.asarray(images / np.float32(255)))
    np.testing.assert_allclose(floats, expected / np.float32(255), rtol=1e-6)


def test_images_and_labels_of_malicious_clients_change_together():
    attack = Backdoor(fraction=0.5, target=4, poisoned=0.4, size=2)
    clients = [np.arange(k * 50, (k + 1) * 50) for k in range(4)]
    labels = np.random.default_rng(1).integers(0, 10, 200)
    changed = MaliciousLabels(attack=attack, seed=3).change_labels(None, clients, labels, 10)
    trigger = BackdoorTrigger(attack=attack, seed=3)
    is_malicious, _ = trigger.make_parameters(None, 4, (8, 8, 1))
    assert is_malicious.sum() == 2
    for k, own in enumerate(clients):
        images = jnp.full((50, 8, 8, 1), 0.5)
        stamped = trigger.transform(images, is_malicious[k], (), own, *trigger.get_static())
        has_trigger = np.asarray(stamped != images).any((1, 2, 3))
        if is_malicious[k]:
            assert 5 < has_trigger.sum() < 40
            assert (changed[own][has_trigger] == 4).all()
        else:
            assert not has_trigger.any()
        np.testing.assert_array_equal(changed[own][~has_trigger], labels[own][~has_trigger])


def test_success_counts_images_of_other_classes():
    metric = Backdoor(target=1).make_success_metric()
    logits = jnp.array([[0.0, 2, 1], [3, 0, 0], [0, 5, 0], [0, 1, 0], [0, 9, 0]])
    labels = jnp.array([0, 2, 1, 2, 0])  # the third image is of the target, the last is padding
    mask = jnp.array([1.0, 1, 1, 1, 0])
    counts = metric.sums(logits, labels, mask)
    assert counts.tolist() == [2, 3]
    assert float(metric.finish(counts)["attack_success"]) == pytest.approx(2 / 3)
    broken = metric.sums(logits.at[1, 0].set(jnp.inf), labels, mask)
    assert np.isnan(metric.finish(broken)["attack_success"])
    padding = metric.sums(logits.at[4, 0].set(jnp.nan), labels, mask)
    assert padding.tolist() == [2, 3]
