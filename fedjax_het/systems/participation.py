"""Clients that do less than a round asks for, and the server's answer to them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedjax_het.systems.base import SystemModel
from fedjax_het.utils.config import Bounds, PositiveFloat, UnitInterval
from fedjax_het.utils.errors import display_name


@dataclass(frozen=True, kw_only=True)
class Dropout(SystemModel):
    """Selected clients that fail after training: their updates and states are lost.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import Dropout
      >>> RunSpec(system=Dropout(probability=0.2)).system
      {'dropout.probability': 0.2}
    """

    probability: UnitInterval = 0.1
    "Probability that a selected client fails."
    name: ClassVar[str] = "dropout"
    description: ClassVar[str] = "selected clients fail after training"
    strength: ClassVar[str] = "probability"


@dataclass(frozen=True, kw_only=True)
class PartialWork(SystemModel):
    """Selected clients that do a part of local training, as the stragglers of FedProx do.

    A straggler does a share of its minibatches that is drawn uniformly from `min_share` to 1 in
    each round, rounded up.

    Example:
      >>> from fedjax_het import RunSpec
      >>> RunSpec(system="partial_work:stragglers=0.9").system
      {'partial_work.stragglers': 0.9}
    """

    stragglers: UnitInterval = 0.5
    "Probability that a selected client does a part of its work."
    min_share: Annotated[float, Bounds(0, 1, open_low=True)] = 0.1
    "Smallest share of the work."
    unit: Literal["epochs", "steps"] = "epochs"
    'Unit to which the work is rounded up: "epochs" or "steps", which are minibatches.'
    name: ClassVar[str] = "partial_work"
    description: ClassVar[str] = "selected clients do a drawn part of local training"
    strength: ClassVar[str] = "stragglers"

    def list_warnings(self, run):
        """Return a warning if clients train for one epoch, which is not divided."""
        if self.unit == "steps" or run.local_epochs != 1:
            return []
        prefix = f"{display_name('system')} {self.name} has no effect with local_epochs = 1"
        return [f"{prefix}: the work is rounded up to whole epochs; unit=steps counts minibatches"]


@dataclass(frozen=True, kw_only=True)
class OverSelection(SystemModel):
    """A server that selects more clients than it needs, and aggregates the first to arrive.

    It selects at most all available clients.

    Example:
      >>> from fedjax_het.systems import OverSelection
      >>> OverSelection(factor=1).is_neutral
      True
    """

    factor: Annotated[float, Bounds(1, 1000)] = 1.3
    "Number of selected clients per aggregated client."
    name: ClassVar[str] = "over_selection"
    description: ClassVar[str] = "the server selects more clients and aggregates the first ones"
    strength: ClassVar[str] = "factor"
    needs_clock: ClassVar[bool] = True
    neutral: ClassVar[float | None] = 1

    def list_warnings(self, run):
        """Return a warning if all clients take part."""
        return self._warn_if_all_take_part(run)


@dataclass(frozen=True, kw_only=True)
class Deadline(SystemModel):
    """A time after which the server aggregates the updates that have arrived.

    Example:
      >>> from fedjax_het.systems import Deadline
      >>> Deadline(seconds=60).late
      'drop'
    """

    seconds: PositiveFloat = 100.0
    "Simulated seconds after the start of a round."
    late: Literal["drop", "partial"] = "drop"
    """Late clients: "drop" loses their work; "partial" lets them send the minibatches that fit."""
    name: ClassVar[str] = "deadline"
    description: ClassVar[str] = "the server waits no longer than a deadline in each round"
    strength: ClassVar[str] = "seconds"
    needs_clock: ClassVar[bool] = True
    neutral: ClassVar[float | None] = float("inf")
