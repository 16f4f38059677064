"""FedDF (Lin et al., NeurIPS 2020, arXiv:2006.07242)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.ensemble_distillation import (
    DistillationOptions,
    TeacherModels,
    build_distillation_algorithm,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.distillation import compute_logits, sum_over_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import Config, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class FedDFOptions(DistillationOptions):
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "fedaux": {"distill_epochs": 1, "distill_batch_size": 128, "annealed": False},
    }

    preset: str = "paper"
    distill_batch_size: PositiveInt = 64
    "Of the server's examples."
    annealed: bool = True
    "Whether a cosine takes the rate to 0 over a round's steps."


@dataclass(frozen=True)
class FedDFHyperParameters(Config):
    distill_lr: NonNegativeFloat = 1e-3
    "Adam's, of the student; where it starts, if annealed."
    distill_clip: PositiveFloat | None = 5.0
    "Norm at which gradients are clipped."


def feddf(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FedDFOptions = FedDFOptions(),
) -> Algorithm:
    """After each round of `base` the global model w learns what its clients' models say together:

        min_w mean_x KL(softmax(mean_k f(x; w_k)) || softmax(f(x; w)))

    over the server's examples x, whose labels are not read. The teachers w_k are the round's client
    models in evaluation mode, all alike, whatever their weights in the average; the student starts
    from what `base` made of them, and learns by Adam, new every round, for `distill_epochs` epochs
    in batches of `distill_batch_size`. 0 epochs is `base`.

    Presets:
      paper: the authors' code (epfml/federated-learning-public-code). `distill_lr` 1e-3, which a
        cosine takes to 0 over the steps (`annealed`); gradients are clipped to a norm of
        `distill_clip` (5); batches of 64, as at its clients. Its at most 10,000 minibatches end
        when accuracy on labelled validation data has not improved for 1,000, and the best student
        of these is kept; here there are 20 epochs, and the last is kept, since the server's
        examples are to be few and without labels. Teachers are not dropped.
      fedaux: what the authors of DynaFed built on (fedaux). One epoch at 5e-5 in batches of 128,
        neither annealed nor clipped. There teachers are in training mode, and Adam's moments are
        kept from round to round; not so here.

    The mean of linear models' logits is that of their mean: there FedDF has nothing to learn from
    a uniform average. Batch norm is the student's as in training.

    Traffic and state: those of `base`. Cost: a pass of each of the S clients' models over the
    server's examples and the student's epochs, both shared by the devices that share a federation;
    memory of the S models.
    """

    def predict_ensemble(hp, teachers: TeacherModels, images, key):
        client_models = teachers.client_models
        total = sum_over_models(
            lambda variables: compute_logits(training.task, variables, images),
            client_models,
            len(images),
            teachers.loops,
        )
        return jax.nn.softmax(total / jnp.maximum(client_models.is_present.sum(), 1))

    def make_optimizer(hp, num_steps: int):
        lr = hp["distill_lr"]
        if options.annealed:
            lr = optax.cosine_decay_schedule(lr, max(num_steps, 1))
        clip = [optax.clip_by_global_norm(hp["distill_clip"])] if "distill_clip" in hp else []
        return optax.chain(*clip, optax.adam(lr))

    return build_distillation_algorithm(
        training, plan, base, predict_ensemble, make_optimizer, options
    )


def make_feddf_hyperparameters(options: FedDFOptions, num_clients: int) -> FedDFHyperParameters:
    """The preset's rate, and its bound on gradients if it has one."""
    if options.preset == "fedaux":
        return FedDFHyperParameters(distill_lr=5e-5, distill_clip=None)
    return FedDFHyperParameters()


SPEC = AlgorithmSpec(
    "feddf",
    feddf,
    "the average learns the mean logits of the clients' models (Lin et al., 2020)",
    paper="Lin et al., NeurIPS 2020, arXiv:2006.07242",
    options=FedDFOptions,
    hyperparameters=make_feddf_hyperparameters,
    color="#CC3311",
    dashes=(0, (6, 2)),
    wraps="model",
    required_data=("proxy_data",),
)
