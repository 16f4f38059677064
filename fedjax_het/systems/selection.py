"""Selection of a round's clients from the clients that are available."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.utils.config import PositiveInt, UnitInterval


@dataclass(frozen=True, kw_only=True)
class ClientSelection(SystemModel):
    """A rule that selects the clients of a round."""

    neutral: ClassVar[float | None] = None

    def select(
        self, federation: Federation, available: np.ndarray, count: int, *path: int
    ) -> np.ndarray:
        """Return the selected clients.

        Args:
          federation: the clients.
          available: ids of the clients that are available, ascending.
          count: number of clients to select; fewer are selected if fewer are available.
          *path: the round, and the number of the draw in the round if it has several.

        Returns:
          Ids of the selected clients, in the order of the draw.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UniformSelection(ClientSelection):
    """Uniform draws without replacement, the rule of runs without this setting."""

    def select(self, federation, available, count, *path):
        """Draw the clients."""
        rng = make_host_rng(federation.seed, Stream.PARTICIPATION, *path)
        return rng.choice(available, min(count, len(available)), replace=False)


@dataclass(frozen=True, kw_only=True)
class SelectionBySize(ClientSelection):
    """Draws without replacement, each with probabilities proportional to size^power."""

    power: UnitInterval = 1.0
    "Exponent of the numbers of examples; 0 is the uniform draw."
    name: ClassVar[str] = "selection_by_size"
    description: ClassVar[str] = "clients with more examples are selected more often"
    strength: ClassVar[str] = "power"
    neutral: ClassVar[float | None] = 0

    def select(self, federation, available, count, *path):
        """Draw the clients that have examples."""
        available = available[federation.sizes[available] > 0]
        weights = federation.sizes[available] ** float(self.power)
        rng = make_host_rng(federation.seed, Stream.PARTICIPATION, *path)
        count = min(count, len(available))
        return rng.choice(available, count, replace=False, p=weights / weights.sum())


@dataclass(frozen=True, kw_only=True)
class CyclicSelection(ClientSelection):
    """Groups of clients that take part in turn (Cho et al., 2023, arXiv:2302.03109).

    The clients are divided at random into groups of nearly equal size. Round r draws from group r
    mod `groups`, uniformly.
    """

    groups: PositiveInt = 4
    "Number of groups."
    name: ClassVar[str] = "cyclic_selection"
    description: ClassVar[str] = "groups of clients take part in turn"
    strength: ClassVar[str] = "groups"
    neutral: ClassVar[float | None] = 1

    def select(self, federation, available, count, *path):
        """Draw the clients of the round's group."""
        rng = self.make_rng(federation.partition_seed)
        groups = rng.permutation(np.arange(federation.num_clients) % self.groups)
        members = available[groups[available] == path[0] % self.groups]
        return UniformSelection().select(federation, members, count, *path)
