"""FedAF (Wang et al., CVPR 2024): collaborative condensation, and matching of soft labels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.client_condensation import (
    ClientCondensation,
    CondensationHyperParameters,
    CondensationOptions,
    make_condensation_hyperparameters,
)
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.condensation.distribution_matching import (
    average_over_owners,
    compute_soft_labels,
    gaussian_mmd,
    interpolate_params,
    sampled_sliced_wasserstein,
    sliced_wasserstein,
)
from fedjax_het.condensation.synthetic_pool import SoftLabelTargets
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SearchRange,
    UnitInterval,
)
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import FLOAT_KINDS


@dataclass(frozen=True)
class FedAFOptions(CondensationOptions):
    """Choices of FedAF."""

    lgkm: Literal["minibatch", "exact"] = "minibatch"
    """Synthetic images whose mean logits match the clients' soft labels: the minibatch's, or all
    images."""
    owners: Literal["condensing", "all"] = "condensing"
    """Clients whose logits of a class are averaged: "condensing", clients that condense it; "all",
    clients that have any example of it."""
    distance: Literal["swd", "mmd", "cosine", "l2"] = "swd"
    """Distance of a class's mean logit from its peers': sliced Wasserstein, maximum mean
    discrepancy with Gaussian kernels, cosine, or Euclidean (not squared)."""
    swd: Literal["exact", "sampled"] = "exact"
    "Sliced Wasserstein distance in closed form, or by random projections."
    swd_projections: PositiveInt = 50
    "Number of random projections."

    def check(self) -> None:
        """Raise ConfigError for options that cannot be combined."""
        super().check()
        is_used = self.distance == "swd" or self.swd == "exact"
        require(is_used, "swd", self.swd, f"no value, with distance = {self.distance!r}")


@dataclass(frozen=True)
class FedAFHyperParameters(CondensationHyperParameters):
    """Hyperparameters of FedAF."""

    gamma: UnitInterval = 0.9
    "Share of the received model in a step's model; the rest is drawn anew."
    lambda_loc: Annotated[NonNegativeFloat, SearchRange(1e-05, 0.001)] = 1e-4
    "Weight of the distance of an image set's mean logit from its peers'; 0: no collaboration."
    lambda_glob: Annotated[NonNegativeFloat, SearchRange(0.001, 0.1)] = 0.01
    "Weight of the distance from the clients' soft labels at the server; 0: no matching."
    tau: PositiveFloat = 2.0
    "Temperature of soft labels."


class ClassStatistics(NamedTuple):
    """Statistics of the classes over all clients, stored in the server's state."""

    logits: jax.Array
    "`[C, C]` V: mean logit of each class over its owners."
    soft_labels: jax.Array
    "`[C, C]` R: mean soft label of each class over its owners."
    is_owned: jax.Array
    "`[C]` bool: whether a client owns the class."


