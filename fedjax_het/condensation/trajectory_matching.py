"""Trajectory matching: synthetic data on which training moves a network as real data did.

DynaFed's server stores the global models of its first rounds. `make_synthesis` learns images, soft
labels and a step size so that a few SGD steps on them from checkpoint t end near the checkpoints
after t.

Sources: Pi et al., "DynaFed: Tackling Client Data Heterogeneity with Global Dynamics" (CVPR 2023)
and its public code; Cazenavette et al., "Dataset Distillation by Matching Training Trajectories"
(MTT, CVPR 2022), from which the code descends.

A network is a pair of functions `apply_params` and `unravel`, see `unrolling`.
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
    """Draw the start of a trajectory segment and its target.

    The start is uniform over `first_start .. last_start`, both included. The target is the mean of
    k checkpoints out of the `segment_length` checkpoints after the start; k is uniform over
    `target_counts`.

    Args:
      key: key of the draws.
      trajectory: checkpoints, `[T + 1, P]`.
      first_start: first possible start.
      last_start: last possible start.
      segment_length: maximum distance of the target's checkpoints from the start.
      target_counts: possible numbers k of checkpoints.
      replacement: whether to draw the checkpoints with replacement.
      end: role of the segment's last checkpoint. "drawn": it is one of the candidates. "always":
        every mean includes it in addition to the k drawn ones. "never": no mean includes it.

    Returns:
      The start, `[]` int, and the target, `[P]`.

    Raises:
      ConfigError: if `target_counts` exceeds the number of candidates, or a segment exceeds the
        trajectory.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import draw_segment
      >>> options = {"first_start": 0, "last_start": 2, "segment_length": 3}
      >>> start, target = draw_segment(jax.random.key(0), jnp.zeros((6, 5)), **options)
      >>> target.shape
      (5,)
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
    """State of the synthesis between outer iterations.

    Attributes:
      data: the current iterate.
      adam: Adam's first and second moments for each leaf of `data`.
      latest_loss: `[L + 1]`, last matching loss at each start; infinite where not drawn yet.
      best_data: the iterate of the lowest score.
      best_score: `[]`, the lowest score. One loss alone is not a good score of an iterate, since it
        depends on the start that was drawn (late segments are harder). The score is therefore the
        mean of `latest_loss` over all starts. Each start counts once, however often it was drawn,
        and the score exists once all starts have been drawn. It averages over about as many past
        iterations as there are starts.
      num_skipped: `[]` int, iterations whose loss or gradient was not finite.

    Example:
      >>> import jax
      >>> from fedjax_het.condensation import SynthesisHyperParameterValues, SynthesisOptions, make_synthesis
      >>> options = SynthesisOptions(trajectory_rounds=4, samples_per_class=2)
      >>> functions = make_synthesis(options, None, None, image_shape=(4, 4, 1), num_classes=3)
      >>> values = SynthesisHyperParameterValues(0.05, 0.01, 1e-5, 0.04)
      >>> state = functions.init(values, jax.random.key(0))
      >>> state.data.images.shape, state.latest_loss.shape
      ((6, 4, 4, 1), (5,))
    """

    data: SyntheticData
    adam: optax.OptState
    latest_loss: Array
    best_data: SyntheticData
    best_score: Array
    num_skipped: Array


class SynthesisLog(NamedTuple):
    """Log of the synthesis with one entry per outer iteration, `[N]` each.

    Attributes:
      matching_loss: matching loss J of the iterate before its update.
      start: round at which the segment started.
      skipped: True where the loss or a gradient was not finite and nothing was updated.
      step_size: learned step size after the update.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.condensation import SynthesisLog, mean_loss_by_start
      >>> skipped, step_size = np.zeros(3, bool), np.full(3, 0.04)
      >>> log = SynthesisLog(np.array([1.0, 0.5, 0.7]), np.array([0, 1, 0]), skipped, step_size)
      >>> mean_loss_by_start(log, num_last=2)
      {0: 0.7, 1: 0.5}
    """

    matching_loss: Array
    start: Array
    skipped: Array
    step_size: Array


