"""A chunk of rounds as one compiled program.

`make_round_chunk` builds the program, `run_round` is one round of it. `core.partial_round` splits a
round into several calls.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedjax_het.core.client_loop import Cohort, CohortOptions, SkewedExamples
from fedjax_het.core.drift import raise_no_model_change
from fedjax_het.core.execution_plan import LANES_AXIS
from fedjax_het.core.resumable_loops import LoopRunner
from fedjax_het.core.round_evaluation import (
    CLIENT_LOSS_NAME,
    RoundMetrics,
    evaluate_round,
    make_missing_evaluation,
    make_missing_metrics,
    run_diagnostics,
)
from fedjax_het.core.round_inputs import ChunkInputs, RoundComponents
from fedjax_het.utils.arrays import count_nonfinite, set_row, take_row
from fedjax_het.utils.errors import make_value_error


def make_round_chunk(
    components: RoundComponents,
    record_samples: Callable[[ChunkInputs, float], None] = lambda inputs, samples: None,
) -> Callable:
    """Build the program of a chunk of rounds, with their evaluations.

    Args:
      components: the static parts of the rounds.
      record_samples: `record_samples(inputs, samples)`, called while the program is traced with an
        upper bound of the samples on which a round trains.

    Returns:
      `chunk(state, inputs) -> (state, RoundMetrics)`: up to R rounds.
    """
    algorithm, plan, evaluation = components.algorithm, components.plan, components.evaluation

    def chunk(state, inputs: ChunkInputs):
        missing_rows = make_missing_metrics(algorithm, evaluation, inputs.schedule.round.shape[0])

        def run_row(r, carry):
            state, metrics_rows, num_nonfinite = carry
            num_samples: list[float] = []
            loops = LoopRunner(num_samples)
            round_inputs = select_round(inputs, r)
            state, metrics, num_nonfinite = run_round(
                components, round_inputs, state, num_nonfinite, loops
            )
            record_samples(inputs, sum(num_samples))
            if plan.has_sharded_client_states:
                state = plan.map_state(state, plan.constrain_sharding)
            metrics_rows = jax.tree.map(
                lambda rows, value: set_row(rows, value.astype(rows.dtype), r),
                metrics_rows,
                metrics,
            )
            return state, metrics_rows, num_nonfinite

        metrics_rows = jax.tree.map(jnp.asarray, missing_rows)
        start = state, metrics_rows, count_nonfinite_state(components, state)
        return jax.lax.fori_loop(0, inputs.num_rounds, run_row, start)[:2]

    return chunk


def select_round(inputs: ChunkInputs, r: jax.Array | int) -> ChunkInputs:
    """Return the inputs of one round: its schedules, without axis of rounds, and its `local_lr`.

    Args:
      inputs: the inputs of the chunk.
      r: position of the round in the chunk.

    Returns:
      The inputs of the round.
    """
    if inputs.lr_factors is not None:
        local_lr = inputs.hp["local_lr"] * take_row(inputs.lr_factors, r)
        inputs = inputs._replace(hp={**inputs.hp, "local_lr": local_lr})
    inputs = with_skewed_examples(inputs)
    schedules = inputs.schedule, inputs.tuning_schedule
    schedule, tuning_schedule = jax.tree.map(lambda a: take_row(a, r), schedules)
    return inputs._replace(schedule=schedule, tuning_schedule=tuning_schedule)


def with_skewed_examples(inputs: ChunkInputs) -> ChunkInputs:
    """Return the inputs with examples that their clients see through the run's skews."""
    skew, examples, tests = inputs.skew, inputs.examples, inputs.test_examples
    if skew is None:
        return inputs
    examples = SkewedExamples(examples.inputs, skew.train_labels, skew.transform)
    if tests is not None:
        arguments = (skew.test_transform, skew.test_label_maps)
        tests = SkewedExamples(tests.inputs, tests.labels, *arguments)
    return inputs._replace(examples=examples, test_examples=tests, skew=None)


