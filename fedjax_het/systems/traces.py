"""CSV files of measured devices."""

import csv
import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.systems.base import SystemModel
from fedjax_het.utils.errors import ConfigError, display_name

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class TraceModel(SystemModel):
    """A kind that reads a CSV file."""

    path: str = ""
    "CSV file."

    def __post_init__(self) -> None:
        """Accept a `Path`, and validate the fields."""
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", os.fspath(self.path))
        super().__post_init__()

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
    columns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> "pd.DataFrame":
    """Read the CSV file of a kind of system heterogeneity.

    Args:
      owner: the kind.
      columns: names of the required columns of numbers.
      optional: names of further columns of numbers.
      labels: names of the required columns of texts.

    Returns:
      The rows of the file.

    Raises:
      ConfigError: if the file is missing or has another digest than the settings. Also if it lacks
        a column or has another or a repeated column, if a row has more values than columns, and
        for a value that is no number above 0 or an empty text. A start may be 0.
    """
    import pandas as pd

    prefix = f"{display_name('system')} {owner.name}:path = {owner.path!r}"
    owner.compute_digest()
    accepted = (*labels, *columns, *optional)
    try:
        header = _read_header(owner.path)
        _require_columns(prefix, header, (*labels, *columns), accepted)
        text_columns = dict.fromkeys(labels, str)
        with warnings.catch_warnings():
            # Otherwise pandas drops values without a column, or reads them as an index.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                owner.path,
                names=header,
                header=0,
                index_col=False,
                dtype=text_columns,
                skipinitialspace=True,
            )
    except pd.errors.ParserWarning as error:
        expected = f"{len(header)} values in each row, one for each column"
        raise ConfigError(f"{prefix}: rows have more values: expected {expected}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prefix}: no CSV file: {error}") from error
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


def _read_header(path: str) -> list[str]:
    """Return the names of the columns of a CSV file.

    Raises:
      EmptyDataError: if the file is empty.
    """
    import pandas as pd

    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, skipinitialspace=True)
        try:
            header = next((row for row in rows if row), None)
        except csv.Error as error:
            raise pd.errors.ParserError(str(error)) from error
    if header is None:
        raise pd.errors.EmptyDataError("the file is empty")
    return [name.strip() for name in header]


def _require_columns(
    prefix: str, header: Sequence[str], required: Sequence[str], accepted: Sequence[str]
) -> None:
    """Raise ConfigError unless a file has the required columns once, and no unknown ones."""
    names = ", ".join(header)
    if missing := [name for name in required if name not in header]:
        raise ConfigError(f"{prefix}: expected the column {missing[0]}; the file has {names}")
    if unknown := [name for name in header if name not in accepted]:
        valid = ", ".join(accepted)
        raise ConfigError(f"{prefix}: column {unknown[0]!r}: expected one of {valid}")
    if repeated := [name for name in accepted if header.count(name) > 1]:
        raise ConfigError(f"{prefix}: expected the column {repeated[0]} once; the file has {names}")


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
