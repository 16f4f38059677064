"""Runs advanced in step, from the first round to the last: the host's side of the work."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms import entry_of
from fedjax_het.algorithms.contract import HostWork
from fedjax_het.common.arrays import host_values
from fedjax_het.engine.randomness import Stream
from fedjax_het.engine.rounds import ChunkInputs, RoundMetrics
from fedjax_het.engine.soundness import not_finite_of_runs
from fedjax_het.running.accounts import curves_of, latest_accuracy, recorded
from fedjax_het.running.ahead import Ahead
from fedjax_het.running.checkpoints import Checkpoints
from fedjax_het.running.inputs import without_rounds
from fedjax_het.running.long_rounds import begun
from fedjax_het.running.progress import Progress
from fedjax_het.running.runs import Runs, begin_states, require_contract
from fedjax_het.running.stopping import rounds_until, stand_of

log = logging.getLogger("fedjax_het")

CHUNK_SECONDS = 2.0  # how often progress shows and a checkpoint may be written
ROUNDS = "rounds"  # what runs are at, where that is no work between rounds
GROWTH = 8  # of a stretch over the one before, at most


def announce(runs: Runs) -> None:
    """Log what is about to run: the splits, the lanes, the share of useful work."""
    group = runs.group
    for federation in runs.federations:
        log.info("data: %s. %s", group.dataset.name, group.split(federation))
        if federation.server is not None:
            log.info("server: %s", group.server_summary(federation))
    log.info(
        "lanes: %s; %.1f %% of the samples that they run through are the clients'",
        runs.plan.describe(),
        100 * group.useful_fraction(runs.federations),
    )
    if runs.paged:
        log.info(
            "client states: on the host; on the devices those of %d clients, for %d rounds",
            runs.room.rows,
            runs.room.rounds,
        )
    if group.dataset.note:
        log.info("note: %s", group.dataset.note)
    spec = runs.federations[0].spec
    entry = entry_of(spec.algorithm, spec.options)
    for remark in entry.remarks(spec, entry):
        log.warning("note: %s", remark)


def start(runs: Runs, checkpoints: Checkpoints, records: Sequence[dict] | None = None) -> None:
    """Begin, or continue from the checkpoints whose records these are; compile.

    Raises ConfigError, before anything compiles, if the method breaks its contract, or if a
    checkpoint is of other data.
    """
    require_contract(runs)
    begin_states(runs)
    if records is not None:
        checkpoints.restore(runs, records)
    began = time.perf_counter()
    one_step = _verify(runs, "rounds")
    _call_for_nothing(runs, without_rounds(runs.source, one_step))
    runs.spent.compiling += time.perf_counter() - began


def finish(runs: Runs, checkpoints: Checkpoints) -> None:
    """Run what is left: rounds, and the work between them."""
    for _ in advanced(runs, checkpoints):
        pass


def advanced(runs: Runs, checkpoints: Checkpoints) -> Iterator[str]:
    """Run what is left, a call of the programs at a time: after each, what was gone on with,
    "rounds" or the name of work between them, before a checkpoint is written. Whoever goes through
    it may end runs there (`Runs.early`), or leave."""
    _end_by_rules(runs)
    with Ahead(runs) as ahead:
        while runs.done < runs.rounds and runs.going:
            for work in runs.algorithm.host_work:
                if work.before_round == runs.done and runs.work_done(work) < work.total:
                    yield from _work_between_rounds(runs, work, checkpoints)
            if not runs.going:
                break
            if runs.stretched is not None:
                metrics, count = _run_in_stretches(runs, checkpoints), 1
            else:
                count = _chunk_length(runs)
                metrics = _run_chunk(runs, ahead, count)
            _record(runs, metrics, count)
            _end_by_rules(runs)
            _report(runs)
            yield ROUNDS
            checkpoints.save(runs)


def _end_by_rules(runs: Runs) -> None:
    """End the runs whose settings say that the rounds so far were enough."""
    for i in runs.going:
        federation = runs.federations[i]
        if federation.spec.ends_by_rules:
            early = stand_of(federation, runs.algorithm, runs.curves[i], runs.done).end
            if early is not None and early.round < runs.rounds:
                runs.early[i] = early
                log.info("stopped after round %d: %s", early.round, early.reason)


def _run_chunk(runs: Runs, ahead: Ahead, count: int) -> RoundMetrics:
    """One call of the program: -> what it measured."""
    began = time.perf_counter()
    rounds = range(runs.done, runs.done + count)
    inputs = ahead.take(rounds.start, count)
    runs.load_states(rounds)
    runs.state, measured = runs.group.program.chunk(runs.state, inputs)
    ahead.prepare(rounds.stop, count)
    metrics = jax.tree.map(host_values, measured)
    runs.store_states(rounds)
    runs.spent.rounds += time.perf_counter() - began
    return metrics


def _run_in_stretches(runs: Runs, checkpoints: Checkpoints) -> RoundMetrics:
    """The next round, in as many calls as it takes: -> what it measured."""
    cut, program, spent = runs.stretched, runs.group.program.stretch, runs.spent
    assert cut is not None
    inputs = runs.call(runs.done, 1)
    runs.load_states([runs.done])
    within = runs.within = runs.within or begun(cut)
    loop, count, first, began = -1, 1, 0, 0.0
    while True:
        if within.loop != loop:  # the first iteration tells how fast the others are
            loop, count, first, began = within.loop, 1, within.done[within.loop], 0.0
        started = time.perf_counter()
        spans = cut.plan.put(within.spans(count))
        state, measured, *left = program(runs.state, inputs, spans, within.carried)
        carried, totals = jax.block_until_ready(left)
        seconds = time.perf_counter() - started
        began += seconds
        spent.rounds += seconds
        totals = host_values(totals)
        total = within.take(carried, count, totals.max(0) if runs.source.apart else totals)
        if within.ended:
            break
        done = within.done[loop]
        rate = max(done - first, 1) / began
        progress = Progress(cut.names[loop], done, total, rate, 0.0, (total - done) / rate)
        runs.progress(progress)
        checkpoints.save(runs)
        count = runs.plan.agreed(max(1, min(int(CHUNK_SECONDS * rate), GROWTH * count)))
    runs.state, runs.within = state, None
    runs.store_states([runs.done])
    return jax.tree.map(host_values, measured)


def _call_for_nothing(runs: Runs, nothing: ChunkInputs) -> None:
    """Let the program compile for the arrays that it will be called with."""
    program, cut = runs.group.program, runs.stretched
    if cut is None:
        runs.state, _ = jax.block_until_ready(program.chunk(runs.state, nothing))
        return
    carried = cut.nothing()
    jax.block_until_ready(program.stretch(runs.state, nothing, cut.spans(0), carried))


def _record(runs: Runs, metrics: Any, count: int) -> None:
    """Keep what was measured (`RoundMetrics`, on the host) in the next `count` rounds, which are
    done now."""
    spent, dataset = runs.spent, runs.group.dataset
    spent.timed_rounds += count
    for i, federation in enumerate(runs.federations):
        worked = federation.scheduler.work.samples[runs.done : runs.done + count]
        spent.timed_samples += int(worked.sum())
        if i not in runs.going:
            continue
        own = jax.tree.map(lambda a, i=i: a[i], metrics) if runs.source.apart else metrics
        measures = runs.group.program.measuring.measures
        new = curves_of(own, dataset, federation.partition, federation.tests, measures)
        runs.stopped[i] = recorded(runs.curves[i], new, own.sound, runs.done, count)
        if runs.stopped[i] is not None:
            seed = federation.spec.seed
            log.warning("diverged in round %d; stopped (seed %d)", runs.stopped[i], seed)
    runs.done += count


def _chunk_length(runs: Runs) -> int:
    """As many rounds as fit the time between two signs of life, up to the next stop."""
    stops = [w.before_round for w in runs.algorithm.host_work if w.before_round > runs.done]
    if runs.pause is not None:
        stops.append((runs.done // runs.pause + 1) * runs.pause)
    most = min(min([runs.rounds, *stops]) - runs.done, runs.room.rounds, _rounds_until_rules(runs))
    if not runs.spent.timed_rounds:
        return 1
    pace = runs.spent.rounds / runs.spent.timed_rounds
    return runs.plan.agreed(max(1, min(most, int(CHUNK_SECONDS / pace))))


def _rounds_until_rules(runs: Runs) -> int:
    """Rounds to the next one in which the settings of a run may end it."""
    return min(
        rounds_until(runs.federations[i], runs.algorithm, runs.curves[i], runs.done)
        for i in runs.going
    )


def _report(runs: Runs) -> None:
    rate = runs.spent.rounds_per_second
    going = [runs.curves[i] for i in runs.going]
    runs.progress(
        Progress(
            ROUNDS,
            runs.done,
            runs.rounds,
            rate,
            runs.spent.samples_per_second,
            (runs.rounds - runs.done) / rate,
            latest_accuracy(runs.algorithm, going, runs.done),
        )
    )


def _verify(runs: Runs, part: str) -> ChunkInputs:
    """Verify the rounds' program in its present state; -> what its first step reads."""
    one_step = runs.first_step()
    runs.load_states([min(runs.done, runs.rounds - 1)])
    program, cut = runs.group.program, runs.stretched
    if cut is None:
        program.chunk.verify((runs.state, one_step), part)
    else:
        whole = cut.spans(np.iinfo(np.int32).max), cut.nothing()
        program.stretch.verify((runs.state, one_step, *whole), part)
    return one_step


