"""Settings of DynaFed's data synthesis: every number in which paper and public code differ."""

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

Scalar = Array | np.floating  # a scalar: traced, or on the host

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
    """Every static setting of the synthesis; presets "paper" and "code" name two sets of them.

    The defaults are those of the public code. `paper` is the paper's text: "2 checkpoints sampled
    between w^t and w^(t+s)" are two of those strictly between, without replacement, and the target
    is the mean of them and w^(t+s); starts are t ~ U(1, L - s). (In the code two or three of
    t + 1, ..., t + s, with replacement: of two, 64 % of the targets of s = 5 lack w^(t+s), and 20 %
    are one checkpoint.) Where it gives no value, or one that cannot be meant, `paper` takes the
    code's:

    * `step_size` (of `SynthesisHyperParameters`): the paper says "SGD with learning rate 1e-5". Inner
      steps of that length leave the network where it was (the matching loss stays at 1). 1e-5 is,
      in the code, the learning rate *of* the learned step size, which starts at 0.04.
    * `inner_steps` (s'), the loss, the augmentation and the distance are unstated.
    * Which model w^1 is: Algorithm 2 sends it out in round 1, which would make it the initial one,
      but stores only the averages that follow. Here w^t is the average of round t.

    The code's sample count is per class (15: 1,500 images for CIFAR-100), the paper's in total
    (150); set one of the two.
    """

    trajectory_rounds: PositiveInt = 24
    """L: rounds of plain training whose averages are kept, beside the initial model."""
    segment_length: PositiveInt = 3
    """s: a target lies at most this many rounds behind its start."""
    target_counts: tuple[PositiveInt, ...] = (2, 3)
    """Number of checkpoints in the target's mean, drawn uniformly from these."""
    target_replacement: bool = True
    """Whether one checkpoint may enter a mean more than once."""
    target_end: Literal["drawn", "always", "never"] = "drawn"
    """Checkpoint t + s: among those that may be drawn, in every mean besides them, or in none."""
    include_initial: bool = True
    """Whether the random initial model (round 0) may be a start."""
    min_start: NonNegativeInt = 0
    """First round that may be a start."""
    max_start: NonNegativeInt | None = 50
    """Last round that may be a start, itself included; never beyond L - s."""
    num_iterations: PositiveInt = 3000
    """N: outer iterations."""
    inner_steps: PositiveInt = 20
    """s': SGD steps on the synthetic data per iteration."""
    inner_batch_size: PositiveInt | None = None
    """Synthetic samples per inner step; None: all."""
    samples_per_class: PositiveInt | None = 15
    "Synthetic samples of each class."
    num_samples: PositiveInt | None = None
    """Synthetic samples in total, instead of per class."""
    label_init: float = 0.0
    """Label logits start at this times one-hot; 0 is the uniform soft label."""
    loss_scaling: Literal["cross_entropy", "cross_entropy_over_classes"] = (
        "cross_entropy_over_classes"
    )
    """Of the inner loss: "cross_entropy", or that divided by the number of classes."""
    distance: Literal["normalized_l2", "cosine"] = "normalized_l2"
    """Of the end from the target: "normalized_l2" or "cosine"."""
    augment_strategy: str = DSA_STRATEGY
    """Families of `augment`, one drawn per inner step; "none" switches it off."""
    step_size_floor: PositiveFloat = 1e-4
    """Guard: the learned step size is kept at or above this."""
    step_size_ceiling: PositiveFloat = 10.0
    """Guard: and at or below this."""
    keep: Literal["last", "best"] = "last"
    """Which iterate is the result: the "last" (as in the code) or the "best" (`TrajectorySynthesisState`)."""

    NAMED_PRESETS: ClassVar[dict[str, dict[str, Any]]] = _STATIC_PRESETS

    def check(self) -> None:
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
            "starts in order, within rounds 0 to trajectory_rounds - segment_length = "
            f"{self.trajectory_rounds} - {self.segment_length}",
        )
        validate_targets(
            self.target_counts, self.segment_length, self.target_replacement, self.target_end
        )

    @property
    def start_range(self) -> tuple[int, int]:
        """First and last round at which a segment may start, both included."""
        last = self.trajectory_rounds - self.segment_length
        if self.max_start is not None:
            last = min(last, self.max_start)
        return max(self.min_start, 0 if self.include_initial else 1), last

    def count_samples(self, num_classes: int) -> int:
        """M, the number of synthetic samples."""
        if self.samples_per_class is None:
            assert self.num_samples is not None  # exactly one of the two is
            return self.num_samples
        return self.samples_per_class * num_classes


