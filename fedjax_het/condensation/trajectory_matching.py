"""Trajectory matching: synthetic data that, trained on, moves a network as real data moved it.

The server of DynaFed keeps the global models of its first rounds. `make_synthesis` learns images,
soft labels and a step size such that a few SGD steps on them from checkpoint t end near the
checkpoints that follow t.

Sources: Pi et al., "DynaFed: Tackling Client Data Heterogeneity with Global Dynamics" (CVPR 2023)
and its public code; Cazenavette et al., "Dataset Distillation by Matching Training Trajectories"
(MTT, CVPR 2022), from which the code descends.

Networks enter as in `unrolling`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedjax_het.condensation.mixed_mode import DifferentiationMode, mixed_mode
from fedjax_het.condensation.synthesis_config import (
    SynthesisHyperParameterValues,
    SynthesisOptions,
    count_eligible_targets,
    validate_targets,
)
from fedjax_het.condensation.synthetic_data import ApplyParams, SyntheticData
from fedjax_het.condensation.unrolling import Unravel, matching_loss, unroll
from fedjax_het.utils.errors import require

_ADAM = optax.scale_by_adam()


def draw_segment(
    key: Array,
    trajectory: Array,
    *,
    first_start: int,
    last_start: int,
    segment_length: int,
    target_counts: tuple[int, ...] = (2, 3),
    replacement: bool = True,
    end: str = "drawn",
) -> tuple[Array, Array]:
    """Draw where a segment of the trajectory `[T + 1, P]` starts, and its target.

    The start is uniform over `first_start .. last_start`, both included. The target is the mean of
    k checkpoints out of the `segment_length` that follow the start, k being uniform over
    `target_counts`. The last of these is one of them where `end` is "drawn", in every mean besides
    the k where it is "always", and in none where it is "never".

    Returns: start `[]` int, target `[P]`.
    Errors: ConfigError: more checkpoints asked for than there are, or a segment beyond the end.
    """
    validate_targets(target_counts, segment_length, replacement, end)
    require(
        0 <= first_start <= last_start <= len(trajectory) - 1 - segment_length,
        "first_start, last_start",
        (first_start, last_start),
        f"0 <= first_start <= last_start <= {len(trajectory) - 1 - segment_length}, so that a "
        f"segment of {segment_length} fits into {len(trajectory)} checkpoints",
    )
    start_key, count_key, target_key = jax.random.split(key, 3)
    start = jax.random.randint(start_key, (), first_start, last_start + 1)
    count = jax.random.choice(count_key, jnp.asarray(target_counts))
    num_eligible, max_count = count_eligible_targets(segment_length, end), max(target_counts)
    if replacement:
        steps = jax.random.randint(target_key, (max_count,), 1, num_eligible + 1)
    else:
        steps = 1 + jax.random.permutation(target_key, num_eligible)[:max_count]
    is_member = jnp.arange(max_count) < count
    if end == "always":
        steps = jnp.append(steps, segment_length)
        is_member = jnp.append(is_member, True)
    weights = is_member / is_member.sum()
    target = jnp.einsum("k,kp->p", weights, trajectory[start + steps], precision="highest")
    return start, target


class TrajectorySynthesisState(NamedTuple):
    """State between outer iterations.

    Attributes:
      data: the current iterate.
      adam: first and second moments of Adam for each leaf of `data`.
      latest_loss: `[L + 1]` last matching loss at each start; infinite where not drawn yet.
      best_data, best_score: the iterate of the lowest score. One loss says little about an
        iterate, for it depends on the start that was drawn (late segments are harder), so the
        score is the mean of `latest_loss` over all starts: each counts once, however often it was
        drawn, and the score exists once all have been. It averages over about as many past
        iterations as there are starts.
      num_skipped: `[]` int, iterations whose loss or gradient was not finite.
    """

    data: SyntheticData
    adam: optax.OptState
    latest_loss: Array
    best_data: SyntheticData
    best_score: Array
    num_skipped: Array


class SynthesisLog(NamedTuple):
    """One entry per outer iteration, `[N]` each.

    Attributes:
      matching_loss: J of the iterate before its update.
      start: round at which the segment started.
      skipped: True where the loss or a gradient was not finite and nothing was updated.
      step_size: after the update.
    """

    matching_loss: Array
    start: Array
    skipped: Array
    step_size: Array


class SynthesisFunctions(NamedTuple):
    """Pure functions; see `make_synthesis`."""

    init: Callable[[SynthesisHyperParameterValues, Array], TrajectorySynthesisState]
    run: Callable[..., tuple[TrajectorySynthesisState, SynthesisLog]]
    result: Callable[[TrajectorySynthesisState], SyntheticData]


def make_synthesis(
    options: SynthesisOptions,
    apply_params: ApplyParams,
    unravel: Unravel,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    differentiation: DifferentiationMode = mixed_mode,
) -> SynthesisFunctions:
    """Data synthesis of DynaFed (Algorithm 1) for one network and image shape `(H, W, C)`.

    Returns three functions, to be jitted by the caller:

    * `init(hp, key) -> state`: images from N(0, 1), label logits `label_init` x one-hot (samples
      ordered by class).
    * `run(hp, state, trajectory, key, first_iteration, *, num_iterations) -> (state, info)`:
      outer iterations `first_iteration, first_iteration + 1, ...` on the trajectory
      `[L + 1, P]`, row 0 the initial model and row c the average after round c. Iteration n draws
      from `fold_in(key, n)`, so running in pieces, or resuming, gives what one piece gives. Only
      `num_iterations` is static.
    * `result(state) -> SyntheticData`: what `config.keep` asks for.

    Each iteration draws a segment, unrolls `inner_steps` from its start, and moves images, label
    logits and step size by Adam against the gradient of the matching loss. Beyond the code: the
    step size is clipped to `[step_size_floor, step_size_ceiling]`, and an iteration whose loss or
    gradient is not finite changes nothing and is counted. Upstream, the learned step size is known
    to turn negative or explode into NaN.

    Errors: ConfigError from `run`, while tracing, if the trajectory does not fit the config.
    Cost: per iteration that of differentiating `unroll`.
    """
    unroll_fn = partial(
        unroll,
        apply_params,
        unravel,
        num_steps=options.inner_steps,
        batch_size=options.inner_batch_size,
        augment_strategy=options.augment_strategy,
        loss_scaling=options.loss_scaling,
        differentiation=differentiation,
    )
    return SynthesisFunctions(
        init=partial(_init_state, options, image_shape, num_classes),
        run=partial(_run_iterations, options, unroll_fn),
        result=partial(_select_result, options),
    )


def _init_state(
    options: SynthesisOptions,
    image_shape: tuple[int, int, int],
    num_classes: int,
    hp: SynthesisHyperParameterValues,
    key: Array,
) -> TrajectorySynthesisState:
    num_samples = options.count_samples(num_classes)
    classes = jnp.arange(num_samples) * num_classes // num_samples
    data = SyntheticData(
        images=jax.random.normal(key, (num_samples, *image_shape), jnp.float32),
        label_logits=options.label_init * jax.nn.one_hot(classes, num_classes),
        step_size=jnp.asarray(hp.step_size, jnp.float32),
    )
    return TrajectorySynthesisState(
        data=data,
        adam=_ADAM.init(data),
        latest_loss=jnp.full(options.trajectory_rounds + 1, jnp.inf),
        best_data=jax.tree.map(jnp.copy, data),  # a donated state may not hold a buffer twice
        best_score=jnp.asarray(jnp.inf),
        num_skipped=jnp.asarray(0, jnp.int32),
    )


def _run_iterations(
    options: SynthesisOptions,
    unroll_fn: Callable[..., Array],
    hp: SynthesisHyperParameterValues,
    state: TrajectorySynthesisState,
    trajectory: Array,
    key: Array,
    first_iteration: int | Array,
    *,
    num_iterations: int,
) -> tuple[TrajectorySynthesisState, SynthesisLog]:
    rounds = options.trajectory_rounds
    require(
        trajectory.ndim == 2 and len(trajectory) == rounds + 1,
        "trajectory",
        trajectory.shape,
        f"[{rounds + 1}, P]: the initial model and the averages of {rounds} rounds",
    )

    def run_iteration(state: TrajectorySynthesisState, iteration_index: Array):
        return _run_iteration(
            options, unroll_fn, hp, trajectory, state, jax.random.fold_in(key, iteration_index)
        )

    return lax.scan(run_iteration, state, first_iteration + jnp.arange(num_iterations))


def _run_iteration(
    options: SynthesisOptions,
    unroll_fn: Callable[..., Array],
    hp: SynthesisHyperParameterValues,
    trajectory: Array,
    state: TrajectorySynthesisState,
    key: Array,
) -> tuple[TrajectorySynthesisState, SynthesisLog]:
    """Draw a segment, and move the data against the gradient of its matching loss."""
    segment_key, unroll_key = jax.random.split(key)
    first_start, last_start = options.start_range
    start, target = draw_segment(
        segment_key,
        trajectory,
        first_start=first_start,
        last_start=last_start,
        segment_length=options.segment_length,
        target_counts=options.target_counts,
        replacement=options.target_replacement,
        end=options.target_end,
    )

    def loss(data: SyntheticData) -> Array:
        end = unroll_fn(trajectory[start], data, unroll_key)
        return matching_loss(end, trajectory[start], target, distance=options.distance)

    value, gradient = jax.value_and_grad(loss)(state.data)
    is_finite = jnp.isfinite(value)
    for leaf in gradient:
        is_finite &= jnp.isfinite(leaf).all()
    direction, adam = _ADAM.update(gradient, state.adam)
    new_data = _descend(options, hp, state.data, direction)
    new_state = _update_state(options, state, start, value, is_finite, new_data, adam)
    return new_state, SynthesisLog(value, start, ~is_finite, new_state.data.step_size)


def _descend(
    options: SynthesisOptions,
    hp: SynthesisHyperParameterValues,
    data: SyntheticData,
    direction: SyntheticData,
) -> SyntheticData:
    """The data after a step against Adam's direction, each part at its own learning rate."""
    step_size = data.step_size - hp.step_size_lr * direction.step_size
    return SyntheticData(
        images=data.images - hp.image_lr * direction.images,
        label_logits=data.label_logits - hp.label_lr * direction.label_logits,
        step_size=jnp.clip(step_size, options.step_size_floor, options.step_size_ceiling),
    )


