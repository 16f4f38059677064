"""Trajectory matching: synthetic data on which training moves a network as real data did.

DynaFed's server stores the global models of its first rounds. `TrajectoryMatching` learns inputs,
soft labels and a step size: a few SGD steps on them from checkpoint t end near later checkpoints.

Sources: Pi et al., "DynaFed: Tackling Client Data Heterogeneity with Global Dynamics" (CVPR 2023)
and its public code; Cazenavette et al., "Dataset Distillation by Matching Training Trajectories"
(MTT, CVPR 2022), from which the code descends.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_het.condensation.augment import DSA_STRATEGY, parse_strategy
from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask
from fedjax_het.condensation.unrolling import Differentiation, Unravel, matching_loss, unroll
from fedjax_het.utils.config import (
    Config,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SearchRange,
)
from fedjax_het.utils.errors import require

LossScaling = Literal["cross_entropy", "cross_entropy_over_classes"]

_ADAM = optax.scale_by_adam()

# Presets of `SynthesisHyperParameters`, by the name of the preset of `SynthesisOptions`.
NUMERIC_PRESETS: dict[str, dict[str, float]] = {
    "code": {},
    "paper": {"label_lr": 5e-2},
    "improved": {"label_lr": 5e-2, "image_lr": 2e-2, "step_size": 0.4, "step_size_lr": 1e-3},
}
_PAPER: dict[str, Any] = {
    "trajectory_rounds": 20,
    "segment_length": 5,
    "target_counts": (2,),
    "target_replacement": False,
    "target_end": "always",
    "min_start": 1,
    "max_start": None,
    "num_iterations": 1000,
    "samples_per_class": None,
    "num_samples": 150,
}


@dataclasses.dataclass(frozen=True)
class SynthesisHyperParameters(Config):
    """The numeric settings of the synthesis; one compiled program serves all values.

    Example:
      >>> from fedjax_het.condensation import SynthesisHyperParameters
      >>> SynthesisHyperParameters().label_lr
      0.01
    """

    image_lr: Annotated[NonNegativeFloat, SearchRange(0.005, 0.5)] = 5e-2
    """Adam's learning rate for the inputs."""
    label_lr: NonNegativeFloat = 1e-2
    """Adam's learning rate for the label logits."""
    step_size: Annotated[PositiveFloat, SearchRange(0.01, 1)] = 0.04
    """Inner learning rate at the start."""
    step_size_lr: NonNegativeFloat = 1e-5
    """Adam's learning rate for the inner learning rate; 0 leaves it constant."""


