"""Trajectory matching: the draw of segments, the settings, and a known trajectory."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import RunSpec
from fedjax_het.analysis.figures.synthetic_images import plot_synthesis
from fedjax_het.condensation import (
    SynthesisHyperParameters,
    SynthesisOptions,
    SyntheticData,
    SyntheticTask,
    TrajectoryMatching,
    matching_loss,
    unroll,
)
from fedjax_het.condensation.trajectory_matching import (
    NUMERIC_PRESETS,
    compute_path,
    draw_segment,
    mean_loss_by_start,
)
from fedjax_het.utils.config import parse_config
from fedjax_het.utils.errors import ConfigError

CLASSES = 3
SHAPE = (5, 4, 1)


def apply_params(weights, images):
    return images.reshape(len(images), -1) @ weights


def unravel(vector):
    return vector.reshape(-1, CLASSES)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("end", ["drawn", "never"])
def test_draw_segment_distribution(replacement, end):
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


def test_draw_segment_paper_preset():
    """mean(w^(t+s), c_1, c_2), two different ones strictly between, t from 1 to L - s."""
    options = parse_config(SynthesisOptions, {"preset": "paper"})
    length, s = options.trajectory_rounds, options.segment_length
    trajectory = jnp.eye(length + 1)
    draw = jax.jit(jax.vmap(lambda key: draw_segment(options, trajectory, key)))
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


def test_initial_max_start_grows():
    options = SynthesisOptions(trajectory_rounds=12, segment_length=2, initial_max_start=1)
    path, keys = jnp.eye(13), jax.random.split(jax.random.key(0), 500)
    draw = jax.jit(jax.vmap(lambda key, done: draw_segment(options, path, key, done)[0], (0, None)))
    latest_starts = [int(draw(keys, done).max()) for done in (0.0, 0.5, 1.0, 2.0)]
    assert latest_starts == [1, 6, 10, 10]
    assert {int(draw(keys, done).min()) for done in (0.0, 1.0)} == {0}


def test_paths_equal_formulas():
    trajectory = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    options = SynthesisOptions(trajectory_rounds=6, segment_length=2, min_start=2, max_start=None)
    average = dataclasses.replace(options, path="average", path_decay=0.3)
    expected, rows = trajectory[0].astype(np.float64), []
    for row in trajectory:
        expected = 0.3 * expected + 0.7 * row
        rows.append(expected)
    np.testing.assert_allclose(compute_path(average, jnp.asarray(trajectory)), rows, rtol=1e-5)
    line = compute_path(dataclasses.replace(options, path="line"), jnp.asarray(trajectory))
    np.testing.assert_allclose(line[:3], trajectory[:3], rtol=1e-5)
    np.testing.assert_allclose(line[4], (trajectory[2] + trajectory[6]) / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(line[6], trajectory[6], rtol=1e-5, atol=1e-6)
    assert (compute_path(options, jnp.asarray(trajectory)) == trajectory).all()


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
    options = SynthesisOptions(**{**settings, **overrides})
    task = SyntheticTask(apply_params, options.augment_strategy, options.loss_scaling)
    synthesis = TrajectoryMatching(options, task, unravel, SHAPE, CLASSES)

    @functools.partial(jax.jit, static_argnames="num_iterations")
    def run(hp, state, trajectory, key, first, *, num_iterations):
        def run_iteration(state, n):
            return synthesis.run_iteration(hp, state, trajectory, jax.random.fold_in(key, n))

        return jax.lax.scan(run_iteration, state, first + jnp.arange(num_iterations))

    hp = traced(SynthesisHyperParameters(step_size=0.3))
    state = synthesis.init(hp, jax.random.key(0))
    return synthesis, run, hp, state


@pytest.mark.slow
def test_synthesis_reproduces_known_trajectory():
    synthesis, run, hp, state = make_toy()
    trajectory, key = real_trajectory(), jax.random.key(1)
    state, info = run(hp, state, trajectory, key, 0, num_iterations=800)
    first = mean_loss_by_start(jax.tree.map(lambda x: x[:50], info))
    last = mean_loss_by_start(jax.tree.map(lambda x: x[-200:], info))
    assert set(last) == set(range(ROUNDS - 2 + 1))
    assert np.mean(list(first.values())) > 0.8
    assert max(last.values()) < 0.3  # 1 would be a network that does not move
    assert state.num_skipped == 0
    assert state.best_score < 0.15

    # The kept iterate's loss, measured anew at every start, is as low as its score says.
    best = synthesis.get_result(state)
    losses = []
    for start in range(ROUNDS - 1):
        end = unroll(synthesis.task, unravel, trajectory[start], best, key, num_steps=8)
        target = trajectory[start + 1 : start + 3].mean(0)
        losses.append(matching_loss(end, trajectory[start], target))
    assert np.mean(losses) < 0.2


@pytest.mark.slow
def test_synthesis_in_several_calls_is_bit_equal():
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
    assert not np.array_equal(whole.data.inputs, start.data.inputs)


def test_synthesis_updates_with_own_learning_rates():
    """Adam's first step has the length of its learning rate in every coordinate."""
    _, run, hp, start = make_toy()
    hp = traced(SynthesisHyperParameters(0.03, 0.002, 0.3, 0.01))
    state, _ = run(hp, start, real_trajectory(), jax.random.key(0), 0, num_iterations=1)
    moved = jax.tree.map(lambda new, old: np.abs(new - old), state.data, start.data)
    np.testing.assert_allclose(np.median(moved.inputs), 0.03, rtol=1e-3)
    np.testing.assert_allclose(np.median(moved.label_logits), 0.002, rtol=1e-3)
    np.testing.assert_allclose(moved.step_size, 0.01, rtol=1e-3)


