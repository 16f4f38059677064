"""Trajectory matching against finite differences, NumPy loops and a trajectory that is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from support.markers import slow_case
from support.x64 import enable_x64

from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
from fedjax_het.condensation import (
    SynthesisHyperParameters,
    SynthesisOptions,
    SyntheticData,
    TrajectoryMatching,
    fine_tune,
    matching_loss,
    train_from_scratch,
    unroll,
)
from fedjax_het.condensation.synthetic_data import soft_cross_entropies
from fedjax_het.condensation.trajectory_matching import (
    NUMERIC_PRESETS,
    draw_segment,
    mean_loss_by_start,
)
from fedjax_het.core.server_training import get_epoch_batch
from fedjax_het.utils.config import parse_config
from fedjax_het.utils.errors import ConfigError

CLASSES = 3
SHAPE = (5, 4, 1)


def mlp_apply(params, images):
    hidden = jnp.tanh(images.reshape(len(images), -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def conv_apply(params, images):
    dimensions = ("NHWC", "HWIO", "NHWC")
    features = jax.lax.conv_general_dilated(
        images, params["kernel"], (1, 1), "SAME", dimension_numbers=dimensions
    )
    return jnp.tanh(features).reshape(len(images), -1) @ params["head"]


def linear_apply(params, images):
    return images.reshape(len(images), -1) @ params["w"]


def make_network(kind, seed=0, dtype=np.float32):
    """`(apply_params, params)` of a tiny network on images of SHAPE."""
    draw = np.random.default_rng(seed).normal
    size = int(np.prod(SHAPE))
    shapes = {
        "mlp": {"w1": (size, 6), "b1": (6,), "w2": (6, CLASSES), "b2": (CLASSES,)},
        "conv": {"kernel": (3, 3, SHAPE[2], 2), "head": (2 * SHAPE[0] * SHAPE[1], CLASSES)},
        "linear": {"w": (size, CLASSES)},
    }[kind]
    apply_params = {"mlp": mlp_apply, "conv": conv_apply, "linear": linear_apply}[kind]
    return apply_params, {name: (0.3 * draw(size=s)).astype(dtype) for name, s in shapes.items()}


def make_data(num_samples=6, seed=1, dtype=np.float32, step_size=0.7):
    rng = np.random.default_rng(seed)
    return SyntheticData(
        images=jnp.asarray(rng.normal(size=(num_samples, *SHAPE)), dtype),
        label_logits=jnp.asarray(rng.normal(size=(num_samples, CLASSES)), dtype),
        step_size=jnp.asarray(step_size, dtype),
    )


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_gradient(params, images, labels, divisor):
    """Gradient of the soft cross-entropy of `mlp_apply`, by hand, in float64."""
    x = images.reshape(len(images), -1)
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    error = (softmax(hidden @ params["w2"] + params["b2"]) - softmax(labels)) / divisor
    back = (error @ params["w2"].T) * (1 - hidden**2)
    return {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


@pytest.mark.parametrize("scaling", ["cross_entropy_over_classes", "cross_entropy"])
def test_soft_cross_entropy_is_the_mean_over_samples_or_over_all_entries(scaling):
    rng = np.random.default_rng(0)
    logits, label_logits = 3 * rng.normal(size=(2, 7, CLASSES))
    products = -softmax(label_logits) * np.log(softmax(logits))
    expected = (
        products.mean() if scaling == "cross_entropy_over_classes" else products.sum(1).mean()
    )
    with enable_x64(True):
        loss = soft_cross_entropies(logits, label_logits, scaling=scaling).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize("scaling", ["cross_entropy_over_classes", "cross_entropy"])
def test_unroll_is_a_plain_loop_of_sgd(scaling):
    with enable_x64(True):
        apply_params, params = make_network("mlp", dtype=np.float64)
        vector, unravel = ravel_pytree(params)
        data = make_data(dtype=np.float64)
        end = unroll(
            apply_params,
            unravel,
            vector,
            data,
            jax.random.key(0),
            num_steps=7,
            augment_strategy="none",
            loss_scaling=scaling,
        )
        end = jax.tree.map(np.asarray, unravel(end))
    images, labels, step_size = (np.asarray(leaf) for leaf in data)
    divisor = len(images) * (CLASSES if scaling == "cross_entropy_over_classes" else 1)
    expected = params
    for _ in range(7):
        gradient = numpy_gradient(expected, images, labels, divisor)
        expected = {name: expected[name] - step_size * gradient[name] for name in expected}
    for name in expected:
        np.testing.assert_allclose(end[name], expected[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "strategy", "batch_size"),
    [
        ("mlp", "none", None),
        slow_case("conv", "none", 4),
        slow_case("mlp", "color_rotate", 4),
        slow_case("conv", "scale_cutout", None),
    ],
)
def test_gradients_of_the_matching_loss_equal_finite_differences(kind, strategy, batch_size):
    """With respect to images, label logits and step size, through six augmented steps."""
    with enable_x64(True):
        apply_params, params = make_network(kind, dtype=np.float64)
        vector, unravel = ravel_pytree(params)
        target = vector + 0.1 * np.random.default_rng(2).normal(size=vector.shape)
        data = make_data(dtype=np.float64)

        @jax.jit
        def loss(data):
            options = {"num_steps": 6, "batch_size": batch_size, "augment_strategy": strategy}
            end = unroll(apply_params, unravel, vector, data, jax.random.key(4), **options)
            return matching_loss(end, vector, target)

        gradient = jax.jit(jax.grad(loss))(data)
        rng = np.random.default_rng(3)
        for name in SyntheticData._fields:
            leaf = getattr(data, name)
            direction = rng.normal(size=leaf.shape)
            slope = (getattr(gradient, name) * direction).sum()
            step = 1e-5
            above = loss(data._replace(**{name: leaf + step * direction}))
            below = loss(data._replace(**{name: leaf - step * direction}))
            np.testing.assert_allclose(slope, (above - below) / (2 * step), rtol=1e-6)
            assert abs(slope) > 1e-5


@pytest.mark.parametrize(("num_samples", "batch_size"), [(12, 4), (10, 4), (5, 1)])
def test_minibatches_cover_the_data_once_per_epoch_in_new_orders(num_samples, batch_size):
    per_epoch = -(-num_samples // batch_size)
    draw = jax.jit(lambda step: get_epoch_batch(jax.random.key(0), step, num_samples, batch_size))
    orders = []
    for epoch in range(3):
        batches = [draw(epoch * per_epoch + step) for step in range(per_epoch)]
        index = np.concatenate([np.asarray(i)[np.asarray(w) > 0] for i, w in batches])
        np.testing.assert_array_equal(np.sort(index), np.arange(num_samples))
        orders.append(tuple(index))
    assert len(set(orders)) == 3


def test_matching_loss_closed_forms():
    start, target = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([2.0, 0.0, 3.0])
    assert matching_loss(start, start, target) == 1
    assert matching_loss(target, start, target) == 0
    np.testing.assert_allclose(matching_loss((start + target) / 2, start, target), 0.25)
    np.testing.assert_allclose(
        matching_loss(3 * target, start, target, distance="cosine"), 0, atol=1e-6
    )
    np.testing.assert_allclose(
        matching_loss(-target, start, target, distance="cosine"), 2, atol=1e-6
    )


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("end", ["drawn", "never"])
def test_segments_are_drawn_from_what_the_settings_allow(replacement, end):
    """Unit vectors as checkpoints show which checkpoints entered the mean, and how often."""
    trajectory = jnp.eye(11, 13)  # unit vectors, with room behind the last
    options = SynthesisOptions(
        trajectory_rounds=10,
        min_start=1,
        segment_length=4,
        target_replacement=replacement,
        target_end=end,
    )
    assert options.start_range == (1, 6)
    draws = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: draw_segment(options, trajectory, key)))
    starts, targets = draw(draws)
    starts, targets = np.asarray(starts), np.asarray(targets)
    counts = np.bincount(starts, minlength=8)
    assert counts[0] == counts[7] == 0
    assert abs(counts[1:7] - 4000 / 6).max() < 5 * np.sqrt(4000 / 6)

    np.testing.assert_allclose(targets.sum(1), 1, atol=1e-6)
    steps = np.stack([target[s : s + 6] for s, target in zip(starts, targets, strict=True)])
    assert (steps[:, 0] == 0).all() and (steps[:, 5] == 0).all()
    last = 4 if end == "drawn" else 3
    assert (steps[:, 1 : last + 1].max(0) > 0).all() and (steps[:, last + 1] == 0).all()
    # Uniform over the eligible checkpoints.
    np.testing.assert_allclose(steps[:, 1 : last + 1].mean(0), 1 / last, atol=0.03)
    # Distinct checkpoints have weights 1/2 or 1/3, both about as often.
    largest = steps.max(1)
    if replacement:
        assert (largest > 0.6).any()
    else:
        assert abs((largest > 0.4).mean() - 0.5) < 0.05
        np.testing.assert_allclose(largest, np.where(largest > 0.4, 1 / 2, 1 / 3), atol=1e-6)


def test_the_papers_target_is_the_end_and_two_checkpoints_before_it():
    """mean(w^(t+s), c_1, c_2), two different ones strictly between, t from 1 to L - s."""
    options = parse_config(SynthesisOptions, {"preset": "paper"})
    length, s = options.trajectory_rounds, options.segment_length
    trajectory = jnp.eye(length + 1)
    draw = jax.vmap(lambda key: draw_segment(options, trajectory, key))
    starts, targets = map(np.asarray, draw(jax.random.split(jax.random.key(0), 3000)))
    assert (starts.min(), starts.max()) == (1, length - s)
    third = np.float32(1 / 3)
    for t, target in zip(starts, targets, strict=True):
        np.testing.assert_allclose(target[t + s], third, rtol=1e-6)
        between = target[t + 1 : t + s]
        np.testing.assert_allclose(np.sort(between)[-2:], third, rtol=1e-6)
        assert np.count_nonzero(target) == 3
    shares = np.mean(
        [target[t + 1 : t + s] > 0 for t, target in zip(starts, targets, strict=True)], 0
    )
    np.testing.assert_allclose(shares, 1 / 2, atol=0.04)


# --- synthesis ---------------------------------------------------------------------------------

ROUNDS = 8


def real_trajectory():
    """A softmax regression trained on three Gaussian classes: 8 rounds of 10 SGD steps."""
    rng = np.random.default_rng(0)
    size = int(np.prod(SHAPE))
    centres = rng.normal(size=(CLASSES, size))
    labels = rng.integers(CLASSES, size=200)
    x = centres[labels] + rng.normal(size=(200, size))
    weights, rows = 0.1 * rng.normal(size=(size, CLASSES)), []
    for _ in range(ROUNDS + 1):
        rows.append(weights.ravel())
        for _ in range(10):
            weights = weights - 0.05 * x.T @ (softmax(x @ weights) - np.eye(CLASSES)[labels]) / 200
    return jnp.asarray(np.stack(rows), jnp.float32)


def traced(hyperparameters):
    """The values as a run has them: float32 by name."""
    return {name: np.float32(v) for name, v in dataclasses.asdict(hyperparameters).items()}


@functools.cache  # one compilation serves every test of the same settings
def make_toy(**overrides):
    settings = {
        "trajectory_rounds": ROUNDS,
        "segment_length": 2,
        "target_counts": (1, 2),
        "keep": "best",
        "inner_steps": 8,
        "label_init": 0.0,
        "samples_per_class": 3,
        "augment_strategy": "none",
    }
    apply_params, params = make_network("linear")
    _, unravel = ravel_pytree(params)
    synthesis = TrajectoryMatching(
        SynthesisOptions(**{**settings, **overrides}), apply_params, unravel, SHAPE, CLASSES
    )
    run = jax.jit(synthesis.run, static_argnames="num_iterations")
    hp = traced(SynthesisHyperParameters(step_size=0.3))
    state = synthesis.init(hp, jax.random.key(0))
    return synthesis, run, hp, state


@pytest.mark.slow
def test_synthesis_learns_to_reproduce_a_known_trajectory():
    synthesis, run, hp, state = make_toy()
    trajectory = real_trajectory()
    state, info = run(hp, state, trajectory, jax.random.key(1), 0, num_iterations=800)
    first, last = (
        mean_loss_by_start(jax.tree.map(lambda x: x[:50], info)),
        mean_loss_by_start(info, num_last=200),
    )
    assert set(last) == set(range(ROUNDS - 2 + 1))
    assert np.mean(list(first.values())) > 0.8
    assert max(last.values()) < 0.3  # 1 would be a network that does not move
    assert state.num_skipped == 0
    assert state.best_score < 0.15

    # The kept iterate's loss, measured anew at every start, is as low as its score says.
    best = synthesis.get_result(state)
    apply_params, params = make_network("linear")
    _, unravel = ravel_pytree(params)
    losses = []
    for start in range(ROUNDS - 1):
        end = unroll(
            apply_params,
            unravel,
            trajectory[start],
            best,
            jax.random.key(0),
            num_steps=8,
            augment_strategy="none",
        )
        target = trajectory[start + 1 : start + 3].mean(0)
        losses.append(matching_loss(end, trajectory[start], target))
    assert np.mean(losses) < 0.2
    untrained = matching_loss(trajectory[0], trajectory[0], trajectory[1])
    assert untrained == 1


@pytest.mark.slow
def test_iterations_run_in_pieces_are_bit_identical():
    _, run, hp, start = make_toy(inner_batch_size=4, augment_strategy="flip")
    trajectory, key = real_trajectory(), jax.random.key(7)
    whole, info = run(hp, start, trajectory, key, 0, num_iterations=12)
    state, infos = start, []
    for first in (0, 4, 8):
        state, part = run(hp, state, trajectory, key, first, num_iterations=4)
        infos.append(part)
    pieces = jax.tree.map(lambda *parts: np.concatenate(parts), *infos)
    for a, b in zip(jax.tree.leaves((whole, info)), jax.tree.leaves((state, pieces)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(whole.data.images, start.data.images)


def test_outer_updates_are_three_adams_with_their_own_rates():
    """Adam's first step has the length of its learning rate in every coordinate."""
    _, run, hp, start = make_toy()
    hp = traced(SynthesisHyperParameters(0.03, 0.002, 0.3, 0.01))
    state, _ = run(hp, start, real_trajectory(), jax.random.key(0), 0, num_iterations=1)
    moved = jax.tree.map(lambda new, old: np.abs(new - old), state.data, start.data)
    np.testing.assert_allclose(np.median(moved.images), 0.03, rtol=1e-3)
    np.testing.assert_allclose(np.median(moved.label_logits), 0.002, rtol=1e-3)
    np.testing.assert_allclose(moved.step_size, 0.01, rtol=1e-3)