@dataclasses.dataclass(frozen=True)
class SynthesisOptions(Config):
    """The static settings of the synthesis, with the presets "paper", "code" and "improved".

    The defaults come from the public code. The preset "paper" follows the paper's text. There,
    "2 checkpoints sampled between w^t and w^(t+s)" are two checkpoints strictly between, without
    replacement. The target is the mean of them and w^(t+s). Starts are t ~ U(1, L - s). In the
    code, two or three checkpoints of t + 1, ..., t + s are drawn with replacement. With two of s =
    5, 64 % of the targets lack w^(t+s), and 20 % are one checkpoint. Where the paper has no value,
    or a value that cannot be right, "paper" uses the code's:

    * `step_size` (of `SynthesisHyperParameters`): the paper states "SGD with learning rate 1e-5".
      Inner steps of that length do not move the network (the matching loss stays at 1). In the
      code, 1e-5 is the learning rate *of* the learned step size, which starts at 0.04.
    * `inner_steps` (s'), the loss, the augmentation and the distance are not stated.
    * The paper does not define which model w^1 is. Algorithm 2 sends it out in round 1, so it would
      be the initial model, but the algorithm stores only the later averages. Here w^t is the
      average of round t.

    The preset "improved" is this package's. It differs from "paper" in a step size ten times as
    large with a learning rate of 1e-3, a lower learning rate of the images, and first-order
    differentiation (`experiments/dynafed/RESULTS.md`).

    The code's sample count is per class (15: 1,500 images for CIFAR-100), the paper's is the total
    (150); exactly one of the two must be set. `parse_config` applies a preset and checks values.

    Example:
      >>> from fedjax_het.condensation import SynthesisOptions
      >>> from fedjax_het.utils.config import parse_config
      >>> parse_config(SynthesisOptions, {"preset": "paper"}).trajectory_rounds
      20
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "code": {},
        "paper": _PAPER,
        "improved": {**_PAPER, "differentiation": "first_order"},
    }

    trajectory_rounds: PositiveInt = 24
    """L: rounds of plain training whose averages are stored, in addition to the initial model."""
    segment_length: PositiveInt = 3
    """s: maximum number of rounds between a start and its target."""
    target_counts: tuple[PositiveInt, ...] = (2, 3)
    """Possible numbers of checkpoints in the target's mean, drawn uniformly."""
    target_replacement: bool = True
    """Whether one checkpoint may enter a mean more than once."""
    target_end: Literal["drawn", "always", "never"] = "drawn"
    """Checkpoint t + s: a candidate of the draw, in every mean in addition to the draw, or in
    none."""
    include_initial: bool = True
    """Whether the random initial model (round 0) may be a start."""
    min_start: NonNegativeInt = 0
    """First round that may be a start."""
    max_start: NonNegativeInt | None = 50
    """Last round that may be a start, inclusive; never beyond L - s."""
    initial_max_start: NonNegativeInt | None = None
    """Last round that may be a start in the first iteration. It grows linearly to `max_start` over
    N iterations (DATM, Guo et al., ICLR 2024) and stays there; None: `max_start` in all
    iterations."""
    path: Literal["rounds", "average", "line"] = "rounds"
    """Models from which targets are drawn: "rounds", the averages of the rounds; "average", their
    exponential average; "line", points on the straight line from the first start to round L (MCT,
    Zhong et al., CVPR 2025)."""
    path_decay: MomentumCoefficient = 0.5
    """Weight of the earlier models in the exponential average of the path "average"."""
    starts: Literal["path", "rounds"] = "path"
    """Models from which segments start: points of the "path", or averages of "rounds"."""
    num_iterations: PositiveInt = 3000
    """N: outer iterations."""
    inner_steps: PositiveInt = 20
    """s': SGD steps on the synthetic data per iteration."""
    inner_batch_size: PositiveInt | None = None
    """Synthetic samples per inner step; None: all."""
    inner_momentum: MomentumCoefficient = 0.0
    """Momentum of the inner steps."""
    differentiation: Differentiation = "exact"
    """Derivative of the inner steps: "exact", or "first_order", which holds each step's parameters
    constant."""
    samples_per_class: PositiveInt | None = 15
    """Synthetic samples of each class."""
    num_samples: PositiveInt | None = None
    """Synthetic samples in total, instead of per class."""
    label_init: float = 0.0
    """Label logits start at this number times one-hot; 0 is the uniform soft label."""
    loss_scaling: LossScaling = "cross_entropy_over_classes"
    """Inner loss: "cross_entropy", or cross-entropy divided by the number of classes."""
    distance: Literal["normalized_l2", "cosine"] = "normalized_l2"
    """Distance of the end of inner training from the target: "normalized_l2" or "cosine"."""
    augment_strategy: str = DSA_STRATEGY
    """Families of `augment`, one drawn per inner step; "none" disables augmentation. The default
    augments images only: features and series have none."""
    step_size_floor: PositiveFloat = 1e-4
    """Minimum of the learned step size, a safeguard."""
    step_size_ceiling: PositiveFloat = 10.0
    """Maximum of the learned step size, a safeguard."""
    keep: Literal["last", "best"] = "last"
    """The result: the "last" iterate (as in the code) or the "best" by mean matching loss."""
    preset: str = "paper"
    """Source of the settings that are not given."""

    def check(self) -> None:
        """Check the relations between the settings.

        Raises:
          ConfigError: if two settings contradict each other.
        """
        sizes = self.samples_per_class, self.num_samples
        is_valid = sizes.count(None) == 1
        require(is_valid, "samples_per_class, num_samples", sizes, "exactly one of the two")
        floor, ceiling = self.step_size_floor, self.step_size_ceiling
        expected = f"at most step_size_ceiling, {ceiling}"
        require(floor <= ceiling, "step_size_floor", floor, expected)
        parse_strategy(self.augment_strategy, "augment_strategy")
        first, last = self.start_range
        num_rounds, length = self.trajectory_rounds, self.segment_length
        bound = f"trajectory_rounds - segment_length = {num_rounds} - {length}"
        expected = f"0 <= first start <= last start <= {bound}"
        lengths = num_rounds, length, first
        is_valid = num_rounds - length >= first
        names = "trajectory_rounds, segment_length, min_start"
        require(is_valid, names, lengths, "trajectory_rounds - segment_length >= min_start")
        starts = self.min_start, self.max_start
        require(first <= last, "min_start, max_start", starts, expected)
        initial = self.initial_max_start
        is_valid = initial is None or first <= initial <= last
        require(is_valid, "initial_max_start", initial, f"{first} to {last}, the range of starts")
        num, max_count = self.num_candidates, max(self.target_counts, default=0)
        expected = f"at least 2 with target_end = {self.target_end!r}, which excludes the end"
        require(num >= 1, "segment_length", self.segment_length, expected)
        is_valid = max_count >= 1 and (self.target_replacement or max_count <= num)
        limit = f"at most {num} without replacement, with segment_length = {length}"
        expected = f"counts >= 1, and {limit}"
        require(is_valid, "target_counts", self.target_counts, expected)

    def check_step_size(self, step_size: float, name: str) -> None:
        """Check that an initial inner learning rate is within its bounds.

        Args:
          step_size: the initial inner learning rate.
          name: name of the setting in the message.

        Raises:
          ConfigError: if `step_size` is out of bounds.
        """
        floor, ceiling = self.step_size_floor, self.step_size_ceiling
        expected = f"step_size_floor ({floor}) <= step_size <= step_size_ceiling ({ceiling})"
        require(floor <= step_size <= ceiling, name, step_size, expected)

    @property
    def start_range(self) -> tuple[int, int]:
        """Return the first and the last round at which a segment may start, both inclusive."""
        last = self.trajectory_rounds - self.segment_length
        if self.max_start is not None:
            last = min(last, self.max_start)
        return max(self.min_start, 0 if self.include_initial else 1), last

    @property
    def num_candidates(self) -> int:
        """Return the number of checkpoints after the start from which a target is drawn."""
        return self.segment_length - (self.target_end != "drawn")

    def count_samples(self, num_classes: int) -> int:
        """Return the number of synthetic samples, M."""
        if self.samples_per_class is None:
            assert self.num_samples is not None  # `check` requires exactly one of the two
            return self.num_samples
        return self.samples_per_class * num_classes