def test_synthesis_hyperparameters_are_traced():
    _, run, hp, state = make_toy()
    trajectory = real_trajectory()
    compiled = set()
    for lr in (0.01, 0.02):
        hp = {**hp, "image_lr": np.float32(lr)}
        run(hp, state, trajectory, jax.random.key(0), 0, num_iterations=60)
        compiled.add(run._cache_size())
    assert len(compiled) == 1


def test_synthesis_skips_nonfinite_iterations():
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
    np.testing.assert_array_equal(synthesis.get_result(state).inputs, state.data.inputs)

    broken = jnp.full_like(trajectory, jnp.nan)
    state, info = run(hp, start, broken, jax.random.key(1), 0, num_iterations=60)
    assert state.num_skipped == 60 and mean_loss_by_start(info) == {}
    for a, b in zip(jax.tree.leaves(state.data), jax.tree.leaves(start.data), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("starts", ["path", "rounds"])
def test_starts_of_segments(starts):
    """The loss of an iteration is the loss from the start and to the target of its draw."""
    synthesis, _, hp, state = make_toy(path="line", starts=starts, inner_momentum=0.5)
    trajectory, key = jnp.asarray(real_trajectory()), jax.random.key(1)
    _, log = jax.jit(synthesis.run_iteration)(hp, state, trajectory, key)
    path = compute_path(synthesis.options, trajectory)
    segment_key, unroll_key = jax.random.split(key)
    start, target = jax.jit(partial(draw_segment, synthesis.options))(path, segment_key)
    assert 0 < start < ROUNDS - 2  # the path differs from the rounds between its ends
    model = (path if starts == "path" else trajectory)[start]
    steps = {"num_steps": synthesis.options.inner_steps, "momentum": 0.5}
    end = jax.jit(partial(unroll, synthesis.task, unravel, **steps))(model, state.data, unroll_key)
    np.testing.assert_allclose(log.matching_loss, matching_loss(end, model, target), rtol=1e-5)


def test_synthesis_clips_step_size():
    _, run, hp, state = make_toy(step_size_floor=0.25, step_size_ceiling=0.35)
    # A rate this large throws the step size from one bound to the other.
    hp = {**hp, "step_size_lr": np.float32(5.0)}
    _, info = run(hp, state, real_trajectory(), jax.random.key(0), 0, num_iterations=30)
    assert np.isin(info.step_size, np.float32([0.25, 0.35])).all()


def test_synthesis_with_huge_learning_rate_stays_finite():
    _, run, hp, state = make_toy()
    hp = {**hp, "image_lr": np.float32(1e20)}
    state, info = run(hp, state, real_trajectory(), jax.random.key(0), 0, num_iterations=60)
    assert np.asarray(info.skipped).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.data))


