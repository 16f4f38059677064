"""Selection of a round's clients from the clients that are available."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.utils.config import Bounds, PositiveInt, UnitInterval
from fedjax_het.utils.errors import require


@dataclass(frozen=True, kw_only=True)
class ClientSelection(SystemModel):
    """A rule that selects the clients of a round.

    Example:
      >>> from fedjax_het.systems import ClientSelection, CyclicSelection
      >>> issubclass(CyclicSelection, ClientSelection)
      True
    """

    neutral: ClassVar[float | None] = None

    @abstractmethod
    def select(
        self, federation: Federation, available: np.ndarray, count: int, *path: int
    ) -> np.ndarray:
        """Return the selected clients.

        Args:
          federation: the clients.
          available: ids of the clients that are available, ascending, at least one. Clients that a
            drift makes absent are not available.
          count: number of clients to select; fewer are selected if fewer are available.
          *path: the round, and the number of the draw in the round if it has several.

        Returns:
          Ids of the selected clients, in the order of the draw.
        """


@dataclass(frozen=True, kw_only=True)
class UniformSelection(ClientSelection):
    """Uniform draws without replacement, the rule of runs without this setting."""

    name: ClassVar[str] = "uniform"

    def select(self, federation, available, count, *path):
        """Draw the clients."""
        rng = make_host_rng(federation.seed, Stream.PARTICIPATION, *path)
        return rng.choice(available, min(count, len(available)), replace=False)


@dataclass(frozen=True, kw_only=True)
class SelectionBySize(ClientSelection):
    """Draws without replacement, each with probabilities proportional to size^power.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import Federation, SelectionBySize
      >>> federation = Federation(np.array([0, 9]), cohort_size=1, seed=0, partition_seed=0)
      >>> SelectionBySize().select(federation, np.arange(2), 1, 0).tolist()
      [1]
    """

    power: UnitInterval = 1.0
    "Exponent of the numbers of examples; 0 is the uniform draw."
    name: ClassVar[str] = "selection_by_size"
    description: ClassVar[str] = "clients with more examples are selected more often"
    strength: ClassVar[str] = "power"
    neutral: ClassVar[float | None] = 0

    def list_warnings(self, run):
        """Return a warning if all clients take part."""
        return self._warn_if_all_take_part(run)

    def select(self, federation, available, count, *path):
        """Draw the clients that have examples."""
        available = available[federation.sizes[available] > 0]
        if not len(available):
            return available
        weights = federation.sizes[available] ** float(self.power)
        rng = make_host_rng(federation.seed, Stream.PARTICIPATION, *path)
        count = min(count, len(available))
        return rng.choice(available, count, replace=False, p=weights / weights.sum())


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(ClientSelection):
    """Each available client takes part with probability `participation`, independently.

    The number of clients of a round varies, with the mean `participation` K, and may be 0.
    Accountants of differential privacy assume such draws, see the setting `privacy`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import Federation, PoissonSampling
      >>> federation = Federation(np.ones(1000), cohort_size=100, seed=0, partition_seed=0)
      >>> rule, ids = PoissonSampling(), np.arange(1000)
      >>> [len(rule.select(federation, ids, 1000, r)) for r in range(4)]
      [109, 88, 98, 101]
    """

    name: ClassVar[str] = "poisson_sampling"
    description: ClassVar[str] = "each client takes part independently of the others"
    strength: ClassVar[str] = ""

    def list_warnings(self, run):
        """Return a warning if all clients take part."""
        return self._warn_if_all_take_part(run)

    def select(self, federation, available, count, *path):
        """Draw the clients."""
        rng = make_host_rng(federation.seed, Stream.PARTICIPATION, *path)
        probability = federation.participation
        if probability is None:
            probability = federation.cohort_size / federation.num_clients
        return available[rng.random(federation.num_clients)[available] < probability]


@dataclass(frozen=True, kw_only=True)
class CyclicSelection(ClientSelection):
    """Groups of clients that take part in turn (Cho et al., 2023, arXiv:2302.03109).

    The clients are divided at random into groups of nearly equal size. Round r draws from group r
    mod `groups`, uniformly.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import CyclicSelection, Federation
      >>> federation = Federation(np.ones(4), cohort_size=2, seed=0, partition_seed=0)
      >>> rule, ids = CyclicSelection(groups=2), np.arange(4)
      >>> rounds = [rule.select(federation, ids, 2, r) for r in (0, 1)]
      >>> sorted(np.concatenate(rounds).tolist())
      [0, 1, 2, 3]
    """

    groups: PositiveInt = 4
    "Number of groups."
    name: ClassVar[str] = "cyclic_selection"
    description: ClassVar[str] = "groups of clients take part in turn"
    strength: ClassVar[str] = "groups"
    neutral: ClassVar[float | None] = 1

    def select(self, federation, available, count, *path):
        """Draw the clients of the round's group."""
        expected = f"at most {federation.num_clients}, the number of clients"
        is_valid = self.groups <= federation.num_clients
        require(is_valid, "system cyclic_selection:groups", self.groups, expected)
        rng = self.make_rng(federation.partition_seed)
        groups = rng.permutation(np.arange(federation.num_clients) % self.groups)
        members = available[groups[available] == path[0] % self.groups]
        return UniformSelection().select(federation, members, count, *path)


