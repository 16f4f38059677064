"""Training on synthetic data against loops of the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.x64 import enable_x64

from fedjax_het.condensation import SyntheticData, SyntheticTask, fine_tune, train_from_scratch
from fedjax_het.condensation.synthetic_data import soft_cross_entropies
from fedjax_het.core.server_training import EpochRange

CLASSES, SHAPE = 3, (5, 4, 1)


def apply_params(params, images):
    hidden = jnp.tanh(images.reshape(len(images), -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


PLAIN_TASK = SyntheticTask(apply_params, "none")


def make_params(seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = {"w1": (20, 6), "b1": (6,), "w2": (6, CLASSES), "b2": (CLASSES,)}
    return {name: (0.3 * draw(size=s)).astype(np.float32) for name, s in shapes.items()}


def make_data(num_samples=6):
    rng = np.random.default_rng(1)
    return SyntheticData(
        inputs=jnp.asarray(rng.normal(size=(num_samples, *SHAPE)), jnp.float32),
        label_logits=jnp.asarray(rng.normal(size=(num_samples, CLASSES)), jnp.float32),
        step_size=jnp.float32(0.7),
    )


def loss(params, data):
    return soft_cross_entropies(apply_params(params, data.inputs), data.label_logits).mean()


def assert_close(ours, theirs):
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaling", ["cross_entropy_over_classes", "cross_entropy"])
def test_soft_cross_entropies_scaling(scaling):
    logits, label_logits = 3 * np.random.default_rng(0).normal(size=(2, 7, CLASSES))
    with enable_x64(True):
        actual = soft_cross_entropies(logits, label_logits, scaling=scaling)
        probabilities, labels = (np.asarray(jax.nn.softmax(x)) for x in (logits, label_logits))
    expected = -(labels * np.log(probabilities)).sum(1)
    divisor = CLASSES if scaling == "cross_entropy_over_classes" else 1
    np.testing.assert_allclose(actual, expected / divisor, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.adam(0.02), optax.sgd(0.5)])
def test_fine_tune_equals_optimizer_loop(optimizer):
    params, data, key = make_params(), make_data(), jax.random.key(0)
    settings = {"optimizer": optimizer, "epochs": EpochRange(5)}
    tuned = jax.jit(lambda: fine_tune(PLAIN_TASK, params, data, key, **settings))()
    expected, state = params, optimizer.init(params)
    for _ in range(5):
        updates, state = optimizer.update(jax.grad(loss)(expected, data), state)
        expected = optax.apply_updates(expected, updates)
    assert_close(tuned, expected)


@pytest.mark.parametrize(("batch_size", "steps"), [(4, 3), (10, 1), (256, 1)])
def test_fine_tune_epoch_visits_every_sample(batch_size, steps):
    data, seen = make_data(num_samples=10), []

    def recording_apply(params, images):
        jax.debug.callback(lambda x: seen.append(x.sum((1, 2, 3))), images, ordered=True)
        return apply_params(params, images)

    settings = {"optimizer": optax.adam(0.1), "epochs": EpochRange(2), "batch_size": batch_size}
    task = PLAIN_TASK._replace(apply_params=recording_apply)
    tuned = fine_tune(task, make_params(), data, jax.random.key(0), **settings)
    jax.block_until_ready(tuned)
    jax.effects_barrier()
    assert len(seen) == 2 * steps
    for epoch in (seen[:steps], seen[steps:]):
        used = np.concatenate(epoch)[:10]  # behind them are fillers of weight 0
        expected = np.asarray(data.inputs).sum((1, 2, 3))
        np.testing.assert_allclose(np.sort(used), np.sort(expected), rtol=1e-5)


def test_train_from_scratch_equals_sgd_loop():
    """Momentum, weight decay, and one decay of the rate with a new buffer."""
    params, data = make_params(), make_data()
    trained = train_from_scratch(PLAIN_TASK, params, data, jax.random.key(0), epochs=9)
    buffer = jax.tree.map(np.zeros_like, params)
    for epoch in range(9):
        lr = 0.7 if epoch <= 9 // 2 + 1 else 0.07
        if epoch == 9 // 2 + 2:
            buffer = jax.tree.map(np.zeros_like, params)
        gradient = jax.grad(loss)(params, data)
        buffer = jax.tree.map(lambda b, g, w: 0.9 * b + g + 5e-4 * w, buffer, gradient, params)
        params = jax.tree.map(lambda w, b, lr=lr: w - lr * b, params, buffer)
    assert_close(trained, params)


@pytest.mark.slow
def test_train_from_scratch_fits_separable_data():
    labels = np.repeat(np.arange(CLASSES), 4)
    data = make_data(12)._replace(
        label_logits=10.0 * jnp.eye(CLASSES)[labels], step_size=jnp.float32(0.3)
    )
    inits = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(make_params, range(3)))

    def accuracy(params, key):
        task = SyntheticTask(apply_params, "flip")
        trained = train_from_scratch(task, params, data, key, epochs=101)
        return (apply_params(trained, data.inputs).argmax(1) == labels).mean()

    assert (jax.vmap(accuracy)(inits, jax.random.split(jax.random.key(0), 3)) == 1).all()