def compute_path(options: SynthesisOptions, trajectory: Array) -> Array:
    """Return the models from which targets are drawn, by `options.path`.

    Args:
      options: kind of the path, decay and range of the starts.
      trajectory: averages of the rounds, `[L + 1, P]`.

    Returns:
      The models, `[L + 1, P]`.
    """
    if options.path == "average":

        def average(mean: Array, model: Array) -> tuple[Array, Array]:
            mean = options.path_decay * mean + (1 - options.path_decay) * model
            return mean, mean

        return jax.lax.scan(average, trajectory[0], trajectory)[1]
    if options.path == "line":
        first, last = options.start_range[0], options.trajectory_rounds
        position = jnp.maximum(jnp.arange(last + 1) - first, 0)[:, None] / (last - first)
        line = trajectory[first] + position * (trajectory[last] - trajectory[first])
        return trajectory.at[first:].set(line[first:])
    return trajectory


def draw_segment(
    options: SynthesisOptions, path: Array, key: Array, progress: Array | float = 1.0
) -> tuple[Array, Array]:
    """Draw the start of a trajectory segment and its target.

    The start is uniform over `options.start_range`. The target is the mean of k checkpoints out of
    the `segment_length` checkpoints after the start; k is uniform over `target_counts`.

    Args:
      options: lengths, counts and the role of the segment's last checkpoint.
      path: models from which the target is drawn, `[L + 1, P]`.
      key: key of the draws.
      progress: share of the iterations that are done, for `options.initial_max_start`.

    Returns:
      The start, `[]` int, and the target, `[P]`.
    """
    start_key, count_key, target_key = jax.random.split(key, 3)
    first_start, last_start = options.start_range
    end_start: Array | int = last_start + 1
    if options.initial_max_start is not None:
        growth = (last_start + 1 - options.initial_max_start) * jnp.minimum(progress, 1)
        end_start = jnp.minimum(options.initial_max_start + growth.astype(int), last_start) + 1
    start = jax.random.randint(start_key, (), first_start, end_start)
    count = jax.random.choice(count_key, jnp.asarray(options.target_counts))
    num_candidates, max_count = options.num_candidates, max(options.target_counts)
    if options.target_replacement:
        steps = jax.random.randint(target_key, (max_count,), 1, num_candidates + 1)
    else:
        steps = 1 + jax.random.permutation(target_key, num_candidates)[:max_count]
    is_member = jnp.arange(max_count) < count
    if options.target_end == "always":
        steps = jnp.append(steps, options.segment_length)
        is_member = jnp.append(is_member, True)
    weights = is_member / is_member.sum()
    target = jnp.einsum("k,kp->p", weights, path[start + steps], precision="highest")
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
        and the score exists once all starts have been drawn. It covers about one past
        iteration for each start.
      num_skipped: `[]` int, iterations whose loss or gradient was not finite.
    """

    data: SyntheticData
    adam: optax.OptState
    latest_loss: Array
    best_data: SyntheticData
    best_score: Array
    num_skipped: Array


class SynthesisLog(NamedTuple):
    """Log of the synthesis of an outer iteration, or of N iterations, `[N]` each.

    Attributes:
      matching_loss: matching loss J of the iterate before its update.
      start: round at which the segment started.
      skipped: True where the loss or a gradient was not finite and nothing was updated.
      step_size: learned step size after the update.
    """

    matching_loss: Array
    start: Array
    skipped: Array
    step_size: Array


@dataclasses.dataclass(frozen=True)
class TrajectoryMatching:
    """DynaFed's data synthesis (Algorithm 1) for one network and input shape.

    Each iteration draws a segment and unrolls `inner_steps` from its start. Adam moves inputs,
    label logits and step size against the gradient of the matching loss. The methods are pure
    functions; the caller jits them.

    Additions to the public code: the step size is clipped to
    `[step_size_floor, step_size_ceiling]`, and an iteration whose loss or gradient is not finite
    changes nothing and is counted. In the public code the learned step size can become negative or
    NaN.

    Attributes:
      options: static settings.
      task: network, augmentation and loss of the inner steps.
      unravel: see `unroll`.
      input_shape: shape of the input of one example.
      num_classes: number of classes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import SynthesisOptions, SyntheticTask, TrajectoryMatching
      >>> options = SynthesisOptions(trajectory_rounds=4, samples_per_class=2, inner_steps=2)
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> unravel = lambda vector: vector.reshape(4, 3)
      >>> synthesis = TrajectoryMatching(options, task, unravel, (2, 2, 1), 3)
      >>> hp = {"image_lr": 0.05, "label_lr": 0.01, "step_size": 0.04, "step_size_lr": 1e-5}
      >>> trajectory, key = jnp.arange(5.0)[:, None] * jnp.ones(12), jax.random.key(0)
      >>> state = synthesis.init(hp, key)
      >>> state, log = synthesis.run_iteration(hp, state, trajectory, key)
      >>> log.matching_loss.shape, synthesis.get_result(state).inputs.shape
      ((), (6, 2, 2, 1))
    """

    options: SynthesisOptions
    task: SyntheticTask
    unravel: Unravel
    input_shape: tuple[int, ...]
    num_classes: int

    def init(self, hp: Mapping[str, Any], key: Array) -> TrajectorySynthesisState:
        """Draw inputs from N(0, 1); label logits are `label_init` * one-hot, ordered by class.

        Args:
          hp: values of `SynthesisHyperParameters` by name; may be traced.
          key: key of the inputs.

        Returns:
          The initial state.
        """
        num_samples = self.options.count_samples(self.num_classes)
        classes = jnp.arange(num_samples) * self.num_classes // num_samples
        data = SyntheticData(
            inputs=jax.random.normal(key, (num_samples, *self.input_shape), jnp.float32),
            label_logits=self.options.label_init * jax.nn.one_hot(classes, self.num_classes),
            step_size=jnp.asarray(hp["step_size"], jnp.float32),
        )
        return TrajectorySynthesisState(
            data=data,
            adam=_ADAM.init(data),
            latest_loss=jnp.full(self.options.trajectory_rounds + 1, jnp.inf),
            best_data=jax.tree.map(jnp.copy, data),  # a donated state must not hold a buffer twice
            best_score=jnp.asarray(jnp.inf),
            num_skipped=jnp.asarray(0, jnp.int32),
        )

    def run_iteration(
        self, hp: Mapping[str, Any], state: TrajectorySynthesisState, trajectory: Array, key: Array
    ) -> tuple[TrajectorySynthesisState, SynthesisLog]:
        """Draw a segment and move the data against the gradient of its matching loss.

        Cost: the derivative of `unroll`.

        Args:
          hp: values of `SynthesisHyperParameters` by name; may be traced.
          state: the state before.
          trajectory: `[L + 1, P]`, the initial model (row 0) and the average after round c (row c).
          key: key of the iteration.

        Returns:
          The state after, and the log with one entry.

        Raises:
          ConfigError: if the trajectory does not have L + 1 rows.
        """
        options, data = self.options, state.data
        rounds = options.trajectory_rounds
        is_valid = trajectory.ndim == 2 and len(trajectory) == rounds + 1
        expected = f"[{rounds + 1}, P]: the initial model and the averages of {rounds} rounds"
        require(is_valid, "trajectory", trajectory.shape, expected)
        segment_key, unroll_key = jax.random.split(key)
        path = compute_path(options, trajectory)
        progress = state.adam.count / options.num_iterations
        start, target = draw_segment(options, path, segment_key, progress)
        start_model = (path if options.starts == "path" else trajectory)[start]

        def loss(data: SyntheticData) -> Array:
            end = unroll(
                *(self.task, self.unravel, start_model, data, unroll_key),
                num_steps=options.inner_steps,
                batch_size=options.inner_batch_size,
                momentum=options.inner_momentum,
                differentiation=options.differentiation,
            )
            return matching_loss(end, start_model, target, distance=options.distance)

        value, gradient = jax.value_and_grad(loss)(data)
        is_finite = jnp.isfinite(value)
        for leaf in gradient:
            is_finite &= jnp.isfinite(leaf).all()
        direction, adam = _ADAM.update(gradient, state.adam)
        step_size = data.step_size - hp["step_size_lr"] * direction.step_size
        new_data = SyntheticData(
            inputs=data.inputs - hp["image_lr"] * direction.inputs,
            label_logits=data.label_logits - hp["label_lr"] * direction.label_logits,
            step_size=jnp.clip(step_size, options.step_size_floor, options.step_size_ceiling),
        )
        latest_loss = _where(is_finite, state.latest_loss.at[start].set(value), state.latest_loss)
        first_start, last_start = options.start_range
        score = latest_loss[first_start : last_start + 1].mean()
        is_better = is_finite & (score < state.best_score)
        new_state = TrajectorySynthesisState(
            data=_where(is_finite, new_data, data),
            adam=_where(is_finite, adam, state.adam),
            latest_loss=latest_loss,
            best_data=_where(is_better, data, state.best_data),
            best_score=jnp.where(is_better, score, state.best_score),
            num_skipped=state.num_skipped + ~is_finite,
        )
        return new_state, SynthesisLog(value, start, ~is_finite, new_state.data.step_size)

    def get_result(self, state: TrajectorySynthesisState) -> SyntheticData:
        """Return the iterate that `SynthesisOptions.keep` selects."""
        if self.options.keep == "last":
            return state.data
        # Until every start has been drawn there is no score; the result is then the last iterate.
        return _where(jnp.isfinite(state.best_score), state.best_data, state.data)


def _where(condition: Array, new: Any, old: Any) -> Any:
    """Return the tree `new` where the scalar condition holds, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def mean_loss_by_start(log: SynthesisLog) -> dict[int, float]:
    """Return the mean matching loss J at each start that was drawn, without skipped iterations.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.condensation.trajectory_matching import SynthesisLog, mean_loss_by_start
      >>> skipped, step_size = np.array([False, False, True]), np.full(3, 0.04)
      >>> log = SynthesisLog(np.array([1.0, 0.5, 0.7]), np.array([0, 0, 1]), skipped, step_size)
      >>> mean_loss_by_start(log)
      {0: 0.75}
    """
    losses, starts, skipped = map(np.asarray, (log.matching_loss, log.start, log.skipped))
    drawn_starts = np.unique(starts[~skipped])
    return {int(t): float(losses[(starts == t) & ~skipped].mean()) for t in drawn_starts}