@dataclasses.dataclass(frozen=True)
class SynthesisHyperParameters(Config):
    """The numeric settings, of which one compiled program serves all values."""

    image_lr: NonNegativeFloat = 5e-2
    """Adam's learning rate for the images."""
    label_lr: NonNegativeFloat = 1e-2
    """Adam's learning rate for the label logits."""
    step_size: PositiveFloat = 0.04
    """Inner learning rate to begin with."""
    step_size_lr: NonNegativeFloat = 1e-5
    """Adam's learning rate for the inner learning rate; 0 keeps it fixed."""

    @classmethod
    def preset(cls, name: str) -> Self:
        """Those of the DynaFed `paper` or of its public `code`."""
        return cls(**_NUMERIC_PRESETS[name])


_NUMERIC_PRESETS: dict[str, dict[str, Any]] = {"code": {}, "paper": {"label_lr": 5e-2}}


@dataclasses.dataclass(frozen=True)
class SynthesisConfig(SynthesisHyperParameters, SynthesisOptions):
    """Every setting of the synthesis: `SynthesisOptions` and `SynthesisHyperParameters` in one record.

    The defaults are those of the public code; `preset("paper")` and `preset("code")` name two sets.
    """

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The settings of the DynaFed `paper` or of its public `code`, with `overrides`."""
        require_name("preset", name, _STATIC_PRESETS)
        return parse_config(
            cls,
            {**_STATIC_PRESETS[name], **_NUMERIC_PRESETS[name], **overrides},
            field_term="setting",
        )

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for name in types:
            validate(name, getattr(self, name), types[name])
        self.check()

    def check(self) -> None:
        super().check()
        validate_step_size(self.step_size, self)

    def to_values(self) -> "SynthesisHyperParameterValues":
        """The numeric settings as a tree that `SynthesisFunctions.init` and `.run` take as traced input."""
        names = SynthesisHyperParameterValues._fields
        return SynthesisHyperParameterValues(*(np.float32(getattr(self, name)) for name in names))


def validate_step_size(
    step_size: float, options: SynthesisOptions, *, name: str = "step_size"
) -> None:
    """Raise ConfigError for an inner rate, called `name`, that the guards do not let through."""
    floor, ceiling = options.step_size_floor, options.step_size_ceiling
    require(
        floor <= step_size <= ceiling,
        name,
        step_size,
        f"0 < step_size_floor ({floor}) <= step_size <= step_size_ceiling ({ceiling})",
    )


class SynthesisHyperParameterValues(NamedTuple):
    """The numbers of `SynthesisConfig` that may differ between runs of one compiled program."""

    image_lr: Scalar
    label_lr: Scalar
    step_size_lr: Scalar
    step_size: Scalar


def count_eligible_targets(segment_length: int, end: str) -> int:
    """Checkpoints behind the start of which a target's are drawn."""
    return segment_length - (end != "drawn")


def validate_targets(
    counts: tuple[int, ...], segment_length: int, replacement: bool, end: str
) -> None:
    """Raise ConfigError unless a target can be drawn: see `SynthesisConfig`."""
    num_eligible = count_eligible_targets(segment_length, end)
    require(
        num_eligible >= 1,
        "segment_length",
        segment_length,
        f"a checkpoint between start and end where target_end is {end!r}: 2 or more",
    )
    require(
        len(counts) > 0 and min(counts) >= 1 and (replacement or max(counts) <= num_eligible),
        "target_counts",
        counts,
        f"counts >= 1, and at most {num_eligible} where drawn without replacement",
    )
