"""Settings of DynaFed's data synthesis, including all in which paper and public code differ."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from jax import Array

from fedjax_het.condensation.augment import DSA_STRATEGY, parse_strategy
from fedjax_het.utils.config import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_types,
    parse_config,
    validate,
)
from fedjax_het.utils.errors import require, require_name

Scalar = Array | np.floating  # traced, or on the host

_STATIC_PRESETS: dict[str, dict[str, Any]] = {
    "code": {},
    "paper": {
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
    },
}


@dataclasses.dataclass(frozen=True)
class SynthesisOptions(Config):
    """The static settings of the synthesis, with the presets "paper" and "code".

    The defaults are those of the public code. The preset "paper" follows the paper's text. There,
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

    The code's sample count is per class (15: 1,500 images for CIFAR-100), the paper's is the total
    (150); exactly one of the two must be set.

    Example:
      >>> from fedjax_het.condensation import SynthesisOptions
      >>> SynthesisOptions(samples_per_class=2).count_samples(num_classes=10)
      20
    """

    trajectory_rounds: PositiveInt = 24
    """L: rounds of plain training whose averages are stored, in addition to the initial model."""
    segment_length: PositiveInt = 3
    """s: maximum number of rounds between a start and its target."""
    target_counts: tuple[PositiveInt, ...] = (2, 3)
    """Possible numbers of checkpoints in the target's mean, drawn uniformly."""
    target_replacement: bool = True
    """Whether one checkpoint may enter a mean more than once."""
    target_end: Literal["drawn", "always", "never"] = "drawn"
    """Checkpoint t + s: a candidate of the draw, in every mean besides the draw, or in none."""
    include_initial: bool = True
    """Whether the random initial model (round 0) may be a start."""
    min_start: NonNegativeInt = 0
    """First round that may be a start."""
    max_start: NonNegativeInt | None = 50
    """Last round that may be a start, inclusive; never beyond L - s."""
    num_iterations: PositiveInt = 3000
    """N: outer iterations."""
    inner_steps: PositiveInt = 20
    """s': SGD steps on the synthetic data per iteration."""
    inner_batch_size: PositiveInt | None = None
    """Synthetic samples per inner step; None: all."""
    samples_per_class: PositiveInt | None = 15
    """Synthetic samples of each class."""
    num_samples: PositiveInt | None = None
    """Synthetic samples in total, instead of per class."""
    label_init: float = 0.0
    """Label logits start at this number times one-hot; 0 is the uniform soft label."""
    loss_scaling: Literal["cross_entropy", "cross_entropy_over_classes"] = (
        "cross_entropy_over_classes"
    )
    """Inner loss: "cross_entropy", or cross-entropy divided by the number of classes."""
    distance: Literal["normalized_l2", "cosine"] = "normalized_l2"
    """Distance of the end of inner training from the target: "normalized_l2" or "cosine"."""
    augment_strategy: str = DSA_STRATEGY
    """Families of `augment`, one drawn per inner step; "none" disables augmentation."""
    step_size_floor: PositiveFloat = 1e-4
    """Minimum of the learned step size, a safeguard."""
    step_size_ceiling: PositiveFloat = 10.0
    """Maximum of the learned step size, a safeguard."""
    keep: Literal["last", "best"] = "last"
    """The result: the "last" iterate (as in the code) or the "best" by mean matching loss."""

    NAMED_PRESETS: ClassVar[dict[str, dict[str, Any]]] = _STATIC_PRESETS

    def check(self) -> None:
        """Check the relations between the settings.

        Raises:
          ConfigError: if two settings contradict each other.
        """
        require(
            (self.samples_per_class is None) != (self.num_samples is None),
            "samples_per_class, num_samples",
            (self.samples_per_class, self.num_samples),
            "exactly one of the two",
        )
        require(
            self.step_size_floor <= self.step_size_ceiling,
            "step_size_floor",
            self.step_size_floor,
            f"at most step_size_ceiling ({self.step_size_ceiling})",
        )
        parse_strategy(self.augment_strategy, "augment_strategy")
        first, last = self.start_range
        require(
            0 <= first <= last,
            "min_start, max_start",
            (self.min_start, self.max_start),
            "0 <= first start <= last start <= trajectory_rounds - segment_length = "
            f"{self.trajectory_rounds} - {self.segment_length}",
        )
        validate_targets(
            self.target_counts, self.segment_length, self.target_replacement, self.target_end
        )

    @property
    def start_range(self) -> tuple[int, int]:
        """Return the first and the last round at which a segment may start, both inclusive."""
        last = self.trajectory_rounds - self.segment_length
        if self.max_start is not None:
            last = min(last, self.max_start)
        return max(self.min_start, 0 if self.include_initial else 1), last

    def count_samples(self, num_classes: int) -> int:
        """Count the synthetic samples.

        Args:
          num_classes: number of classes.

        Returns:
          Number of synthetic samples, M.
        """
        if self.samples_per_class is None:
            assert self.num_samples is not None  # `check` requires exactly one of the two
            return self.num_samples
        return self.samples_per_class * num_classes


