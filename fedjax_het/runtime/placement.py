"""Placement of runs: devices, lanes, runs in parallel, and the place of client states.

Speed and memory depend on the placement; results do not, beyond rounding.
"""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.autotune.search import (
    LaneChoice,
    Workload,
    choose_lanes,
    choose_server_sharding,
    lookup_conv_impl,
)
from fedjax_het.core.execution_plan import LANES_AXIS, RUNS_AXIS, ExecutionPlan, make_execution_plan
from fedjax_het.core.memory import usable_free_bytes
from fedjax_het.core.schedule import Scheduler, compute_cohort_size
from fedjax_het.runtime.compiled_programs import (
    CompiledPrograms,
    Signature,
    compute_client_state_bytes,
    to_items,
)
from fedjax_het.runtime.provenance import describe_environment
from fedjax_het.utils.config import to_python_scalar
from fedjax_het.utils.errors import is_integer_at_least, require, require_name

BARRIER_EFFICIENCY = 0.95  # relative speed of devices that wait for each other every round


class ParallelismPlan(NamedTuple):
    """A way to execute some runs on some devices.

    Attributes:
      mesh_axis: the axis of devices, as in `ExecutionPlan`.
      num_parallel: number of runs in parallel on each device.
      num_batches: number of batches of runs, one after the other.
      cost: time of all runs, relative to the time of one run alone on one device.
      utilization: fraction of slots that hold a run, over all batches; of a device's steps where
        devices share each run.
    """

    mesh_axis: str
    num_parallel: int
    num_batches: int
    cost: float
    utilization: float


