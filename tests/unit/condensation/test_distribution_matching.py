"""Distribution matching, soft labels, training on a pool: closed forms, finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import IMAGE_SHAPE, NUM_CLASSES
from support.networks import make_linear_model
from support.reference_loop import softmax_gradient
from support.x64 import enable_x64

from fedjax_het.condensation.distribution_matching import (
    average_over_owners,
    compute_soft_labels,
    distribution_distance,
    divide_by_count,
    interpolate_params,
    mean_embedding,
    sample_on_ball,
    sampled_sliced_wasserstein,
    sliced_wasserstein,
    soft_label_matching_loss,
    sum_logits_by_class,
    symmetric_kl,
)
from fedjax_het.condensation.privacy import clip_by_norm
from fedjax_het.condensation.synthetic_pool import (
    PoolTask,
    SoftLabelTargets,
    SyntheticPool,
    _add_exact_matching,
    make_decayed_sgd,
    train_on_synthetic_pool,
)
from fedjax_het.core.server_training import EpochRange
from fedjax_het.nn import make_model

KEY = jax.random.key(3)


# --- matching ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_matching_gradient_finite_differences(norm):
    with enable_x64(True):
        model = make_model("convnet", (6, 6, 2), 3, width=4, depth=1, norm=norm)
        variables = jax.tree.map(lambda a: a.astype(jnp.float64), jax.jit(model.init)(KEY))
        if norm == "batch":  # statistics that are not those of the batch
            state = variables["state"]
            variables["state"] = jax.tree.map(lambda a: a + 0.3, state)
        real = jax.random.normal(jax.random.fold_in(KEY, 1), (6, 6, 6, 2), jnp.float64)
        images = jax.random.normal(jax.random.fold_in(KEY, 2), (3, 6, 6, 2), jnp.float64)
        mask = jnp.array([1.0, 1, 1, 1, 0, 0])

        def embed(x):
            return model.embed(variables, x, train=False)[:2]

        def loss(images):
            features, logits = mean_embedding(embed, real, mask, None)
            actual, mean_logits = (value.mean(0) for value in embed(images))
            return (
                distribution_distance(features, actual)
                + distribution_distance(logits, mean_logits)
                + 0.5 * sliced_wasserstein(mean_logits, jnp.arange(3.0))
            )

        loss = jax.jit(loss)
        gradient = jax.jit(jax.grad(loss))(images)
        direction = jax.random.normal(jax.random.fold_in(KEY, 3), images.shape, jnp.float64)
        step = 1e-5
        ahead, behind = loss(images + step * direction), loss(images - step * direction)
        slope = float((ahead - behind) / (2 * step))
        assert abs(float((gradient * direction).sum()) - slope) < 1e-6 * max(1, abs(slope))
        assert abs(slope) > 1e-4


def test_mean_embedding_masks_and_micro_batches():
    model = make_linear_model()
    variables = model.init(KEY)
    images = jax.random.normal(KEY, (12, *IMAGE_SHAPE))
    mask = jnp.arange(12) < 7

    def embed(x):
        return model.embed(variables, x, train=False)[:2]

    expected = np.asarray(images[:7]).reshape(7, -1).mean(0)
    for piece in (None, 3, 5, 100):
        features, logits = mean_embedding(embed, images, mask.astype(jnp.float32), piece)
        np.testing.assert_allclose(features, expected, atol=1e-6)
        weights, bias = variables["params"]["w"], variables["params"]["b"]
        np.testing.assert_allclose(logits, expected @ weights + bias, atol=1e-6)


def test_mean_embedding_leaves_out_micro_batches_of_padding():
    images = jnp.ones((12, 2, 2, 1)).at[9:].set(jnp.nan)
    mask = (jnp.arange(12) < 7).astype(jnp.float32)
    for first in (0, 2):  # gaps do not end the inputs
        embed = lambda x: (x.reshape(len(x), -1), x.mean((1, 2)))  # noqa: E731
        features, logits = mean_embedding(embed, images, mask.at[:first].set(0), 3)
        np.testing.assert_array_equal(features, np.ones(4))
        np.testing.assert_array_equal(logits, np.ones(1))


def test_sampled_sliced_wasserstein_expectation():
    u, v = jax.random.normal(KEY, (2, 10))
    exact = float(sliced_wasserstein(u, v))
    assert exact == pytest.approx(
        float(np.sum((np.asarray(u) - np.asarray(v)) ** 2) / 10), rel=1e-6
    )
    draw = jax.jit(jax.vmap(lambda key: sampled_sliced_wasserstein(u, v, key, 50)))
    draws = draw(jax.random.split(KEY, 2000))
    error = float(draws.std() / np.sqrt(len(draws)))
    assert abs(float(draws.mean()) - exact) < 4 * error
    assert error < 0.02 * exact  # so that the line above says something


def test_interpolate_params():
    received, fresh = {"w": jnp.ones(3)}, {"w": jnp.full(3, 5.0)}
    for gamma, expected in ((0.0, 5.0), (0.75, 2.0), (1.0, 1.0)):
        np.testing.assert_allclose(interpolate_params(received, fresh, gamma)["w"], expected)


def test_sample_on_ball_distance_and_direction():
    params = {"a": jnp.ones((30, 20)), "b": jnp.zeros(200)}
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    moved = [
        flat(sample_on_ball(jax.random.key(i), params, 5.0)) - flat(params) for i in range(200)
    ]
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 5.0, rtol=1e-5)
    # The mean of n unit directions has a length near 1 / sqrt(n).
    assert np.linalg.norm(np.mean(moved, 0)) < 2 * 5 / np.sqrt(200)
    np.testing.assert_array_equal(flat(sample_on_ball(KEY, params, 0.0)), flat(params))


def test_clip_by_norm():
    gradient = jax.random.normal(KEY, (4, 3, 3, 1))
    norm = float(jnp.linalg.norm(gradient))
    np.testing.assert_allclose(clip_by_norm(gradient, 2 * norm), gradient)
    np.testing.assert_allclose(clip_by_norm(gradient, 0.5 * norm), gradient / 2, rtol=1e-6)
    assert np.isfinite(np.asarray(clip_by_norm(jnp.zeros(3), 1.0))).all()


# --- soft labels ---------------------------------------------------------------------------


def test_average_over_owners():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 4)).astype(np.float32)
    owns = np.array([[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0]], bool)
    actual, owned = average_over_owners(logits, owns)
    expected = np.zeros((4, 4))
    for c in range(4):
        if owns[:, c].any():
            expected[c] = logits[owns[:, c], c].mean(0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert np.asarray(owned).tolist() == [True, True, False, True]
    stranger = np.full((1, 4, 4), np.nan, np.float32)
    more, _ = average_over_owners(
        np.concatenate([logits, stranger]), np.vstack([owns, np.zeros((1, 4))]) > 0
    )
    np.testing.assert_array_equal(more, actual)


def test_soft_labels_and_symmetric_kl():
    rng = np.random.default_rng(1)
    p, q = np.exp(rng.normal(size=(2, 5)))
    p, q = p / p.sum(), q / q.sum()
    expected = 0.5 * ((p * np.log(p / q)).sum() + (q * np.log(q / p)).sum())
    assert float(symmetric_kl(np.log(p), np.log(q))) == pytest.approx(expected, rel=1e-5)
    assert float(symmetric_kl(np.log(p), np.log(p))) == 0
    np.testing.assert_allclose(compute_soft_labels(3 * np.log(p), 3.0), p, rtol=1e-5)


def test_sum_logits_by_class_masks_padding():
    logits = jnp.arange(12.0).reshape(4, 3)
    sums, count = sum_logits_by_class(logits, jnp.array([0, 2, 0, 2]), jnp.array([1.0, 1, 1, 0]), 3)
    np.testing.assert_allclose(divide_by_count(sums, count), [[3, 4, 5], [0, 0, 0], [3, 4, 5]])
    assert count.tolist() == [2, 0, 1]


# --- training on the pool ------------------------------------------------------------------


def pool_of(count=11, capacity=16):
    """`count` valid images scattered over `capacity` places, the others poison."""
    rng = np.random.default_rng(5)
    images = np.full((capacity, *IMAGE_SHAPE), 1e3, np.float32)
    labels = rng.integers(0, NUM_CLASSES, capacity).astype(np.int32)
    valid = np.zeros(capacity, bool)
    valid[rng.permutation(capacity)[:count]] = True
    images[valid] = rng.normal(size=(count, *IMAGE_SHAPE))
    return SyntheticPool(jnp.asarray(images), jnp.asarray(labels), jnp.asarray(valid))


def test_pool_training_equals_float64_loop():
    model, pool = make_linear_model(), pool_of()
    variables = model.init(KEY)
    trained = jax.jit(
        partial(
            train_on_synthetic_pool,
            PoolTask(model),
            optimizer=make_decayed_sgd(0.3, 0.8, 0.1),
            epochs=EpochRange(7),
            batch_size=64,
        )
    )(variables, pool, KEY)
    valid = np.asarray(pool.is_valid)
    x = np.asarray(pool.inputs)[valid].reshape(valid.sum(), -1).astype(np.float64)
    y = np.asarray(pool.labels)[valid]
    weights = [np.asarray(variables["params"][n], np.float64) for n in ("w", "b")]
    velocity = [0.0, 0.0]
    for _ in range(7):
        for i, g in enumerate(softmax_gradient(*weights, x, y)):
            velocity[i] = 0.8 * velocity[i] + g + 0.1 * weights[i]
        weights = [w - 0.3 * v for w, v in zip(weights, velocity, strict=True)]
    np.testing.assert_allclose(trained["params"]["w"], weights[0], atol=2e-6)
    np.testing.assert_allclose(trained["params"]["b"], weights[1], atol=2e-6)


def test_pool_epoch_visits_valid_images():
    model, pool = make_linear_model(), pool_of(count=12)
    variables = model.init(KEY)
    lr = 1e-4  # so small that the gradients do not change on the way
    trained = train_on_synthetic_pool(
        *(PoolTask(model), variables, pool, KEY),
        optimizer=optax.sgd(lr),
        epochs=EpochRange(1),
        batch_size=4,
    )
    moved = (np.asarray(variables["params"]["w"]) - np.asarray(trained["params"]["w"])) / lr
    valid = np.asarray(pool.is_valid)
    x = np.asarray(pool.inputs)[valid].reshape(12, -1).astype(np.float64)
    start = [np.asarray(variables["params"][n], np.float64) for n in ("w", "b")]
    expected = 3 * softmax_gradient(*start, x, np.asarray(pool.labels)[valid])[0]
    np.testing.assert_allclose(moved, expected, atol=5e-3)


def test_pool_without_images_changes_nothing():
    model, pool = make_linear_model(), pool_of()
    variables = model.init(KEY)
    empty = pool._replace(is_valid=jnp.zeros_like(pool.is_valid))
    trained = train_on_synthetic_pool(
        *(PoolTask(model), variables, empty, KEY),
        optimizer=make_decayed_sgd(1.0, 0.9, 0.1),
        epochs=EpochRange(3),
        batch_size=4,
    )
    np.testing.assert_array_equal(trained["params"]["w"], variables["params"]["w"])


def knowledge_of(weight=1.5):
    logits = jax.random.normal(jax.random.key(9), (NUM_CLASSES, NUM_CLASSES))
    owned = jnp.array([True, False, True])
    return SoftLabelTargets(
        compute_soft_labels(logits, 2.0), owned, jnp.float32(weight), jnp.float32(2.0)
    )


def matching_over_the_pool(model, params, pool, knowledge):
    """The weighted term, in one pass over the valid images."""
    valid = np.flatnonzero(np.asarray(pool.is_valid))
    variables = {"params": params, "state": {}}
    logits, _ = model.apply(variables, pool.inputs[valid], train=False)
    sums, seen = sum_logits_by_class(logits, pool.labels[valid], jnp.ones(len(valid)), NUM_CLASSES)
    present = (seen > 0) & knowledge.is_owned
    means = divide_by_count(sums, seen)
    term = soft_label_matching_loss(means, present, knowledge.soft_labels, knowledge.tau)
    return knowledge.weight * term


def compute_matching_gradient(model, params, pool, knowledge):
    return jax.jit(jax.grad(lambda p: matching_over_the_pool(model, p, pool, knowledge)))(params)


def test_exact_matching_gradient():
    model, pool, knowledge = make_linear_model(), pool_of(), knowledge_of()
    params = model.init(KEY)["params"]
    expected = compute_matching_gradient(model, params, pool, knowledge)

    def zero_loss(variables, batch, key):
        return 0.0, jax.tree.map(jnp.zeros_like, params), variables

    add = _add_exact_matching(PoolTask(model, knowledge), zero_loss, pool, 5)
    _, actual, _ = jax.jit(lambda params: add({"params": params, "state": {}}, None, None))(params)
    for name in ("w", "b"):
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-6)
    assert float(jnp.abs(expected["w"]).max()) > 1e-2


@pytest.mark.parametrize("exact", [False, True])
def test_matching_adds_to_cross_entropy(exact):
    # With one batch that is the pool, the minibatch's class means are the pool's.
    model, pool, knowledge = make_linear_model(), pool_of(), knowledge_of()
    variables = model.init(KEY)
    settings = {"optimizer": optax.sgd(0.1), "epochs": EpochRange(1), "batch_size": 16}

    def train(*targets):
        return train_on_synthetic_pool(PoolTask(model, *targets), variables, pool, KEY, **settings)

    plain, both = train(), train(knowledge, exact)
    term = compute_matching_gradient(model, variables["params"], pool, knowledge)
    expected = plain["params"]["w"] - 0.1 * term["w"]
    np.testing.assert_allclose(both["params"]["w"], expected, atol=2e-6)
    nothing = knowledge._replace(weight=jnp.float32(0))
    same = train(nothing, exact)
    np.testing.assert_allclose(same["params"]["w"], plain["params"]["w"], atol=1e-7)
