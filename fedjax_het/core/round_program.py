"""A chunk of rounds as one compiled program."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.client_loop import Cohort, Examples, tile_over_clients, train_cohort
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.divergence import count_nonfinite_replicated
from fedjax_het.core.drift import raise_no_model_change
from fedjax_het.core.evaluation import (
    ClientEvaluation,
    ClientTests,
    Evaluation,
    EvaluationSet,
    evaluate,
    evaluate_clients,
)
from fedjax_het.core.execution_plan import PER_BLOCK, PER_DEVICE, PER_RUN, REPLICATED, ExecutionPlan
from fedjax_het.core.gradient_diagnostics import (
    GRADIENT_GAP_NAMES,
    ClientDiagnostics,
    measure_gradient_gaps,
)
from fedjax_het.core.local_training import ServerMessage
from fedjax_het.core.resumable_loops import (
    BLOCKS,
    TUNING,
    LoopRunner,
    LoopTrace,
    ResumableLoopRunner,
    SampleCounter,
)
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.schedule import RoundSchedule
from fedjax_het.core.task import Task
from fedjax_het.metrics.registry import Metric, metric_shapes
from fedjax_het.utils.arrays import set_row, take_row


class ChunkInputs(NamedTuple):
    """What a chunk reads besides the state; all of it traced, so one program serves a run.

    How each is made on the host, and for which methods, is said in `runtime.group_state`.
    """

    hp: Any
    train_key: jax.Array
    schedule: RoundSchedule  # [R, ...]
    num_rounds: jax.Array  # [] int32, <= R
    num_eval_batches: jax.Array  # [] int32, per block
    examples: Examples
    tuning_schedule: RoundSchedule | None = None  # [R, ...] of all clients, where they tune copies
    test_set: EvaluationSet | None = None  # None where there is no global model to test
    client_tests: ClientTests | None = None  # None where clients have no tests of their own
    test_examples: Examples | None = None  # that these index
    server_examples: Examples | None = None  # [n_0, ...]; None where the server has no examples
    diagnostics_schedule: RoundSchedule | None = (
        None  # of all clients, where their gradients are measured
    )
    method_inputs: dict[str, Any] = {}  # noqa: RUF012  what the method asks for besides, by name
    lr_factors: jax.Array | None = None  # [R] factors of `local_lr`; None where it is constant


_PER_DEVICE_FIELDS = (
    "round",
    "num_clients",
    "is_eval_round",
    "is_verification",
    "max_steps",
    "num_segments",
    "segment_ends",
)
# What of a chunk's inputs belongs to a federation, see `ExecutionPlan.map_runs`. Federations that are
# vmapped go through the same rounds and segments, so that every loop has one bound.
SCHEDULE_PLACEMENTS: Any = RoundSchedule._make(
    PER_DEVICE if name in _PER_DEVICE_FIELDS else PER_RUN for name in RoundSchedule._fields
)


class RoundMetrics(NamedTuple):
    """Per round; float32 `[R]` and more, NaN where nothing was measured."""

    test_accuracy: jax.Array  # of the global model
    test_loss: jax.Array
    train_loss: jax.Array
    update_norm: jax.Array
    domain_accuracy: jax.Array | None  # [R, G]; None for a data set without domains
    client_accuracy: jax.Array | None  # [R, K]; None where clients have no tests of their own
    records: dict[str, jax.Array]  # [R, ...] what else the method records
    metrics: dict[str, jax.Array]  # [R, ...] what the run's `measures` find
    is_finite: jax.Array  # 1 where the round's losses, update and state are finite, else 0


class EvaluationOptions(NamedTuple):
    """What is measured besides the test set; static."""

    num_clients: int
    num_domains: int = 0  # the data set's
    has_client_tests: bool = False
    diagnostics_every: int = 0  # rounds between surveys of all clients' data; 0: never
    metrics: tuple[Metric, ...] = ()
    num_classes: int = 0  # the data set's, where there are measures

    @property
    def example_metrics(self) -> tuple[Metric, ...]:
        """Of the global model's outputs."""
        return tuple(measure for measure in self.metrics if measure.sums is not None)

    @property
    def metric_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what these find in an evaluation, by name."""
        return metric_shapes(self.example_metrics, self.num_classes)

    @property
    def update_metric_names(self) -> tuple[str, ...]:
        """What is found of what clients send, by name; numbers."""
        return tuple(name for measure in self.metrics for name in measure.update_metric_names)

    def missing_metrics(self, algorithm, num_rounds: int) -> RoundMetrics:
        """NaN for every round."""

        def nan(*shape):
            return np.full((num_rounds, *shape), np.nan, np.float32)

        records = algorithm.record_shapes(self.num_clients)
        if self.diagnostics_every:
            names = (
                GRADIENT_GAP_NAMES if algorithm.diagnostics is None else algorithm.diagnostics.names
            )
            records = records | dict.fromkeys(names, ())
        has_domain_accuracy = self.num_domains and algorithm.global_model
        return RoundMetrics(
            test_accuracy=nan(),
            test_loss=nan(),
            train_loss=nan(),
            update_norm=nan(),
            domain_accuracy=nan(self.num_domains) if has_domain_accuracy else None,
            client_accuracy=nan(self.num_clients) if self.has_client_tests else None,
            records={name: nan(*shape) for name, shape in records.items()},
            metrics={
                **{name: nan(*shape) for name, shape in self.metric_shapes.items()},
                **{name: nan() for name in self.update_metric_names},
            },
            is_finite=nan(),
        )


class RoundComponents(NamedTuple):
    """What the rounds of a run are made of; static."""

    algorithm: Any  # an `Algorithm`
    task: Task
    plan: ExecutionPlan
    evaluation: EvaluationOptions


def make_round_chunk(
    components: RoundComponents,
    record_samples: Callable[[ChunkInputs, float], None] = lambda inputs, samples: None,
) -> Callable:
    """-> chunk(state, inputs) -> (state, RoundMetrics): up to R rounds, evaluation inside.

    note(inputs, samples): told, as it is traced, on how many samples a round trains at most.
    """
    algorithm, plan, evaluation = components.algorithm, components.plan, components.evaluation

    def chunk(state, inputs: ChunkInputs):
        missing_rows = evaluation.missing_metrics(algorithm, inputs.schedule.round.shape[0])
        missing = _missing_metrics(components)

        def run_round(r, carry):
            state, metrics_rows, num_nonfinite = carry
            sample_counter = SampleCounter()
            loops = LoopRunner(sample_counter)
            state, metrics, num_nonfinite = _run_round(
                components, inputs, state, r, missing, num_nonfinite, loops
            )
            record_samples(inputs, sample_counter.num_samples)
            if plan.has_sharded_client_states:
                state = plan.map_state(state, plan.constrain_sharding)
            metrics_rows = jax.tree.map(
                lambda rows, value: set_row(rows, value, r), metrics_rows, metrics
            )
            return state, metrics_rows, num_nonfinite

        start = (
            state,
            jax.tree.map(jnp.asarray, missing_rows),
            _count_nonfinite_state(components, state),
        )
        return jax.lax.fori_loop(0, inputs.num_rounds, run_round, start)[:2]

    return chunk


def make_partial_round(components: RoundComponents) -> Callable:
    """Build the program of one part of a resumable round; see `core.resumable_loops`.

    Args:
      components: algorithm, task, plan and evaluation of the run.

    Returns:
      `partial_round(state, inputs, spans, carries) -> (state, RoundMetrics, carries, totals)`, a
      part of the first round of `inputs`. `spans` `[n, 2]` int32: iterations of each long loop that
      are done before and after the call. `totals` `[n]`: iterations of each loop, known once the
      loops before it are done. State and metrics are valid once the last loop is done.
    """

    def partial_round(state, inputs: ChunkInputs, spans, carries):
        spans = jnp.where(inputs.num_rounds > 0, spans, 0)  # none, where there is no run
        loops = ResumableLoopRunner(spans, carries)
        num_nonfinite = _count_nonfinite_state(components, state)
        state, metrics, _ = _run_round(
            components, inputs, state, 0, _missing_metrics(components), num_nonfinite, loops
        )
        metrics = jax.tree.map(lambda a: a[None], metrics)
        constrain, totals = components.plan.constrain_sharding, jnp.stack(loops.trace.totals)
        carries = jax.tree.map(
            lambda layout, carry: constrain(carry, PER_BLOCK if layout == BLOCKS else REPLICATED),
            loops.trace.layouts,
            loops.trace.carries,
        )
        state = components.plan.map_state(state, constrain)
        return state, constrain(metrics, REPLICATED), carries, constrain(totals, REPLICATED)

    return partial_round


def trace_loops(
    components: RoundComponents, placements: ChunkInputs, state, inputs: ChunkInputs
) -> LoopTrace:
    """The long loops of a round, by tracing it; what they carry, of all federations that go in
    step, as shapes.

    Args:
      kinds: of the inputs, see `ExecutionPlan.map_runs`. state, inputs: of all of them, or as shapes.
    """
    traces: list[LoopTrace] = []

    def trace_round(state, inputs):
        loops = ResumableLoopRunner(None, ())
        _run_round(
            components,
            inputs,
            state,
            0,
            _missing_metrics(components),
            _count_nonfinite_state(components, state),
            loops,
        )
        traces.append(loops.trace)
        return loops.trace.carries

    carries = jax.eval_shape(
        components.plan.map_runs(trace_round, (PER_RUN, placements)), state, inputs
    )
    return traces[0]._replace(carries=carries, totals=[])


def _missing_metrics(components: RoundComponents) -> RoundMetrics:
    """What a round without an evaluation has measured."""
    missing_rows = components.evaluation.missing_metrics(components.algorithm, 1)
    return jax.tree.map(lambda a: jnp.full(a.shape[1:], jnp.nan, jnp.float32), missing_rows)


def _count_nonfinite_state(components: RoundComponents, state) -> jax.Array:
    """What a round is handed of the one before: how many entries of the state are not finite. The
    states of clients that are read by row alone are left out, as their lanes look at them."""
    clients = () if components.algorithm.can_page_state else state.clients
    return count_nonfinite_replicated(components.plan, (state.server, clients))


def _run_round(
    components: RoundComponents,
    inputs: ChunkInputs,
    state,
    r,
    missing: RoundMetrics,
    num_nonfinite,
    loops: LoopRunner,
):
    """Run the r-th round of a chunk.

    Args:
      components: the static parts of the rounds.
      inputs: the inputs of the chunk.
      state: the state before the round.
      r: position of the round in the chunk.
      missing: the metrics of a round without an evaluation.
      num_nonfinite: `_count_nonfinite_state` of the state before the round.
      loops: runs the round's long loops.

    Returns:
      The new state, the round's `RoundMetrics`, and `_count_nonfinite_state` of the new state.
    """
    algorithm, plan, evaluation = components.algorithm, components.plan, components.evaluation
    inputs = _apply_lr_factor(inputs, r)
    schedule = jax.tree.map(lambda a: take_row(a, r), inputs.schedule)
    key = jax.random.fold_in(inputs.train_key, schedule.round)
    diagnostics = {}
    if evaluation.diagnostics_every:
        diagnostics, signal = _run_diagnostics(components, inputs, state, schedule, loops)
        segments = plan.order_after(signal, schedule.num_segments)
        schedule = schedule._replace(num_segments=segments)
    cohort = Cohort(schedule, inputs.examples, inputs.server_examples, inputs.method_inputs, loops)
    state, round_info, drift_metrics = _run_algorithm_round(
        components, inputs.hp, state, key, cohort
    )

    # What is counted is in both branches, where it does not mix with what made the state: fused
    # with it, it could change the order of sums.
    def evaluate_models(loops: LoopRunner, state):
        evaluation_result = _evaluate_global_model(components, inputs, state, r, loops)
        is_finite = (
            jnp.isfinite(evaluation_result.loss) if algorithm.global_model else jnp.array(True)
        )
        client_accuracy = None
        if evaluation.has_client_tests:
            client_evaluation = _evaluate_clients(
                components, inputs, state, r, key, evaluation_result.loss, loops
            )
            client_accuracy, is_finite = (
                client_evaluation.accuracy,
                is_finite & client_evaluation.is_finite,
            )
        return (
            evaluation_result,
            client_accuracy,
            is_finite,
            _count_nonfinite_state(components, state),
        )

    def skip_evaluation(state):
        num_domains = evaluation.num_domains if algorithm.global_model else 0
        evaluation_result = Evaluation.missing(num_domains, evaluation.metric_shapes)
        return (
            evaluation_result,
            missing.client_accuracy,
            jnp.array(True),
            _count_nonfinite_state(components, state),
        )

    is_due = schedule.is_eval_round & loops.has_finished_loops()
    evaluation_result, client_accuracy, is_finite, num_nonfinite_after = loops.cond(
        is_due, evaluate_models, skip_evaluation, state
    )
    is_finite &= jnp.isfinite(round_info.train_loss) & jnp.isfinite(round_info.update_norm)
    is_finite &= (num_nonfinite_after <= num_nonfinite).all()
    metrics = RoundMetrics(
        evaluation_result.accuracy,
        evaluation_result.loss,
        round_info.train_loss,
        round_info.update_norm,
        evaluation_result.domain_accuracy,
        client_accuracy,
        round_info.records | diagnostics,
        evaluation_result.metrics | drift_metrics,
        is_finite.astype(jnp.float32),
    )
    return state, metrics, num_nonfinite_after


def _run_algorithm_round(components: RoundComponents, hp, state, key, cohort: Cohort):
    """Run the method's round.

    Returns:
      The new state, the method's `RoundInfo`, and the metrics of the clients' updates by name.
    """
    state, round_info = components.algorithm.round(hp, state, key, cohort)
    names = components.evaluation.update_metric_names
    if names and not round_info.drift:
        raise_no_model_change()
    return state, round_info, {name: round_info.drift[name] for name in names}


def _apply_lr_factor(inputs: ChunkInputs, r) -> ChunkInputs:
    """The same with the local rate of the r-th round, for clients and server."""
    if inputs.lr_factors is None:
        return inputs
    rate = inputs.hp["local_lr"] * take_row(inputs.lr_factors, r)
    return inputs._replace(hp={**inputs.hp, "local_lr": rate})


def _evaluate_global_model(
    components: RoundComponents, inputs: ChunkInputs, state, r, loops: LoopRunner
) -> Evaluation:
    """Of the global model, if there is one."""
    task, plan, evaluation = components.task, components.plan, components.evaluation
    if components.algorithm.global_model is None:
        return Evaluation.missing(0, {})
    assert inputs.test_set is not None
    model, num_batches = components.algorithm.global_model(state), inputs.num_eval_batches
    if components.algorithm.fine_tuning is not None:  # in a stretch, with what ends it
        assert inputs.tuning_schedule is not None
        num_batches = num_batches * loops.can_finish_next_loop(inputs.tuning_schedule.max_steps[r])
    return evaluate(
        task,
        plan,
        model,
        inputs.test_set,
        num_batches,
        num_domains=evaluation.num_domains,
        metrics=evaluation.example_metrics,
    )


def _evaluate_clients(
    components: RoundComponents, inputs: ChunkInputs, state, r, key, signal, loops: LoopRunner
) -> ClientEvaluation:
    """Of the models that clients' own tests are for, measured once `signal` is known."""
    algorithm, plan = components.algorithm, components.plan
    personal, model_source = algorithm.personal_variables, (inputs.hp, state)
    if algorithm.fine_tuning is not None:
        model_source = _tune_clients(components, inputs, state, r, key, signal, loops)
        signal = jnp.float32(0)
        get_model = get_client_row
    elif personal is None:

        def get_model(model_source, k):
            return algorithm.global_model(model_source[1])
    else:

        def get_model(source, k):
            return personal(*source, k)

    assert inputs.client_tests is not None and inputs.test_examples is not None
    num_groups = inputs.client_tests.clients.shape[1]
    num_groups = jnp.where(inputs.schedule.is_verification[r], 1, num_groups)
    num_groups *= loops.has_finished_loops()
    network = algorithm.personal_model or components.task.model
    return evaluate_clients(
        components.task._replace(model=network),
        plan,
        get_model,
        model_source,
        inputs.client_tests,
        inputs.test_examples,
        components.evaluation.num_clients,
        plan.order_after(signal, num_groups),
    )