def fedaf(training: LocalTraining, plan: ExecutionPlan, *, options: FedAFOptions) -> Algorithm:
    """FedAF: clients condense with their peers' logits, the server trains without averaging.

        S_k^c = argmin_S E_v ||mean h_v(D_k^c) - mean h_v(S)||^2 + lambda_loc SWD(mean f_v(S), V^c),
        w <- argmin_u CE(u; all S) + lambda_glob KL_sym(R, T(u)),   started at w.

    A round (section 4): each client runs the received model over all its data and sends the mean
    logit of each class it owns. Their means V over the owners come back. Each class's images are
    condensed for `steps` (1000) by matching mean embeddings h. The loss adds `lambda_loc` times the
    sliced Wasserstein distance of their mean logit f from V's. The server trains `server_epochs`
    (500) on all images. Its loss is cross-entropy plus `lambda_glob` times the symmetric KL between
    the soft labels R and T. R are the clients', softmax(v / tau), averaged over owners; T are the
    soft labels of the synthetic images. All terms of a step use v = gamma * received + (1 - gamma)
    * freshly initialized parameters (Eq. 17). lambda_loc, lambda_glob and image_lr depend on the
    data set (appendix A). lambda_loc = 0 and lambda_glob = 0 are the ablations without
    collaboration and without matching. `private`: see `ClientCondensation`; V and R have noise.

    `distance` replaces SWD. The paper leaves the distance open (Eq. 10), and its instance SWD is
    the squared error of two vectors. Scales differ: each distance needs its own lambda_loc.

    Traffic: the model and V down; V_k, R_k (redundant, but the paper sends both) and the images up.
    State: ipc images per client and class. Cost: FedDM's cost, a pass over all data in evaluation
    mode, and a fresh initialization in every step.

    Choices that the paper does not state: classes of fewer than ipc examples are not condensed
    (Table 7's bytes fit that). V and R are averaged over owners, not all clients, each with one
    weight. Owners are the clients that condense the class. With `owners` "all", a client with one
    image has the weight of a client with thousands, which costs 2 to 4 points of accuracy. The
    matching is summed over classes. The distance is the exact squared one, |u - v|^2 / C. tau is 2,
    the only public value. Images start each round anew from means of 5 real ones. Networks run in
    evaluation mode while condensing. There is no clipping, augmentation or weight decay. The
    matching uses class means of the minibatch. In the first round V comes from the initial model,
    and no term is switched off.

    Args:
      training: the task and the batch size.
      plan: where the clients run, and the devices that share the server's work.
      options: choices of the method.

    Returns:
      The method.
    """

    def perturb_params(hp, key, params):
        fresh_params = training.task.model.init(key)["params"]
        return interpolate_params(params, fresh_params, hp["gamma"])

    def collaboration_loss(hp, logits, class_, statistics: ClassStatistics, key):
        target = statistics.logits[class_]
        if options.distance != "swd":
            distance = _DISTANCES[options.distance](logits, target)
        elif options.swd == "exact":
            distance = sliced_wasserstein(logits, target)
        else:
            distance = sampled_sliced_wasserstein(logits, target, key, options.swd_projections)
        return hp["lambda_loc"] * statistics.is_owned[class_] * distance

    def aggregate_logits(hp, mean_logits, is_owner):
        logits, is_owned = average_over_owners(mean_logits, is_owner)
        labels, _ = average_over_owners(compute_soft_labels(mean_logits, hp["tau"]), is_owner)
        targets = SoftLabelTargets(labels, is_owned, hp["lambda_glob"], hp["tau"])
        return ClassStatistics(logits, labels, is_owned), targets

    algorithm = ClientCondensation(
        training,
        plan,
        options,
        perturb_params,
        collaboration_loss,
        aggregate_logits,
        only_condensing_owners=options.owners == "condensing",
        exact_matching=options.lgkm == "exact",
    ).build()

    def artifacts(state):
        logits, soft_labels, _ = state.server.extra
        statistics = {"class_logits": logits, "soft_labels": soft_labels}
        return algorithm.artifacts(state) | statistics

    return algorithm._replace(artifacts=artifacts)


_SMALLEST_NORM = 1e-6  # of logits; below it gradients are 0
_DISTANCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mmd": gaussian_mmd,
    "cosine": partial(optax.cosine_distance, epsilon=_SMALLEST_NORM),
    "l2": lambda u, v: optax.safe_norm(u - v, _SMALLEST_NORM),
}
_PROTOCOLS = ("fedaf", "feddm")


def _make_dataset_rule(
    lambda_loc: float, lambda_glob: float, image_lr: float, *datasets: str
) -> DefaultsRule:
    hp = {"lambda_loc": lambda_loc, "lambda_glob": lambda_glob, "image_lr": image_lr}
    return DefaultsRule(_PROTOCOLS, datasets, hp=hp)


SPEC = AlgorithmSpec(
    "fedaf",
    fedaf,
    "FedDM with the help of peers' logits, and soft labels for the server (Wang et al., 2024)",
    title="FedAF",
    paper="Wang et al., CVPR 2024",
    options=FedAFOptions,
    hyperparameters=partial(make_condensation_hyperparameters, FedAFHyperParameters),
    protocol="fedaf",
    rules=(
        DefaultsRule(_PROTOCOLS, settings={"batch_size": 256}),
        DefaultsRule(_PROTOCOLS, ("domainnet",), options={"ipc": 20}),
        # Appendix A. Its numbers of Fashion-MNIST, whose images are nearest, serve data sets that
        # it does not use.
        _make_dataset_rule(1e-3, 2.0, 0.2),
        _make_dataset_rule(1e-4, 0.01, 1.0, "cifar10"),
        _make_dataset_rule(1e-4, 0.01, 0.1, "cifar100"),
        _make_dataset_rule(0.01, 0.1, 1.0, "domainnet"),
    ),
    color="#CC79A7",
    trains_locally=False,
    input_kinds=FLOAT_KINDS,
    needs_classes=True,
)