def balance_parallel_runs(num_runs: int, num_devices: int, max_parallel: int) -> int:
    """Return the fewest parallel runs per device that need as few batches as `max_parallel`.

    Example: 27 runs on one device, at most 8 in parallel, give 7.
    """
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
    """Choose the cheapest way to execute runs; of equal ones, the one with fewer in parallel.

    Args:
      num_runs: number of runs.
      num_devices: number of devices.
      lanes: lanes of a run on each device.
      max_parallel: runs in parallel on a device, at most.
      step_seconds: seconds of a client's step by the number of lanes of a device, see `LaneChoice`;
        w runs in parallel have w times `lanes`. Other numbers of lanes are interpolated linearly in
        logarithms. Not read where `max_parallel` is 1.
      utilization: fraction of the devices' steps that train a client where devices share each run,
        whose blocks wait for the longest.
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
    """Plan runs of their own for each device; idle slots of the last batch cost as much as others."""
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


AUTO = "auto"
# Where the states of all clients are: all on each device, a part on each, or on the host.
DEVICE_STATE, SPLIT_STATE, HOST_STATE = "device", "split", "host"
SHARDED_SERVER, REPLICATED_SERVER = (
    "shared",
    "alone",
)  # what devices that share a federation do of its server's work
# Of a device's memory: if all clients' states take more, they are on the host. Checking a program's
# numbers holds four copies on every device, and CPU devices share the memory with the host.
MAX_STATE_FRACTION = 1 / 8
MAX_LANES, MAX_BYTES = 2**16, 2**60  # more are something else


@dataclass(frozen=True)
class Placement:
    """Where runs go: a matter of speed and memory, on which results do not depend beyond
    rounding.

    Attributes:
      lanes: vmapped lanes of one federation in each block, or "auto" for what a short timing found
        fastest.
      devices: which, or how many of the first; None for all (of a sweep: this process's).
      blocks: of lanes (None: as many as devices). Sums are taken block by block, so what was begun
        on another number of devices goes on to the same bits with the blocks that it had.
      spread: what the devices share out: "lanes" (one federation over all devices), "runs" (each
        has federations of its own), or "auto" for what should be faster.
      width: federations that are vmapped on each device, at most (fewer where as few turns do), or
        "auto" for what short timings found fastest. Only "runs" have several.
      server_work: whether devices that share a federation also share what its server does (its
        training, passes over its examples, synthesis): "shared", each taking a part of every batch;
        "alone", all of them doing the same; or "auto" for what a short timing found faster.
      client_state: where the states of all clients are: "device"; "split", a part of them on each
        of the devices that share a federation, which send each other those of a round's clients;
        "host", from where those of the next rounds' clients alone are put on the devices (both need
        a method whose server does not read them, and results are the same bits); or "auto": if
        all would take more than an eighth of a device's memory they are split over accelerators,
        and if their parts would too, or on CPUs, on the host.
      memory: bytes on each device that may be taken (None: what is free).

    Raises: ConfigError, which names the attribute, its value and what would be right.
    """

    lanes: int | str = AUTO
    devices: Sequence[jax.Device] | int | None = None
    blocks: int | None = None
    spread: str = AUTO
    width: int | str = AUTO
    server_work: str = AUTO
    client_state: str = AUTO
    memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("lanes", "blocks", "width", "memory", "devices"):
            object.__setattr__(self, name, to_python_scalar(getattr(self, name)))
        for name in ("lanes", "width"):
            value = getattr(self, name)
            is_valid = (isinstance(value, str) and value == AUTO) or _is_positive_int(
                value, MAX_LANES
            )
            require(is_valid, name, value, f"'auto' or a whole number >= 1, at most {MAX_LANES}")
        for name, maximum in (("blocks", MAX_LANES), ("memory", MAX_BYTES)):
            value = getattr(self, name)
            is_valid = value is None or _is_positive_int(value, maximum)
            require(is_valid, name, value, f"a whole number >= 1, at most {maximum}, or None")
        require_name("spread", self.spread, (AUTO, LANES_AXIS, RUNS_AXIS))
        require_name("server_work", self.server_work, (AUTO, SHARDED_SERVER, REPLICATED_SERVER))
        require_name(
            "client_state", self.client_state, (AUTO, DEVICE_STATE, SPLIT_STATE, HOST_STATE)
        )
        require(
            self.devices is None
            or _is_positive_int(self.devices, MAX_LANES)
            or _are_devices(self.devices),
            "devices",
            self.devices,
            "a whole number >= 1, a sequence of jax devices, or None for all",
        )

    @property
    def has_explicit_cpus(self) -> bool:
        """Whether CPU devices were asked for."""
        if not isinstance(self.devices, Sequence):
            return False
        return all(device.platform == "cpu" for device in self.devices)

    def list_devices(self) -> list[jax.Device]:
        """The devices. Raises ConfigError if there are fewer."""
        if isinstance(self.devices, Sequence):
            return list(self.devices)
        available = jax.devices()
        is_available = self.devices is None or self.devices <= len(available)
        require(
            is_available,
            "devices",
            self.devices,
            f"1 to {len(available)}, the devices that there are",
        )
        return available[: self.devices]


def _is_positive_int(value: Any, maximum: int) -> bool:
    return is_integer_at_least(value, 1) and int(value) <= maximum


def _are_devices(value: Any) -> bool:
    is_sequence = isinstance(value, Sequence) and len(value) > 0
    return is_sequence and all(isinstance(device, jax.Device) for device in value)


def choose_num_blocks(
    placement: Placement, devices: Sequence[jax.Device], spec: ResolvedRunSpec
) -> int:
    """Return the number of blocks of lanes: at most the clients that take part in a round."""
    cohort = compute_cohort_size(spec.num_clients, spec.participation)
    return placement.blocks or min(len(devices), cohort)


def choose_num_lanes(
    placement: Placement,
    spec: ResolvedRunSpec,
    signature: Signature,
    algorithm: Algorithm,
    devices: Sequence[jax.Device],
    build_schedulers: Callable[[int], Sequence[Scheduler]],
    num_runs: int,
) -> LaneChoice:
    """Choose the number of lanes in each block.

    Args:
      placement: the number of lanes, or AUTO.
      spec: the settings of one of the runs.
      signature: the static choices of the runs.
      algorithm: the method.
      devices: the devices that the blocks of a run are on.
      build_schedulers: returns schedulers of the first rounds of some runs for a number of lanes.
      num_runs: number of runs that go in step.

    Returns:
      The number of lanes, the number of runs in parallel on each device, and how long the steps of
      each number that was tried took.
    """
    pairs = algorithm.condensation_work
    workload = Workload(
        signature.training,
        spec.batch_size,
        _format_network_label(spec, signature),
        None if pairs is None else pairs.ipc,
    )
    condenses = workload.images_per_pair is not None
    if placement.lanes != AUTO:
        lanes = int(placement.lanes)
        return LaneChoice(lanes, 1, {}, lookup_conv_impl(workload, devices, lanes))
    if condenses and jax.default_backend() == "cpu":
        return LaneChoice(1, 1, {})  # pairs go in turn

    @functools.cache
    def count_block_steps(lanes: int) -> np.ndarray:
        """[rounds, blocks] of the longest lanes."""
        return np.concatenate(
            [scheduler.work_counts.block_steps for scheduler in build_schedulers(lanes)]
        )

    def idle_factor(lanes: int) -> float:
        useful_steps = count_block_steps(1).sum()  # of one lane in each block
        num_blocks = count_block_steps(1).shape[1]
        return float(
            count_block_steps(lanes).max(1).sum() * num_blocks * lanes / max(1, useful_steps)
        )

    cohort = compute_cohort_size(spec.num_clients, spec.participation)
    if condenses:
        cohort = int(max(scheduler.work_counts.pairs.max() for scheduler in build_schedulers(1)))
    return choose_lanes(
        workload,
        devices=devices,
        cohort_size=max(1, cohort),
        num_runs=1 if condenses else num_runs,
        idle_factor=idle_factor,
        memory_bytes=placement.memory,
    )


def should_shard_server_work(
    placement: Placement,
    spec: ResolvedRunSpec,
    signature: Signature,
    algorithm: Algorithm,
    devices: Sequence[jax.Device],
) -> bool:
    """Return whether devices that share a run also share its server's training."""
    task, batch_size = signature.training.task, algorithm.server_batch_size
    if (
        not batch_size
        or placement.server_work == REPLICATED_SERVER
        or not task.model.can_shard_batch
    ):
        return False
    if placement.server_work == SHARDED_SERVER:
        return True
    return choose_server_sharding(
        task, batch_size=batch_size, devices=devices, label=_format_network_label(spec, signature)
    )


