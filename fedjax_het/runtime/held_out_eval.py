"""How good the final global model is on clients that took no part, as it is and fine-tuned."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import FineTuning
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.client_loop import (
    Cohort,
    Examples,
    RoundSchedule,
    tile_over_clients,
    train_cohort,
)
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.evaluation import (
    ClientTests,
    compute_client_tests_shape,
    evaluate_clients,
    make_client_tests,
)
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.local_training import ServerMessage, make_local_model_training
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.rng import Purpose, Stream, fold_in_purpose, make_stream_key
from fedjax_het.core.schedule import Scheduler
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.compiled_programs import Signature, build_algorithm
from fedjax_het.runtime.data_assignment import HeldOutClients

MAX_LANES = 8  # clients that are tuned at a time


class HeldOutAccuracy(NamedTuple):
    """Shares of each held-out client's own test, `[H]`; NaN where it has none."""

    global_model: np.ndarray  # of the global model
    tuned_model: np.ndarray | None  # of its copy, fine-tuned; None where clients do not train


def evaluate_held_out_clients(
    signature: Signature,
    spec: ResolvedRunSpec,
    dataset: Dataset,
    held_out: HeldOutClients,
    variables: Any,
    hp: dict[str, Any],
) -> HeldOutAccuracy:
    """Of a final global model.

    Every held-out client fine-tunes a copy on its data: as the method tunes what it scores, if it
    does, else by local training without the method's terms, for `held_out_epochs`.
    Cost: a compilation; a pass over the clients' tests, and their epochs, on one device.
    """
    num_clients = held_out.partition.num_clients
    plan = make_execution_plan(min(num_clients, MAX_LANES), 1, mesh_axis=None)
    examples, tests = _select_examples(dataset.test_images, dataset.test_labels, held_out.tests)
    device_tests = jax.device_put(
        make_client_tests(plan, tests, compute_client_tests_shape(plan, tests))
    )
    program_inputs = (hp, variables, device_tests, examples)
    global_accuracy = np.asarray(_build_evaluation(signature, plan, num_clients)(*program_inputs))
    tuning = _get_tuning(signature)
    if tuning is None:
        return HeldOutAccuracy(global_accuracy, None)
    if spec.held_out_epochs is not None:
        tuning = tuning._replace(epochs=spec.held_out_epochs, steps=None)
    train_examples, partition = _select_examples(
        dataset.train_images, dataset.train_labels, held_out.partition
    )
    scheduler = _build_tuning_scheduler(spec, partition, tuning, plan)
    program = _build_tuned_evaluation(signature, plan, num_clients)
    # As copies were tuned in a round after the last one.
    round_key = jax.random.fold_in(make_stream_key(spec.seed, Stream.TRAIN), spec.rounds)
    key = fold_in_purpose(round_key, Purpose.TUNING)
    program.verify((*program_inputs, scheduler.make_first_step_round(0), train_examples, key))
    _, tuned_accuracy = program(*program_inputs, scheduler.make_round(0), train_examples, key)
    return HeldOutAccuracy(global_accuracy, np.asarray(tuned_accuracy))


def _build_tuning_scheduler(
    spec: ResolvedRunSpec, partition: Partition, tuning: FineTuning, plan: ExecutionPlan
) -> Scheduler:
    """Of the round in which all of them tune."""
    work_items = ClientWork(
        partition, tuning.epochs, spec.batch_size, max_num_steps=tuning.steps, stream=Stream.TUNING
    )
    return Scheduler(
        partition,
        work_items,
        seed=spec.seed,
        num_rounds=1,
        participation=1.0,
        averaging=None,
        eval_every=1,
        blocks=plan.blocks,
        lanes=plan.lanes,
    )


@functools.lru_cache(maxsize=32)
def _build_evaluation(signature: Signature, plan: ExecutionPlan, num_clients: int) -> Callable:
    """-> accuracies `[clients]` of what was received."""

    def evaluate_global_model(hp, variables, tests, examples):
        return _evaluate_clients(
            signature, plan, num_clients, lambda model, k: model, variables, tests, examples
        )

    return jax.jit(evaluate_global_model)


@functools.lru_cache(maxsize=32)
def _build_tuned_evaluation(
    signature: Signature, plan: ExecutionPlan, num_clients: int
) -> VerifiedJit:
    """-> (tuned copies `[clients, ...]`, their accuracies)."""
    tuning = _get_tuning(signature)
    assert tuning is not None
    client = tuning.client_algorithm

    def tune_and_evaluate(
        hp, variables, tests, examples, schedule: RoundSchedule, train_examples: Examples, key
    ):
        copies = tile_over_clients(variables, num_clients)
        cohort, message = Cohort(schedule, train_examples), ServerMessage(variables)
        tuned_models = train_cohort(client, plan, hp, message, copies, key, cohort).states
        return tuned_models, _evaluate_clients(
            signature, plan, num_clients, get_client_row, tuned_models, tests, examples
        )

    return VerifiedJit(
        tune_and_evaluate,
        baseline=lambda args: (tile_over_clients(args[1], num_clients), 0.0),
        name="held-out clients",
    )


def _evaluate_clients(
    signature: Signature,
    plan: ExecutionPlan,
    num_clients: int,
    get_model: Callable,
    models: Any,
    tests: ClientTests,
    examples: Examples,
) -> jax.Array:
    task, groups = signature.training.task, tests.clients.shape[1]
    evaluation_inputs = (get_model, models, tests, examples, num_clients, groups)
    return evaluate_clients(task, plan, *evaluation_inputs).accuracy


def _get_tuning(signature: Signature) -> FineTuning | None:
    """How a client tunes its copy; None where clients do not train."""
    tuning, training = build_algorithm(signature).fine_tuning, signature.training
    if tuning is None and training.optimizer is not None:
        return FineTuning(make_local_model_training(training), 1)
    return tuning


def _select_examples(
    images: np.ndarray, labels: np.ndarray, partition: Partition
) -> tuple[Examples, Partition]:
    """Of a split, what these clients have, and where in it."""
    selected, indices = np.unique(partition.indices, return_inverse=True)
    examples = Examples(images[selected], np.asarray(labels[selected], np.int32))
    return jax.device_put(examples), dataclasses.replace(partition, indices=indices)
