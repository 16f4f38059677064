"""CSV files of measured devices."""

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedjax_het.systems.base import SystemModel
from fedjax_het.utils.errors import ConfigError, display_name


@dataclass(frozen=True, kw_only=True)
class TraceModel(SystemModel):
    """A kind that reads a CSV file."""

    path: str = ""
    "CSV file."
    digest: str = ""
    "Digest of the file, which the settings of a run record (default: computed)."

    def compute_digest(self) -> str:
        """Return the digest of the file.

        Raises:
          ConfigError: if the file is missing and its digest unknown, and if the file has another
            digest than the settings.
        """
        prefix = f"{display_name('system')} {self.name}:path = {self.path!r}"
        if not os.path.isfile(self.path):
            if self.digest:
                return self.digest
            raise ConfigError(f"{prefix}: expected a CSV file")
        digest = hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:16]
        if self.digest not in ("", digest):
            raise ConfigError(f"{prefix}: expected the file with the digest {self.digest}")
        return digest


def read_trace(
    owner: TraceModel,
    columns: Collection[str],
    *,
    optional: Collection[str] = (),
    labels: Collection[str] = (),
) -> pd.DataFrame:
    """Read the CSV file of a kind of system heterogeneity.

    Args:
      owner: the kind.
      columns: names of the required columns of numbers.
      optional: names of further columns of numbers.
      labels: names of the required columns of texts.

    Returns:
      The rows of the file.

    Raises:
      ConfigError: if the file is missing, has another digest than the settings, lacks a column, or
        has a value that is no number above 0 or an empty text. A start may be 0.
    """
    prefix = f"{display_name('system')} {owner.name}:path = {owner.path!r}"
    owner.compute_digest()
    try:
        text_columns = dict.fromkeys(labels, str)
        table = pd.read_csv(owner.path, dtype=text_columns, skipinitialspace=True)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prefix}: no CSV file: {error}") from error
    table.columns = table.columns.astype(str).str.strip()
    if missing := [name for name in (*labels, *columns) if name not in table]:
        names = ", ".join(map(str, table.columns))
        raise ConfigError(f"{prefix}: expected the column {missing[0]}; the file has {names}")
    for name in labels:
        if len(rows := np.flatnonzero(table[name].isna())):
            raise ConfigError(f"{prefix}: column {name}: row {rows[0] + 1} is empty")
    for name in (*columns, *(name for name in optional if name in table)):
        values = pd.to_numeric(table[name], errors="coerce")
        is_valid = np.isfinite(values) & ((values >= 0) if name == "start" else (values > 0))
        if not is_valid.all() or not len(table):
            rows = np.flatnonzero(~is_valid)
            value = (
                f"row {rows[0] + 1} has {table[name].astype(object).iloc[rows[0]]!r}"
                if len(rows)
                else "empty"
            )
            raise ConfigError(f"{prefix}: column {name}: {value}: expected numbers above 0")
        table[name] = values
    return table


def draw_devices(rng: np.random.Generator, num_devices: int, num_clients: int) -> np.ndarray:
    """Draw a device for each client; each device is drawn once before any is drawn again.

    Args:
      rng: NumPy Generator.
      num_devices: number of devices.
      num_clients: number of clients, K.

    Returns:
      Positions of the devices, int64 `[K]`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.systems.traces import draw_devices
      >>> sorted(draw_devices(np.random.default_rng(0), 2, 4).tolist())
      [0, 0, 1, 1]
    """
    repeats = -(-num_clients // num_devices)
    return np.concatenate([rng.permutation(num_devices) for _ in range(repeats)])[:num_clients]
