"""Parts of methods whose server combines or distills the clients' models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.server_step import (
    ServerStepContext,
    get_server_examples,
    with_server_step,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.resumable_loops import WHOLE_LOOPS, LoopRunner
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import (
    EpochRange,
    ServerTraining,
    make_shuffled_batches,
    train_on_examples,
)
from fedjax_het.utils.arrays import AnyArray
from fedjax_het.utils.config import Config, NonNegativeInt, PositiveInt
from fedjax_het.utils.input_kinds import count_rows

Tree = Any


@dataclass(frozen=True)
class DistillationOptions(Config):
    """Choices of the student's training."""

    distill_epochs: NonNegativeInt = 20
    "Epochs over the server's examples in each round."
    distill_batch_size: PositiveInt = 128
    "Number of the server's examples in a minibatch."


class TeacherModels(NamedTuple):
    """Models of an ensemble."""

    client_models: ClientModels
    "The round's clients' models after local training."
    variables_before: Tree
    "Variables of the global model at the start of the round."
    variables_after: Tree
    "Variables of the global model after the base's round."
    loops: LoopRunner = WHOLE_LOOPS
    "Runs the long loops over the models."


def with_ensemble_step(
    training: LocalTraining,
    plan: ExecutionPlan,
    base: Callable[..., Algorithm],
    combine_models: Callable[[Any, ServerStepContext, ClientModels], Tree],
    server_batch_size: int,
) -> Algorithm:
    """Return `base` with a server step that reads all models of the round's clients.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      base: `base(training, plan)`, a method whose rounds can return the clients' models.
      combine_models: `combine_models(hp, context, client_models) -> variables` of the global model.
      server_batch_size: samples per step of the server's work.

    Returns:
      The method.
    """
    algorithm = base(training._replace(returns_client_models=True), plan)

    def run_server_step(hp, step_state, context: ServerStepContext):
        assert context.client_models is not None, "the base does not return its clients' models"
        return combine_models(hp, context, context.client_models), step_state

    return with_server_step(algorithm, run_server_step, server_batch_size=server_batch_size)


def build_distillation(
    training: LocalTraining,
    plan: ExecutionPlan,
    base: Callable[..., Algorithm],
    predict_ensemble: Callable[[Any, TeacherModels, AnyArray, jax.Array], jax.Array],
    make_optimizer: Callable[[Any, int], tuple[optax.GradientTransformation, Callable | None]],
    options: DistillationOptions,
) -> Algorithm:
    """Return `base`, whose global model learns an ensemble's predictions in each round.

    The server's examples are the inputs. A round in which no client has data changes nothing.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, a method whose rounds can return the clients' models.
      predict_ensemble: `predict_ensemble(hp, teachers, inputs, key) -> targets`, probabilities
        `[n, C]`, each of its input alone. The inputs may be a part of the server's.
      make_optimizer: `make_optimizer(hp, num_steps) -> (optimizer, is_averaged_step)` of the
        student, see `ServerTraining`.
      options: choices of the student's training.

    Returns:
      The method.
    """
    epochs, batch_size = options.distill_epochs, options.distill_batch_size

    def distill_on_shard(
        parallelism: ServerParallelism, hp, before, after, models: ClientModels, inputs, key
    ):
        draw_key, key = jax.random.split(key)
        order_key, step_key = jax.random.split(key)
        teachers = TeacherModels(models, before, after, parallelism.loops)
        targets = parallelism.map_samples(
            lambda inputs: predict_ensemble(hp, teachers, inputs, draw_key), inputs
        )
        num_steps = epochs * -(-count_rows(inputs) // batch_size)
        batches = make_shuffled_batches(order_key, count_rows(inputs), batch_size)
        optimizer, is_averaged_step = make_optimizer(hp, num_steps)
        # Cross-entropy differs from the divergence by a term that does not depend on the student.
        loss_and_gradient = training.task.loss_and_gradient
        server_training = ServerTraining(
            loss_and_gradient, optimizer, step_key, is_averaged_step, parallelism
        )
        num_epochs = jnp.where(models.is_present.any(), epochs, 0)
        epoch_range = EpochRange(num_epochs, max_total=epochs)
        return train_on_examples(
            server_training, after, Examples(inputs, targets), batches, epoch_range
        )

    def distill_round(hp, context: ServerStepContext, models: ClientModels):
        key = fold_in_purpose(context.key, Purpose.SERVER)
        before_and_after = (context.variables_before, context.variables_after)
        args = (hp, *before_and_after, models, get_server_examples(context).inputs, key)
        return plan.shard_server_work(distill_on_shard, *args, loops=context.cohort.loops)

    return with_ensemble_step(training, plan, base, distill_round, batch_size)