@dataclasses.dataclass(frozen=True)
class SynthesisHyperParameters(Config):
    """The numeric settings of the synthesis; one compiled program serves all values.

    Example:
      >>> from fedjax_het.condensation import SynthesisHyperParameters
      >>> SynthesisHyperParameters.preset("paper").label_lr
      0.05
    """

    image_lr: NonNegativeFloat = 5e-2
    """Adam's learning rate for the images."""
    label_lr: NonNegativeFloat = 1e-2
    """Adam's learning rate for the label logits."""
    step_size: PositiveFloat = 0.04
    """Inner learning rate at the start."""
    step_size_lr: NonNegativeFloat = 1e-5
    """Adam's learning rate for the inner learning rate; 0 leaves it constant."""

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return the numeric settings of the DynaFed paper or of its public code.

        Args:
          name: "paper" or "code".

        Returns:
          The settings.
        """
        return cls(**_NUMERIC_PRESETS[name])


_NUMERIC_PRESETS: dict[str, dict[str, Any]] = {"code": {}, "paper": {"label_lr": 5e-2}}


@dataclasses.dataclass(frozen=True)
class SynthesisConfig(SynthesisHyperParameters, SynthesisOptions):
    """All settings of the synthesis, static and numeric, in one record.

    The defaults are those of the public code; `preset("paper")` and `preset("code")` are named
    sets. The fields are those of `SynthesisOptions` and `SynthesisHyperParameters`.

    Example:
      >>> from fedjax_het.condensation import SynthesisConfig
      >>> SynthesisConfig.preset("paper", inner_steps=10).trajectory_rounds
      20
    """

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Return the settings of the DynaFed paper or of its public code.

        Args:
          name: "paper" or "code".
          **overrides: settings that replace those of the preset.

        Returns:
          The settings.

        Raises:
          ConfigError: if the preset or a setting is unknown, or a value is invalid.
        """
        require_name("preset", name, _STATIC_PRESETS)
        return parse_config(
            cls,
            {**_STATIC_PRESETS[name], **_NUMERIC_PRESETS[name], **overrides},
            field_term="setting",
        )

    def __post_init__(self) -> None:
        """Check the type of each setting and the relations between settings."""
        types = field_types(type(self))
        for name in types:
            validate(name, getattr(self, name), types[name])
        self.check()

    def check(self) -> None:
        """Check the relations between the settings.

        Raises:
          ConfigError: if two settings contradict each other.
        """
        super().check()
        validate_step_size(self.step_size, self)

    def to_values(self) -> "SynthesisHyperParameterValues":
        """Return the numeric settings as a tree of float32 scalars for `SynthesisFunctions`."""
        names = SynthesisHyperParameterValues._fields
        return SynthesisHyperParameterValues(*(np.float32(getattr(self, name)) for name in names))


def validate_step_size(
    step_size: float, options: SynthesisOptions, *, name: str = "step_size"
) -> None:
    """Check that the initial inner learning rate is within its bounds.

    Args:
      step_size: the initial inner learning rate.
      options: settings with `step_size_floor` and `step_size_ceiling`.
      name: name of the argument in the message.

    Raises:
      ConfigError: if `step_size` is out of bounds.
    """
    floor, ceiling = options.step_size_floor, options.step_size_ceiling
    require(
        floor <= step_size <= ceiling,
        name,
        step_size,
        f"0 < step_size_floor ({floor}) <= step_size <= step_size_ceiling ({ceiling})",
    )


class SynthesisHyperParameterValues(NamedTuple):
    """The numeric settings as a tree of scalars.

    The values may differ between runs of one compiled program.

    Attributes:
      image_lr: Adam's learning rate for the images.
      label_lr: Adam's learning rate for the label logits.
      step_size_lr: Adam's learning rate for the inner learning rate.
      step_size: inner learning rate at the start.

    Example:
      >>> from fedjax_het.condensation import SynthesisConfig
      >>> SynthesisConfig().to_values()._fields
      ('image_lr', 'label_lr', 'step_size_lr', 'step_size')
    """

    image_lr: Scalar
    label_lr: Scalar
    step_size_lr: Scalar
    step_size: Scalar


def count_eligible_targets(segment_length: int, end: str) -> int:
    """Count the candidates for a target's checkpoints after the start.

    Args:
      segment_length: number of checkpoints after the start.
      end: role of the last checkpoint, see `draw_segment`.

    Returns:
      Number of candidates.
    """
    return segment_length - (end != "drawn")


def validate_targets(
    counts: tuple[int, ...], segment_length: int, replacement: bool, end: str
) -> None:
    """Check that a target can be drawn, see `draw_segment`.

    Args:
      counts: possible numbers of checkpoints.
      segment_length: number of checkpoints after the start.
      replacement: whether the draw is with replacement.
      end: role of the last checkpoint.

    Raises:
      ConfigError: if no target can be drawn.
    """
    num_eligible = count_eligible_targets(segment_length, end)
    require(
        num_eligible >= 1,
        "segment_length",
        segment_length,
        f"at least 2 with target_end = {end!r}, which needs a checkpoint between start and end",
    )
    require(
        len(counts) > 0 and min(counts) >= 1 and (replacement or max(counts) <= num_eligible),
        "target_counts",
        counts,
        f"counts >= 1, and at most {num_eligible} without replacement",
    )
