"""Drift: the examples and the clients that take part change over the rounds."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedjax_het.skews.base import Skew
from fedjax_het.utils.config import Bounds, PositiveInt, UnitInterval
from fedjax_het.utils.errors import display_name

NUM_PHASES = 10
"""Number of phases of a drift. The examples are constant within a phase."""


@dataclass(frozen=True, kw_only=True)
class DriftSkew(Skew):
    """A skew that selects the active examples of each client in each phase of a run.

    A drift has `NUM_PHASES` phases of equal length in the first `rounds` rounds; the last phase
    lasts until the end of the run.

    Example:
      >>> from fedjax_het.skews import SKEWS, DriftSkew
      >>> [name for name, kind in SKEWS.items() if issubclass(kind.make, DriftSkew)]
      ['drift', 'arrival', 'churn']
    """

    rounds: PositiveInt | None = None
    "Rounds of the drift (default: the rounds of the run)."

    def list_warnings(self, run):
        """Return a warning of phases after the end of the run."""
        if self.rounds is None or self.rounds <= run.rounds:
            return []
        prefix = f"{display_name('skew')} {self.name}:rounds = {self.rounds}"
        return [f"{prefix}: the run ends after {run.rounds} rounds, before the last phase"]

    @abstractmethod
    def select_active(
        self,
        rng: np.random.Generator,
        clients: list[np.ndarray],
        labels: np.ndarray,
        num_classes: int,
    ) -> list[list[np.ndarray]]:
        """Return the active examples of each client in each phase.

        Args:
          rng: NumPy Generator of the skew.
          clients: positions of the examples of each of the K clients.
          labels: labels of the training examples, integers `[N]`.
          num_classes: number of classes, C.

        Returns:
          For each phase, K arrays of positions, which are parts of `clients`.
        """


@dataclass(frozen=True, kw_only=True)
class LabelDrift(DriftSkew):
    """Class proportions that move: a window of each client's examples slides over its classes.

    A client's examples are sorted by class, in an order of classes that each client draws. The
    window has the share `width` of the examples; it begins at the first and ends at the last one.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import LabelDrift
      >>> clients, labels = [np.arange(10)], np.arange(10) // 5
      >>> phases = LabelDrift(width=0.5).select_active(np.random.default_rng(0), clients, labels, 2)
      >>> len(phases), len(phases[0][0])
      (10, 5)
    """

    width: Annotated[float, Bounds(0, 1, open_low=True)] = 0.5
    "Share of a client's examples that are active at a time."
    needs_classes: ClassVar[bool] = True
    name: ClassVar[str] = "drift"
    description: ClassVar[str] = "class proportions that move over the rounds"
    strength: ClassVar[str] = "width"
    neutral: ClassVar[float | None] = 1

    def select_active(self, rng, clients, labels, num_classes):
        """Slide the windows."""
        ordered = []
        for own in clients:
            ranks = rng.permutation(num_classes)[labels[own]] + rng.random(len(own))
            ordered.append(own[np.argsort(ranks)])
        return [
            [_take_window(own, self.width, phase / (NUM_PHASES - 1)) for own in ordered]
            for phase in range(NUM_PHASES)
        ]


def _take_window(ordered: np.ndarray, width: float, time: float) -> np.ndarray:
    """Return the examples of a window at a time from 0 to 1; at least one if there are any."""
    size = min(max(round(width * len(ordered)), 1), len(ordered))
    start = round(time * (len(ordered) - size))
    return ordered[start : start + size]


@dataclass(frozen=True, kw_only=True)
class ClassArrival(DriftSkew):
    """Classes that arrive: the first phase has some classes, the last phase has all of them.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import ClassArrival
      >>> clients, labels = [np.arange(10)], np.arange(10)
      >>> skew = ClassArrival(initial=0.5)
      >>> phases = skew.select_active(np.random.default_rng(0), clients, labels, num_classes=10)
      >>> len(phases[0][0]), len(phases[-1][0])
      (5, 10)
    """

    initial: UnitInterval = 0.5
    "Share of the classes in the first phase."
    needs_classes: ClassVar[bool] = True
    name: ClassVar[str] = "arrival"
    description: ClassVar[str] = "classes that arrive over the rounds, in a drawn order"
    strength: ClassVar[str] = "initial"
    neutral: ClassVar[float | None] = 1

    def select_active(self, rng, clients, labels, num_classes):
        """Select the examples of classes that have arrived."""
        ranks = rng.permutation(num_classes)
        times = np.arange(NUM_PHASES) / (NUM_PHASES - 1)
        shares = self.initial + (1 - self.initial) * times
        counts = np.maximum(np.rint(shares * num_classes), 1)
        return [[own[ranks[labels[own]] < count] for own in clients] for count in counts]


@dataclass(frozen=True, kw_only=True)
class ClientChurn(DriftSkew):
    """Clients that join late or leave early.

    A share of the clients is present for one part of the phases only: half of them from a drawn
    phase on, half of them until a drawn phase. A client that is absent holds no examples.

    Example:
      >>> from fedjax_het.skews import ClientChurn
      >>> ClientChurn(share=0.0).is_neutral
      True
    """

    share: UnitInterval = 0.5
    "Share of the clients that join late or leave early."
    name: ClassVar[str] = "churn"
    description: ClassVar[str] = "clients that join late or leave early"
    strength: ClassVar[str] = "share"

    def select_active(self, rng, clients, labels, num_classes):
        """Select the examples of clients that are present."""
        num_clients = len(clients)
        firsts, lasts = np.zeros(num_clients, int), np.full(num_clients, NUM_PHASES - 1)
        changing = rng.permutation(num_clients)[: round(self.share * num_clients)]
        joining, leaving = changing[::2], changing[1::2]
        firsts[joining] = rng.integers(1, NUM_PHASES, len(joining))
        lasts[leaving] = rng.integers(0, NUM_PHASES - 1, len(leaving))
        return [
            [
                own if first <= phase <= last else own[:0]
                for own, first, last in zip(clients, firsts, lasts, strict=True)
            ]
            for phase in range(NUM_PHASES)
        ]
