"""What short timings found, remembered in the user's cache folder: a table for each kind of device.

A row is of some work (jaxlib, network, optimiser, batch, precision), a column of a way to do it
(implementation of convolutions, lanes). What did not fit, or failed, is remembered with the memory
that there was: where there is more, it is tried again.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_het.common.cache import cache_root, private_folder
from fedjax_het.common.files import write_atomically

log = logging.getLogger("fedjax_het")

FILE = "lanes.json"
FORMAT = 2  # files of another are as if they were not there


class Timing(NamedTuple):
    """Of one way to do some work."""

    seconds: float | None  # per step; None where it could not be done
    more_than: int = 0  # bytes on each device that it needs more than, where it could not be done

    def holds(self, free: int | None) -> bool:
        """Whether it is still to be believed where so much is free (None: nobody knows)."""
        return self.seconds is not None or free is None or free <= self.more_than


def recall(device_kind: str, work: str) -> dict[str, Timing]:
    """What is known of some work, by way."""
    ways = _table().get(device_kind, {}).get(work, {})
    return {way: timing for way, found in ways.items() if (timing := _timing(found)) is not None}


def recall_all(device_kind: str) -> dict[str, dict[str, Timing]]:
    """What is known of a kind of device: by work, by way."""
    return {work: recall(device_kind, work) for work in _table().get(device_kind, {})}


def remember(device_kind: str, work: str, found: Mapping[str, Timing]) -> None:
    """Add to what is known; where it cannot be written, it is timed again next time."""
    table = _table()
    ways = table.setdefault(device_kind, {}).setdefault(work, {})
    for way, timing in found.items():
        done = timing.seconds is not None
        ways[way] = timing.seconds if done else {"more_than": timing.more_than}
    try:
        text = json.dumps({"format": FORMAT, "devices": table}, indent=1).encode()
        write_atomically(private_folder() / FILE, lambda file: file.write(text), private=True)
    except OSError as error:
        log.info("the choice of lanes is not remembered: %s", error)


def _table() -> dict[str, dict[str, dict[str, Any]]]:
    try:
        known = json.loads((cache_root() / FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        return {}
    table: Any = known.get("devices")
    if not isinstance(table, dict):
        return {}
    return {kind: works for kind, works in table.items() if _is_table(works)}


def _is_table(works: Any) -> bool:
    return isinstance(works, dict) and all(isinstance(ways, dict) for ways in works.values())


def _timing(found: Any) -> Timing | None:
    """An entry of the file; None for one that is none."""
    if isinstance(found, dict):
        found, seconds = found.get("more_than"), None
        return Timing(seconds, found) if isinstance(found, int) else None
    is_time = isinstance(found, int | float) and not isinstance(found, bool) and found > 0
    return Timing(float(found)) if is_time else None
