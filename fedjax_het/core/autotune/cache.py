"""Results of short timings in the user's cache folder: a table for each kind of device.

A row is a workload (jaxlib, network, optimizer, batch, precision), a column a candidate
(implementation of convolutions, lanes). A candidate that did not fit or failed is stored with the
memory that was free; with more memory it is timed again.
"""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from fedjax_het.utils.config import Bounds, PositiveFloat, validate
from fedjax_het.utils.env import get_cache_dir, make_private_dir
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import write_atomically

log = logging.getLogger("fedjax_het")

CACHE_FILE = "lanes.json"
FORMAT_VERSION = 2  # files of other versions are ignored
_Workloads = dict[str, dict[str, Any]]
_Bytes = Annotated[int, Bounds(0, 2**63)]


class Timing(NamedTuple):
    """Timing of one candidate.

    seconds: per step; None if the candidate failed.
    insufficient_bytes: free bytes on each device with which it failed.
    """

    seconds: float | None
    insufficient_bytes: int = 0

    def is_valid_for(self, free_bytes: int | None) -> bool:
        """Return whether the timing holds with that much free memory (None: unknown)."""
        return (
            self.seconds is not None or free_bytes is None or free_bytes <= self.insufficient_bytes
        )


def load_timings(device_kind: str, workload: str) -> dict[str, Timing]:
    """Return the timings of a workload by candidate."""
    candidates = _load_table().get(device_kind, {}).get(workload, {})
    return {
        candidate: timing
        for candidate, entry in candidates.items()
        if (timing := _parse_timing(entry)) is not None
    }


def load_all_timings(device_kind: str) -> dict[str, dict[str, Timing]]:
    """Return the timings on a kind of device by workload and candidate."""
    return {
        workload: load_timings(device_kind, workload)
        for workload in _load_table().get(device_kind, {})
    }


def save_timings(device_kind: str, workload: str, timings: Mapping[str, Timing]) -> None:
    """Add timings to the file; if it cannot be written, the next run times again."""
    table = _load_table()
    candidates = table.setdefault(device_kind, {}).setdefault(workload, {})
    for candidate, timing in timings.items():
        is_timed = timing.seconds is not None
        candidates[candidate] = (
            timing.seconds if is_timed else {"insufficient_bytes": timing.insufficient_bytes}
        )
    try:
        text = json.dumps({"format": FORMAT_VERSION, "devices": table}, indent=1).encode()
        write_atomically(
            make_private_dir() / CACHE_FILE, lambda file: file.write(text), private=True
        )
    except OSError as error:
        log.info("the choice of lanes is not remembered: %s", error)


def _load_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the valid entries of the file; nothing if it cannot be read."""
    try:
        contents = json.loads((get_cache_dir() / CACHE_FILE).read_text())
        contents = validate("contents", contents, dict[str, Any])
        if contents.get("format") != FORMAT_VERSION:
            return {}
        table = validate("devices", contents.get("devices"), dict[str, Any])
    except (OSError, ValueError):
        return {}
    return {kind: workloads for kind, workloads in table.items() if _fits(workloads, _Workloads)}


def _fits(value: Any, annotation: Any) -> bool:
    try:
        validate("value", value, annotation)
    except ConfigError:
        return False
    return True


def _parse_timing(entry: Any) -> Timing | None:
    """Return an entry of the file; None for another value."""
    if _fits(entry, PositiveFloat):
        return Timing(float(entry))
    is_failure = _fits(entry, dict[str, _Bytes]) and "insufficient_bytes" in entry
    return Timing(None, entry["insufficient_bytes"]) if is_failure else None
