"""Kinds of system heterogeneity as settings that combine: `SystemModel` and `SYSTEMS`."""

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
    PowerOfChoice,
    SelectionBySize,
)
from fedjax_het.systems.simulation import SystemSimulation, validate_combination
from fedjax_het.utils.kinds import KindSetting

_KINDS: tuple[type[SystemModel], ...] = (
    *(Speed, Bandwidth, DeviceTrace),
    *(Bernoulli, MarkovAvailability, DayNight, AvailabilityTrace),
    *(SelectionBySize, CyclicSelection, PowerOfChoice, Oort, OverSelection),
    *(PartialWork, Dropout, Deadline),
)
SYSTEM_SETTING: KindSetting[SystemModel] = KindSetting(
    "system", SystemModel, _KINDS, example="speed:sigma=1"
)
"""The setting `system`."""
SYSTEMS = SYSTEM_SETTING.registry
"""Kinds of system heterogeneity by name."""

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
    "PowerOfChoice",
    "SelectionBySize",
    "Speed",
    "SystemModel",
    "SystemSimulation",
    "validate_combination",
]
