"""One private round in float64: clipping, the divisor, noise, and adaptive clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms.private_updates import add_private_noise, clip_change
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.private_gradients import compute_private_gradient
from fedjax_het.methods import Batch, Task
from fedjax_het.nn import make_model
from fedjax_het.privacy import ClientLevel, ExampleLevel


def draw_change(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {"a": scale * rng.normal(size=(7, 5)), "b": {"c": scale * rng.normal(size=11)}}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_clipping_is_the_projection_on_a_ball(scale):
    change = draw_change(0, scale)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(change)))
    clipped, is_within = clip_change(jax.tree.map(jnp.float32, change), 0.5)
    expected = jax.tree.map(lambda a: a * min(1, 0.5 / norm), change)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), clipped, expected)
    assert bool(is_within) == (norm <= 0.5)


def make_update(value):
    params = jax.tree.map(jnp.float32, draw_change(1))
    variables = {"params": params, "state": {}}
    mean = {"params": jax.tree.map(lambda a: jnp.full(a.shape, value, jnp.float32), params)}
    return ClientUpdate(mean={**mean, "state": {}}, sum=jnp.int32(3)), variables


def add_noise(mechanism, value, *, num_trained, seed=0, hp=None):
    update, variables = make_update(value)
    noisy = add_private_noise(
        *(mechanism, update, variables, None),
        hp=hp or {},
        num_trained=jnp.int32(num_trained),
        cohort_size=8,
        key=jax.random.key(seed),
    )
    assert noisy.sum == () and noisy.mean["state"] == {}
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(noisy.mean["params"])])


def test_the_sum_is_divided_by_the_expected_number_of_clients():
    plain = ClientLevel(noise_multiplier=0)
    for num_trained, factor in ((8, 1), (4, 0.5), (0, 0), (10, 1.25)):
        values = add_noise(plain, 2.0, num_trained=num_trained)
        np.testing.assert_array_equal(values, np.float32(2 * factor))


@pytest.mark.parametrize(
    ("mechanism", "hp", "expected"),
    [
        (ClientLevel(noise_multiplier=3.0, clip_norm=0.5), {}, 3 * 0.5 / 8),
        (ClientLevel(noise_multiplier=3.0, clip_norm=0.5), {"privacy_clip_norm": 2.0}, 3 * 2.0 / 8),
        (
            ClientLevel(noise_multiplier=3.0, quantile=0.5, count_std=2.0),
            {},
            (1 / 9 - 1 / 16) ** -0.5 / 8,
        ),
    ],
)
def test_noise_is_gaussian_with_the_deviation_of_the_mechanism(mechanism, hp, expected):
    draws = np.concatenate(
        [add_noise(mechanism, 1.0, num_trained=8, seed=seed, hp=hp) - 1 for seed in range(200)]
    ).astype(np.float64)
    assert abs(draws.mean()) < 5 * expected / np.sqrt(draws.size)
    assert draws.std() == pytest.approx(expected, rel=0.05)
    # A Gaussian has the kurtosis 3; a uniform draw has 1.8, a Laplace draw 6.
    assert np.mean((draws / draws.std()) ** 4) == pytest.approx(3, abs=0.25)
    parts = draws.reshape(200, -1)
    assert abs(np.corrcoef(parts[:, 0], parts[:, 40])[0, 1]) < 0.3  # leaves have their own keys


def make_batch(num_examples=6, num_masked=2):
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(num_examples, 3, 3, 1)).astype(np.float32)
    labels = rng.integers(0, 4, num_examples).astype(np.int32)
    mask = (np.arange(num_examples) < num_examples - num_masked).astype(np.float32)
    return Batch(*map(jnp.asarray, (inputs, labels, mask)), step_index=jnp.int32(5))


TASK = Task(make_model("mlp", (3, 3, 1), 4, hidden=[5]), mean=(0.2,), std=(2.0,))


@pytest.mark.parametrize("clip_norm", [0.05, 0.5, 1e6])
def test_private_gradient_is_the_mean_of_clipped_gradients_in_float64(clip_norm):
    """The oracle writes out the network's derivatives for one example after the other."""
    key, batch = jax.random.key(0), make_batch()
    variables = TASK.model.init(key)
    mechanism = ExampleLevel(noise_multiplier=0, clip_norm=clip_norm)
    loss, gradient, _ = compute_private_gradient(TASK, mechanism, variables, batch, key)
    params = jax.tree.map(np.float64, variables["params"])
    names = sorted(params, key=lambda name: params[name]["kernel"].shape[0], reverse=True)
    (w1, b1), (w2, b2) = ((params[n]["kernel"], params[n]["bias"]) for n in names)
    total, losses = [np.zeros_like(a) for a in (w1, b1, w2, b2)], []
    for x, label, is_real in zip(batch.inputs, batch.labels, batch.mask, strict=True):
        if not is_real:
            continue
        x = (np.float64(x).ravel() - 0.2) / 2
        hidden = np.maximum(x @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        losses.append(-np.log(probabilities[label]))
        d_logits = probabilities - np.eye(4)[label]
        d_hidden = (w2 @ d_logits) * (hidden > 0)
        gradients = [np.outer(x, d_hidden), d_hidden, np.outer(hidden, d_logits), d_logits]
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients))
        for sum_, g in zip(total, gradients, strict=True):
            sum_ += g * min(1, clip_norm / norm)
    actual = [gradient[n][part] for n in names for part in ("kernel", "bias")]
    for a, b in zip(actual, total, strict=True):
        np.testing.assert_allclose(a, b / 4, rtol=1e-5, atol=1e-7)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)


def test_noise_of_a_gradient_has_the_deviation_of_the_mechanism():
    variables, batch = TASK.model.init(jax.random.key(0)), make_batch()

    def compute(noise_multiplier, key):
        mechanism = ExampleLevel(noise_multiplier=noise_multiplier, clip_norm=0.5)
        gradient = compute_private_gradient(TASK, mechanism, variables, batch, key)[1]
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

    keys = jax.random.split(jax.random.key(1), 300)
    noise = jax.vmap(lambda key: compute(2.0, key))(keys) - compute(0.0, keys[0])
    # 2 * 0.5 on the sum, over the four examples that are real
    assert float(noise.std()) == pytest.approx(2 * 0.5 / 4, rel=0.03)
    assert abs(float(noise.mean())) < 5 * 0.25 / np.sqrt(noise.size)


def test_examples_do_not_exceed_the_norm_together():
    variables, batch = TASK.model.init(jax.random.key(0)), make_batch(num_masked=5)
    mechanism = ExampleLevel(noise_multiplier=0, clip_norm=0.01)
    gradient = compute_private_gradient(TASK, mechanism, variables, batch, jax.random.key(0))[1]
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(gradient)))
    assert norm == pytest.approx(0.01, rel=1e-4)