def run_round(
    components: RoundComponents, inputs: ChunkInputs, state, num_nonfinite, loops: LoopRunner
):
    """Run a round.

    Args:
      components: the static parts of the rounds.
      inputs: the inputs of the round, see `select_round`.
      state: the state before the round.
      num_nonfinite: `count_nonfinite_state` of the state before the round.
      loops: runs the round's long loops.

    Returns:
      The new state, the round's `RoundMetrics`, and `count_nonfinite_state` of the new state.
    """
    algorithm, evaluation, schedule = components.algorithm, components.evaluation, inputs.schedule
    key = jax.random.fold_in(inputs.train_key, schedule.round)
    diagnostics: dict[str, jax.Array] = {}
    if evaluation.diagnostics_every:
        diagnostics, schedule = run_diagnostics(components, inputs, state, loops)
    cohort = Cohort(
        schedule,
        inputs.examples,
        inputs.server_examples,
        inputs.method_inputs,
        loops,
        CohortOptions(records_losses=evaluation.records_client_losses),
    )
    state, info = algorithm.round(inputs.hp, state, key, cohort)
    if evaluation.update_metric_names and not info.drift:
        raise_no_model_change()
    client_losses: dict[str, jax.Array] = {}
    if evaluation.records_client_losses:
        if info.client_losses is None:
            expected = "a method whose rounds return CohortResult.client_losses in RoundInfo"
            raise make_value_error("system", "client selection by losses", expected)
        client_losses[CLIENT_LOSS_NAME] = info.client_losses.by_client(evaluation.num_clients)
    update_metrics = {name: info.drift[name] for name in evaluation.update_metric_names}

    # Both branches count, apart from the computation of the state: fused with it, the count could
    # change the order of sums.
    def evaluate(loops, state):
        result = evaluate_round(components, inputs, state, key, loops)
        return result, count_nonfinite_state(components, state)

    def skip(state):
        return make_missing_evaluation(components), count_nonfinite_state(components, state)

    is_due = schedule.is_eval_round & loops.has_finished_loops()
    result, new_num_nonfinite = loops.cond(is_due, evaluate, skip, state)
    # Without a client that trains, the loss is a mean of nothing. The server may move the model.
    has_trained = schedule.weight_fraction > 0
    is_finite = jnp.isfinite(info.train_loss) | ~has_trained
    is_finite &= result.is_finite & jnp.isfinite(info.update_norm)
    is_finite &= (new_num_nonfinite <= num_nonfinite).all()
    train_loss = jnp.where(has_trained, info.train_loss, jnp.nan)
    update_norm = jnp.where(has_trained | (info.update_norm != 0), info.update_norm, jnp.nan)
    metrics = RoundMetrics(
        result.global_model.accuracy,
        result.global_model.loss,
        train_loss,
        update_norm,
        result.global_model.domain_accuracy,
        result.client_accuracy,
        info.records | diagnostics | client_losses,
        result.global_model.metrics | update_metrics,
        is_finite.astype(jnp.float32),
        result.validation,
    )
    return state, metrics, new_num_nonfinite


def count_nonfinite_state(components: RoundComponents, state) -> jax.Array:
    """Count the entries of a state that are not finite, to compare them with the previous round's.

    The states of clients that are read by row alone are left out, as their lanes check them. No
    collective: where devices share the lanes, each counts in its own copy. XLA would split the
    count between them, see `device_exchange.exchange_between_devices`.

    Args:
      components: the static parts of the rounds.
      state: the state.

    Returns:
      The number of such entries of each leaf, `[L]` int32.
    """
    clients = () if components.algorithm.can_page_state else state.clients
    count, plan = count_nonfinite, components.plan
    if plan.mesh_axis == LANES_AXIS:
        count = jax.shard_map(count, mesh=plan.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return count((state.server, clients))
