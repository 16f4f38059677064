"""Kinds of system heterogeneity as settings that combine: `SystemModel` and `SYSTEMS`."""

from typing import Any

from fedjax_het.systems.asynchronous import AsynchronousSimulation
from fedjax_het.systems.availability import (
    AvailabilityModel,
    AvailabilityTrace,
    Bernoulli,
    DayNight,
    MarkovAvailability,
)
from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.systems.devices import Bandwidth, DeviceModel, DeviceTrace, Speed
from fedjax_het.systems.oort import Oort
from fedjax_het.systems.participation import Deadline, Dropout, OverSelection, PartialWork
from fedjax_het.systems.selection import (
    AdaptiveSelection,
    ClientSelection,
    CyclicSelection,
    PoissonSampling,
    PowerOfChoice,
    SelectionBySize,
)
from fedjax_het.systems.simulation import SystemSimulation, validate_combination
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.kinds import KindSetting

_KINDS: tuple[type[SystemModel], ...] = (
    *(Speed, Bandwidth, DeviceTrace),
    *(Bernoulli, MarkovAvailability, DayNight, AvailabilityTrace),
    *(SelectionBySize, PoissonSampling, CyclicSelection, PowerOfChoice, Oort, OverSelection),
    *(PartialWork, Dropout, Deadline),
)
SYSTEM_SETTING: KindSetting[SystemModel] = KindSetting(
    "system", SystemModel, _KINDS, example="speed:sigma=1"
)
"""The setting `system`."""
SYSTEMS = SYSTEM_SETTING.registry
"""Kinds of system heterogeneity by name."""

_BASES = (DeviceModel, AvailabilityModel, ClientSelection, AdaptiveSelection)


def has_poisson_sampling(run: Any) -> bool:
    """Return whether Poisson sampling selects the clients of a run.

    Args:
      run: arguments of the run.

    Returns:
      True if `run.system` has `poisson_sampling`.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import has_poisson_sampling
      >>> has_poisson_sampling(RunSpec(system="poisson_sampling"))
      True
    """
    return any(isinstance(m, PoissonSampling) for m in SYSTEM_SETTING.parse(run.system))


def compute_expected_cohort_size(run: Any) -> float:
    """Return the expected number of clients that the server selects in a round.

    Args:
      run: settings of the run.

    Returns:
      The number of clients; with Poisson sampling its mean, which may be a fraction.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import compute_expected_cohort_size
      >>> run = RunSpec(num_clients=10, participation=0.25)
      >>> compute_expected_cohort_size(run)
      2
      >>> compute_expected_cohort_size(RunSpec(**vars(run) | {"system": "poisson_sampling"}))
      2.5
    """
    if has_poisson_sampling(run):
        return run.participation * run.num_clients
    return compute_cohort_size(run.num_clients, run.participation)


@validate_arguments
def register_system(kind: type) -> type:
    """Register a kind of system heterogeneity of the user, until the process ends.

    Args:
      kind: frozen dataclass that inherits `DeviceModel`, `AvailabilityModel`, `ClientSelection` or
        `AdaptiveSelection` and has the class variables `name` and `strength`. Its fields are the
        parameters of the kind and have defaults. The first line of its docstring is its default
        `description`. Draws should depend on `make_rng` alone, so that a resumed run repeats them.

    Returns:
      The class, so that the function also serves as its decorator.

    Raises:
      ConfigError: if `kind` is no such class, or if its name belongs to a kind of the package or is
        not an identifier.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import ClassVar
      >>> from fedjax_het import RunSpec, register_system
      >>> from fedjax_het.systems import ClientSelection
      >>> @register_system
      ... @dataclass(frozen=True, kw_only=True)
      ... class LargestClients(ClientSelection):
      ...     "The clients with the most examples take part."
      ...     offset: int = 0
      ...     name: ClassVar[str] = "largest"
      ...     strength: ClassVar[str] = "offset"
      ...     def select(self, federation, available, count, *path):
      ...         order = federation.sizes[available].argsort()[::-1]
      ...         return available[order[self.offset :][:count]]
      >>> RunSpec(system="largest:offset=1").resolved().system
      {'largest.offset': 1}
    """
    SYSTEM_SETTING.register(kind, _BASES)
    return kind


__all__ = [
    "SYSTEMS",
    "SYSTEM_SETTING",
    "AdaptiveSelection",
    "AsynchronousSimulation",
    "AvailabilityModel",
    "AvailabilityTrace",
    "Bandwidth",
    "Bernoulli",
    "ClientSelection",
    "CyclicSelection",
    "DayNight",
    "Deadline",
    "DeviceModel",
    "DeviceTrace",
    "Dropout",
    "Federation",
    "MarkovAvailability",
    "Oort",
    "OverSelection",
    "PartialWork",
    "PoissonSampling",
    "PowerOfChoice",
    "SelectionBySize",
    "Speed",
    "SystemModel",
    "SystemSimulation",
    "compute_expected_cohort_size",
    "has_poisson_sampling",
    "register_system",
    "validate_combination",
]
