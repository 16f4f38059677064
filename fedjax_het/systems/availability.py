"""Availability of the clients: a round selects among the clients that are available."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.systems.traces import TraceModel, draw_devices, read_trace
from fedjax_het.utils.config import PositiveFloat, UnitInterval
from fedjax_het.utils.errors import ConfigError, display_name


@dataclass(frozen=True, kw_only=True)
class AvailabilityModel(SystemModel):
    """A kind that decides which clients are available.

    Example:
      >>> from fedjax_het.systems import AvailabilityModel, DayNight
      >>> issubclass(DayNight, AvailabilityModel), DayNight.needs_clock
      (True, True)
    """

    @abstractmethod
    def start(self, federation: Federation) -> Any:
        """Return the state of the clients before the first round.

        Args:
          federation: the clients.

        Returns:
          The state, which `find_available` reads and returns.
        """

    @abstractmethod
    def find_available(
        self, state: Any, federation: Federation, round_index: int, time: float
    ) -> tuple[np.ndarray, Any]:
        """Return the clients that are available at a time.

        Args:
          state: the state after the previous round.
          federation: the clients.
          round_index: the round.
          time: simulated seconds since the start.

        Returns:
          Whether each client is available, bool `[K]`, and the new state.
        """

    def find_next_time(self, state: Any, time: float) -> float:
        """Return the first time, not before `time`, at which some client is available."""
        return time


@dataclass(frozen=True, kw_only=True)
class Bernoulli(AvailabilityModel):
    """Each client is available in each round with one probability, independently.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import Bernoulli, Federation
      >>> federation = Federation(np.ones(1000), cohort_size=1, seed=0, partition_seed=0)
      >>> is_available, _ = Bernoulli(probability=0.3).find_available(None, federation, 0, 0.0)
      >>> 200 < is_available.sum() < 400
      True
    """

    probability: UnitInterval = 0.8
    "Probability that a client is available in a round."
    name: ClassVar[str] = "availability"
    description: ClassVar[str] = "clients are available at random in each round"
    strength: ClassVar[str] = "probability"
    neutral: ClassVar[float | None] = 1

    def start(self, federation):
        """Return no state."""

    def find_available(self, state, federation, round_index, time):
        """Draw the clients of the round."""
        draws = self.make_rng(federation.seed, round_index).random(federation.num_clients)
        return draws < self.probability, state


@dataclass(frozen=True, kw_only=True)
class MarkovAvailability(AvailabilityModel):
    """Each client goes on and off between rounds as a Markov chain with two states.

    The chain starts in its stationary distribution, in which a share join / (join + leave) of the
    clients is available.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems import Federation, MarkovAvailability
      >>> federation = Federation(np.ones(1000), cohort_size=1, seed=0, partition_seed=0)
      >>> 700 < MarkovAvailability(leave=0.1, join=0.3).start(federation).sum() < 800
      True
    """

    leave: UnitInterval = 0.1
    "Probability that an available client is unavailable in the next round."
    join: UnitInterval = 0.3
    "Probability that an unavailable client is available in the next round."
    name: ClassVar[str] = "markov"
    description: ClassVar[str] = "clients go on and off between rounds by a Markov chain"
    strength: ClassVar[str] = "leave"

    def start(self, federation):
        """Draw the stationary distribution."""
        share = 1.0 if self.leave == 0 else self.join / (self.join + self.leave)
        return self.make_rng(federation.partition_seed).random(federation.num_clients) < share

    def find_available(self, state, federation, round_index, time):
        """Make one transition after the first round."""
        if round_index == 0:
            return state, state
        draws = self.make_rng(federation.seed, round_index).random(federation.num_clients)
        available = np.where(state, draws >= self.leave, draws < self.join)
        return available, available


@dataclass(frozen=True, kw_only=True)
class DayNight(AvailabilityModel):
    """Each client is available in one part of each day, at a time of day of its own.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import DayNight, Speed
      >>> RunSpec(system=[Speed(sigma=1), DayNight(share=0.3)]).system
      {'speed.sigma': 1.0, 'day_night.share': 0.3}
    """

    share: UnitInterval = 0.5
    "Share of the day in which a client is available."
    period: PositiveFloat = 86_400.0
    "Length of the day in simulated seconds."
    spread: UnitInterval = 1.0
    "Largest difference of the clients' times of day as a share of the day; 0: all have one time."
    name: ClassVar[str] = "day_night"
    description: ClassVar[str] = "clients are available in a part of each simulated day"
    strength: ClassVar[str] = "share"
    neutral: ClassVar[float | None] = 1
    needs_clock: ClassVar[bool] = True

    def start(self, federation):
        """Draw the time of day of each client at the start, as a share of the day."""
        rng = self.make_rng(federation.partition_seed)
        return self.spread * rng.random(federation.num_clients)

    def find_available(self, state, federation, round_index, time):
        """Compare the times of day with the share of the day."""
        return (time / self.period + state) % 1 < self.share, state

    def find_next_time(self, state, time):
        """Return the start of the next day of any client, if none is available."""
        day_time = (time / self.period + state) % 1
        if (day_time < self.share).any():
            return time
        # A little later than the start of the day: sums of floats may fall short of it.
        return time + self.period * (1 - float(day_time.max()) + 1e-9)


@dataclass(frozen=True, kw_only=True)
class AvailabilityTrace(TraceModel, AvailabilityModel):
    """Availability of measured devices from a CSV file.

    The file has a row per interval with the columns `device`, `start` and `end`, in simulated
    seconds. The trace repeats after its last end. Each client has a drawn device. Devices repeat
    only if there are more clients than devices.

    Example:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> from fedjax_het.systems import AvailabilityTrace, Federation
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "intervals.csv"
      >>> _ = path.write_text("device,start,end\\na,10,20\\n")
      >>> trace = AvailabilityTrace(path=str(path))
      >>> federation = Federation(np.ones(2), cohort_size=1, seed=0, partition_seed=0)
      >>> trace.find_available(trace.start(federation), federation, 0, 15.0)[0].tolist()
      [True, True]
    """

    name: ClassVar[str] = "availability_trace"
    description: ClassVar[str] = (
        "intervals in which measured devices are available, from a CSV file"
    )
    strength: ClassVar[str] = "path"
    needs_clock: ClassVar[bool] = True
    neutral: ClassVar[float | None] = None

    def start(self, federation):
        """Read the file, and draw a device for each client."""
        table = read_trace(self, ("start", "end"), labels=("device",))
        if len(rows := np.flatnonzero(table["end"] <= table["start"])):
            start, end = (f"{table[name].iloc[rows[0]]:g}" for name in ("start", "end"))
            raise ConfigError(
                f"{display_name('system')} {self.name}:path = {self.path!r}: row {rows[0] + 1} has start {start}, "
                f"end {end}: expected an end after the start"
            )
        names, device_ids = np.unique(table["device"], return_inverse=True)
        rng = self.make_rng(federation.partition_seed)
        devices = draw_devices(rng, len(names), federation.num_clients)
        starts, ends = table["start"].to_numpy(float), table["end"].to_numpy(float)
        return starts, ends, device_ids, devices, len(names)

    def find_available(self, state, federation, round_index, time):
        """Compare the time in the trace with all intervals."""
        starts, ends, device_ids, devices, num_devices = state
        trace_time = time % ends.max()
        is_open = (starts <= trace_time) & (trace_time < ends)
        return np.bincount(device_ids[is_open], minlength=num_devices)[devices] > 0, state

    def find_next_time(self, state, time):
        """Return the start of the next interval of any client's device, if none is open."""
        starts, ends, device_ids, devices, _ = state
        is_used, horizon = np.isin(device_ids, devices), ends.max()
        starts, ends, trace_time = starts[is_used], ends[is_used], time % horizon
        if ((starts <= trace_time) & (trace_time < ends)).any():
            return time
        later = starts[starts > trace_time]
        wait = later.min() - trace_time if len(later) else horizon - trace_time + starts.min()
        return time + float(wait) + 1e-9 * horizon
