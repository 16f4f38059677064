"""Runs that end before their last round: at a target, at a plateau, or by a callback.

The number of rounds per call has no influence: a call ends at the first round in which a rule may
stop a run (`count_rounds_until_rule`), so that state, curves and result are of the same round.
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
        """Return the record for a result's summary."""
        return {"why": self.cause, "round": self.round, "reason": self.reason}


class StoppingState(NamedTuple):
    """The state of a run's stopping rules after some rounds."""

    rounds_without_gain: int  # measured rounds since the last gain
    early_stop: EarlyStop | None


def evaluate_rules(spec: RunSpec, accuracies: np.ndarray) -> StoppingState:
    """Apply the stopping rules of a run; the first round that meets one ends it.

    Args:
      spec: the settings of the run.
      accuracies: float32 fractions `[rounds]`, NaN where nothing was measured.

    Returns:
      The state of the rules; a target has precedence over a plateau in the same round.
    """
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
    """Apply the stopping rules of a run whose first `done` rounds are done."""
    return evaluate_rules(prepared_run.spec, curves[get_accuracy_name(algorithm)][:done])


def count_rounds_until_rule(
    prepared_run: PreparedRun, algorithm: Algorithm, curves: Curves, done: int
) -> int:
    """Return the number of rounds up to and including the next in which a rule may end the run.

    Without a rule, this is the number of its remaining rounds.
    """
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