def _update_state(
    options: SynthesisOptions,
    state: TrajectorySynthesisState,
    start: Array,
    loss: Array,
    is_finite: Array,
    new_data: SyntheticData,
    adam: optax.OptState,
) -> TrajectorySynthesisState:
    """The state after an iteration whose data had this loss at this start; as it was but for the
    count where something is not `is_finite`."""

    def where(condition, new, old):
        return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)

    latest_loss = where(is_finite, state.latest_loss.at[start].set(loss), state.latest_loss)
    first_start, last_start = options.start_range
    score = latest_loss[first_start : last_start + 1].mean()
    is_better = is_finite & (score < state.best_score)
    return TrajectorySynthesisState(
        data=where(is_finite, new_data, state.data),
        adam=where(is_finite, adam, state.adam),
        latest_loss=latest_loss,
        best_data=where(is_better, state.data, state.best_data),
        best_score=jnp.where(is_better, score, state.best_score),
        num_skipped=state.num_skipped + ~is_finite,
    )


def _select_result(options: SynthesisOptions, state: TrajectorySynthesisState) -> SyntheticData:
    if options.keep == "last":
        return state.data
    # Before every start has been drawn there is no score, and nothing better than the last.
    has_score = jnp.isfinite(state.best_score)
    return jax.tree.map(lambda b, d: jnp.where(has_score, b, d), state.best_data, state.data)


def mean_loss_by_start(info: SynthesisLog, *, num_last: int | None = None) -> dict[int, float]:
    """Mean matching loss J at each start that was drawn in the `last` iterations (default: all).

    On the host; skipped iterations do not count.
    """
    losses, starts, skipped = (
        np.asarray(x)[-num_last if num_last else None :]
        for x in (info.matching_loss, info.start, info.skipped)
    )
    return {
        int(start): float(losses[(starts == start) & ~skipped].mean())
        for start in np.unique(starts[~skipped])
    }