def _work_between_rounds(runs: Runs, work: HostWork, checkpoints: Checkpoints) -> Iterator[str]:
    """Work that is due: for every run on its own, or shared by the devices, or on one of them. A
    run whose state it leaves with numbers that are not finite has diverged."""
    program, spent = runs.group.program.host_work[work.name], runs.spent
    local = (lambda tree: tree) if runs.shares_host_work else _on_one_device
    state, hp = local(runs.state), local(runs.kept["hp"])
    key, server = local(runs.keys(Stream.SERVER)), local(runs.kept.get("server"))

    began, counted = time.perf_counter(), not_finite_of_runs(state, apart=runs.source.apart)
    program.verify((hp, state, key, jnp.int32(1), server))
    state = runs.state = jax.block_until_ready(program(hp, state, key, jnp.int32(0), server))
    spent.compiling += time.perf_counter() - began

    done = first = runs.work_done(work)
    began, count = time.perf_counter(), 1
    while done < work.total and runs.going:
        count = runs.plan.agreed(min(count, work.total - done))
        state = jax.block_until_ready(program(hp, state, key, jnp.int32(count), server))
        done += count
        rate = (done - first) / (time.perf_counter() - began)
        count = max(1, int(CHUNK_SECONDS * rate))
        to_go = (work.total - done) / rate
        runs.progress(Progress(work.name, done, work.total, rate, 0.0, to_go))
        runs.state = state
        _stop_diverged(runs, counted, work.name)
        yield work.name
        checkpoints.save(runs)
    spent.host_work += time.perf_counter() - began
    if not runs.shares_host_work:
        state = runs.plan.with_clients(state, runs.plan.put)
    runs.state = state

    began = time.perf_counter()
    _verify(runs, work.name)
    spent.compiling += time.perf_counter() - began


def _stop_diverged(runs: Runs, counted: np.ndarray, name: str) -> None:
    """Stop the runs that work between rounds has left with more numbers that are not finite than
    were `counted` before it."""
    now = not_finite_of_runs(runs.state, apart=runs.source.apart)
    for i, federation in enumerate(runs.federations):
        if i in runs.going and (now[i] > counted[i]).any():
            runs.stopped[i] = runs.done
            log.warning(
                "diverged in %s after round %d; stopped (seed %d)",
                name,
                runs.done,
                federation.spec.seed,
            )


def _on_one_device(tree: Any) -> Any:
    """A copy on this process's first device: the work is not made of lanes."""
    device = jax.local_devices()[0]
    return jax.tree.map(
        lambda a: (
            jax.device_put(a.addressable_data(0), device)
            if isinstance(a, jax.Array) and not a.is_fully_addressable
            else jax.device_put(a, device)
        ),
        tree,
    )
