"""Synthetic data: augmentation, trajectory matching, and training on what came out."""

from fedjax_het.condensation.augment import DSA_STRATEGY
from fedjax_het.condensation.synthesis_config import SynthesisConfig, SynthesisHyperParameters
from fedjax_het.condensation.synthetic import (
    SyntheticData,
    fine_tune,
    soft_cross_entropy,
    train_from_scratch,
)
from fedjax_het.condensation.trajectory import (
    Synthesis,
    SynthesisInfo,
    SynthesisState,
    draw_segment,
    j_by_start,
    make_synthesis,
    matching_loss,
    unroll,
)

__all__ = [
    "DSA_STRATEGY",
    "Synthesis",
    "SynthesisConfig",
    "SynthesisHyperParameters",
    "SynthesisInfo",
    "SynthesisState",
    "SyntheticData",
    "draw_segment",
    "fine_tune",
    "j_by_start",
    "make_synthesis",
    "matching_loss",
    "soft_cross_entropy",
    "train_from_scratch",
    "unroll",
]
