"""Runs that go in step, from the first round to the last: the host's side of the work.

A thread prefetches the inputs of the next calls of the program while the devices work.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.algorithms.base import ServerStage
from fedjax_het.core.divergence import count_nonfinite_per_run
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_program import ChunkInputs, RoundMetrics
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.early_stopping import count_rounds_until_rule, evaluate_run_rules
from fedjax_het.runtime.group_state import GroupState, check_method_contract, init_states
from fedjax_het.runtime.history import build_curves, get_latest_accuracy, record_rounds
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.resumable_rounds import start_round
from fedjax_het.utils.arrays import fetch_to_host

log = logging.getLogger("fedjax_het")

CHUNK_SECONDS = 2.0  # between reports of progress, at which a checkpoint may be written
ROUNDS_PHASE = "rounds"  # the phase of runs outside of server stages
MAX_CALL_GROWTH = 8  # iterations of a call relative to the call before, at most


class InputPrefetcher:
    """Makes the inputs of the next calls of the rounds' program in a thread.

    Two are made ahead, so that a short call on the devices finds inputs that were made during a
    longer one. Inputs of calls that do not come are dropped. Use it as a context, which ends the
    thread. An exception of the thread is raised by `get`.
    """

    def __init__(self, group_state: GroupState):
        self._group_state = group_state
        self._futures: dict[tuple[int, int], Future[ChunkInputs]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fedjax_het-schedules")

    def __enter__(self) -> "InputPrefetcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def get(self, first: int, count: int) -> ChunkInputs:
        """Return the inputs of rounds `first .. first + count - 1`."""
        future = self._futures.pop((first, count), None)
        if future is not None:
            return future.result()
        self._cancel_all()
        return self._group_state.build_chunk_inputs(first, count)

    def prefetch(self, first: int, count: int) -> None:
        """Begin to make the inputs of the calls from round `first` on, of `count` rounds each."""
        calls: list[tuple[int, int]] = []
        while (
            first < self._group_state.total_rounds
            and len(calls) < self._group_state.limits.num_prefetch
        ):
            count = min(count, self._group_state.total_rounds - first)
            calls.append((first, count))
            first += count
        if not self._futures.keys() <= set(calls):
            self._cancel_all()
        for call in calls:
            if call not in self._futures:
                self._futures[call] = self._executor.submit(
                    self._group_state.build_chunk_inputs, *call
                )

    def _cancel_all(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()


def log_run_header(group_state: GroupState) -> None:
    """Log the partitions, the lanes and the fraction of useful work of runs that begin."""
    group = group_state.group
    for prepared_run in group_state.prepared_runs:
        log.info("data: %s. %s", group.dataset.name, group.summarize_partition(prepared_run))
        if prepared_run.server_data is not None:
            log.info("server: %s", group.summarize_server_data(prepared_run))
    log.info(
        "lanes: %s; %.1f %% of the samples that they run through are the clients'",
        group_state.group.program.plan.describe(),
        100 * group.useful_work_fraction(group_state.prepared_runs),
    )
    if group_state.has_paged_states:
        log.info(
            "client states: on the host; on the devices those of %d clients, for %d rounds",
            group_state.limits.num_rows,
            group_state.limits.max_rounds,
        )
    if group.dataset.note:
        log.info("note: %s", group.dataset.note)
    spec = group_state.prepared_runs[0].spec
    algorithm_spec = get_algorithm_spec(spec.algorithm, spec.options)
    for remark in algorithm_spec.settings_warnings(spec, algorithm_spec):
        log.warning("note: %s", remark)


def start_runs(
    group_state: GroupState, checkpoints: CheckpointWriter, records: Sequence[dict] | None = None
) -> None:
    """Initialize runs, or resume them from checkpoints, and compile their program.

    Args:
      group_state: the runs.
      checkpoints: their checkpoints.
      records: the records of the checkpoints from which they resume (default: they begin).

    Raises:
      ConfigError: before compilation, if the method breaks its contract, or if a checkpoint is of
        other data.
    """
    if not group_state.group.program.plan.is_debug:
        check_method_contract(group_state)
    init_states(group_state)
    if records is not None:
        checkpoints.restore(group_state, records)
    if group_state.group.program.plan.is_debug:
        return
    start_time = time.perf_counter()
    first_step_inputs = _verify_round_program(group_state, "rounds")
    _warm_up_compile(group_state, group_state.without_rounds(first_step_inputs))
    group_state.timing.compile_seconds += time.perf_counter() - start_time


def finish_runs(group_state: GroupState, checkpoints: CheckpointWriter) -> None:
    """Execute all remaining rounds and server stages."""
    for _ in advance_runs(group_state, checkpoints):
        pass


def advance_runs(group_state: GroupState, checkpoints: CheckpointWriter) -> Iterator[str]:
    """Execute the remaining rounds and server stages, a call of a program at a time.

    Yields:
      After each call and before a checkpoint is written, "rounds" or the name of the server stage.
      The caller may end runs there (`GroupState.early_stops`), or leave the loop.
    """
    _apply_stopping_rules(group_state)
    with InputPrefetcher(group_state) as prefetcher:
        while group_state.rounds_done < group_state.total_rounds and group_state.active:
            for stage in group_state.group.program.algorithm.server_stages:
                if (
                    stage.before_round == group_state.rounds_done
                    and group_state.stage_iterations_done(stage) < stage.num_iterations
                ):
                    yield from _run_server_stage(group_state, stage, checkpoints)
            if not group_state.active:
                break
            if group_state.loop_layout is not None:
                metrics, count = _run_resumable_round(group_state, checkpoints), 1
            else:
                count = _compute_chunk_length(group_state)
                metrics = _run_chunk(group_state, prefetcher, count)
            _record_metrics(group_state, metrics, count)
            _apply_stopping_rules(group_state)
            _report_progress(group_state)
            yield ROUNDS_PHASE
            checkpoints.save(group_state)


def _apply_stopping_rules(group_state: GroupState) -> None:
    """End the runs of which a stopping rule is met."""
    for i in group_state.active:
        prepared_run = group_state.prepared_runs[i]
        if prepared_run.spec.has_early_stopping:
            early_stop = evaluate_run_rules(
                prepared_run,
                group_state.group.program.algorithm,
                group_state.curves[i],
                group_state.rounds_done,
            ).early_stop
            if early_stop is not None and early_stop.round < group_state.total_rounds:
                group_state.early_stops[i] = early_stop
                log.info("stopped after round %d: %s", early_stop.round, early_stop.reason)


def _run_chunk(group_state: GroupState, prefetcher: InputPrefetcher, count: int) -> RoundMetrics:
    """Execute one call of the program, and return its metrics."""
    start_time = time.perf_counter()
    rounds = range(group_state.rounds_done, group_state.rounds_done + count)
    inputs = prefetcher.get(rounds.start, count)
    group_state.load_client_states(rounds)
    group_state.state, device_metrics = group_state.group.program.chunk(group_state.state, inputs)
    prefetcher.prefetch(rounds.stop, count)
    metrics = jax.tree.map(fetch_to_host, device_metrics)
    group_state.store_client_states(rounds)
    group_state.timing.round_seconds += time.perf_counter() - start_time
    return metrics


def _run_resumable_round(group_state: GroupState, checkpoints: CheckpointWriter) -> RoundMetrics:
    """Execute the next round in several calls, and return its metrics."""
    layout, program, timing = (
        group_state.loop_layout,
        group_state.group.program.partial_round,
        group_state.timing,
    )
    assert layout is not None
    inputs = group_state.build_chunk_inputs(group_state.rounds_done, 1)
    group_state.load_client_states([group_state.rounds_done])
    round_progress = group_state.round_progress = group_state.round_progress or start_round(layout)
    loop, count, first_iteration, loop_seconds = -1, 1, 0, 0.0
    while True:
        if round_progress.loop_index != loop:  # the first iteration tells how fast the others are
            loop, count, first_iteration, loop_seconds = (
                round_progress.loop_index,
                1,
                round_progress.done[round_progress.loop_index],
                0.0,
            )
        start_time = time.perf_counter()
        spans = layout.plan.put(round_progress.build_spans(count))
        state, device_metrics, *loop_outputs = program(
            group_state.state, inputs, spans, round_progress.carry
        )
        carried, totals = jax.block_until_ready(loop_outputs)
        seconds = time.perf_counter() - start_time
        loop_seconds += seconds
        timing.round_seconds += seconds
        totals = fetch_to_host(totals)
        total = round_progress.advance(
            carried, count, totals.max(0) if group_state.group.runs_parallel else totals
        )
        if round_progress.is_complete:
            break
        done = round_progress.done[loop]
        rate = max(done - first_iteration, 1) / loop_seconds
        progress = Progress(layout.loop_names[loop], done, total, rate, 0.0, (total - done) / rate)
        group_state.progress(progress)
        checkpoints.save(group_state)
        count = group_state.group.program.plan.sync_across_processes(
            max(1, min(int(CHUNK_SECONDS * rate), MAX_CALL_GROWTH * count))
        )
    group_state.state, group_state.round_progress = state, None
    group_state.store_client_states([group_state.rounds_done])
    return jax.tree.map(fetch_to_host, device_metrics)


def _warm_up_compile(group_state: GroupState, empty_inputs: ChunkInputs) -> None:
    """Compile the program for the arrays that it will be called with."""
    program, layout = group_state.group.program, group_state.loop_layout
    if layout is None:
        group_state.state, _ = jax.block_until_ready(program.chunk(group_state.state, empty_inputs))
        return
    carried = layout.init_carry()
    jax.block_until_ready(
        program.partial_round(group_state.state, empty_inputs, layout.build_spans(0), carried)
    )


def _record_metrics(group_state: GroupState, metrics: Any, count: int) -> None:
    """Record the metrics (`RoundMetrics`, on the host) of the next `count` rounds, now done."""
    timing, dataset = group_state.timing, group_state.group.dataset
    timing.timed_rounds += count
    for i, prepared_run in enumerate(group_state.prepared_runs):
        processed_samples = prepared_run.scheduler.work_counts.samples[
            group_state.rounds_done : group_state.rounds_done + count
        ]
        timing.timed_samples += int(processed_samples.sum())
        if i not in group_state.active:
            continue
        run_metrics = (
            jax.tree.map(lambda a, i=i: a[i], metrics)
            if group_state.group.runs_parallel
            else metrics
        )
        requested_metrics = group_state.group.program.signature.evaluation.metrics
        new_curves = build_curves(
            run_metrics,
            dataset,
            prepared_run.partition,
            prepared_run.client_tests,
            requested_metrics,
        )
        group_state.diverged_rounds[i] = record_rounds(
            group_state.curves[i], new_curves, run_metrics.is_finite, group_state.rounds_done, count
        )
        if group_state.diverged_rounds[i] is not None:
            seed = prepared_run.spec.seed
            log.warning(
                "diverged in round %d; stopped (seed %d)", group_state.diverged_rounds[i], seed
            )
    group_state.rounds_done += count


def _compute_chunk_length(group_state: GroupState) -> int:
    """Return the number of rounds of the next call: about `CHUNK_SECONDS`, up to a stop."""
    stop_rounds = [
        w.before_round
        for w in group_state.group.program.algorithm.server_stages
        if w.before_round > group_state.rounds_done
    ]
    if group_state.pause_every is not None:
        stop_rounds.append(
            (group_state.rounds_done // group_state.pause_every + 1) * group_state.pause_every
        )
    max_rounds = min(
        min([group_state.total_rounds, *stop_rounds]) - group_state.rounds_done,
        group_state.limits.max_rounds,
        _rounds_until_rules(group_state),
    )
    if not group_state.timing.timed_rounds:
        return 1
    seconds_per_round = group_state.timing.round_seconds / group_state.timing.timed_rounds
    return group_state.group.program.plan.sync_across_processes(
        max(1, min(max_rounds, int(CHUNK_SECONDS / seconds_per_round)))
    )


def _rounds_until_rules(group_state: GroupState) -> int:
    """Return the number of rounds to the next in which a stopping rule may end a run."""
    return min(
        count_rounds_until_rule(
            group_state.prepared_runs[i],
            group_state.group.program.algorithm,
            group_state.curves[i],
            group_state.rounds_done,
        )
        for i in group_state.active
    )


def _report_progress(group_state: GroupState) -> None:
    rate = group_state.timing.rounds_per_second
    active_curves = [group_state.curves[i] for i in group_state.active]
    group_state.progress(
        Progress(
            ROUNDS_PHASE,
            group_state.rounds_done,
            group_state.total_rounds,
            rate,
            group_state.timing.samples_per_second,
            (group_state.total_rounds - group_state.rounds_done) / rate,
            get_latest_accuracy(
                group_state.group.program.algorithm, active_curves, group_state.rounds_done
            ),
        )
    )


def _verify_round_program(group_state: GroupState, phase: str) -> ChunkInputs:
    """Verify the rounds' program with the present state; return the inputs of its first step."""
    first_step_inputs = group_state.build_first_step_inputs()
    group_state.load_client_states([min(group_state.rounds_done, group_state.total_rounds - 1)])
    program, layout = group_state.group.program, group_state.loop_layout
    if layout is None:
        program.chunk.verify((group_state.state, first_step_inputs), phase)
    else:
        loop_inputs = layout.build_spans(np.iinfo(np.int32).max), layout.init_carry()
        program.partial_round.verify((group_state.state, first_step_inputs, *loop_inputs), phase)
    return first_step_inputs