def test_hyper_parameters_are_traced():
    _, run, hp, state = make_toy()
    trajectory = real_trajectory()
    compiled = []
    for lr in (0.01, 0.02, 0.03):
        hp = {**hp, "image_lr": np.float32(lr)}
        run(hp, state, trajectory, jax.random.key(0), 0, num_iterations=60)
        compiled.append(run._cache_size())
    assert compiled[0] == compiled[-1]


def test_a_non_finite_iteration_changes_nothing_and_is_counted():
    """Checkpoint 3 is broken: every iteration that meets it is skipped, the others go on."""
    synthesis, run, hp, start = make_toy()
    trajectory = real_trajectory().at[3].set(jnp.nan)
    state, info = run(hp, start, trajectory, jax.random.key(1), 0, num_iterations=60)
    skipped, starts = np.asarray(info.skipped), np.asarray(info.start)
    assert skipped[starts == 3].all() and not skipped[(starts == 0) | (starts > 3)].any()
    assert state.num_skipped == skipped.sum() > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.data))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.adam))
    assert all(np.isfinite(value) for value in mean_loss_by_start(info).values())
    # No start 3, no score; the result falls back to the last iterate.
    np.testing.assert_array_equal(synthesis.get_result(state).images, state.data.images)

    broken = jnp.full_like(trajectory, jnp.nan)
    state, info = run(hp, start, broken, jax.random.key(1), 0, num_iterations=60)
    assert state.num_skipped == 60 and mean_loss_by_start(info) == {}
    for a, b in zip(jax.tree.leaves(state.data), jax.tree.leaves(start.data), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_step_size_stays_between_floor_and_ceiling():
    bounds = {"step_size_floor": 0.25, "step_size_ceiling": 0.35}
    _, run, hp, state = make_toy(**bounds)
    # A rate this large throws the step size from one bound to the other.
    hp = {**hp, "step_size_lr": np.float32(5.0)}
    _, info = run(hp, state, real_trajectory(), jax.random.key(0), 0, num_iterations=30)
    steps = np.asarray(info.step_size)
    assert np.isin(steps, np.float32([0.25, 0.35])).all()


def test_an_exploding_image_rate_stays_finite():
    _, run, hp, state = make_toy()
    hp = {**hp, "image_lr": np.float32(1e20)}
    state, info = run(hp, state, real_trajectory(), jax.random.key(0), 0, num_iterations=60)
    assert np.asarray(info.skipped).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.data))


