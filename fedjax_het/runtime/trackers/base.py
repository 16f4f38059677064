"""What a tracker is made of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol


class TrackedRun(NamedTuple):
    """What a record is opened with."""

    folder: Path
    """The output folder."""
    digest: str
    """Of the run's files."""
    settings: dict[str, str | int | float | bool]
    """By name, those of `hp` and others in words as `hp.local_lr`."""
    metrics: tuple[str, ...]
    """Names of the curves."""
    done: int
    """Rounds that took place before: more than 0 of a run that is resumed."""


class RunTracker(Protocol):
    """A run's, in a tracker."""

    done: int
    """Rounds that it has, of those that took place; it is told the later ones."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Take a round's numbers (from 1): those that were measured and are finite."""

    def flush(self) -> None:
        """Write what was logged: a kill after this loses none of it."""

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        """The run has ended."""


OpenTracker = Callable[[TrackedRun], RunTracker]


class Tracker(NamedTuple):
    """A program that keeps curves. `open` makes a run's record, or finds the one that it left."""

    name: str
    description: str
    open: OpenTracker
    packages: tuple[str, ...] = ()  # to be imported
