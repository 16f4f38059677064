"""Runs that end before their last round: at a target, at a plateau, or as a callback asks.

What decides is what was measured up to a round, and never how many rounds were computed at a time:
chunks end before a rule could want them to (`count_rounds_until_rule`), so that a run's state, its curves and
its result are all of the round in which it stopped, whatever goes on beside it.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.history import Curves, get_accuracy_name
from fedjax_het.runtime.prepared_run import PreparedRun

TARGET, PLATEAU, CALLBACK = "target", "plateau", "callback"


class EarlyStop(NamedTuple):
    """A run's end before its last round."""

    round: int  # the last that took place, from 1; 0: none did
    cause: str  # TARGET, PLATEAU or CALLBACK
    reason: str  # in words

    def to_summary(self) -> dict[str, str | int]:
        """As a result has it."""
        return {"why": self.cause, "round": self.round, "reason": self.reason}


class StoppingState(NamedTuple):
    """How near a run is to its end by its settings, after some rounds."""

    rounds_without_gain: int  # measured rounds since the last gain
    early_stop: EarlyStop | None


def evaluate_rules(spec: RunSpec, accuracies: np.ndarray) -> StoppingState:
    """Where the rules stand after the rounds of a curve `[rounds]` of accuracies (float32 shares,
    NaN where nothing was measured). The first round that meets one counts; a target goes before a
    plateau."""
    best, rounds_without_gain, min_gain = np.float32(-np.inf), 0, np.float32(spec.min_gain or 0)
    for round_index in np.flatnonzero(np.isfinite(accuracies)):
        accuracy = np.float32(accuracies[round_index])
        has_improved = accuracy > best + min_gain  # in single precision, as accuracies are
        best, rounds_without_gain = (
            (accuracy, 0) if has_improved else (best, rounds_without_gain + 1)
        )
        if spec.stop_at is not None and accuracy >= np.float32(spec.stop_at):
            reason = f"accuracy {accuracy:.4f} is at least stop_at = {spec.stop_at:g}"
            return StoppingState(
                rounds_without_gain, EarlyStop(int(round_index) + 1, TARGET, reason)
            )
        if spec.patience is not None and rounds_without_gain >= spec.patience:
            reason = (
                f"{rounds_without_gain} measured rounds without a gain over accuracy {best:.4f}"
            )
            return StoppingState(
                rounds_without_gain, EarlyStop(int(round_index) + 1, PLATEAU, reason)
            )
    return StoppingState(rounds_without_gain, None)


def evaluate_run_rules(
    prepared_run: PreparedRun, algorithm: Algorithm, curves: Curves, done: int
) -> StoppingState:
    """The same of a run whose first `done` rounds are done."""
    return evaluate_rules(prepared_run.spec, curves[get_accuracy_name(algorithm)][:done])


def count_rounds_until_rule(
    prepared_run: PreparedRun, algorithm: Algorithm, curves: Curves, done: int
) -> int:
    """How many rounds there are to the next one in which a rule may end this run, that one
    included; to its last round without a rule."""
    spec, scheduler = prepared_run.spec, prepared_run.scheduler
    if not spec.has_early_stopping:
        return spec.rounds - done
    remaining_evaluations = 1  # measured rounds
    if spec.stop_at is None and spec.patience is not None:
        remaining_evaluations = (
            spec.patience
            - evaluate_run_rules(prepared_run, algorithm, curves, done).rounds_without_gain
        )
    for count, round_index in enumerate(range(done, spec.rounds), 1):
        remaining_evaluations -= scheduler.is_eval_round(round_index)
        if remaining_evaluations <= 0:
            return count
    return spec.rounds - done
