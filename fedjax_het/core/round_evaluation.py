"""Measurements of a round: evaluation of the models, and diagnostics of the clients' data."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_loop import ClientExamples, Cohort, RoundSchedule, train_cohort
from fedjax_het.core.client_rows import get_client_row, tile_over_clients
from fedjax_het.core.evaluation import (
    ClientEvaluation,
    ClientModelSource,
    ClientTests,
    Evaluation,
    evaluate,
    evaluate_clients,
)
from fedjax_het.core.gradient_diagnostics import (
    GRADIENT_GAP_NAMES,
    ClientDiagnostics,
    measure_gradient_gaps,
)
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.resumable_loops import TUNING, LoopRunner
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.round_inputs import ChunkInputs, EvaluationOptions, RoundComponents

Tree = Any

CLIENT_LOSS_NAME = "client_train_loss"
"""Name of the record of each client's training loss, `[R, K]`; NaN for clients that did not train.
"""


class RoundMetrics(NamedTuple):
    """Measurements of each round, float32 `[R, ...]`; NaN where nothing was measured."""

    test_accuracy: jax.Array
    "Accuracy of the global model."
    test_loss: jax.Array
    "Mean cross-entropy of the global model, in nats."
    train_loss: jax.Array
    "Mean loss of local training, in nats; NaN if no client trained."
    update_norm: jax.Array
    "Norm of the global model's change; NaN if no client trained and the model stayed."
    domain_accuracy: jax.Array | None
    "`[R, G]`; None for a data set without domains."
    client_accuracy: jax.Array | None
    "`[R, K]`; None if clients have no own tests."
    records: dict[str, jax.Array]
    "Records of the method, and diagnostics, by name."
    metrics: dict[str, jax.Array]
    "Values of the run's metrics, by name."
    is_finite: jax.Array
    "1 if the losses, the update and the state of the round are finite, else 0."
    validation: dict[str, jax.Array]
    "Accuracy and loss on validation examples, and accuracies of clients `[R, K]`, by name."


def make_missing_metrics(
    algorithm: Any, options: EvaluationOptions, num_rounds: int
) -> RoundMetrics:
    """Return the metrics of rounds in which nothing was measured.

    Args:
      algorithm: the method, an `Algorithm`.
      options: the measurements of the run.
      num_rounds: number of rounds, R.

    Returns:
      NaN of the shapes of all metrics, on the host.
    """

    def nan(*shape):
        return np.full((num_rounds, *shape), np.nan, np.float32)

    shapes = algorithm.record_shapes(options.num_clients)
    if options.diagnostics_every:
        diagnostics = algorithm.diagnostics
        names = GRADIENT_GAP_NAMES if diagnostics is None else diagnostics.names
        shapes = shapes | dict.fromkeys(names, ())
    if options.records_client_losses:
        shapes = shapes | {CLIENT_LOSS_NAME: (options.num_clients,)}
    has_domains = options.num_domains and algorithm.global_model
    metric_shapes = {**options.metric_shapes, **dict.fromkeys(options.update_metric_names, ())}
    validation_shapes = _get_validation_shapes(algorithm, options)
    return RoundMetrics(
        test_accuracy=nan(),
        test_loss=nan(),
        train_loss=nan(),
        update_norm=nan(),
        domain_accuracy=nan(options.num_domains) if has_domains else None,
        client_accuracy=nan(options.num_clients) if options.has_client_tests else None,
        records={name: nan(*shape) for name, shape in shapes.items()},
        metrics={name: nan(*shape) for name, shape in metric_shapes.items()},
        is_finite=nan(),
        validation={name: nan(*shape) for name, shape in validation_shapes.items()},
    )


def _get_validation_shapes(
    algorithm: Any, options: EvaluationOptions
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the measurements on validation examples, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    if options.has_validation and algorithm.global_model is not None:
        shapes |= {"validation_accuracy": (), "validation_loss": ()}
    if options.has_validation and options.has_client_tests:
        shapes["client_validation_accuracy"] = (options.num_clients,)
    return shapes


class RoundEvaluation(NamedTuple):
    """The evaluation of the models after a round."""

    global_model: Evaluation
    client_accuracy: jax.Array | None
    "`[K]` float32; None if clients have no own tests."
    is_finite: jax.Array
    "`[]` bool: whether the loss and all outputs are finite."
    validation: dict[str, jax.Array]
    "Measurements on validation examples, see `RoundMetrics`."


def evaluate_round(
    components: RoundComponents, inputs: ChunkInputs, state, key: jax.Array, loops: LoopRunner
) -> RoundEvaluation:
    """Evaluate the global model, and the clients' models on their own tests.

    Args:
      components: the static parts of the rounds.
      inputs: the inputs of the round.
      state: the state after the round.
      key: PRNG key of the round.
      loops: runs the long loops.

    Returns:
      The evaluation.
    """
    algorithm, options = components.algorithm, components.evaluation
    evaluation = _evaluate_global_model(components, inputs, state, loops)
    is_finite = jnp.isfinite(evaluation.loss) if algorithm.global_model else jnp.array(True)
    signal, validation = evaluation.loss, {}
    if options.has_validation and algorithm.global_model is not None:
        global_validation = _validate_global_model(components, inputs, state, signal, loops)
        signal = global_validation.loss
        validation = {"validation_accuracy": global_validation.accuracy, "validation_loss": signal}
        is_finite &= jnp.isfinite(signal)
    if not options.has_client_tests:
        return RoundEvaluation(evaluation, None, is_finite, validation)
    clients, client_validation = _evaluate_clients(components, inputs, state, key, signal, loops)
    is_finite &= clients.is_finite
    if client_validation is not None:
        validation["client_validation_accuracy"] = client_validation.accuracy
        is_finite &= client_validation.is_finite
    return RoundEvaluation(evaluation, clients.accuracy, is_finite, validation)


def make_missing_evaluation(components: RoundComponents) -> RoundEvaluation:
    """Return the evaluation of a round without one: NaN, which counts as finite."""
    options = components.evaluation
    num_domains = options.num_domains if components.algorithm.global_model else 0
    evaluation = Evaluation.missing(num_domains, options.metric_shapes)
    client_accuracy = None
    if options.has_client_tests:
        client_accuracy = jnp.full(options.num_clients, jnp.nan, jnp.float32)
    shapes = _get_validation_shapes(components.algorithm, options)
    validation = {name: jnp.full(shape, jnp.nan, jnp.float32) for name, shape in shapes.items()}
    return RoundEvaluation(evaluation, client_accuracy, jnp.array(True), validation)


def _evaluate_global_model(
    components: RoundComponents, inputs: ChunkInputs, state, loops: LoopRunner
) -> Evaluation:
    algorithm = components.algorithm
    if algorithm.global_model is None:
        return Evaluation.missing(0, {})
    assert inputs.test_set is not None
    num_batches = _defer_to_end_of_tuning(components, inputs, inputs.num_eval_batches, loops)
    options, backdoor = components.evaluation, components.evaluation.backdoor
    arguments = components.task, components.plan, algorithm.get_result_model(state), inputs.test_set
    evaluation = evaluate(
        *(*arguments, num_batches),
        num_domains=options.num_domains,
        metrics=options.example_metrics,
    )
    if backdoor is None:
        return evaluation
    attacked = evaluate(
        *(*arguments, components.plan.order_after(evaluation.loss, num_batches)),
        num_domains=options.num_domains,
        metrics=(backdoor.make_success_metric(),),
        change_inputs=backdoor.stamp,
    )
    return evaluation._replace(metrics=evaluation.metrics | attacked.metrics)


def _validate_global_model(
    components: RoundComponents, inputs: ChunkInputs, state, signal, loops: LoopRunner
) -> Evaluation:
    """Evaluate the global model on all validation examples, once `signal` is known."""
    assert inputs.validation_set is not None
    num_batches = jnp.int32(inputs.validation_set.labels.shape[1])
    num_batches = jnp.where(inputs.schedule.is_verification, 1, num_batches)
    num_batches = _defer_to_end_of_tuning(components, inputs, num_batches, loops)
    return evaluate(
        components.task,
        components.plan,
        components.algorithm.get_result_model(state),
        inputs.validation_set,
        components.plan.order_after(signal, num_batches),
        examples=inputs.examples,
    )


def _defer_to_end_of_tuning(
    components: RoundComponents, inputs: ChunkInputs, num_batches: jax.Array, loops: LoopRunner
) -> jax.Array:
    """Return `num_batches`, or 0 in calls that do not end the tuning of clients' copies."""
    if components.algorithm.fine_tuning is None:
        return num_batches
    assert inputs.tuning_schedule is not None
    return num_batches * loops.can_finish_next_loop(inputs.tuning_schedule.max_steps)


