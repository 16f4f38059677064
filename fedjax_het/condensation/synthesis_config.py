"""Settings of DynaFed's data synthesis: every number in which paper and public code differ."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from fedjax_het.common.errors import require, require_name
from fedjax_het.condensation.augment import DSA_STRATEGY, parse_strategy
from fedjax_het.condensation.synthetic import LOSS_SCALINGS

DISTANCES = ("normalized_l2", "cosine")


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
    """Every setting of the synthesis; `preset("paper")` and `preset("code")` name two of them.

    The defaults are those of the public code. Where the paper gives no value, or one that cannot
    be meant, the `paper` preset takes the code's:

    * `step_size`: the paper says "SGD with learning rate 1e-5". Inner steps of that length leave
      the network where it was (the matching loss stays at 1). 1e-5 is, in the code, the learning
      rate *of* the learned step size, which starts at 0.04.
    * `inner_steps` (s'), the loss, the augmentation and the distance are unstated.
    * `include_initial`: the paper's first checkpoint is w^1, which Algorithm 2 sends out in round
      1, so it is the initial model, but the same algorithm stores only the averages that follow.
      The code includes it.
    * "2 checkpoints sampled between w^t and w^(t+s)": with replacement and with the end included,
      as in the code.

    The code's sample count is per class (15: 1,500 images for CIFAR-100), the paper's in total
    (150); set one of the two.
    """

    trajectory_rounds: int = 24
    """L: rounds of plain training whose averages are kept, beside the initial model."""
    segment_length: int = 3
    """s: a target lies at most this many rounds behind its start."""
    target_counts: tuple[int, ...] = (2, 3)
    """Number of checkpoints in the target's mean, drawn uniformly from these."""
    target_replacement: bool = True
    """Whether one checkpoint may enter a mean more than once."""
    target_endpoint: bool = True
    """Whether checkpoint t + s itself may enter the mean."""
    include_initial: bool = True
    """Whether the random initial model (round 0) may be a start."""
    min_start: int = 0
    """First round that may be a start."""
    max_start: int | None = 50
    """Last round that may be a start, itself included; never beyond L - s."""
    num_iterations: int = 3000
    """N: outer iterations."""
    inner_steps: int = 20
    """s': SGD steps on the synthetic data per iteration."""
    inner_batch_size: int | None = None
    """Synthetic samples per inner step; None: all."""
    samples_per_class: int | None = 15
    num_samples: int | None = None
    """Synthetic samples in total, instead of per class."""
    image_lr: float = 5e-2
    """Adam's learning rate for the images."""
    label_lr: float = 1e-2
    """Adam's learning rate for the label logits."""
    step_size: float = 0.04
    """Inner learning rate to begin with."""
    step_size_lr: float = 1e-5
    """Adam's learning rate for the inner learning rate; 0 keeps it fixed."""
    label_init: float = 0.0
    """Label logits start at this times one-hot; 0 is the uniform soft label."""
    loss_scaling: str = "cross_entropy_over_classes"
    """Of the inner loss: "cross_entropy", or that divided by the number of classes."""
    distance: str = "normalized_l2"
    """Of the end from the target: "normalized_l2" or "cosine"."""
    augment_strategy: str = DSA_STRATEGY
    """Families of `augment`, one drawn per inner step; "none" switches it off."""
    step_size_floor: float = 1e-4
    """Guard: the learned step size is kept at or above this."""
    step_size_ceiling: float = 10.0
    """Guard: and at or below this."""
    keep: str = "last"
    """Which iterate is the result: the "last" (as in the code) or the "best" (`SynthesisState`)."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "SynthesisConfig":
        """The settings of the DynaFed `paper` or of its public `code`, with `overrides`."""
        require_name("preset", name, _PRESETS)
        for setting in overrides:
            require_name("setting", setting, (field.name for field in dataclasses.fields(cls)))
        return cls(**{**_PRESETS[name], **overrides})

    def __post_init__(self) -> None:
        whole = ("trajectory_rounds", "segment_length", "num_iterations", "inner_steps")
        for name in whole:
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
        for name in ("inner_batch_size", "samples_per_class", "num_samples"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "None or a whole number >= 1")
        require(
            (self.samples_per_class is None) != (self.num_samples is None),
            "samples_per_class, num_samples",
            (self.samples_per_class, self.num_samples),
            "exactly one of the two",
        )
        for name in ("image_lr", "label_lr", "step_size_lr"):
            require(getattr(self, name) >= 0, name, getattr(self, name), f"{name} >= 0")
        require(
            0 < self.step_size_floor <= self.step_size <= self.step_size_ceiling < float("inf"),
            "step_size",
            self.step_size,
            f"0 < step_size_floor ({self.step_size_floor}) <= step_size <= step_size_ceiling "
            f"({self.step_size_ceiling})",
        )
        require_name("loss_scaling", self.loss_scaling, LOSS_SCALINGS)
        require_name("distance", self.distance, DISTANCES)
        require_name("keep", self.keep, ("last", "best"))
        parse_strategy(self.augment_strategy)
        first, last = self.start_range
        require(
            0 <= first <= last,
            "min_start, max_start",
            (self.min_start, self.max_start),
            f"starts within rounds 0 to L - s = {self.trajectory_rounds - self.segment_length}",
        )
        check_targets(
            self.target_counts, self.segment_length, self.target_replacement, self.target_endpoint
        )

    @property
    def start_range(self) -> tuple[int, int]:
        """First and last round at which a segment may start, both included."""
        last = self.trajectory_rounds - self.segment_length
        if self.max_start is not None:
            last = min(last, self.max_start)
        return max(self.min_start, 0 if self.include_initial else 1), last

    def total_samples(self, num_classes: int) -> int:
        """M, the number of synthetic samples."""
        return self.num_samples or self.samples_per_class * num_classes

    def hyper_parameters(self) -> "SynthesisHyperParameters":
        """The numeric settings as a tree that `Synthesis.init` and `.run` take as traced input."""
        names = SynthesisHyperParameters._fields
        return SynthesisHyperParameters(*(np.float32(getattr(self, name)) for name in names))


_PRESETS = {
    "code": {},
    "paper": {
        "trajectory_rounds": 20,
        "segment_length": 5,
        "target_counts": (2,),
        "max_start": None,
        "num_iterations": 1000,
        "label_lr": 5e-2,
        "samples_per_class": None,
        "num_samples": 150,
    },
}


class SynthesisHyperParameters(NamedTuple):
    """The numbers of `SynthesisConfig` that may differ between runs of one compiled program."""

    image_lr: Array
    label_lr: Array
    step_size_lr: Array
    step_size: Array


def check_targets(
    counts: tuple[int, ...], segment_length: int, replacement: bool, endpoint: bool
) -> None:
    """Raise ConfigError unless a target can be drawn: see `SynthesisConfig`."""
    num_eligible = segment_length - (not endpoint)
    require(
        num_eligible >= 1,
        "segment_length",
        segment_length,
        "a checkpoint between start and end where the end may not be drawn: 2 or more",
    )
    require(
        len(counts) > 0 and min(counts) >= 1 and (replacement or max(counts) <= num_eligible),
        "target_counts",
        counts,
        f"counts >= 1, and at most {num_eligible} where drawn without replacement",
    )