def _format_network_label(spec: ResolvedRunSpec, signature: Signature) -> str:
    """Return the name of the network in the table of timings."""
    network, precision = signature.network, spec.precision
    precision = precision or describe_environment()["matmul_precision"]
    options = to_items(spec.model_options)
    return f"{spec.model} {options} {network.input_shape} {network.num_classes} {precision}"


def build_plan(
    placement: Placement,
    devices: Sequence[jax.Device],
    blocks: int,
    lane_choice: LaneChoice,
    schedulers: Sequence[Scheduler],
    num_runs: int,
    server_sharding_check: Callable[[], bool],
) -> ExecutionPlan:
    """The plan of so many federations, of which some have these schedulers.

    shares_server(): whether their server's work is shared, asked where it could be.
    """
    mesh_axis, num_parallel = placement.spread, lane_choice.num_parallel
    if placement.width != AUTO:
        num_parallel = int(placement.width)
        mesh_axis = RUNS_AXIS if mesh_axis == AUTO and num_parallel > 1 else mesh_axis
    num_parallel = balance_parallel_runs(num_runs, len(devices), num_parallel)
    if len(devices) < blocks:
        mesh_axis = RUNS_AXIS
    if mesh_axis == AUTO:
        mesh_axis, num_parallel = _choose_fastest_mesh_axis(
            schedulers, num_runs, len(devices), lane_choice, num_parallel
        )
    if mesh_axis == LANES_AXIS:
        has_sharded_server = blocks > 1 and server_sharding_check()
        return make_execution_plan(
            lane_choice.lanes,
            devices[:blocks],
            blocks=blocks,
            has_sharded_server=has_sharded_server,
        )
    return make_execution_plan(
        lane_choice.lanes, devices, mesh_axis=RUNS_AXIS, blocks=blocks, num_parallel=num_parallel
    )


