"""What short timings found, remembered in the user's cache folder: a table for each kind of device.

A row is of some work (jaxlib, network, optimiser, batch, precision), a column of a way to do it
(implementation of convolutions, lanes). What did not fit, or failed, is remembered with the memory
that there was: where there is more, it is tried again.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_het.utils.cache import get_cache_dir, make_private_dir
from fedjax_het.utils.io import write_atomically

log = logging.getLogger("fedjax_het")

CACHE_FILE = "lanes.json"
FORMAT_VERSION = 2  # files of another are as if they were not there


class Timing(NamedTuple):
    """Of one way to do some work."""

    seconds: float | None  # per step; None where it could not be done
    insufficient_bytes: int = (
        0  # bytes on each device that it needs more than, where it could not be done
    )

    def is_valid_for(self, free_bytes: int | None) -> bool:
        """Whether it is still to be believed where so much is free (None: nobody knows)."""
        return (
            self.seconds is not None or free_bytes is None or free_bytes <= self.insufficient_bytes
        )


def load_timings(device_kind: str, workload: str) -> dict[str, Timing]:
    """What is known of some work, by way."""
    candidates = _load_table().get(device_kind, {}).get(workload, {})
    return {
        candidate: timing
        for candidate, entry in candidates.items()
        if (timing := _parse_timing(entry)) is not None
    }


def load_all_timings(device_kind: str) -> dict[str, dict[str, Timing]]:
    """What is known of a kind of device: by work, by way."""
    return {
        workload: load_timings(device_kind, workload)
        for workload in _load_table().get(device_kind, {})
    }


def save_timings(device_kind: str, workload: str, timings: Mapping[str, Timing]) -> None:
    """Add to what is known; where it cannot be written, it is timed again next time."""
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
    try:
        contents = json.loads((get_cache_dir() / CACHE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(contents, dict) or contents.get("format") != FORMAT_VERSION:
        return {}
    table: Any = contents.get("devices")
    if not isinstance(table, dict):
        return {}
    return {kind: workloads for kind, workloads in table.items() if _is_timing_table(workloads)}


def _is_timing_table(workloads: Any) -> bool:
    return isinstance(workloads, dict) and all(
        isinstance(candidates, dict) for candidates in workloads.values()
    )


def _parse_timing(entry: Any) -> Timing | None:
    """An entry of the file; None for one that is none."""
    if isinstance(entry, dict):
        entry, seconds = entry.get("insufficient_bytes"), None
        return Timing(seconds, entry) if isinstance(entry, int) else None
    is_time = isinstance(entry, int | float) and not isinstance(entry, bool) and entry > 0
    return Timing(float(entry)) if is_time else None