def _evaluate_clients(
    components: RoundComponents, inputs: ChunkInputs, state, key, signal, loops: LoopRunner
) -> tuple[ClientEvaluation, ClientEvaluation | None]:
    """Evaluate clients' models on their tests and validation examples, once `signal` is known."""
    algorithm, plan, task = components.algorithm, components.plan, components.task

    def get_model(hp_and_state, k):
        if algorithm.personal_variables is None:
            return algorithm.get_result_model(hp_and_state[1])
        return algorithm.personal_variables(*hp_and_state, k)

    models = ClientModelSource(get_model, (inputs.hp, state))
    if algorithm.fine_tuning is not None:
        tuned = _tune_clients(components, inputs, state, key, signal, loops)
        models, signal = ClientModelSource(get_client_row, tuned), jnp.float32(0)

    def evaluate_on(tests: ClientTests, examples: ClientExamples, signal) -> ClientEvaluation:
        num_groups = tests.clients.shape[1]
        num_groups = jnp.where(inputs.schedule.is_verification, 1, num_groups)
        num_groups *= loops.has_finished_loops()
        return evaluate_clients(
            task._replace(model=algorithm.personal_model or task.model),
            plan,
            models,
            tests,
            examples,
            components.evaluation.num_clients,
            plan.order_after(signal, num_groups),
        )

    assert inputs.client_tests is not None and inputs.test_examples is not None
    result = evaluate_on(inputs.client_tests, inputs.test_examples, signal)
    if inputs.client_validation is None:
        return result, None
    signal = result.is_finite.astype(jnp.float32)
    return result, evaluate_on(inputs.client_validation, inputs.examples, signal)