LossReports = Literal["all", "minibatch"]
"""Examples on which a candidate measures the loss of the current model."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveSelection(SystemModel):
    """A rule that selects by losses of the clients.

    The server knows the mean loss of local training of each client whose update it aggregated. A
    client that fails or arrives late reports no loss. With `loss_reports` the server also sends its
    current model to candidates, which report their losses before the selection.

    Example:
      >>> from fedjax_het.systems import AdaptiveSelection, PowerOfChoice
      >>> issubclass(PowerOfChoice, AdaptiveSelection)
      True
    """

    neutral: ClassVar[float | None] = None

    @property
    def loss_reports(self) -> LossReports | None:
        """Examples of each candidate's loss of the current model; None: no candidate reports."""
        return None

    def draw_candidates(
        self, federation: Federation, available: np.ndarray, count: int, round_index: int
    ) -> np.ndarray:
        """Return the clients that report their loss of the current model.

        Args:
          federation: the clients.
          available: ids of the clients that are available, ascending, at least one.
          count: number of clients to select.
          round_index: the round.

        Returns:
          Ids of clients with examples; by default all available ones.
        """
        return available[federation.sizes[available] > 0]

    @abstractmethod
    def start(self, federation: Federation) -> Any:
        """Return the server's knowledge of the clients before the first round.

        Args:
          federation: the clients.

        Returns:
          The state, which `select_by_losses` and `record_losses` read.
        """

    @abstractmethod
    def select_by_losses(
        self,
        state: Any,
        federation: Federation,
        available: np.ndarray,
        count: int,
        *,
        durations: np.ndarray,
        round_index: int,
    ) -> tuple[np.ndarray, Any]:
        """Select the clients of a round.

        Args:
          state: the state after the previous round.
          federation: the clients.
          available: ids of the clients that are available, ascending, at least one. Clients that a
            drift makes absent are not available.
          count: number of clients to select; fewer are selected if fewer are available.
          durations: simulated seconds of each client's work and transfers, float64 `[K]`; 0
            without simulated time, NaN for clients that a drift makes absent.
          round_index: the round.

        Returns:
          Ids of the selected clients, and the new state.
        """

    @abstractmethod
    def record_losses(self, state: Any, losses: np.ndarray) -> Any:
        """Return the state after a round, or after the reports of the candidates.

        Args:
          state: the state after the selection of the round, or before it.
          losses: mean training loss of each client, or loss of the current model on its training
            examples, float32 `[K]`; NaN for clients that did not report one.

        Returns:
          The new state.
        """


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(AdaptiveSelection):
    """The largest losses among drawn candidates (Cho et al., 2020, arXiv:2010.01243).

    The server draws d = `factor` * S candidates without replacement, each with probabilities
    proportional to size. It selects the S candidates with the largest losses, the first drawn ones
    among equals. `losses` chooses the paper's variant (Section 4):

    * "current", pow-d: the mean loss of the current global model on all training examples of the
      candidate, without dropout or augmentation. All d candidates receive the model.
    * "minibatch", cpow-d: the same on `batch_size` examples, drawn without replacement.
    * "stale", rpow-d: the mean loss of local training when the candidate last took part, and
      infinite before. It costs no communication.

    Departures: with `over_selection` S is the number of selected clients. The upload of a loss
    counts no bytes. The transfer to candidates and their evaluation take no simulated time.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import PowerOfChoice
      >>> RunSpec(participation=0.5, system=PowerOfChoice(factor=2)).system
      {'power_of_choice.factor': 2}
    """

    factor: Annotated[float, Bounds(1, 1e6)] = 2.0
    "Number of candidates per selected client, d / S."
    losses: Literal["stale", "current", "minibatch"] = "stale"
    """Losses of the candidates: "stale" (rpow-d), "current" (pow-d) or "minibatch" (cpow-d)."""
    name: ClassVar[str] = "power_of_choice"
    description: ClassVar[str] = "clients with the largest losses among drawn candidates"
    strength: ClassVar[str] = "factor"

    def list_warnings(self, run):
        """Return a warning if all clients take part."""
        return self._warn_if_all_take_part(run)

    @property
    def loss_reports(self):
        """Examples of the loss of the current model; None for stale losses."""
        reports: dict[str, LossReports] = {"current": "all", "minibatch": "minibatch"}
        return reports.get(self.losses)

    def draw_candidates(self, federation, available, count, round_index):
        """Draw the candidates by size."""
        num_candidates = math.ceil(self.factor * count - 1e-9)
        return SelectionBySize().select(federation, available, num_candidates, round_index)

    def start(self, federation):
        """Return infinite losses."""
        return np.full(federation.num_clients, np.inf, np.float32)

    def select_by_losses(self, state, federation, available, count, *, durations, round_index):
        """Select candidates by loss."""
        candidates = self.draw_candidates(federation, available, count, round_index)
        by_loss = np.argsort(-state[candidates], kind="stable")
        return candidates[np.sort(by_loss[:count])], state

    def record_losses(self, state, losses):
        """Replace the losses of the clients that reported one."""
        return np.where(np.isfinite(losses), losses, state)
