"""Speed and bandwidth of the clients' devices."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from fedjax_het.systems.base import Federation, SystemModel
from fedjax_het.systems.traces import TraceModel, draw_devices, read_trace
from fedjax_het.utils.config import Bounds, PositiveFloat

LogDeviation = Annotated[float, Bounds(0, 10)]
"""A standard deviation of logarithms; all factors of 10,000 clients are then below 1e18."""


class DeviceRates(NamedTuple):
    """Times of the clients' devices, float64 `[K]` each."""

    step_seconds: np.ndarray
    "Seconds of a minibatch."
    transfer_seconds: np.ndarray
    "Seconds of a round's transfers, without `class_seconds`."
    class_seconds: np.ndarray
    "Seconds of the upload of one condensed class."


@dataclass(frozen=True, kw_only=True)
class DeviceModel(SystemModel):
    """A kind that gives the devices times.

    Example:
      >>> from fedjax_het.systems import DeviceModel, Speed
      >>> issubclass(Speed, DeviceModel)
      True
    """

    neutral: ClassVar[float | None] = None
    reads_traffic: ClassVar[bool] = True
    "Whether times depend on the bytes that clients send and receive."

    @abstractmethod
    def add_times(self, rates: DeviceRates, federation: Federation) -> DeviceRates:
        """Return the times of the devices with the times of this kind.

        Args:
          rates: the times so far.
          federation: the clients.

        Returns:
          The times.
        """


@dataclass(frozen=True, kw_only=True)
class Speed(DeviceModel):
    """Seconds of a minibatch, log-normal over the clients.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import Speed
      >>> RunSpec(system=Speed(sigma=1)).system
      {'speed.sigma': 1.0}
    """

    sigma: LogDeviation = 0.5
    "Standard deviation of the natural logarithm of the clients' times."
    step_seconds: PositiveFloat = 1.0
    "Median time of a minibatch in seconds."
    name: ClassVar[str] = "speed"
    description: ClassVar[str] = "seconds of a minibatch, log-normal over the clients"
    strength: ClassVar[str] = "sigma"
    reads_traffic: ClassVar[bool] = False

    def add_times(self, rates, federation):
        """Draw the times of a minibatch."""
        rng = self.make_rng(federation.partition_seed)
        factors = np.exp(self.sigma * rng.standard_normal(federation.num_clients))
        return rates._replace(step_seconds=rates.step_seconds + self.step_seconds * factors)


@dataclass(frozen=True, kw_only=True)
class Bandwidth(DeviceModel):
    """Bytes per second of the clients' connections, log-normal over the clients.

    A client's upload and download have one factor. Transfers take the bytes of the method's
    traffic.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.systems import Bandwidth
      >>> RunSpec(system=Bandwidth(upload=1e5)).system
      {'bandwidth.sigma': 0.5, 'bandwidth.upload': 100000.0}
    """

    sigma: LogDeviation = 0.5
    "Standard deviation of the natural logarithm of the clients' bandwidths."
    upload: PositiveFloat = 1e6
    "Median bandwidth from a client to the server in bytes per second."
    download: PositiveFloat = 1e7
    "Median bandwidth from the server to a client in bytes per second."
    name: ClassVar[str] = "bandwidth"
    description: ClassVar[str] = "bytes per second of transfers, log-normal over the clients"
    strength: ClassVar[str] = "sigma"

    def add_times(self, rates, federation):
        """Draw the bandwidths."""
        rng = self.make_rng(federation.partition_seed)
        factors = np.exp(self.sigma * rng.standard_normal(federation.num_clients))
        return _add_transfers(rates, federation, self.upload * factors, self.download * factors)


@dataclass(frozen=True, kw_only=True)
class DeviceTrace(TraceModel, DeviceModel):
    """Times of measured devices from a CSV file.

    The file has a row per device with the columns `step_seconds`, and `upload` and `download` in
    bytes per second if transfers take time. Each client has a drawn device. Devices repeat only
    if there are more clients than devices.

    Example:
      >>> import pathlib, tempfile
      >>> from fedjax_het.systems import DeviceTrace
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "devices.csv"
      >>> _ = path.write_text("step_seconds,upload\\n0.1,100000\\n")
      >>> len(DeviceTrace(path=str(path)).compute_digest())
      16
    """

    name: ClassVar[str] = "device_trace"
    description: ClassVar[str] = "speed and bandwidth of measured devices from a CSV file"
    strength: ClassVar[str] = "path"

    def add_times(self, rates, federation):
        """Read the file, and draw a device for each client."""
        table = read_trace(self, ("step_seconds",), optional=("upload", "download"))
        rng = self.make_rng(federation.partition_seed)
        rows = table.iloc[draw_devices(rng, len(table), federation.num_clients)]
        step_seconds = rows["step_seconds"].to_numpy(float)
        rates = rates._replace(step_seconds=rates.step_seconds + step_seconds)
        if "upload" not in rows and "download" not in rows:
            return rates
        upload, download = (
            rows[name].to_numpy(float) if name in rows else np.full(len(rows), np.inf)
            for name in ("upload", "download")
        )
        return _add_transfers(rates, federation, upload, download)


def _add_transfers(
    rates: DeviceRates, federation: Federation, upload: np.ndarray, download: np.ndarray
) -> DeviceRates:
    """Return the times with transfers at these bandwidths, bytes per second `[K]`."""
    transfer_seconds = federation.bytes_down / download + federation.bytes_up / upload
    return rates._replace(
        transfer_seconds=rates.transfer_seconds + transfer_seconds,
        class_seconds=rates.class_seconds + federation.bytes_up_per_class / upload,
    )