def _tune_clients(
    components: RoundComponents, inputs: ChunkInputs, state, key, signal, loops: LoopRunner
) -> Tree:
    """Return a tuned copy of the global model for every client, `[K, ...]`."""
    algorithm, schedule = components.algorithm, inputs.tuning_schedule
    assert schedule is not None
    plan = components.plan._replace(has_sharded_client_states=False)
    segments = plan.order_after(signal, schedule.num_segments)
    cohort = Cohort(schedule._replace(num_segments=segments), inputs.examples, loops=loops)
    variables = algorithm.global_model(state)
    copies = tile_over_clients(variables, components.evaluation.num_clients)
    key, message = fold_in_purpose(key, Purpose.TUNING), ServerMessage(variables)
    client_algorithm = algorithm.fine_tuning.client_algorithm._replace(phase=TUNING)
    return train_cohort(client_algorithm, plan, inputs.hp, message, copies, key, cohort).states


def run_diagnostics(
    components: RoundComponents, inputs: ChunkInputs, state, loops: LoopRunner
) -> tuple[dict[str, jax.Array], RoundSchedule]:
    """Measure diagnostics on all clients' data before a round.

    Args:
      components: the static parts of the rounds.
      inputs: the inputs of the round.
      state: the state before the round.
      loops: runs the long loops.

    Returns:
      The measurements by name, NaN in rounds without diagnostics; and the schedule, whose segments
      are ordered after them.
    """
    schedule, every = inputs.schedule, components.evaluation.diagnostics_every
    is_due = schedule.is_verification | (schedule.round % every == 0)
    assert inputs.diagnostics_schedule is not None
    cohort = Cohort(
        inputs.diagnostics_schedule, inputs.examples, inputs.server_examples, inputs.method_inputs
    )
    diagnostics = components.algorithm.diagnostics or ClientDiagnostics(
        GRADIENT_GAP_NAMES, partial(_measure_gradient_gaps, components)
    )

    def measure(loops, state):
        values = diagnostics.measure(inputs.hp, state, cohort._replace(loops=loops))
        return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}

    def skip(state):
        return dict.fromkeys(diagnostics.names, jnp.float32(jnp.nan))

    values = loops.cond(is_due, measure, skip, state)
    signal = values[diagnostics.names[0]]
    num_segments = components.plan.order_after(signal, schedule.num_segments)
    return values, schedule._replace(num_segments=num_segments)


def _measure_gradient_gaps(
    components: RoundComponents, hp, state, cohort: Cohort
) -> dict[str, jax.Array]:
    """Measure the gaps of methods with a global model."""
    algorithm = components.algorithm
    server_gradient = None
    if algorithm.server_gradient is not None:
        server_gradient = partial(algorithm.server_gradient, state, cohort.inputs)
    variables = algorithm.global_model(state)
    return measure_gradient_gaps(
        components.task, components.plan, variables, cohort, server_gradient
    )
