"""FedDF (Lin et al., NeurIPS 2020, arXiv:2006.07242)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.ensemble_distillation import (
    DistillationOptions,
    TeacherModels,
    build_distillation,
)
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.distillation import compute_logits, sum_over_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.utils.config import (
    Config,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SearchRange,
)
from fedjax_het.utils.input_kinds import count_rows


@dataclass(frozen=True)
class FedDFOptions(DistillationOptions):
    """Choices of FedDF."""

    PRESETS = {  # noqa: RUF012
        "paper": {},
        "fedaux": {"distill_epochs": 1, "distill_batch_size": 128, "annealed": False},
    }

    preset: str = "paper"
    distill_batch_size: PositiveInt = 64
    "Number of the server's examples in a minibatch."
    annealed: bool = True
    "Whether a cosine schedule decays the rate to 0 over a round's steps."


@dataclass(frozen=True)
class FedDFHyperParameters(Config):
    """Hyperparameters of FedDF."""

    distill_lr: Annotated[NonNegativeFloat, SearchRange(0.0001, 0.01)] = 1e-3
    "Learning rate of the student's Adam; the initial rate if it is annealed."
    distill_clip: PositiveFloat | None = 5.0
    "Norm at which the student's gradients are clipped."


def feddf(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: FedDFOptions,
) -> Algorithm:
    """FedDF: the global model learns the mean logits of the clients' models (Algorithm 1).

    After each round of `base`, over the server's examples x, whose labels are not read,

        min_w mean_x KL(softmax(mean_k f(x; w_k)) || softmax(f(x; w))).

    The teachers w_k are the round's client models in evaluation mode. All teachers have equal
    weights, independent of their weights in the average. The student starts from the model of
    `base`. It learns by Adam with new moments every round, for `distill_epochs` epochs in batches
    of `distill_batch_size`. 0 epochs is `base`. Batch norm of the student is in training mode. The
    mean of the logits of linear models equals the logits of their mean, so FedDF learns nothing
    from a uniform average of linear models.

    Presets:
      paper: the authors' code (epfml/federated-learning-public-code). `distill_lr` 1e-3, which a
        cosine decays to 0 over the steps (`annealed`); gradients are clipped to a norm of
        `distill_clip` (5); batches of 64, as at its clients.
      fedaux: the code that DynaFed's authors built on (fedaux). One epoch at 5e-5 in batches of
        128, neither annealed nor clipped.

    Traffic and client state equal the traffic and state of `base`. Cost: one pass of each of the S
    client models over the server's examples, the student's epochs, and memory for S models. The
    devices of a federation share the work.

    Departure: the authors' code runs up to 10,000 minibatches. It stops after 1,000 without better
    accuracy on labeled validation data, and returns the best student. Here there are 20 epochs, and
    the last student is returned, since the server's examples should be few and unlabeled. Teachers
    are not dropped. In fedaux teachers are in training mode, and Adam's moments are kept from round
    to round. Here neither holds.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose model is distilled.
      options: choices of the method.

    Returns:
      The method.
    """

    def predict_ensemble(hp, teachers: TeacherModels, inputs, key):
        def predict(variables):
            return compute_logits(training.task, variables, inputs)

        models = teachers.client_models
        total = sum_over_models(predict, models, count_rows(inputs), teachers.loops)
        return jax.nn.softmax(total / jnp.maximum(models.is_present.sum(), 1))

    def make_optimizer(hp, num_steps: int):
        lr = hp["distill_lr"]
        if options.annealed:
            lr = optax.cosine_decay_schedule(lr, max(num_steps, 1))
        clip = [optax.clip_by_global_norm(hp["distill_clip"])] if "distill_clip" in hp else []
        return optax.chain(*clip, optax.adam(lr)), None

    return build_distillation(training, plan, base, predict_ensemble, make_optimizer, options)


def _make_hyperparameters(options: FedDFOptions, num_clients: int) -> FedDFHyperParameters:
    """Return the numbers of the preset."""
    if options.preset == "fedaux":
        return FedDFHyperParameters(distill_lr=5e-5, distill_clip=None)
    return FedDFHyperParameters()


SPEC = AlgorithmSpec(
    "feddf",
    feddf,
    "the average learns the mean logits of the clients' models (Lin et al., 2020)",
    title="FedDF",
    paper="Lin et al., NeurIPS 2020, arXiv:2006.07242",
    options=FedDFOptions,
    hyperparameters=_make_hyperparameters,
    color="#CC3311",
    dashes=(0, (6, 2)),
    wraps="model",
    required_data=("proxy_data",),
    needs_classes=True,
)
