"""Execution of one run, or of several runs side by side, from the first round to the last.

`runtime.session` calls this module for a single run, `runtime.group_runner` for a sweep.
"""

import time
from collections.abc import Iterator

import jax

from fedjax_het.runtime import long_phases
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.group_init import init_states
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import count_rounds_until_rule, get_latest_accuracy
from fedjax_het.runtime.input_prefetcher import InputPrefetcher
from fedjax_het.runtime.long_phases import (
    run_resumable_round,
    run_server_stage,
    verify_round_program,
)
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.round_recording import ROUNDS_PHASE, apply_stopping_rules, finish_rounds
from fedjax_het.utils.arrays import fetch_to_host
from fedjax_het.utils.signals import defer_signals


def start_runs(group_state: GroupState, checkpoints: CheckpointWriter) -> None:
    """Initialize runs, or resume them from checkpoints, and compile their program.

    Args:
      group_state: the runs.
      checkpoints: their checkpoints.

    Raises:
      ConfigError: before compilation, if a checkpoint is of other data.
    """
    program, timing = group_state.group.program, group_state.timing
    with timing.record_compilation():
        init_states(group_state)
    if group_state.records:
        checkpoints.restore(group_state)
    with timing.record_compilation():
        group_state.plan_rounds(from_start=True)
    if program.plan.is_debug:
        return
    with timing.record_compilation():
        inputs = group_state.without_rounds(verify_round_program(group_state, ROUNDS_PHASE))
        # A call without rounds compiles the program for the arrays that it will be called with.
        if (layout := group_state.loop_layout) is None:
            state, _ = jax.block_until_ready(program.chunk(group_state.state, inputs))
            group_state.update(state=state)
        else:
            loop_inputs = layout.build_spans(0), layout.init_carry()
            jax.block_until_ready(program.partial_round(group_state.state, inputs, *loop_inputs))


def advance_runs(group_state: GroupState, checkpoints: CheckpointWriter) -> Iterator[str]:
    """Execute the remaining rounds and server stages, a call of a program at a time.

    Args:
      group_state: the runs.
      checkpoints: their checkpoints.

    Yields:
      After each call and before a checkpoint is written, "rounds" or the name of the server stage.
      The caller may end runs there (`GroupState.early_stops`), or leave the loop. After a signal
      another call continues.
    """
    apply_stopping_rules(group_state)
    with InputPrefetcher(group_state) as prefetcher:
        while group_state.is_unfinished:
            for stage in group_state.group.program.algorithm.server_stages:
                if group_state.rounds_done in stage.before_rounds and group_state.active:
                    yield from run_server_stage(group_state, stage, checkpoints)
                    if group_state.active:
                        with group_state.timing.record_compilation():
                            group_state.plan_rounds(from_start=True)  # the model has changed
                            verify_round_program(group_state, stage.name)
            if not group_state.is_unfinished:  # another iterator may have gone on meanwhile
                break
            if group_state.loop_layout is not None:
                run_resumable_round(group_state, checkpoints)
            else:
                _run_chunk(group_state, prefetcher, _compute_chunk_length(group_state))
            _report_progress(group_state)
            yield ROUNDS_PHASE
            checkpoints.save(group_state)


def _run_chunk(group_state: GroupState, prefetcher: InputPrefetcher, count: int) -> None:
    """Execute one call of the program, which donates the state's buffers, and record its rounds."""
    start_time, program = time.perf_counter(), group_state.group.program
    rounds = range(group_state.rounds_done, group_state.rounds_done + count)
    inputs = prefetcher.get(rounds.start, count)
    group_state.load_client_states(rounds)
    # A debug run keeps the old state, and the user may wish to interrupt a client's function.
    with defer_signals(enabled=not program.plan.is_debug):
        state, device_metrics = program.chunk(group_state.state, inputs)
        prefetcher.prefetch(rounds.stop, count)
        group_state.prefetch_client_states(rounds.stop, count)
        metrics = jax.tree.map(fetch_to_host, device_metrics)
        finish_rounds(group_state, state, metrics, count)
        group_state.timing.round_seconds += time.perf_counter() - start_time


def _compute_chunk_length(group_state: GroupState) -> int:
    """Return the rounds of the next call, about `long_phases.CHUNK_SECONDS` long, up to a stop."""
    program, timing, done = group_state.group.program, group_state.timing, group_state.rounds_done
    if not timing.timed_rounds:
        return 1
    stop_rounds = [group_state.total_rounds]
    for stage in program.algorithm.server_stages:
        stop_rounds += [i for i in stage.before_rounds if i > done]
    if (every := group_state.pause_every) is not None:
        stop_rounds.append((done // every + 1) * every)
    rounds_until_rules = (
        count_rounds_until_rule(run.spec, run.scheduler, group_state.get_accuracies(i))
        for i, run in enumerate(group_state.prepared_runs)
        if i in group_state.active
    )
    max_rounds = min(min(stop_rounds) - done, group_state.limits.max_rounds, *rounds_until_rules)
    seconds_per_round = timing.round_seconds / timing.timed_rounds
    return program.plan.sync_across_processes(
        max(1, min(max_rounds, int(long_phases.CHUNK_SECONDS / seconds_per_round)))
    )


def _report_progress(group_state: GroupState) -> None:
    """Pass the number of rounds, their speed and the latest accuracy to the progress function."""
    timing, done = group_state.timing, group_state.rounds_done
    rate = timing.timed_rounds / max(timing.round_seconds, 1e-9)
    group_state.progress(
        Progress(
            ROUNDS_PHASE,
            done,
            group_state.total_rounds,
            rate,
            timing.samples_per_second,
            (group_state.total_rounds - done) / rate,
            get_latest_accuracy([group_state.get_accuracies(i) for i in group_state.active]),
            group_state.accuracy_name,
        )
    )
