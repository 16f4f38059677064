"""The end of rounds: their metrics, the stopping rules, and the state after them, in one step."""

import logging
from typing import Any

from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.history import EarlyStop, build_curves, evaluate_rules, record_rounds
from fedjax_het.utils.signals import defer_signals

log = logging.getLogger("fedjax_het")

ROUNDS_PHASE = "rounds"  # the phase of runs outside server stages


def finish_rounds(group_state: GroupState, state: Any, metrics: Any, count: int) -> None:
    """Record the metrics of the next `count` rounds, and replace the snapshot.

    Signals wait. After an error within the function the runs have no state and cannot continue.

    Args:
      group_state: the runs before these rounds.
      state: the states of all runs after these rounds, on the devices.
      metrics: the metrics of these rounds, `RoundMetrics` on the host.
      count: number of these rounds.
    """
    group, timing, active = group_state.group, group_state.timing, group_state.active
    done, diverged_rounds = group_state.rounds_done, list(group_state.diverged_rounds)
    requested_metrics = group.program.signature.evaluation.metrics
    with defer_signals():
        group_state.update(state=None)
        group_state.store_client_states(state.clients, range(done, done + count))
        timing.timed_rounds += count
        for i, run in enumerate(group_state.prepared_runs):
            samples = run.scheduler.work_counts.samples[done : done + count]
            timing.timed_samples += int(samples.sum())
            if i not in active:
                continue
            run_metrics = group.take_run(metrics, i)
            new_curves = build_curves(run_metrics, run, requested_metrics)
            diverged_round = diverged_rounds[i] = record_rounds(
                group_state.curves[i], new_curves, run_metrics.is_finite, done, count
            )
            if diverged_round is not None:
                name, seed = run.spec.algorithm, run.spec.seed
                log.warning(
                    "diverged in round %d; stopped (%s, seed %d)", diverged_round, name, seed
                )
        active = [i for i in active if diverged_rounds[i] is None]
        group_state.update(
            state=state,
            rounds_done=done + count,
            round_progress=None,
            diverged_rounds=tuple(diverged_rounds),
            early_stops=_find_early_stops(group_state, active, done + count),
            unreported_phase=ROUNDS_PHASE,
        )
        group_state.plan_rounds()


def apply_stopping_rules(group_state: GroupState) -> None:
    """End the runs of which a stopping rule is met."""
    early_stops = _find_early_stops(group_state, group_state.active, group_state.rounds_done)
    group_state.update(early_stops=early_stops)


def _find_early_stops(
    group_state: GroupState, active: list[int], rounds_done: int
) -> dict[int, EarlyStop]:
    """Return the ends of runs before their last round, with the ends by rules that are met now."""
    early_stops = dict(group_state.early_stops)
    for i in active:
        spec = group_state.prepared_runs[i].spec
        if not spec.has_early_stopping:
            continue
        accuracies = group_state.get_accuracies(i, rounds_done)
        early_stop = evaluate_rules(spec, accuracies).early_stop
        if early_stop is not None and early_stop.round < group_state.total_rounds:
            early_stops[i] = early_stop
            log.info("stopped after round %d: %s", early_stop.round, early_stop.reason)
    return early_stops
