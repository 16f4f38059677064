"""The strongly convex problem: its loss in float64 against differences and the package's task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.reference_loop import cross_entropy, finite_difference_gradient

from fedjax_het.core.client_algorithm import Batch
from fedjax_het.papers.softmax_regression import (
    SoftmaxRegression,
    make_convex_federation,
    stack_params,
)

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def federation():
    return make_convex_federation(num_clients=20)


def make_small_loss():
    weights = RNG.uniform(size=7)
    features = np.concatenate([RNG.normal(size=(7, 2)), np.ones((7, 1))], axis=1)
    return SoftmaxRegression(features, RNG.integers(10, size=7), weights / weights.sum(), 0.3)


def test_value_and_gradient_match_definition():
    loss, point = make_small_loss(), RNG.normal(size=(3, 10))
    losses = [
        cross_entropy(x[None] @ point, np.array([y]))
        for x, y in zip(loss.features, loss.labels, strict=True)
    ]
    expected = loss.weights @ losses + 0.15 * (point**2).sum()
    assert loss.compute_value(point) == pytest.approx(expected)
    slopes = finite_difference_gradient(
        lambda flat: loss.compute_value(flat.reshape(3, 10)), point.ravel()
    )
    np.testing.assert_allclose(loss.compute_gradient(point).ravel(), slopes, atol=1e-8)


def test_optimum_and_constants_bound_loss():
    """mu / 2 d^2 <= f - f* <= L / 2 d^2 at any distance d from the optimum."""
    loss = make_small_loss()
    optimum = loss.minimize()
    assert np.linalg.norm(loss.compute_gradient(optimum)) < 1e-8
    for length in (0.1, 1.0, 5.0):
        step = RNG.normal(size=(3, 10))
        step *= length / np.linalg.norm(step)
        gap = loss.compute_value(optimum + step) - loss.compute_value(optimum)
        assert loss.l2 / 2 * length**2 <= gap <= loss.smoothness / 2 * length**2


def test_clients_share_digits_evenly(federation):
    clients, loss = federation.clients, federation.loss
    assert len(np.unique(clients)) == clients.size
    assert max(len(np.unique(loss.labels[client])) for client in clients) == 2
    point = RNG.normal(size=(65, 10))
    gradients = [loss.with_weights(client).compute_gradient(point) for client in clients]
    np.testing.assert_allclose(np.mean(gradients, 0), loss.compute_gradient(point), atol=1e-12)


def test_task_has_same_loss(federation):
    dataset, task = federation.dataset, federation.task
    examples, point = federation.clients[0], RNG.normal(size=(65, 10))
    head = {"kernel": point[:-1], "bias": point[-1]}
    variables = {"params": {"head": jax.tree.map(jnp.float32, head)}, "state": {}}
    np.testing.assert_allclose(stack_params(variables["params"]), point, atol=1e-6)
    images, labels = (
        jnp.asarray(array[examples]) for array in (dataset.train_inputs, dataset.train_labels)
    )
    batch = Batch(images, labels, jnp.ones(len(examples)), 0)
    value, gradient, _ = task.loss_and_gradient(variables, batch, None)
    loss = federation.loss.with_weights(examples)
    assert float(value) == pytest.approx(loss.compute_value(point), rel=1e-5)
    np.testing.assert_allclose(stack_params(gradient), loss.compute_gradient(point), atol=1e-5)