def _choose_fastest_mesh_axis(
    schedulers: Sequence[Scheduler],
    num_runs: int,
    num_devices: int,
    lane_choice: LaneChoice,
    max_parallel: int,
) -> tuple[str, int]:
    """Whether devices should share every federation, or have federations of their own, and how many
    of these side by side."""
    if num_runs == 1:
        return LANES_AXIS, 1
    work = schedulers[0].work_counts
    utilization = work.block_steps.sum() / max(1, (work.block_steps.max(1) * num_devices).sum())
    parallelism = choose_parallelism(
        num_runs,
        num_devices,
        lanes=lane_choice.lanes,
        max_parallel=max_parallel,
        step_seconds=lane_choice.seconds,
        utilization=max(utilization, 1e-9),
    )
    return parallelism.mesh_axis, parallelism.num_parallel


def choose_client_state(
    placement: Placement, program: CompiledPrograms, spec: ResolvedRunSpec
) -> str:
    """Choose where client states are: on each device, a part on each, or on the host."""
    state_bytes, requested = compute_client_state_bytes(program, spec), placement.client_state
    if not state_bytes or requested == DEVICE_STATE:
        return DEVICE_STATE
    pageable, plan = program.algorithm.can_page_state, program.plan
    if requested in (SPLIT_STATE, HOST_STATE):
        require(
            pageable,
            "client_state",
            requested,
            f"'device' or 'auto': {spec.algorithm} needs the states of all clients at once"
            + (", to score their own models" if spec.has_client_tests else ""),
        )
    if requested == SPLIT_STATE and len(plan.devices) > 1 and plan.mesh_axis == LANES_AXIS:
        can_split = _can_split_client_states(plan, spec)
        expected = (
            f"'auto', or of one process a num_clients that {len(plan.devices)} devices divide"
        )
        require(can_split, "client_state", requested, f"{expected} (there are {spec.num_clients})")
        return SPLIT_STATE
    if requested == SPLIT_STATE:  # one device has all of a run's
        return DEVICE_STATE
    if requested == HOST_STATE:
        return HOST_STATE
    if not pageable:
        return DEVICE_STATE
    assert plan.mesh is not None
    available_bytes = placement.memory or usable_free_bytes(plan.mesh.local_devices)
    required_bytes = state_bytes * spec.num_clients * plan.num_parallel
    if not plan.sync_across_processes(
        int(available_bytes is not None and required_bytes > MAX_STATE_FRACTION * available_bytes)
    ):
        return DEVICE_STATE
    full_participation = (
        compute_cohort_size(spec.num_clients, spec.participation) == spec.num_clients
    )
    if plan.platform != "cpu" and _can_split_client_states(plan, spec):
        fits_split = full_participation or required_bytes <= MAX_STATE_FRACTION * (
            available_bytes or 0
        ) * len(plan.devices)
        if fits_split:
            return SPLIT_STATE
    return DEVICE_STATE if full_participation else HOST_STATE


def _can_split_client_states(plan: ExecutionPlan, spec: ResolvedRunSpec) -> bool:
    """Return whether devices of one process can each hold an equal part of the client states."""
    assert plan.mesh is not None
    has_several_devices = (
        plan.mesh_axis == LANES_AXIS and len(plan.devices) > 1 and not plan.mesh.is_multi_process
    )
    return has_several_devices and spec.num_clients % len(plan.devices) == 0
