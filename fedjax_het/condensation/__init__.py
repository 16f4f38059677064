"""Dataset condensation: synthetic data, how they are learned, and training on them.

Modules:

* `distribution_matching`: losses of distribution matching and of soft labels.
* `synthetic_pool`: the server's training on the clients' synthetic images.
* `trajectory_matching`, `unrolling`: DynaFed's data synthesis.
* `synthetic_data`: synthetic data with soft labels, and training on them.
* `augment`: differentiable augmentation.
* `privacy`: clipping, noise, and its differential privacy.
* `downstream_eval`: accuracy of networks that learn from the images alone, and scores of it.
* `training_dynamics`: training on synthetic data beside training on real data.

`fedjax_het.algorithms` runs these functions for all clients.
"""

from fedjax_het.condensation.augment import DSA_STRATEGY
from fedjax_het.condensation.distribution_matching import (
    compute_soft_labels,
    distribution_distance,
    gaussian_mmd,
    interpolate_params,
    mean_embedding,
    sample_on_ball,
    sampled_sliced_wasserstein,
    sliced_wasserstein,
    soft_label_matching_loss,
)
from fedjax_het.condensation.downstream_eval import (
    DownstreamAccuracy,
    ScratchAccuracies,
    compare_with_random_subset,
    measure_scratch_accuracies,
    train_from_scratch,
)
from fedjax_het.condensation.privacy import compute_gaussian_epsilon
from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask, fine_tune
from fedjax_het.condensation.synthetic_pool import (
    PoolTask,
    SoftLabelTargets,
    SyntheticPool,
    train_on_synthetic_pool,
)
from fedjax_het.condensation.training_dynamics import DynamicsGap, compare_dynamics
from fedjax_het.condensation.trajectory_matching import (
    SynthesisHyperParameters,
    SynthesisOptions,
    TrajectoryMatching,
)
from fedjax_het.condensation.unrolling import matching_loss, unroll

__all__ = [
    "DSA_STRATEGY",
    "DownstreamAccuracy",
    "DynamicsGap",
    "PoolTask",
    "ScratchAccuracies",
    "SoftLabelTargets",
    "SynthesisHyperParameters",
    "SynthesisOptions",
    "SyntheticData",
    "SyntheticPool",
    "SyntheticTask",
    "TrajectoryMatching",
    "compare_dynamics",
    "compare_with_random_subset",
    "compute_gaussian_epsilon",
    "compute_soft_labels",
    "distribution_distance",
    "fine_tune",
    "gaussian_mmd",
    "interpolate_params",
    "matching_loss",
    "mean_embedding",
    "measure_scratch_accuracies",
    "sample_on_ball",
    "sampled_sliced_wasserstein",
    "sliced_wasserstein",
    "soft_label_matching_loss",
    "train_from_scratch",
    "train_on_synthetic_pool",
    "unroll",
]
