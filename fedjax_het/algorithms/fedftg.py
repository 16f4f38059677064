"""FedFTG (Zhang et al., CVPR 2022, arXiv:2203.09249)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.class_counts import CLASS_COUNTS, select_class_counts
from fedjax_het.algorithms.data_free_distillation import (
    DataFreeDistillation,
    DataFreeOptions,
    TeacherEnsemble,
)
from fedjax_het.algorithms.server_step import ServerStepContext, with_server_step
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.task import Task
from fedjax_het.nn import make_image_generator
from fedjax_het.utils.config import (
    Config,
    DecayFactor,
    NonNegativeFloat,
    SearchRange,
)
from fedjax_het.utils.input_kinds import IMAGE_KINDS


@dataclass(frozen=True)
class FedFTGHyperParameters(Config):
    """Hyperparameters of FedFTG."""

    image_generator_lr: Annotated[NonNegativeFloat, SearchRange(0.001, 0.1)] = 0.01
    "Learning rate of the generator's Adam in round 0."
    distill_lr: Annotated[NonNegativeFloat, SearchRange(0.001, 0.1)] = 0.01
    "Learning rate of the SGD of the student, the global model, in round 0."
    distill_lr_decay: DecayFactor = 0.998
    "Factor of both learning rates per round."
    fidelity_weight: NonNegativeFloat = 1.0
    """Weight of the cross-entropy that the teachers, the clients' models, have on generated images
    with the labels that the generator read."""
    image_diversity: NonNegativeFloat = 1.0
    "Weight of the generator's term that keeps images apart."


def fedftg(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: DataFreeOptions,
) -> Algorithm:
    """FedFTG: the global model learns from generated images on which it differs from the clients.

    After each round of `base`, the server draws in each of I iterations a minibatch of noise e from
    N(0, 1) and of labels y with p(y) proportional to sum_k n_ky (customized label sampling). n_ky
    counts the examples of class y at client k of the round. With images x = G(e, y), the models w_k
    of the round's clients and w of the server play

        min_w max_G mean sum_k alpha_ky (KL(p(x; w_k) || p(x; w)) - fidelity CE(p(x; w_k), y))
                    - diversity exp(-mean_ij |e_i - e_j|^2 |x_i - x_j|),

    alpha_ky = n_ky / sum_j n_jy (class-level ensemble). First G makes `synthesis_steps` steps of
    Adam, then w makes `distill_steps` steps of SGD on the divergence alone. The last term has mean
    squares and mean absolute values. w starts from the model of `base`. G is kept from round to
    round, its Adam starts anew. Both rates are multiplied by `distill_lr_decay` per round. 0
    iterations are `base`, and so is a round in which no client has data.

    All networks are in evaluation mode, except for the one that learns. Generated images are
    normalized already, see `make_image_generator`.

    Traffic: as `base`. The class counts, C numbers per client once, are not counted. State: the
    generator at the server. Cost per iteration: a pass with gradients through the S client models
    for each generator step, a pass through them for the targets, and the student's steps; memory
    for S models. The devices of a federation share the work.

    Defaults: the authors' code (ZhangLin-PKU/FedFTG, MIT license), `synthesis_loss` included. On
    digits (10 clients, alpha 0.1, 20 rounds of `mlp`, one seed) FedAvg has 75.8 %, "code" 74.7 %
    and "paper" 64.6 %. Its student's rate of 0.1
    applies to a mean over samples and 10 classes, which is 0.01 for the mean over samples here.

    Departures from that code: labels are drawn one by one, instead of in exact shares over all
    iterations. The student has no weight decay, which is 0.001 there. Convolutions before batch
    norm learn no bias. `synthesis_loss` "code" is the code's loss: one step per teacher along

        mean(-alpha_ky mean_c |f_c(x; w) - f_c(x; w_k)|) + fidelity mean(CE) mean(alpha_ky)
        + diversity / S exp(...),

    with constant f(x; w_k) in the first term. Its product of means is not the mean of products.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, a method whose rounds can return the clients' models.
      options: choices of the method.

    Returns:
      The method.
    """
    model, max_iterations = training.task.model, options.distill_iterations
    sizes = (options.image_width, options.image_noise)
    generator = make_image_generator(model.num_classes, model.input_shape, *sizes)
    fine_tuning = DataFreeDistillation(make_normalized_task(training.task), generator, options)
    algorithm = base(training._replace(returns_client_models=True), plan)
    algorithm = algorithm._replace(round_inputs=(*algorithm.round_inputs, CLASS_COUNTS))

    def init_generator(hp, key, variables):
        return generator.init(fold_in_purpose(key, Purpose.SERVER))

    def run_server_step(hp, generator_variables, context: ServerStepContext):
        models, cohort = context.client_models, context.cohort
        assert models is not None, "the base does not return its clients' models"
        schedule, all_counts = cohort.schedule, select_class_counts(cohort)
        counts = all_counts.at[schedule.participants].get(mode="fill", fill_value=0)
        counts = jnp.where(models.is_present[:, None], counts, 0)
        decay = hp["distill_lr_decay"] ** context.round_index
        rates = {name: hp[name] * decay for name in ("image_generator_lr", "distill_lr")}
        num_iterations = jnp.where(schedule.is_verification, min(1, max_iterations), max_iterations)
        num_iterations = jnp.where(models.is_present.any(), num_iterations, 0)
        class_weights = counts / jnp.maximum(counts.sum(0), 1)
        teachers = TeacherEnsemble(models.variables, class_weights, models.is_present)
        key = fold_in_purpose(context.key, Purpose.SERVER)
        args = (generator_variables, context.variables_after, teachers, counts.sum(0), key)
        return plan.shard_server_work(
            fine_tuning.run, hp | rates, *args, num_iterations, loops=cohort.loops
        )

    return with_server_step(
        algorithm,
        run_server_step,
        init_step_state=init_generator,
        server_batch_size=options.distill_batch_size,
    )


def make_normalized_task(task: Task) -> Task:
    """Return the task of images that are already normalized."""
    channels = task.model.input_shape[-1]
    return Task(task.model, mean=(0.0,) * channels, std=(1.0,) * channels)


SPEC = AlgorithmSpec(
    "fedftg",
    fedftg,
    "the average learns from images on which it differs from the clients (Zhang et al., 2022)",
    title="FedFTG",
    paper="Zhang et al., CVPR 2022, arXiv:2203.09249",
    options=DataFreeOptions,
    hyperparameters=FedFTGHyperParameters,
    color="#A0522D",
    dashes=(0, (4, 1)),
    wraps="model",
    input_kinds=IMAGE_KINDS,
    needs_classes=True,
)