def test_synthesis_rejects_trajectory_length():
    _, run, hp, state = make_toy()
    with pytest.raises(ConfigError, match=r"trajectory = \(8, 60\)"):
        run(hp, state, real_trajectory()[1:], jax.random.key(0), 0, num_iterations=1)


def test_synthesis_initial_labels():
    _, _, _, state = make_toy()
    np.testing.assert_array_equal(state.data.label_logits, np.zeros((9, CLASSES)))
    _, _, _, state = make_toy(label_init=2.0)
    np.testing.assert_array_equal(
        state.data.label_logits, 2 * np.eye(CLASSES)[np.repeat(np.arange(CLASSES), 3)]
    )
    assert state.data.inputs.shape == (9, *SHAPE)
    assert state.data.step_size == np.float32(0.3)


# --- settings ----------------------------------------------------------------------------------


def test_synthesis_presets():
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


def test_improved_preset_is_paper_with_other_inner_training():
    paper, improved = (parse_config(SynthesisOptions, {"preset": p}) for p in ("paper", "improved"))
    expected = dataclasses.replace(paper, preset="improved", differentiation="first_order")
    assert improved == expected
    hp = RunSpec("dynafed", "digits", options={"preset": "improved"}).resolved().hp
    names = ("step_size", "step_size_lr", "image_lr", "label_lr", "fine_tune_lr")
    assert [hp[name] for name in names] == [0.4, 1e-3, 0.02, 0.05, 3e-4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment_length": 0}, "segment_length = 0"),
        ({"segment_length": 25}, r"segment_length, min_start = \(24, 25, 0\): expected"),
        ({"min_start": 30}, r"segment_length, min_start = \(24, 3, 30\): expected"),
        ({"min_start": 5, "max_start": 4}, r"min_start, max_start = \(5, 4\): expected"),
        ({"segment_length": 1, "target_end": "never"}, "segment_length = 1"),
        ({"target_counts": (4,), "target_replacement": False}, "target_counts"),
        ({"target_counts": ()}, "target_counts"),
        ({"num_samples": 5}, "exactly one"),
        ({"step_size_floor": 20.0}, "step_size_floor = 20.0: expected at most step_size_ceiling"),
        ({"distance": "normalised_l2"}, "did you mean 'normalized_l2'"),
        ({"loss_scaling": "ce"}, "loss_scaling"),
        ({"augment_strategy": "colour"}, "colour"),
        ({"keep": "first"}, "keep"),
        ({"inner_step": 3}, "did you mean 'inner_steps'"),
        ({"preset": "papre"}, "did you mean 'paper'"),
    ],
)
def test_synthesis_options_reject_invalid_values(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(SynthesisOptions, {"preset": "code", **settings})


# --- pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_plot_synthesis_layout(channels):
    rng = np.random.default_rng(0)
    snapshots = {
        iteration: SyntheticData(
            inputs=rng.normal(size=(6, 8, 8, channels)),
            label_logits=5 * np.eye(CLASSES)[[0, 0, 1, 1, 2, 2]],
            step_size=np.float32(0.04),
        )
        for iteration in (100, 0, 10)
    }
    one, all_classes = (plot_synthesis(snapshots, num_samples=n).get_size_inches() for n in (1, 5))
    np.testing.assert_allclose(all_classes - one, (0, 2 * 1.1))
    with pytest.raises(ConfigError, match="snapshots"):
        plot_synthesis({})
