"""How many federations devices hold at a time, and whether they share each of them: pure arithmetic
on counts and timings."""

import bisect
import math
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_het.engine.plan import LANES_AXIS, RUNS_AXIS

BARRIER_EFFICIENCY = 0.95  # what is left of the speed when devices wait for each other every round


class ParallelismPlan(NamedTuple):
    """A way to make some federations on some devices.

    cost: of all of them, in what a device takes for one of them by itself in one block's lanes.
    useful: the share of places that hold one, over all turns; of a device's steps, where devices
      share each federation.
    """

    mesh_axis: str  # as in `ExecutionPlan`
    num_parallel: int  # federations side by side on a device
    num_batches: int
    cost: float
    utilization: float


def balance_parallel_runs(num_runs: int, num_devices: int, max_parallel: int) -> int:
    """The fewest federations side by side on each device with which all go through in as few turns
    as with `width`: 27 on one device, 8 at most -> 7."""
    num_batches = -(-num_runs // (num_devices * max_parallel))
    return -(-num_runs // (num_devices * num_batches))


def choose_parallelism(
    num_runs: int,
    num_devices: int,
    *,
    lanes: int,
    max_parallel: int,
    step_seconds: Mapping[int, float],
    utilization: float,
) -> ParallelismPlan:
    """The cheapest way to make `count` federations; of equal ones, that with fewer side by side.

    Args:
      lanes: of a federation on each device. most: federations side by side on a device.
      seconds: that a device takes for a client's step by how many lanes it has in all, see
        `LaneChoice`; w federations side by side have w times `lanes`. What lies between two of them
        is read off the straight line, in logarithms. Not read where `most` is 1.
      together: the share of the devices' steps that are some client's where they share each
        federation, its blocks waiting for the longest.
    """
    parallel_counts = sorted(
        {
            balance_parallel_runs(num_runs, num_devices, num_parallel)
            for num_parallel in range(1, max_parallel + 1)
        }
    )
    plans = [
        plan_independent_runs(
            num_runs, num_devices, num_parallel, lanes=lanes, step_seconds=step_seconds
        )
        for num_parallel in parallel_counts
    ]
    sharded_plan = ParallelismPlan(
        LANES_AXIS,
        1,
        num_runs,
        num_runs / (num_devices * utilization * BARRIER_EFFICIENCY),
        utilization,
    )
    return min([*plans, sharded_plan], key=lambda plan: plan.cost)


def plan_independent_runs(
    num_runs: int,
    num_devices: int,
    num_parallel: int,
    *,
    lanes: int,
    step_seconds: Mapping[int, float],
) -> ParallelismPlan:
    """Federations of their own for each device, `width` side by side. Places that stay empty in the
    last turn take as long as those that do not."""
    num_batches = -(-num_runs // (num_devices * num_parallel))
    speedup = (
        1.0
        if num_parallel == 1
        else _interpolate_step_seconds(step_seconds, lanes)
        / _interpolate_step_seconds(step_seconds, num_parallel * lanes)
    )
    return ParallelismPlan(
        RUNS_AXIS,
        num_parallel,
        num_batches,
        num_batches * num_parallel / speedup,
        num_runs / (num_batches * num_devices * num_parallel),
    )


def _interpolate_step_seconds(step_seconds: Mapping[int, float], lanes: int) -> float:
    timed_lanes = sorted(step_seconds)
    index = bisect.bisect_left(timed_lanes, lanes)
    if index == 0 or index == len(timed_lanes):
        return step_seconds[timed_lanes[0 if index == 0 else -1]]
    below, above = timed_lanes[index - 1], timed_lanes[index]
    weight = math.log(lanes / below) / math.log(above / below)
    return step_seconds[below] ** (1 - weight) * step_seconds[above] ** weight
