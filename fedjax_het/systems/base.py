"""`SystemModel`, the base class of all kinds of system heterogeneity."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.errors import display_name
from fedjax_het.utils.kinds import Kind


class Federation(NamedTuple):
    """Properties of the clients that do not change over the rounds.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import Federation
      >>> Federation(np.array([4, 8]), cohort_size=1, seed=0, partition_seed=0).num_clients
      2
    """

    sizes: np.ndarray
    "Training examples of each client, int64 `[K]`."
    cohort_size: int
    "Clients whose updates the server aggregates in a round, S."
    seed: int
    "Seed of the run, of draws in each round."
    partition_seed: int
    "Seed of the partition, of draws that last for the whole run."
    bytes_down: float = 0.0
    "Bytes that a client receives in a round."
    bytes_up: float = 0.0
    "Bytes that a client sends in a round, without `bytes_up_per_class`."
    bytes_up_per_class: float = 0.0
    "Bytes that a client sends in addition for each class that it condenses."
    participation: float | None = None
    "Share of the clients that take part; None: S / K."

    @property
    def num_clients(self) -> int:
        """Number of clients, K."""
        return len(self.sizes)


@dataclass(frozen=True, kw_only=True)
class SystemModel(Kind):
    """A kind of system heterogeneity with its parameters; a value of the setting `system`.

    Example:
      >>> from fedjax_het.systems import Dropout, SystemModel
      >>> isinstance(Dropout(probability=0.2), SystemModel)
      True
    """

    needs_clock: ClassVar[bool] = False
    "Whether the kind reads the simulated time."

    def make_rng(self, seed: int, *path: int) -> np.random.Generator:
        """Return the generator of this kind of system heterogeneity.

        Args:
          seed: a seed of the federation.
          *path: the node below the kind, for example the round.

        Returns:
          NumPy Generator.
        """
        return make_host_rng(seed, Stream.SYSTEM, *self.name.encode(), *path)

    def _warn_if_all_take_part(self, run: Any) -> list[str]:
        """Return a warning if the server selects all clients, so that the kind has no effect."""
        if compute_cohort_size(run.num_clients, run.participation) < run.num_clients:
            return []
        reason = f"participation = {run.participation:g}: all clients take part"
        return [f"{display_name('system')} {self.name} has no effect with {reason}"]