def _run_server_stage(
    group_state: GroupState, stage: ServerStage, checkpoints: CheckpointWriter
) -> Iterator[str]:
    """Execute a server stage: on each run's device, shared by the devices, or on one device.

    A run whose state has more numbers that are not finite than before has diverged.
    """
    program, timing = group_state.group.program.server_stages[stage.name], group_state.timing
    place = (lambda tree: tree) if group_state.shards_server_stages else _copy_to_first_device
    state, hp = place(group_state.state), place(group_state.cached_inputs["hp"])
    key, server = (
        place(group_state.build_keys(Stream.SERVER)),
        place(group_state.cached_inputs.get("server_examples")),
    )

    start_time, nonfinite_counts = (
        time.perf_counter(),
        count_nonfinite_per_run(state, has_run_axis=group_state.group.runs_parallel),
    )
    program.verify((hp, state, key, jnp.int32(1), server))
    state = group_state.state = jax.block_until_ready(program(hp, state, key, jnp.int32(0), server))
    timing.compile_seconds += time.perf_counter() - start_time

    done = initial_done = group_state.stage_iterations_done(stage)
    start_time, count = time.perf_counter(), 1
    while done < stage.num_iterations and group_state.active:
        count = group_state.group.program.plan.sync_across_processes(
            min(count, stage.num_iterations - done)
        )
        state = jax.block_until_ready(program(hp, state, key, jnp.int32(count), server))
        done += count
        rate = (done - initial_done) / (time.perf_counter() - start_time)
        count = max(1, int(CHUNK_SECONDS * rate))
        seconds_remaining = (stage.num_iterations - done) / rate
        group_state.progress(
            Progress(stage.name, done, stage.num_iterations, rate, 0.0, seconds_remaining)
        )
        group_state.state = state
        _stop_diverged(group_state, nonfinite_counts, stage.name)
        yield stage.name
        checkpoints.save(group_state)
    timing.server_seconds += time.perf_counter() - start_time
    if not group_state.shards_server_stages:
        state = group_state.group.program.plan.map_state(state, group_state.group.program.plan.put)
    group_state.state = state

    start_time = time.perf_counter()
    _verify_round_program(group_state, stage.name)
    timing.compile_seconds += time.perf_counter() - start_time


def _stop_diverged(group_state: GroupState, previous_counts: np.ndarray, name: str) -> None:
    """Stop the runs whose states have more numbers that are not finite than before the stage."""
    current_counts = count_nonfinite_per_run(
        group_state.state, has_run_axis=group_state.group.runs_parallel
    )
    for i, prepared_run in enumerate(group_state.prepared_runs):
        if i in group_state.active and (current_counts[i] > previous_counts[i]).any():
            group_state.diverged_rounds[i] = group_state.rounds_done
            log.warning(
                "diverged in %s after round %d; stopped (seed %d)",
                name,
                group_state.rounds_done,
                prepared_run.spec.seed,
            )


def _copy_to_first_device(tree: Any) -> Any:
    """Copy a pytree to this process's first device: the stage is not made of lanes."""
    device = jax.local_devices()[0]
    return jax.tree.map(
        lambda a: (
            jax.device_put(a.addressable_data(0), device)
            if isinstance(a, jax.Array) and not a.is_fully_addressable
            else jax.device_put(a, device)
        ),
        tree,
    )
