"""A condensed set's quality is measured by the recipe that it names, against its equals."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import IMAGE_SHAPE, NUM_CLASSES, make_user_dataset
from support.networks import make_linear_model

from fedjax_het.condensation.downstream_eval import (
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
        jnp.asarray(DATASET.train_images[positions])
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
        ({"images": np.zeros((12, 3, 3, 1))}, r"shape of images = \(12, 3, 3, 1\)"),
        ({"labels": LABELS[:5]}, "labels = "),
        ({"labels": LABELS + 1}, "labels = "),
        ({"epochs": 0}, "epochs = 0"),
        ({"num_networks": 0.5}, "num_networks = 0.5"),
    ],
)
def test_downstream_rejects_invalid_arguments(change, message):
    arguments = {"images": np.zeros((12, *IMAGE_SHAPE)), "labels": LABELS, **change}
    with pytest.raises(ConfigError, match=message):
        compare_with_random_subset(MODEL, dataset=DATASET, **arguments)


def test_random_subset_rejects_too_many_images():
    many = np.zeros(1000, int)
    with pytest.raises(ConfigError, match="labels: 1000 images of class 0: expected at most"):
        compare_with_random_subset(MODEL, np.zeros((1000, *IMAGE_SHAPE)), many, DATASET)
