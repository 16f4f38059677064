"""Runs that end before their last round: at a target, at a plateau, or as a callback asks.

What decides is what was measured up to a round, and never how many rounds were computed at a time:
chunks end before a rule could want them to (`rounds_until`), so that a run's state, its curves and
its result are all of the round in which it stopped, whatever goes on beside it.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.running.accounts import Curves, accuracy_name
from fedjax_het.running.federations import Federation
from fedjax_het.settings.spec import RunSpec

TARGET, PLATEAU, CALLBACK = "target", "plateau", "callback"


class Early(NamedTuple):
    """A run's end before its last round."""

    round: int  # the last that took place, from 1; 0: none did
    why: str  # TARGET, PLATEAU or CALLBACK
    reason: str  # in words

    def summary(self) -> dict[str, str | int]:
        """As a result has it."""
        return {"why": self.why, "round": self.round, "reason": self.reason}


class Stand(NamedTuple):
    """How near a run is to its end by its settings, after some rounds."""

    waited: int  # measured rounds since the last gain
    end: Early | None


def stand(spec: RunSpec, measured: np.ndarray) -> Stand:
    """Where the rules stand after the rounds of a curve `[rounds]` of accuracies (float32 shares,
    NaN where nothing was measured). The first round that meets one counts; a target goes before a
    plateau."""
    best, waited, gain = np.float32(-np.inf), 0, np.float32(spec.min_gain or 0)
    for at in np.flatnonzero(np.isfinite(measured)):
        accuracy = np.float32(measured[at])
        gained = accuracy > best + gain  # in single precision, as accuracies are
        best, waited = (accuracy, 0) if gained else (best, waited + 1)
        if spec.stop_at is not None and accuracy >= np.float32(spec.stop_at):
            said = f"accuracy {accuracy:.4f} is at least stop_at = {spec.stop_at:g}"
            return Stand(waited, Early(int(at) + 1, TARGET, said))
        if spec.patience is not None and waited >= spec.patience:
            said = f"{waited} measured rounds without a gain over accuracy {best:.4f}"
            return Stand(waited, Early(int(at) + 1, PLATEAU, said))
    return Stand(waited, None)


def stand_of(federation: Federation, algorithm: Algorithm, curves: Curves, done: int) -> Stand:
    """The same of a run whose first `done` rounds are done."""
    return stand(federation.spec, curves[accuracy_name(algorithm)][:done])


def rounds_until(federation: Federation, algorithm: Algorithm, curves: Curves, done: int) -> int:
    """How many rounds there are to the next one in which a rule may end this run, that one
    included; to its last round without a rule."""
    spec, scheduler = federation.spec, federation.scheduler
    if not spec.ends_by_rules:
        return spec.rounds - done
    needed = 1  # measured rounds
    if spec.stop_at is None and spec.patience is not None:
        needed = spec.patience - stand_of(federation, algorithm, curves, done).waited
    for count, at in enumerate(range(done, spec.rounds), 1):
        needed -= scheduler.evaluates(at)
        if needed <= 0:
            return count
    return spec.rounds - done
