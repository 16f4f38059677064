"""FedAF (Wang et al., CVPR 2024): collaborative condensation, and matching of soft labels."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.client_condensation import (
    CondensationHyperParameters,
    CondensationOptions,
    build_condensation_algorithm,
    with_privacy_defaults,
)
from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.condensation.distribution_matching import (
    interpolate_params,
    sampled_sliced_wasserstein,
    sliced_wasserstein,
)
from fedjax_het.condensation.soft_label_matching import average_over_owners, compute_soft_labels
from fedjax_het.condensation.synthetic_pool import SoftLabelTargets
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval


@dataclass(frozen=True)
class FedAFOptions(CondensationOptions):
    """See `fedaf` for what each is."""

    lgkm: Literal["minibatch", "exact"] = "minibatch"
    """Whose mean logits of synthetic images meet the clients' soft labels: the minibatch's or all
    images'."""
    owners: Literal["condensing", "all"] = "condensing"
    "Of a class, whose logits are averaged: clients that condense it, or all that have any of it."
    swd: Literal["exact", "sampled"] = "exact"
    "The sliced Wasserstein distance in closed form, or by random projections."
    swd_projections: PositiveInt = 50
    "Their number, where they are drawn."


@dataclass(frozen=True)
class FedAFHyperParameters(CondensationHyperParameters):
    gamma: UnitInterval = 0.9
    "What a step's model keeps of the received one; the rest is drawn anew."
    lambda_loc: NonNegativeFloat = 1e-4
    "Of the distance of an image set's mean logit from its peers'; 0: without collaboration."
    lambda_glob: NonNegativeFloat = 0.01
    "Of the distance from the clients' soft labels at the server; 0: without matching."
    tau: PositiveFloat = 2.0
    "Temperature of soft labels."


class ClassStatistics(NamedTuple):
    """What the server knows of the classes after hearing the clients; kept with its state."""

    logits: jax.Array  # [C, C] V: mean logit of each class over its owners
    soft_labels: jax.Array  # [C, C] R
    is_owned: jax.Array  # [C] bool


def fedaf(
    training: LocalTraining, plan: ExecutionPlan, *, options: FedAFOptions = FedAFOptions()
) -> Algorithm:
    """Aggregation-free learning: clients condense with the help of their peers' logits, the server
    goes on training the model it sent on their images and soft labels.

    A round (section 4): each client runs the received model over all its data and tells the mean
    logit of each class it owns; their means V over the owners come back; each class's images are
    condensed for `steps` (1000) by matching mean embeddings, plus `lambda_loc` times the sliced
    Wasserstein distance of their mean logit from V's; the server trains `server_epochs` (500) on
    all images with cross-entropy plus `lambda_glob` times the symmetric KL between the clients'
    soft labels R = softmax(v / tau), averaged over owners, and those of the synthetic images.

    Every step uses gamma * received + (1 - gamma) * freshly initialised parameters (Eq. 17), for
    all of its terms. lambda_loc, lambda_glob and image_lr depend on the data set (appendix A).

    Where the paper is silent: classes of fewer than ipc examples are not condensed (Table 7's bytes
    fit that); V and R are averaged over owners, not all clients, each counting the same, and owners
    are those that condense the class (`owners` "all": all that have any of it, so that a client
    with one image says as much as one with thousands, which cost 2 to 4 points); the matching is
    summed over classes; the distance is the exact squared one, |u - v|^2 / C; tau 2 (the only
    public value); images start each round anew from means of 5 real ones; networks run in
    evaluation mode while condensing; no clipping, no augmentation, no weight decay; class means of
    the matching are those of the minibatch. In the first round V comes from the initial model, and
    the terms act all the same.

    `private`: see `condensing`; V, and R that is made of it, are noised as the images are.
    lambda_loc = 0 and lambda_glob = 0 are the ablations without collaboration and without matching.
    Sent: down the model and V; up V_k and R_k (redundant, but the paper sends both) and the images.
    Cost: FedDM's, a pass over all data in evaluation mode, a fresh initialisation in every step.
    """

    def perturb_params(hp, key, params):
        fresh_params = training.task.model.init(key)["params"]
        return interpolate_params(params, fresh_params, hp["gamma"])

    def collaboration_loss(hp, logits, class_, class_statistics: ClassStatistics, key):
        target = class_statistics.logits[class_]
        if options.swd == "exact":
            distance = sliced_wasserstein(logits, target)
        else:
            distance = sampled_sliced_wasserstein(logits, target, key, options.swd_projections)
        return hp["lambda_loc"] * class_statistics.is_owned[class_] * distance

    def aggregate_logits(hp, mean_logits, is_owner):
        logits, is_owned = average_over_owners(mean_logits, is_owner)
        labels, _ = average_over_owners(compute_soft_labels(mean_logits, hp["tau"]), is_owner)
        soft_label_targets = SoftLabelTargets(labels, is_owned, hp["lambda_glob"], hp["tau"])
        return ClassStatistics(logits, labels, is_owned), soft_label_targets

    algorithm = build_condensation_algorithm(
        training,
        plan,
        options,
        perturb_params=perturb_params,
        collaboration_loss=collaboration_loss,
        aggregate_logits=aggregate_logits,
        only_condensing_owners=options.owners == "condensing",
        exact_matching=options.lgkm == "exact",
    )

    def artifacts(state):
        class_statistics = state.server.extra
        return {
            **algorithm.artifacts(state),
            "class_logits": class_statistics.logits,
            "soft_labels": class_statistics.soft_labels,
        }

    return algorithm._replace(artifacts=artifacts)


def make_fedaf_hyperparameters(options: FedAFOptions, num_clients: int) -> FedAFHyperParameters:
    """With those of the private option, where it is taken."""
    return with_privacy_defaults(options, FedAFHyperParameters())


_PROTOCOLS = ("fedaf", "feddm")


def _make_dataset_rule(
    dataset: str, lambda_loc: float, lambda_glob: float, image_lr: float
) -> DefaultsRule:
    hyperparameters = {"lambda_loc": lambda_loc, "lambda_glob": lambda_glob, "image_lr": image_lr}
    return DefaultsRule(_PROTOCOLS, (dataset,) if dataset else (), hp=hyperparameters)


SPEC = AlgorithmSpec(
    "fedaf",
    fedaf,
    "FedDM with the help of peers' logits, and soft labels for the server (Wang et al., 2024)",
    paper="Wang et al., CVPR 2024",
    options=FedAFOptions,
    hyperparameters=make_fedaf_hyperparameters,
    protocol="fedaf",
    rules=(
        DefaultsRule(_PROTOCOLS, settings={"batch_size": 256}),
        DefaultsRule(_PROTOCOLS, ("domainnet",), options={"ipc": 20}),
        # Appendix A; on data sets that it does not use as on Fashion-MNIST, whose images are
        # nearest.
        _make_dataset_rule("", 1e-3, 2.0, 0.2),
        _make_dataset_rule("cifar10", 1e-4, 0.01, 1.0),
        _make_dataset_rule("cifar100", 1e-4, 0.01, 0.1),
        _make_dataset_rule("domainnet", 0.01, 0.1, 1.0),
    ),
    color="#CC79A7",
    trains_locally=False,
)