def _tune_clients(
    components: RoundComponents, inputs: ChunkInputs, state, r, key, signal, loops: LoopRunner
):
    """Every client's copy of the global model, tuned."""
    algorithm, plan = components.algorithm, components.plan.with_replicated_client_states
    schedule = jax.tree.map(lambda a: take_row(a, r), inputs.tuning_schedule)
    segments = plan.order_after(signal, schedule.num_segments)
    cohort = Cohort(schedule._replace(num_segments=segments), inputs.examples, loops=loops)
    variables = algorithm.global_model(state)
    client_models = tile_over_clients(variables, components.evaluation.num_clients)
    key = fold_in_purpose(key, Purpose.TUNING)
    message, client_algorithm = ServerMessage(variables), algorithm.fine_tuning.client_algorithm
    return train_cohort(
        client_algorithm, plan, inputs.hp, message, client_models, key, cohort, loop_name=TUNING
    ).states


def _run_diagnostics(
    components: RoundComponents,
    inputs: ChunkInputs,
    state,
    schedule: RoundSchedule,
    loops: LoopRunner,
):
    """-> (what is found, by name; what is known when it is); NaN in rounds without one."""
    is_due = schedule.is_verification | (
        schedule.round % components.evaluation.diagnostics_every == 0
    )
    assert inputs.diagnostics_schedule is not None
    cohort = Cohort(
        inputs.diagnostics_schedule, inputs.examples, inputs.server_examples, inputs.method_inputs
    )
    diagnostics = components.algorithm.diagnostics or ClientDiagnostics(
        GRADIENT_GAP_NAMES, partial(_gradient_gap_diagnostics, components)
    )
    values = loops.cond(
        is_due,
        lambda inner_loops, state: diagnostics.measure(
            inputs.hp, state, cohort._replace(loops=inner_loops)
        ),
        lambda state: dict.fromkeys(diagnostics.names, jnp.float32(jnp.nan)),
        state,
    )
    return values, values[diagnostics.names[0]]


def _gradient_gap_diagnostics(
    components: RoundComponents, hp, state, cohort: Cohort
) -> dict[str, jax.Array]:
    """The survey of methods with a global model: how far gradients are apart."""
    algorithm = components.algorithm
    server_gradient = None
    if algorithm.server_gradient is not None:
        server_gradient = partial(algorithm.server_gradient, state, cohort.inputs)
    variables = algorithm.global_model(state)
    return measure_gradient_gaps(
        components.task, components.plan, variables, cohort, server_gradient
    )
