"""Synthetic data: distribution matching, trajectory matching, augmentation, and training on what
came out.

`distribution` has the losses of distribution matching and the networks it draws, `knowledge` the
soft labels that go with the images, `class_logits` what clients' classes look like to a network,
`pool` the server's training on them, `privacy` what noise hides, `quality` what images are worth;
`trajectory`, `synthesis_config` and `synthetic` are DynaFed's. What runs them for all clients is in
`fedjax_het.algorithms`.
"""

from fedjax_het.condensation.augment import DSA_STRATEGY
from fedjax_het.condensation.distribution import (
    distribution_distance,
    in_ball,
    interpolated,
    mean_embedding,
    sliced_wasserstein,
    sliced_wasserstein_sampled,
)
from fedjax_het.condensation.knowledge import knowledge_matching, soft_labels
from fedjax_het.condensation.mixed_mode import mixed_mode, reverse_mode
from fedjax_het.condensation.pool import Knowledge, Pool, train_on_pool
from fedjax_het.condensation.privacy import gaussian_epsilon
from fedjax_het.condensation.quality import Quality, gain_over_random
from fedjax_het.condensation.synthesis_config import (
    SynthesisConfig,
    SynthesisHyperParameters,
    SynthesisNumbers,
    SynthesisOptions,
)
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
)
from fedjax_het.condensation.unrolling import matching_loss, unroll

__all__ = [
    "DSA_STRATEGY",
    "Knowledge",
    "Pool",
    "Quality",
    "Synthesis",
    "SynthesisConfig",
    "SynthesisHyperParameters",
    "SynthesisInfo",
    "SynthesisNumbers",
    "SynthesisOptions",
    "SynthesisState",
    "SyntheticData",
    "distribution_distance",
    "draw_segment",
    "fine_tune",
    "gain_over_random",
    "gaussian_epsilon",
    "in_ball",
    "interpolated",
    "j_by_start",
    "knowledge_matching",
    "make_synthesis",
    "matching_loss",
    "mean_embedding",
    "mixed_mode",
    "reverse_mode",
    "sliced_wasserstein",
    "sliced_wasserstein_sampled",
    "soft_cross_entropy",
    "soft_labels",
    "train_from_scratch",
    "train_on_pool",
    "unroll",
]
