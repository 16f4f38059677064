"""Phases of runs that several calls of a program execute: server stages and long rounds."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_inputs import ChunkInputs
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.resumable_rounds import RoundProgress
from fedjax_het.runtime.round_recording import finish_rounds
from fedjax_het.utils.arrays import count_nonfinite, fetch_to_host
from fedjax_het.utils.signals import defer_signals

log = logging.getLogger("fedjax_het")

CHUNK_SECONDS = 2.0  # between reports of progress, at which a checkpoint may be written
MAX_CALL_GROWTH = 8  # iterations of a call relative to the call before, at most


def verify_round_program(group_state: GroupState, phase: str) -> ChunkInputs:
    """Verify the numbers of the rounds' program with the present state.

    Args:
      group_state: the runs.
      phase: the phase for messages: "rounds", or the name of the server stage before them.

    Returns:
      The inputs of the program's first step.
    """
    inputs = group_state.build_first_step_inputs()
    group_state.load_client_states([min(group_state.rounds_done, group_state.total_rounds - 1)])
    program, layout = group_state.group.program, group_state.loop_layout
    if layout is None:
        program.chunk.verify((group_state.state, inputs), phase)
    else:
        loop_inputs = layout.build_spans(np.iinfo(np.int32).max), layout.init_carry()
        program.partial_round.verify((group_state.state, inputs, *loop_inputs), phase)
    return inputs


def run_resumable_round(group_state: GroupState, checkpoints: CheckpointWriter) -> None:
    """Execute the next round in several calls, and record it.

    Args:
      group_state: the runs, of which a round may have begun.
      checkpoints: their checkpoints, which are written between calls.
    """
    group, timing, layout = group_state.group, group_state.timing, group_state.loop_layout
    assert layout is not None
    inputs = group_state.build_chunk_inputs(group_state.rounds_done, 1)
    group_state.load_client_states([group_state.rounds_done])
    num_loops = len(layout.loop_names)
    round_progress = group_state.round_progress
    if round_progress is None:
        round_progress = RoundProgress(layout.init_carry(), (0,) * num_loops)
    loop, count, first_iteration, loop_seconds = -1, 1, 0, 0.0
    while True:
        if round_progress.loop_index != loop:  # the first iteration tells how fast the others are
            loop, count, loop_seconds = round_progress.loop_index, 1, 0.0
            first_iteration = round_progress.done[loop]
        start_time = time.perf_counter()
        spans = layout.plan.put(round_progress.build_spans(count))
        with defer_signals():  # the call takes the buffers of the carry
            state, device_metrics, *loop_outputs = group.program.partial_round(
                group_state.state, inputs, spans, round_progress.carry
            )
            carry, totals = jax.block_until_ready(loop_outputs)
            seconds = time.perf_counter() - start_time
            loop_seconds += seconds
            timing.round_seconds += seconds
            totals = fetch_to_host(totals)
            totals = totals.max(0) if group.runs_parallel else totals
            round_progress = round_progress.advance(carry, count, totals)
            if round_progress.loop_index == num_loops:
                metrics = jax.tree.map(fetch_to_host, device_metrics)
                finish_rounds(group_state, state, metrics, 1)
                return
            group_state.update(round_progress=round_progress)
        done, total = round_progress.done[loop], int(totals[loop])
        rate = max(done - first_iteration, 1) / loop_seconds
        progress = Progress(layout.loop_names[loop], done, total, rate, 0.0, (total - done) / rate)
        group_state.progress(progress)
        checkpoints.save(group_state)
        count = layout.plan.sync_across_processes(
            max(1, min(int(CHUNK_SECONDS * rate), MAX_CALL_GROWTH * count))
        )


def run_server_stage(
    group_state: GroupState, stage: ServerStage, checkpoints: CheckpointWriter
) -> Iterator[str]:
    """Execute a server stage before the current round, unless it is complete.

    It runs on each run's device, shared by the devices, or on one device.

    A run whose state has more numbers that are not finite after a call than before it has diverged.
    After a signal another call of this function continues, and several iterators of one run may
    take turns.

    Args:
      group_state: the runs.
      stage: the server stage.
      checkpoints: their checkpoints, which are written between calls.

    Yields:
      The name of the stage after each call.
    """
    total = stage.num_iterations * (stage.before_rounds.index(group_state.rounds_done) + 1)
    if group_state.count_stage_iterations(stage) >= total:
        return
    group, timing = group_state.group, group_state.timing
    program, plan = group.program.server_stages[stage.name], group.program.plan
    place = (lambda tree: tree) if group_state.shards_server_stages else _copy_to_first_device
    cached_inputs, key = group_state.cached_inputs, group_state.build_keys(Stream.SERVER)
    hp, key, server = place((cached_inputs["hp"], key, cached_inputs.get("server_examples")))

    with timing.record_compilation():
        state = place(group_state.state)
        program.verify((hp, state, key, jnp.int32(1), server))
        with defer_signals(enabled=not plan.is_debug):  # the call takes the buffers of the state
            state = jax.block_until_ready(program(hp, state, key, jnp.int32(0), server))
            group_state.update(state=state)

    done = initial_done = group_state.count_stage_iterations(stage)
    nonfinite_counts = count_nonfinite_per_run(state, has_run_axis=group.runs_parallel)
    start_time, count = time.perf_counter(), 1
    while done < total and group_state.active:
        count = plan.sync_across_processes(min(count, total - done))
        with defer_signals(enabled=not plan.is_debug):
            state = program(hp, place(group_state.state), key, jnp.int32(count), server)
            state = jax.block_until_ready(state)
            done += count
            counts = count_nonfinite_per_run(state, has_run_axis=group.runs_parallel)
            is_greater = counts > nonfinite_counts
            diverged_rounds = _find_diverged(group_state, is_greater, stage.name)
            if done == total and not group_state.shards_server_stages:
                state = plan.map_state(state, plan.put)
            group_state.update(
                state=state, diverged_rounds=diverged_rounds, unreported_phase=stage.name
            )
        rate = (done - initial_done) / (time.perf_counter() - start_time)
        count = max(1, int(CHUNK_SECONDS * rate))
        group_state.progress(Progress(stage.name, done, total, rate, 0.0, (total - done) / rate))
        yield stage.name
        checkpoints.save(group_state)
        done, nonfinite_counts = group_state.count_stage_iterations(stage), counts
    timing.server_seconds += time.perf_counter() - start_time


def count_nonfinite_per_run(state: Any, *, has_run_axis: bool) -> np.ndarray:
    """Count the entries that are not finite of the state of each run, on the host.

    Args:
      state: the states.
      has_run_axis: whether they have a leading axis of runs; else there is one run.

    Returns:
      The number of such entries of each floating leaf, `[F, L]` int32.
    """
    count = _count_each_run if has_run_axis else _count_single_run
    return np.atleast_2d(fetch_to_host(count(state)))


_count_single_run = jax.jit(count_nonfinite)
_count_each_run = jax.jit(jax.vmap(count_nonfinite))


def _find_diverged(
    group_state: GroupState, is_greater: np.ndarray, name: str
) -> tuple[int | None, ...]:
    """Return the rounds of divergence, with the runs of which a leaf has new nonfinite numbers."""
    done, diverged_rounds = group_state.rounds_done, [*group_state.diverged_rounds]
    for i in group_state.active:
        if is_greater[i].any():
            seed, diverged_rounds[i] = group_state.prepared_runs[i].spec.seed, done
            log.warning("diverged in %s after round %d; stopped (seed %d)", name, done, seed)
    return tuple(diverged_rounds)


def _copy_to_first_device(tree: Any) -> Any:
    """Copy a pytree to this process's first device: the stage is not made of lanes."""
    device = jax.local_devices()[0]

    def copy(leaf: Any) -> jax.Array:
        is_remote = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return jax.device_put(leaf.addressable_data(0) if is_remote else leaf, device)

    return jax.tree.map(copy, tree)
