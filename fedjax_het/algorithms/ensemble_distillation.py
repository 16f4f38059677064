"""What the methods that distil the clients' models into the server's share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import ServerStepContext, get_server_examples, with_server_step
from fedjax_het.core.client_loop import ClientModels
from fedjax_het.core.distillation import distill_student
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.resumable_loops import WHOLE_LOOPS, LoopRunner
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import count_steps_per_epoch
from fedjax_het.utils.arrays import AnyArray
from fedjax_het.utils.config import Config, NonNegativeInt, PositiveInt

Tree = Any


@dataclass(frozen=True)
class DistillationOptions(Config):
    distill_epochs: NonNegativeInt = 20
    "Over the server's examples, each round."
    distill_batch_size: PositiveInt = 128
    "Of the server's examples."


class TeacherModels(NamedTuple):
    """Of whom an ensemble is made."""

    client_models: ClientModels
    variables_before: Tree  # the variables that the round started from
    variables_after: Tree  # those that the base made of its clients' work
    loops: LoopRunner = WHOLE_LOOPS  # runs the long loops over the models


def with_ensemble_step(
    training: LocalTraining,
    plan: ExecutionPlan,
    base: Callable[..., Algorithm],
    combine_models: Callable[[Any, ServerStepContext, ClientModels], Tree],
    server_batch_size: int,
) -> Algorithm:
    """`base`, whose global model becomes `refine(hp, round, models)` of all its clients' models."""
    algorithm = base(training._replace(returns_client_models=True), plan)

    def run_server_step(hp, step_state, context: ServerStepContext):
        assert context.client_models is not None, (
            "the base is not one that hands out its clients' models"
        )
        return combine_models(hp, context, context.client_models), step_state

    return with_server_step(algorithm, run_server_step, server_batch_size=server_batch_size)


def build_distillation_algorithm(
    training: LocalTraining,
    plan: ExecutionPlan,
    base: Callable[..., Algorithm],
    predict_ensemble: Callable[[Any, TeacherModels, AnyArray, jax.Array], jax.Array],
    make_optimizer: Callable[[Any, int], optax.GradientTransformation],
    options: DistillationOptions,
    *,
    make_swa_predicate: Callable[[int], Callable | None] = lambda num_steps: None,
) -> Algorithm:
    """`base`, whose global model learns each round what an ensemble says of the server's examples.

    A round in which no client has data teaches nothing.

    Args:
      ensemble(hp, teachers, images, key) -> targets, `[n, C]` probabilities, each of its image
        by itself; it may see a part of the server's.
      optimizer(hp, num_steps); collects(num_steps): see `distill_student`.
    """
    task = training.task

    def distill_round(hp, context: ServerStepContext, client_models: ClientModels):
        images = get_server_examples(context).images
        key = fold_in_purpose(context.key, Purpose.SERVER)
        variables_before, variables_after = context.variables_before, context.variables_after
        return plan.shard_server_work(
            distill_on_shard,
            hp,
            variables_before,
            variables_after,
            client_models,
            images,
            key,
            loops=context.cohort.loops,
        )

    def distill_on_shard(
        server_parallelism: ServerParallelism,
        hp,
        variables_before,
        variables_after,
        client_models: ClientModels,
        images,
        key,
    ):
        draw_key, key = jax.random.split(key)
        batch_size = options.distill_batch_size
        num_steps = options.distill_epochs * count_steps_per_epoch(len(images), batch_size)
        teachers = TeacherModels(
            client_models, variables_before, variables_after, server_parallelism.loops
        )
        targets = server_parallelism.map_samples(
            lambda images: predict_ensemble(hp, teachers, images, draw_key), images
        )
        return distill_student(
            task,
            variables_after,
            images,
            targets,
            key,
            optimizer=make_optimizer(hp, num_steps),
            batch_size=batch_size,
            epochs=jnp.where(client_models.is_present.any(), options.distill_epochs, 0),
            max_epochs=options.distill_epochs,
            is_averaged_step=make_swa_predicate(num_steps),
            server_parallelism=server_parallelism,
        )

    return with_ensemble_step(training, plan, base, distill_round, options.distill_batch_size)