def test_a_trajectory_of_another_length_is_refused():
    _, run, hp, state = make_toy()
    with pytest.raises(ConfigError, match=r"trajectory = \(8, 60\)"):
        run(hp, state, real_trajectory()[1:], jax.random.key(0), 0, num_iterations=1)


def test_initial_labels_are_uniform_or_one_hot_in_class_order():
    _, _, _, state = make_toy()
    np.testing.assert_array_equal(state.data.label_logits, np.zeros((9, CLASSES)))
    _, _, _, state = make_toy(label_init=2.0)
    np.testing.assert_array_equal(
        state.data.label_logits, 2 * np.eye(CLASSES)[np.repeat(np.arange(CLASSES), 3)]
    )
    assert state.data.images.shape == (9, *SHAPE)
    assert state.data.step_size == np.float32(0.3)


# --- settings ----------------------------------------------------------------------------------


def test_presets_have_the_values_of_paper_and_code():
    paper, code = (parse_config(SynthesisOptions, {"preset": p}) for p in ("paper", "code"))
    rows = {  # setting: (paper, code)
        "trajectory_rounds": (20, 24),
        "segment_length": (5, 3),
        "target_counts": ((2,), (2, 3)),
        "num_iterations": (1000, 3000),
        "inner_steps": (20, 20),
        "loss_scaling": ("cross_entropy_over_classes",) * 2,
        "augment_strategy": ("color_crop_cutout_flip_scale_rotate",) * 2,
        "distance": ("normalized_l2",) * 2,
        "start_range": ((1, 15), (0, 21)),
        "target_end": ("always", "drawn"),
        "target_replacement": (False, True),
        "keep": ("last", "last"),
        "label_init": (0.0, 0.0),
    }
    for name, values in rows.items():
        assert (getattr(paper, name), getattr(code, name)) == values, name
    assert (paper.count_samples(10), code.count_samples(10)) == (150, 150)
    assert (paper.count_samples(100), code.count_samples(100)) == (150, 1500)
    rates = [SynthesisHyperParameters(**NUMERIC_PRESETS[p]) for p in ("paper", "code")]
    assert [dataclasses.astuple(values) for values in rates] == [
        (0.05, 0.05, 0.04, 1e-5),
        (0.05, 0.01, 0.04, 1e-5),
    ]
    assert dataclasses.replace(code, include_initial=False).start_range == (1, 21)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment_length": 0}, "segment_length = 0"),
        ({"segment_length": 25}, "min_start, max_start"),
        ({"min_start": 30}, "min_start, max_start"),
        ({"segment_length": 1, "target_end": "never"}, "segment_length = 1"),
        ({"target_counts": (4,), "target_replacement": False}, "target_counts"),
        ({"target_counts": ()}, "target_counts"),
        ({"num_samples": 5}, "exactly one"),
        ({"step_size_floor": 0.05}, "step_size = 0.04"),
        ({"distance": "normalised_l2"}, "did you mean 'normalized_l2'"),
        ({"loss_scaling": "ce"}, "loss_scaling"),
        ({"augment_strategy": "colour"}, "colour"),
        ({"keep": "first"}, "keep"),
        ({"inner_step": 3}, "did you mean 'inner_steps'"),
        ({"preset": "papre"}, "did you mean 'paper'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(SynthesisOptions, {"preset": "code", **settings})


# --- training on what was synthesised ----------------------------------------------------------


@pytest.mark.slow
def test_fine_tuning_is_a_loop_of_a_fresh_optimiser():
    apply_params, params = make_network("mlp")
    data = make_data()

    def loss(params):
        return soft_cross_entropies(apply_params(params, data.images), data.label_logits).mean()

    for make_optimizer, lr in ((optax.adam, 0.02), (optax.sgd, 0.5)):
        tune = jax.jit(
            lambda lr, make_optimizer=make_optimizer: fine_tune(
                apply_params,
                params,
                data,
                jax.random.key(0),
                optimizer=make_optimizer(lr),
                epochs=5,
                augment_strategy="none",
            )
        )
        tx = make_optimizer(lr)
        expected, state = params, tx.init(params)
        for _ in range(5):
            updates, state = tx.update(jax.grad(loss)(expected), state)
            expected = optax.apply_updates(expected, updates)
        tuned = tune(lr)
        for name in params:
            np.testing.assert_allclose(tuned[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("batch_size", "steps"), [(4, 3), (10, 1), (256, 1)])
def test_an_epoch_of_fine_tuning_sees_every_sample_once(batch_size, steps):
    apply_params, params = make_network("linear")
    data, seen = make_data(num_samples=10), []

    def recording_apply(params, images):
        jax.debug.callback(lambda x: seen.append(x.sum((1, 2, 3))), images, ordered=True)
        return apply_params(params, images)

    tuned = fine_tune(
        recording_apply,
        params,
        data,
        jax.random.key(0),
        optimizer=optax.adam(0.1),
        epochs=2,
        batch_size=batch_size,
        augment_strategy="none",
    )
    jax.block_until_ready(tuned)
    jax.effects_barrier()
    assert len(seen) == 2 * steps
    for epoch in (seen[:steps], seen[steps:]):
        used = np.concatenate(epoch)[:10]  # behind them are fillers of weight 0
        expected = np.asarray(data.images).sum((1, 2, 3))
        np.testing.assert_allclose(np.sort(used), np.sort(expected), rtol=1e-5)


def test_training_from_scratch_decays_once_and_uses_momentum_and_weight_decay():
    apply_params, params = make_network("mlp")
    data = make_data()

    def loss(params):
        return soft_cross_entropies(apply_params(params, data.images), data.label_logits).mean()

    trained = train_from_scratch(
        apply_params, params, data, jax.random.key(0), epochs=9, augment_strategy="none"
    )
    expected = params
    buffer = jax.tree.map(np.zeros_like, params)
    for epoch in range(9):
        lr = 0.7 if epoch <= 9 // 2 + 1 else 0.07
        if epoch == 9 // 2 + 2:
            buffer = jax.tree.map(np.zeros_like, params)
        gradient = jax.grad(loss)(expected)
        buffer = jax.tree.map(lambda b, g, w: 0.9 * b + g + 5e-4 * w, buffer, gradient, expected)
        expected = jax.tree.map(lambda w, b, lr=lr: w - lr * b, expected, buffer)
    for name in params:
        np.testing.assert_allclose(trained[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_training_from_scratch_fits_separable_synthetic_data():
    labels = np.repeat(np.arange(CLASSES), 4)
    images = np.random.default_rng(0).normal(size=(12, *SHAPE)).astype(np.float32)
    data = SyntheticData(jnp.asarray(images), 10.0 * jnp.eye(CLASSES)[labels], jnp.float32(0.3))
    apply_params, _ = make_network("mlp")
    inits = [make_network("mlp", seed)[1] for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inits)
    trained = jax.vmap(
        lambda params, key: train_from_scratch(
            apply_params, params, data, key, epochs=101, augment_strategy="flip"
        )
    )(stacked, jax.random.split(jax.random.key(0), 3))
    for index in range(3):
        network = jax.tree.map(lambda leaf, index=index: leaf[index], trained)
        assert (np.argmax(apply_params(network, data.images), 1) == labels).all()


# --- pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_synthesis_is_drawn_with_a_row_per_class_and_a_column_per_iteration(tmp_path, channels):
    from PIL import Image

    rng = np.random.default_rng(0)
    snapshots = {
        iteration: SyntheticData(
            images=rng.normal(size=(6, 8, 8, channels)),
            label_logits=5 * np.eye(CLASSES)[[0, 0, 1, 1, 2, 2]],
            step_size=np.float32(0.04),
        )
        for iteration in (100, 0, 10)
    }
    sizes = []
    for samples in ([0], None):
        path = tmp_path / "synthesis.png"
        plot_synthesis(snapshots, path, samples=samples)
        with Image.open(path) as picture:
            sizes.append(picture.size)
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] - sizes[0][1] == 2 * 1.1 * 150
    with pytest.raises(ConfigError, match="samples"):
        plot_synthesis(snapshots, path, samples=[6])
    with pytest.raises(ConfigError, match="snapshots"):
        plot_synthesis({}, path)
