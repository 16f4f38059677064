"""The server's loop of minibatch steps: which examples it visits, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_equal

from fedjax_het.condensation.synthetic_pool import make_masked_shuffled_batches
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.server_training import (
    EpochRange,
    ServerTraining,
    make_sequential_batches,
    make_shuffled_batches,
    train_on_examples,
)

KEY = jax.random.key(3)
N, SIZE = 11, 4
X = np.random.default_rng(0).normal(size=(N, 5))
Y = np.random.default_rng(1).normal(size=N)
EXAMPLES = Examples(jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
START = {"params": {"w": jnp.zeros(5)}, "state": jnp.int32(0)}


def least_squares(variables, batch, key):
    """Mean of (x . w - y)^2 / 2; the state counts steps."""

    def loss(params):
        errors = batch.inputs @ params["w"] - batch.labels
        return 0.5 * (batch.mask * errors**2).sum() / batch.mask.sum()

    value, gradient = jax.value_and_grad(loss)(variables["params"])
    return value, gradient, {**variables, "state": variables["state"] + 1}


TRAINING = ServerTraining(least_squares, optax.sgd(0.1))


def descended(orders, lr):
    w = np.zeros(5)
    for order in orders:
        for start in range(0, len(order), SIZE):
            batch = order[start : start + SIZE]
            w -= lr * X[batch].T @ (X[batch] @ w - Y[batch]) / len(batch)
    return w


def order_of(batches, epoch):
    return np.asarray(batches.order(jnp.int32(epoch)))[: int(batches.num_visited)]


PRESENT = np.arange(N) % 3 != 0
BATCHES = {
    "in order": make_sequential_batches(N, SIZE),
    "shuffled": make_shuffled_batches(KEY, N, SIZE),
    "present": make_masked_shuffled_batches(KEY, jnp.asarray(PRESENT), SIZE),
}


TRAINING = ServerTraining(least_squares, optax.sgd(0.1))


@pytest.mark.parametrize("name", BATCHES)
def test_train_on_examples_equals_float64_loop(name):
    batches = BATCHES[name]
    orders = [order_of(batches, epoch) for epoch in range(3)]
    visited = np.flatnonzero(PRESENT) if name == "present" else np.arange(N)
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), visited)
    assert (orders[0].tolist() == orders[1].tolist()) == (name == "in order")

    def train_on_range(epochs):
        return train_on_examples(TRAINING, START, EXAMPLES, batches, EpochRange(epochs))

    train = jax.jit(train_on_range)
    trained = train(3)
    np.testing.assert_allclose(trained["params"]["w"], descended(orders, 0.1), atol=1e-6)
    assert trained["state"] == 3 * int(batches.steps_per_epoch) == 3 * -(-len(visited) // SIZE)
    np.testing.assert_array_equal(train(0)["params"]["w"], START["params"]["w"])


def test_train_on_examples_from_later_epoch():
    def train(start, *epochs):
        return train_on_examples(
            TRAINING, start, EXAMPLES, BATCHES["shuffled"], EpochRange(*epochs)
        )

    whole, part = train(START, 5), train(START, 2)
    both = train(part, 3, 2)
    np.testing.assert_allclose(both["params"]["w"], whole["params"]["w"], rtol=1e-6)
    again = train(part, 3)
    assert np.abs(again["params"]["w"] - whole["params"]["w"]).max() > 1e-4


def test_step_keys_and_average():
    def draw(variables, batch, key):
        state = variables["state"].at[batch.step_index].set(jax.random.uniform(key))
        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        return jnp.float32(0), zeros, {**variables, "state": state}

    start = {**START, "state": jnp.zeros(6)}
    training = TRAINING._replace(loss_and_gradient=draw, key=KEY)
    args = (start, EXAMPLES, BATCHES["in order"], EpochRange(2))
    variables = train_on_examples(training, *args)
    averaging = training._replace(is_averaged_step=lambda number: (number == 3) | (number == 6))
    averaged = train_on_examples(averaging, *args)
    expected = [jax.random.uniform(jax.random.fold_in(KEY, number)) for number in range(6)]
    np.testing.assert_array_equal(variables["state"], expected)
    half = np.where(np.arange(6) < 3, 1, 0.5)
    np.testing.assert_allclose(averaged["state"], half * np.asarray(expected), rtol=1e-6)
    never = training._replace(is_averaged_step=lambda number: number > 6)
    assert_trees_all_equal(train_on_examples(never, *args), variables)


def test_take_step():
    batches = BATCHES["shuffled"]
    per_epoch = batches.steps_per_epoch
    assert per_epoch == 3
    for step in range(2 * per_epoch):
        index, mask = batches.take_step(jnp.int32(step))
        order = order_of(batches, step // per_epoch)
        expected = order[step % per_epoch * SIZE :][:SIZE]
        np.testing.assert_array_equal(np.asarray(index)[: len(expected)], expected)
        np.testing.assert_array_equal(mask, np.arange(SIZE) < len(expected))
