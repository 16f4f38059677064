"""How many federations devices hold at a time, and whether they share each of them: pure arithmetic
on counts and timings."""

import bisect
import math
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_het.engine.plan import AXIS, RUNS

BARRIERS = 0.95  # what is left of the speed when devices wait for each other every round


class Places(NamedTuple):
    """A way to make some federations on some devices.

    cost: of all of them, in what a device takes for one of them by itself in one block's lanes.
    useful: the share of places that hold one, over all turns; of a device's steps, where devices
      share each federation.
    """

    spread: str  # as in `Plan`
    width: int  # federations side by side on a device
    turns: int
    cost: float
    useful: float


def balanced(count: int, devices: int, width: int) -> int:
    """The fewest federations side by side on each device with which all go through in as few turns
    as with `width`: 27 on one device, 8 at most -> 7."""
    turns = -(-count // (devices * width))
    return -(-count // (devices * turns))


def best_places(
    count: int,
    devices: int,
    *,
    lanes: int,
    most: int,
    seconds: Mapping[int, float],
    together: float,
) -> Places:
    """The cheapest way to make `count` federations; of equal ones, that with fewer side by side.

    Args:
      lanes: of a federation on each device. most: federations side by side on a device.
      seconds: that a device takes for a client's step by how many lanes it has in all, see
        `LaneChoice`; w federations side by side have w times `lanes`. What lies between two of them
        is read off the straight line, in logarithms. Not read where `most` is 1.
      together: the share of the devices' steps that are some client's where they share each
        federation, its blocks waiting for the longest.
    """
    widths = sorted({balanced(count, devices, width) for width in range(1, most + 1)})
    ways = [apart(count, devices, width, lanes=lanes, seconds=seconds) for width in widths]
    shared = Places(AXIS, 1, count, count / (devices * together * BARRIERS), together)
    return min([*ways, shared], key=lambda way: way.cost)


def apart(
    count: int, devices: int, width: int, *, lanes: int, seconds: Mapping[int, float]
) -> Places:
    """Federations of their own for each device, `width` side by side. Places that stay empty in the
    last turn take as long as those that do not."""
    turns = -(-count // (devices * width))
    gain = 1.0 if width == 1 else _at(seconds, lanes) / _at(seconds, width * lanes)
    return Places(RUNS, width, turns, turns * width / gain, count / (turns * devices * width))


def _at(seconds: Mapping[int, float], lanes: int) -> float:
    timed = sorted(seconds)
    place = bisect.bisect_left(timed, lanes)
    if place == 0 or place == len(timed):
        return seconds[timed[0 if place == 0 else -1]]
    below, above = timed[place - 1], timed[place]
    share = math.log(lanes / below) / math.log(above / below)
    return seconds[below] ** (1 - share) * seconds[above] ** share
