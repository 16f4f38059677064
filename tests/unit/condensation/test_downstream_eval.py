"""A condensed set's quality is measured by the recipe that it names, against its equals."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import IMAGE_SHAPE, NUM_CLASSES, make_user_dataset
from support.networks import make_linear_model

from fedjax_het.condensation import (
    ScratchAccuracies,
    SyntheticData,
    SyntheticTask,
    downstream_eval,
    measure_scratch_accuracies,
    train_from_scratch,
)
from fedjax_het.condensation.downstream_eval import (
    HARD_LABEL_LOGIT,
    compare_with_random_subset,
    make_step_decay_phases,
    random_subset,
    train_from_init,
)
from fedjax_het.core.task import Task
from fedjax_het.utils.errors import ConfigError

DATASET = make_user_dataset()
MODEL = make_linear_model()
LABELS = np.repeat(np.arange(NUM_CLASSES), 4)
RECIPE = {"epochs": 400}


def normalised(positions):
    return Task(None, DATASET.mean, DATASET.std).normalize(
        jnp.asarray(DATASET.train_inputs[positions])
    )


def test_random_subset():
    first, again, other = (
        random_subset(DATASET.train_labels, LABELS, seed=3, subset_index=n) for n in (0, 0, 1)
    )
    np.testing.assert_array_equal(DATASET.train_labels[first], LABELS)
    assert len(set(first)) == len(LABELS)
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)


def test_downstream_gain_of_real_images_is_zero():
    subset = random_subset(DATASET.train_labels, LABELS, seed=5)
    actual = compare_with_random_subset(
        MODEL, normalised(subset), LABELS, DATASET, seed=5, num_networks=1, **RECIPE
    )
    assert actual.gain.mean == 0
    assert actual.synthetic.mean == actual.random.mean > 0.5
    # Another seed draws other real images.
    other = compare_with_random_subset(
        MODEL, normalised(subset), LABELS, DATASET, seed=6, num_networks=1, **RECIPE
    )
    assert other.synthetic.mean != other.random.mean


@pytest.mark.slow
def test_downstream_gain_of_noise():
    noise = np.random.default_rng(0).normal(size=(len(LABELS), *IMAGE_SHAPE))
    actual = compare_with_random_subset(MODEL, noise, LABELS, DATASET, num_networks=4, **RECIPE)
    assert actual.gain.mean < -0.1
    assert actual.gain.mean == pytest.approx(actual.synthetic.mean - actual.random.mean)
    assert actual.random.std > 0  # real images differ between networks


def test_default_epochs_of_public_code():
    """Its epochs are 0 to 1000; the rate decays after epoch 501."""
    default = inspect.signature(compare_with_random_subset).parameters["epochs"].default
    phases = [(phase.first, phase.total) for _, phase in make_step_decay_phases(1.0, default)]
    assert default == 1001 and phases == [(0, 502), (502, 499)]


def test_train_from_init_equals_float64_loop():
    """Against float64 NumPy; the whole set is one batch, so that its order does not matter."""
    epochs, lr, momentum, decay = 7, 0.3, 0.9, 5e-4
    images = normalised(random_subset(DATASET.train_labels, LABELS, seed=0))
    key = jax.random.key(1)
    actual = train_from_init(MODEL, images, jnp.asarray(LABELS), key, lr, epochs=epochs)["params"]

    params = MODEL.init(jax.random.split(key)[0])["params"]
    w, b = np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64)
    x, y = np.asarray(images, np.float64).reshape(len(LABELS), -1), np.eye(NUM_CLASSES)[LABELS]
    velocity = [0.0, 0.0]
    for epoch in range(epochs):
        if epoch == epochs // 2 + 2:  # after epoch epochs // 2 + 1, counted from 0
            velocity, lr = [0.0, 0.0], lr / 10
        exponentials = np.exp(x @ w + b)
        error = (exponentials / exponentials.sum(1, keepdims=True) - y) / len(y)
        gradients = (x.T @ error + decay * w, error.sum(0) + decay * b)
        velocity = [momentum * v + g for v, g in zip(velocity, gradients, strict=True)]
        w, b = w - lr * velocity[0], b - lr * velocity[1]
    np.testing.assert_allclose(actual["w"], w, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(actual["b"], b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": np.zeros((12, 3, 3, 1))}, r"shape of inputs = \(12, 3, 3, 1\)"),
        ({"labels": LABELS[:5]}, "labels = "),
        ({"labels": LABELS + 1}, "labels = "),
        ({"epochs": 0}, "epochs = 0"),
        ({"num_networks": 0.5}, "num_networks = 0.5"),
    ],
)
def test_downstream_rejects_invalid_arguments(change, message):
    arguments = {"inputs": np.zeros((12, *IMAGE_SHAPE)), "labels": LABELS, **change}
    with pytest.raises(ConfigError, match=message):
        compare_with_random_subset(MODEL, dataset=DATASET, **arguments)


def test_random_subset_rejects_too_many_images():
    many = np.zeros(1000, int)
    with pytest.raises(
        ConfigError, match="1000 random real images need 1000 of class 0: expected at most"
    ):
        compare_with_random_subset(MODEL, np.zeros((1000, *IMAGE_SHAPE)), many, DATASET)


# DD-Ranking's scores


def score(total):
    return (math.exp(total) - math.exp(-1)) / (math.exp(1) - math.exp(-1))


def test_scores_equal_formulas():
    accuracies = ScratchAccuracies(
        synthetic=np.array([0.7, 0.5]),
        synthetic_plain=np.array([0.65, 0.4]),
        synthetic_hard=np.array([0.6, 0.3]),
        random=np.array([0.55, 0.6]),
        random_plain=np.array([0.5, 0.55]),
        real=np.array([0.9, 0.9]),
    )
    for w in (0.5, 0.25):
        lrs = [score(w * 0.15 - (1 - w) * 0.3), score(w * -0.1 - (1 - w) * 0.6)]
        ars = [score(w * 0.15 + (1 - w) * 0.15), score(w * -0.1 + (1 - w) * -0.15)]
        np.testing.assert_allclose(accuracies.compute_lrs(w), lrs, rtol=1e-12)
        np.testing.assert_allclose(accuracies.compute_ars(w), ars, rtol=1e-12)
    np.testing.assert_array_equal(accuracies.compute_lrs(), accuracies.compute_lrs(0.5))


def test_limits_of_scores():
    best = ScratchAccuracies(*map(np.array, ([1.0], [1.0], [1.0], [0.0], [0.0], [0.0])))
    worst = ScratchAccuracies(*map(np.array, ([0.0], [0.0], [0.0], [1.0], [1.0], [1.0])))
    equal = ScratchAccuracies(*map(np.array, ([0.5],) * 6))
    for accuracies, expected in ((best, 1), (worst, 0), (equal, 1 / (math.e + 1))):
        assert accuracies.compute_lrs()[0] == pytest.approx(expected, abs=1e-12)
        assert accuracies.compute_ars()[0] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ConfigError, match=r"weight = 1.5: expected a number in \[0, 1\]"):
        equal.compute_lrs(1.5)


def test_scratch_accuracies_equal_loop(monkeypatch):
    """The synthetic data are the random real images: all scores are those of equal data."""
    monkeypatch.setattr(downstream_eval, "LEARNING_RATES", (0.02, 0.3))
    subset = random_subset(DATASET.train_labels, LABELS, seed=4, subset_index=1)
    hard_labels = HARD_LABEL_LOGIT * jnp.eye(NUM_CLASSES)[LABELS]
    data = SyntheticData(normalised(subset), hard_labels, jnp.float32(jnp.nan))
    settings = {"augment_strategy": "none", "seed": 4, "num_networks": 1, "epochs": 9}
    actual = measure_scratch_accuracies(MODEL, data, DATASET, **settings, real_accuracy=0.9)
    assert actual.improvement_over_random == 0 and actual.real == 0.9
    assert actual.compute_ars() == pytest.approx(score(0))

    init_key, train_key = jax.random.split(jax.random.split(jax.random.key(4), 1)[0])
    task = SyntheticTask(
        lambda params, x: MODEL.apply({"params": params, "state": {}}, x, train=True)[0],
        *("none", "cross_entropy"),
    )
    images = normalised_test_inputs().reshape(len(DATASET.test_labels), -1)
    expected = []
    for lr in (0.02, 0.3):
        start = MODEL.init(init_key)["params"]
        args = (data._replace(step_size=jnp.float32(lr)), train_key)
        params = train_from_scratch(task, start, *args, epochs=9)
        classes = (images @ np.asarray(params["w"]) + np.asarray(params["b"])).argmax(1)
        expected.append((classes == DATASET.test_labels).mean())
    assert expected[0] != expected[1]
    assert actual.synthetic[0] == actual.synthetic_hard[0] == pytest.approx(max(expected))


def normalised_test_inputs():
    return np.asarray(
        Task(None, DATASET.mean, DATASET.std).normalize(jnp.asarray(DATASET.test_inputs))
    )


def test_all_real_images_are_better_than_few():
    """Without `real_accuracy` a network trains on the whole training set."""
    data = SyntheticData(
        jnp.zeros((3, *IMAGE_SHAPE)), 30 * jnp.eye(NUM_CLASSES), jnp.float32(jnp.nan)
    )
    settings = {"augment_strategy": "none", "num_networks": 1, "epochs": 1, "real_epochs": 300}
    actual = measure_scratch_accuracies(MODEL, data, DATASET, **settings)
    assert actual.real > 0.5 and actual.hard_label_recovery > 0
