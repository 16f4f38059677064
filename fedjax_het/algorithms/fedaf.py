"""FedAF (Wang et al., CVPR 2024): collaborative condensation, and matching of soft labels."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from fedjax_het.algorithms.condensing import (
    CondensingNumbers,
    CondensingOptions,
    condensing,
    private_numbers,
)
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry, Rule
from fedjax_het.common.records import Count, NonNegative, Positive, Share
from fedjax_het.condensation.distribution import (
    interpolated,
    sliced_wasserstein,
    sliced_wasserstein_sampled,
)
from fedjax_het.condensation.knowledge import over_owners, soft_labels
from fedjax_het.condensation.pool import Knowledge
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan


@dataclass(frozen=True)
class FedAFOptions(CondensingOptions):
    """See `fedaf` for what each is."""

    lgkm: Literal["minibatch", "exact"] = "minibatch"
    """Whose mean logits of synthetic images meet the clients' soft labels: the minibatch's or all
    images'."""
    owners: Literal["condensing", "all"] = "condensing"
    "Of a class, whose logits are averaged: clients that condense it, or all that have any of it."
    swd: Literal["exact", "sampled"] = "exact"
    "The sliced Wasserstein distance in closed form, or by random projections."
    swd_projections: Count = 50
    "Their number, where they are drawn."


@dataclass(frozen=True)
class FedAFNumbers(CondensingNumbers):
    gamma: Share = 0.9
    "What a step's model keeps of the received one; the rest is drawn anew."
    lambda_loc: NonNegative = 1e-4
    "Of the distance of an image set's mean logit from its peers'; 0: without collaboration."
    lambda_glob: NonNegative = 0.01
    "Of the distance from the clients' soft labels at the server; 0: without matching."
    tau: Positive = 2.0
    "Temperature of soft labels."


class Told(NamedTuple):
    """What the server knows of the classes after hearing the clients; kept with its state."""

    logits: jax.Array  # [C, C] V: mean logit of each class over its owners
    soft_labels: jax.Array  # [C, C] R
    owned: jax.Array  # [C] bool


def fedaf(
    training: LocalTraining, plan: Plan, *, options: FedAFOptions = FedAFOptions()
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

    def perturb(hp, key, params):
        fresh = training.task.model.init(key)["params"]
        return interpolated(params, fresh, hp["gamma"])

    def collaboration(hp, logits, class_, known: Told, key):
        target = known.logits[class_]
        if options.swd == "exact":
            distance = sliced_wasserstein(logits, target)
        else:
            distance = sliced_wasserstein_sampled(logits, target, key, options.swd_projections)
        return hp["lambda_loc"] * known.owned[class_] * distance

    def knowledge(hp, mean_logits, owns):
        logits, owned = over_owners(mean_logits, owns)
        labels, _ = over_owners(soft_labels(mean_logits, hp["tau"]), owns)
        matched = Knowledge(labels, owned, hp["lambda_glob"], hp["tau"])
        return Told(logits, labels, owned), matched

    algorithm = condensing(
        training,
        plan,
        options,
        perturb=perturb,
        collaboration=collaboration,
        knowledge=knowledge,
        condensing_owners=options.owners == "condensing",
        exact=options.lgkm == "exact",
    )

    def artifacts(state):
        known = state.server.extra
        return {
            **algorithm.artifacts(state),
            "class_logits": known.logits,
            "soft_labels": known.soft_labels,
        }

    return algorithm._replace(artifacts=artifacts)


def fedaf_numbers(options: FedAFOptions, num_clients: int) -> FedAFNumbers:
    """With those of the private option, where it is taken."""
    return private_numbers(options, FedAFNumbers())


_PROTOCOLS = ("fedaf", "feddm")


def _on(dataset: str, lambda_loc: float, lambda_glob: float, image_lr: float) -> Rule:
    numbers = {"lambda_loc": lambda_loc, "lambda_glob": lambda_glob, "image_lr": image_lr}
    return Rule(_PROTOCOLS, (dataset,) if dataset else (), hp=numbers)


ENTRY = Entry(
    "fedaf",
    fedaf,
    "FedDM with the help of peers' logits, and soft labels for the server (Wang et al., 2024)",
    paper="Wang et al., CVPR 2024",
    options=FedAFOptions,
    numbers=fedaf_numbers,
    protocol="fedaf",
    rules=(
        Rule(_PROTOCOLS, settings={"batch_size": 256}),
        Rule(_PROTOCOLS, ("domainnet",), options={"ipc": 20}),
        # Appendix A; on data sets that it does not use as on Fashion-MNIST, whose images are
        # nearest.
        _on("", 1e-3, 2.0, 0.2),
        _on("cifar10", 1e-4, 0.01, 1.0),
        _on("cifar100", 1e-4, 0.01, 0.1),
        _on("domainnet", 0.01, 0.1, 1.0),
    ),
    colour="#CC79A7",
    trains_locally=False,
)
