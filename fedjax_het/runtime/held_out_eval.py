"""Evaluation of a final global model on clients that took no part in the run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import FineTuning
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.client_loop import Cohort, Examples, SkewedExamples, train_cohort
from fedjax_het.core.client_rows import get_client_row, tile_over_clients
from fedjax_het.core.evaluation import (
    ClientModelSource,
    compute_client_tests_shape,
    evaluate_clients,
    make_client_tests,
)
from fedjax_het.core.example_transform import make_skew_inputs
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.memory import MAX_CACHED_PROGRAMS
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.rng import Purpose, Stream, fold_in_purpose, make_stream_key
from fedjax_het.core.schedule import RoundSettings, Scheduler
from fedjax_het.core.training_variants import make_local_model_training
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import Dataset, Partition
from fedjax_het.runtime.compiled_programs import build_algorithm
from fedjax_het.runtime.data_assignment import HeldOutClients
from fedjax_het.runtime.signature import Signature
from fedjax_het.utils.input_kinds import take_rows

MAX_LANES = 8
"""Number of clients that fine-tune in parallel."""


def evaluate_held_out_clients(
    signature: Signature,
    spec: ResolvedRunSpec,
    dataset: Dataset,
    held_out: HeldOutClients,
    variables: Any,
    hp: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Evaluate a global model and fine-tuned copies on the tests of clients that took no part.

    Every client fine-tunes a copy on its training examples for `held_out_epochs` epochs. It uses
    the method's fine-tuning of evaluated models, otherwise local training without the terms of the
    method. Cost: one compilation, one pass over the tests and the epochs, on one device.

    Args:
      signature: the static choices of the run.
      spec: settings of the run.
      dataset: data set of the run.
      held_out: the clients and their tests.
      variables: the global model.
      hp: numeric hyperparameters, as programs read them.

    Returns:
      Accuracies of the clients by name, fractions `[clients]`, NaN for a client without a test:
      `held_out_accuracy` of the global model and, if clients train, `held_out_tuned_accuracy`.
    """
    programs = _build_programs(signature, held_out.partition.num_clients)
    plan, tuning = programs.plan, programs.tuning
    key = make_stream_key(spec.partition_seed, Stream.SKEW)
    skew = make_skew_inputs(held_out.skew, key, dataset.train_labels, owners=None)
    examples, tests = _select_examples(dataset.test_inputs, dataset.test_labels, held_out.tests)
    test_examples = SkewedExamples(*examples, skew.test_transform, skew.test_label_maps)
    shape = compute_client_tests_shape(plan, tests)
    inputs = (variables, jax.device_put(make_client_tests(plan, tests, shape)), test_examples)
    accuracies = {"held_out_accuracy": np.asarray(programs.evaluate(*inputs))}
    if tuning is None or programs.tune is None:
        return accuracies
    if spec.held_out_epochs is not None:
        tuning = tuning._replace(epochs=spec.held_out_epochs, steps=None)
    train_examples, partition = _select_examples(
        dataset.train_inputs, dataset.train_labels, held_out.partition
    )
    skewed_examples = SkewedExamples(*train_examples, skew.transform)
    work = ClientWork(
        partition, tuning.epochs, spec.batch_size, max_num_steps=tuning.steps, stream=Stream.TUNING
    )
    settings = RoundSettings(spec.seed, averaging=None)
    scheduler = Scheduler(work, settings, plan.blocks, plan.lanes)
    # The keys equal the keys of a fine-tuning in a round after the last round.
    round_key = jax.random.fold_in(make_stream_key(spec.seed, Stream.TRAIN), spec.rounds)
    key = fold_in_purpose(round_key, Purpose.TUNING)
    programs.tune.verify((*inputs, hp, scheduler.make_first_step_round(0), skewed_examples, key))
    _, tuned = programs.tune(*inputs, hp, scheduler.make_round(0), skewed_examples, key)
    return {**accuracies, "held_out_tuned_accuracy": np.asarray(tuned)}


class _Programs(NamedTuple):
    plan: ExecutionPlan
    tuning: FineTuning | None  # None if clients do not train
    evaluate: Callable
    tune: VerifiedJit | None


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _build_programs(signature: Signature, num_clients: int) -> _Programs:
    plan = make_execution_plan(min(num_clients, MAX_LANES), 1, mesh_axis=None)
    training, tuning = signature.training, build_algorithm(signature).fine_tuning
    if tuning is None and training.optimizer is not None:
        tuning = FineTuning(make_local_model_training(training), 1)

    def evaluate_models(get_model, arrays, tests, examples):
        models, num_groups = ClientModelSource(get_model, arrays), tests.clients.shape[1]
        inputs = (models, tests, examples, num_clients, num_groups)
        return evaluate_clients(training.task, plan, *inputs).accuracy

    def evaluate_global_model(variables, tests, examples):
        return evaluate_models(lambda model, k: model, variables, tests, examples)

    def tune_and_evaluate(variables, tests, examples, hp, schedule, train_examples, key):
        assert tuning is not None
        copies, message = tile_over_clients(variables, num_clients), ServerMessage(variables)
        cohort = Cohort(schedule, train_examples)
        tuned = train_cohort(tuning.client_algorithm, plan, hp, message, copies, key, cohort).states
        return tuned, evaluate_models(get_client_row, tuned, tests, examples)

    tune = None
    if tuning is not None:
        tune = VerifiedJit(
            tune_and_evaluate,
            baseline=lambda args: (tile_over_clients(args[0], num_clients), 0.0),
            name="held-out clients",
        )
    return _Programs(plan, tuning, jax.jit(evaluate_global_model), tune)


def clear_programs() -> None:
    """Drop the programs of all signatures."""
    _build_programs.cache_clear()


def _select_examples(
    inputs: Any, labels: np.ndarray, partition: Partition
) -> tuple[Examples, Partition]:
    """Return the examples of these clients on the device, and their partition of these examples."""
    selected, indices = np.unique(partition.indices, return_inverse=True)
    examples = Examples(take_rows(inputs, selected), labels[selected])
    return jax.device_put(examples), dataclasses.replace(partition, indices=indices)