class SynthesisFunctions(NamedTuple):
    """The pure functions of the synthesis, for the caller to jit; see `make_synthesis`.

    Attributes:
      init: `init(hp, key) -> state`. Images are drawn from N(0, 1); label logits are `label_init` *
        one-hot, with samples ordered by class.
      run: `run(hp, state, trajectory, key, first_iteration, *, num_iterations) -> (state, log)`
        runs the outer iterations `first_iteration, first_iteration + 1, ...`. Rows of the trajectory
        `[L + 1, P]` are the initial model (row 0) and the average after round c (row c). Iteration
        n draws from `fold_in(key, n)`, so several calls, or a resumed run, give the same result as
        one call. Only `num_iterations` is static.
      result: `result(state) -> SyntheticData`, the iterate that `SynthesisOptions.keep` selects.

    Example:
      >>> from fedjax_het.condensation import SynthesisFunctions
      >>> SynthesisFunctions._fields
      ('init', 'run', 'result')
    """

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
    """Build DynaFed's data synthesis (Algorithm 1) for one network and image shape.

    Each iteration draws a segment, unrolls `inner_steps` from its start, and moves images, label
    logits and step size by Adam against the gradient of the matching loss.

    Additions to the public code: the step size is clipped to
    `[step_size_floor, step_size_ceiling]`, and an iteration whose loss or gradient is not finite
    changes nothing and is counted. In the public code the learned step size can become negative or
    NaN.

    Cost: per iteration, the cost of differentiating `unroll`.

    Args:
      options: static settings.
      apply_params: `(params, images) -> logits [B, C]`.
      unravel: `vector [P] -> params`.
      image_shape: height, width and channels.
      num_classes: number of classes.
      differentiation: how to differentiate an inner step's gradient, see `unroll`.

    Returns:
      The functions `init`, `run` and `result`. While it is traced, `run` raises ConfigError if the
      trajectory does not fit the options.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import SynthesisHyperParameterValues, SynthesisOptions, make_synthesis
      >>> options = SynthesisOptions(
      ...     trajectory_rounds=4, samples_per_class=2, inner_steps=2, augment_strategy="none"
      ... )
      >>> functions = make_synthesis(
      ...     options,
      ...     lambda w, images: images.reshape(len(images), -1) @ w,
      ...     lambda vector: vector.reshape(4, 3),
      ...     image_shape=(2, 2, 1),
      ...     num_classes=3,
      ... )
      >>> values, key = SynthesisHyperParameterValues(0.05, 0.01, 1e-5, 0.04), jax.random.key(0)
      >>> trajectory = jnp.arange(5.0)[:, None] * jnp.ones(12)
      >>> state = functions.init(values, key)
      >>> state, log = functions.run(values, state, trajectory, key, 0, num_iterations=2)
      >>> log.matching_loss.shape, functions.result(state).images.shape
      ((2,), (6, 2, 2, 1))
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
    """Return the initial state: images from N(0, 1) and label logits times one-hot, by class."""
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
        best_data=jax.tree.map(jnp.copy, data),  # a donated state must not contain a buffer twice
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
    """Run outer iterations; the trajectory must have the shape `[L + 1, P]`."""
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
    """Draw a segment and move the data against the gradient of its matching loss."""
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
    """Return the data after a step against Adam's direction, each part at its own learning rate."""
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
    """Return the state after an iteration with this start and loss.

    If the loss or gradient is not finite, only the count of skipped iterations changes.
    """

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
    """Return the iterate that `options.keep` selects."""
    if options.keep == "last":
        return state.data
    # Until every start has been drawn there is no score; the result is then the last iterate.
    has_score = jnp.isfinite(state.best_score)
    return jax.tree.map(
        lambda best, last: jnp.where(has_score, best, last), state.best_data, state.data
    )


def mean_loss_by_start(log: SynthesisLog, *, num_last: int | None = None) -> dict[int, float]:
    """Average the matching loss J at each start, on the host.

    Args:
      log: log of `SynthesisFunctions.run`; skipped iterations are left out.
      num_last: number of last iterations to use; None: all.

    Returns:
      Mean loss by start, for each start that was drawn.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.condensation import SynthesisLog, mean_loss_by_start
      >>> skipped, step_size = np.array([False, False, True]), np.full(3, 0.04)
      >>> log = SynthesisLog(np.array([1.0, 0.5, 0.7]), np.array([0, 0, 1]), skipped, step_size)
      >>> mean_loss_by_start(log)
      {0: 0.75}
    """
    losses, starts, skipped = (
        np.asarray(entries)[-num_last if num_last else None :]
        for entries in (log.matching_loss, log.start, log.skipped)
    )
    return {
        int(start): float(losses[(starts == start) & ~skipped].mean())
        for start in np.unique(starts[~skipped])
    }
