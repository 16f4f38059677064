"""Placement of runs: devices, lanes, runs in parallel, and the place of client states.

Speed and memory depend on the placement; results do not, beyond rounding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import num_bytes
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.autotune import (
    LaneChoice,
    Workload,
    choose_lanes,
    choose_server_sharding,
    lookup_conv_impl,
)
from fedjax_het.core.contract_checks import without_trace_frames
from fedjax_het.core.execution_plan import LANES_AXIS, RUNS_AXIS, ExecutionPlan, make_execution_plan
from fedjax_het.core.memory import free_host_bytes, min_over_processes, usable_free_bytes
from fedjax_het.core.schedule import Scheduler
from fedjax_het.data import Dataset
from fedjax_het.nn import count_training_flops
from fedjax_het.runtime.compiled_programs import CompiledPrograms
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.signature import Signature, to_items
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.config import Bounds, validate_fields
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.memory_maps import is_memory_mapped

AUTO = "auto"
# Places of the states of all clients: all on each device, a part on each, on the host, or on disk.
DEVICE_STATE, SPLIT_STATE, HOST_STATE, DISK_STATE = "device", "split", "host", "disk"
PAGED_STATES = (HOST_STATE, DISK_STATE)
CLIENT_STATES = (AUTO, DEVICE_STATE, SPLIT_STATE, *PAGED_STATES)
# Places of the clients' training examples: all on each device, or on the host.
DEVICE_DATA, HOST_DATA = "device", "host"
CLIENT_DATA = (AUTO, DEVICE_DATA, HOST_DATA)
# The server's work on devices that share a run: each a part of it, or each all of it.
SHARDED_SERVER, REPLICATED_SERVER = "shared", "alone"
SERVER_WORKS = (AUTO, SHARDED_SERVER, REPLICATED_SERVER)
SPREADS = (AUTO, LANES_AXIS, RUNS_AXIS)
# Fraction of a device's memory: if the states of all clients take more, they are on the host. The
# check of a program's numbers holds four copies on every device, and CPU devices share the memory
# with the host.
MAX_STATE_FRACTION = 1 / 8
BARRIER_EFFICIENCY = 0.95  # relative speed of devices that wait for each other every round

Count = Annotated[int, Bounds(1, 2**16)]


@dataclass(frozen=True)
class Placement:
    """Devices, lanes and the place of client states.

    Speed and memory depend on the placement; results do not, beyond rounding.

    Attributes:
      lanes: number of clients that each block of a run trains in parallel; "auto" for the number
        that short timings found fastest.
      devices: the devices, or the number of devices to use, from the first; None for all (in a
        sweep: all of this process).
      blocks: number of blocks of lanes; None for one block per device. Sums are taken block by
        block, so a run that resumes on another number of devices uses the blocks that it began
        with.
      spread: the work that devices share: "lanes" (one run over all devices), "runs" (each device
        has separate runs), or "auto" for the faster layout.
      width: largest number of runs in parallel on each device with `spread="runs"`; "auto" for the
        number that short timings found fastest.
      server_work: distribution of the server's work (training, passes over its examples, synthesis)
        over the devices of a run. "shared" gives each device a part of every batch, "alone" gives
        each device the whole batch, and "auto" chooses the faster distribution.
      client_state: the place of the states of all clients. With "device" each device holds all
        states, with "split" a part, and with "host" and "disk" the states of the next rounds'
        clients. "disk" stores the other states in a temporary file in the folder of the
        environment variable TMPDIR. All but "device" need a method whose server does not read
        client states; results are bit-equal. "auto" splits states over accelerators if all states
        take more than 1/8 of a device's memory. It puts them on the host on CPUs or if the parts
        are too large, and on disk if the states of the clients that train take more than half of
        the host's free memory.
      client_data: the place of the clients' training examples. With "device" each device holds all
        examples, with "host" the examples of the next rounds' clients, which a thread reads in
        advance. "auto" is "host" for inputs that are mapped into memory from a file, as far as the
        run allows it. Results are bit-equal.
      memory: bytes on each device that runs may use; None for all free bytes.

    Raises:
      ConfigError: if a value is not allowed; the message names the attribute and the allowed
        values.

    Example:
      >>> from fedjax_het import Placement
      >>> Placement(devices=1, lanes=4).lanes
      4
    """

    lanes: Count | Literal["auto"] = "auto"
    devices: Sequence[jax.Device] | Count | None = None
    blocks: Count | None = None
    spread: str = AUTO
    width: Count | Literal["auto"] = "auto"
    server_work: str = AUTO
    client_state: str = AUTO
    client_data: str = AUTO
    memory: Annotated[int, Bounds(1, 2**60)] | None = None

    def __post_init__(self) -> None:
        for name, value in validate_fields(vars(self), type(self)).items():
            object.__setattr__(self, name, value)
        require_name("spread", self.spread, SPREADS)
        require_name("server_work", self.server_work, SERVER_WORKS)
        require_name("client_state", self.client_state, CLIENT_STATES)
        require_name("client_data", self.client_data, CLIENT_DATA)
        is_empty = isinstance(self.devices, Sequence) and not self.devices
        require(not is_empty, "devices", self.devices, "at least one device, or None for all")

    @property
    def has_explicit_cpus(self) -> bool:
        """Whether the user chose CPU devices."""
        if not isinstance(self.devices, Sequence):
            return False
        return all(device.platform == "cpu" for device in self.devices)

    def list_devices(self) -> list[jax.Device]:
        """Return the devices. Raises ConfigError if there are fewer."""
        if isinstance(self.devices, Sequence):
            return list(self.devices)
        available = jax.devices()
        is_available = self.devices is None or self.devices <= len(available)
        expected = f"1 to {len(available)}, the number of devices"
        require(is_available, "devices", self.devices, expected)
        return available[: self.devices]


class ParallelismPlan(NamedTuple):
    """A way to execute some runs on some devices.

    Attributes:
      mesh_axis: the axis of devices, as in `ExecutionPlan`.
      num_parallel: number of runs in parallel on each device.
      cost: time of all runs, relative to the time of one run alone on one device.
      utilization: fraction of slots that hold a run, over all batches of runs; of a device's steps
        where devices share each run.
    """

    mesh_axis: str
    num_parallel: int
    cost: float
    utilization: float


def balance_parallel_runs(num_runs: int, num_devices: int, max_parallel: int) -> int:
    """Return the fewest parallel runs per device that need as few batches as `max_parallel`.

    Args:
      num_runs: number of runs.
      num_devices: number of devices.
      max_parallel: largest number of runs in parallel on a device.

    Returns:
      The number of runs in parallel on each device.

    Example:
      >>> from fedjax_het.runtime.placement import balance_parallel_runs
      >>> balance_parallel_runs(27, 1, 8)
      7
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
    """Choose the cheapest way to execute runs; of equal ways, the way with fewer in parallel.

    Args:
      num_runs: number of runs.
      num_devices: number of devices.
      lanes: lanes of a run on each device.
      max_parallel: runs in parallel on a device, at most.
      step_seconds: seconds of a client's step by the number of lanes of a device, see `LaneChoice`.
        Not read where `max_parallel` is 1.
      utilization: fraction of the devices' steps that train a client where devices share each run,
        whose blocks wait for the longest.

    Returns:
      The cheapest plan.
    """
    counts = {
        balance_parallel_runs(num_runs, num_devices, count) for count in range(1, max_parallel + 1)
    }
    plans = [
        plan_independent_runs(num_runs, num_devices, count, lanes=lanes, step_seconds=step_seconds)
        for count in sorted(counts)
    ]
    cost = num_runs / (num_devices * utilization * BARRIER_EFFICIENCY)
    plans.append(ParallelismPlan(LANES_AXIS, 1, cost, utilization))
    return min(plans, key=lambda plan: plan.cost)


def plan_independent_runs(
    num_runs: int,
    num_devices: int,
    num_parallel: int,
    *,
    lanes: int,
    step_seconds: Mapping[int, float],
) -> ParallelismPlan:
    """Plan separate runs for each device; idle slots of the last batch cost as much as others.

    Args:
      num_runs: number of runs.
      num_devices: number of devices.
      num_parallel: number of runs in parallel on each device, w.
      lanes: lanes of a run on each device; w runs in parallel have w * `lanes` lanes.
      step_seconds: seconds of a client's step by the number of lanes of a device. Other numbers of
        lanes are interpolated linearly in logarithms.

    Returns:
      The plan.
    """
    num_batches, slowdown = -(-num_runs // (num_devices * num_parallel)), 1.0
    if num_parallel > 1:
        timed = sorted(step_seconds)
        log_seconds = np.interp(
            np.log([lanes, num_parallel * lanes]),
            np.log(timed),
            np.log([step_seconds[count] for count in timed]),
        )
        slowdown = float(np.exp(log_seconds[1] - log_seconds[0]))
    return ParallelismPlan(
        RUNS_AXIS,
        num_parallel,
        num_batches * num_parallel * slowdown,
        num_runs / (num_batches * num_devices * num_parallel),
    )


@dataclass(frozen=True)
class Planner:
    """Chooses lanes and devices for runs of one signature.

    Attributes:
      placement: the choices of the user.
      spec: the settings of one of the runs.
      signature: the static choices of the runs.
      algorithm: the method.
      devices: the devices.
      num_runs: number of runs that the programs serve.
    """

    placement: Placement
    spec: ResolvedRunSpec
    signature: Signature
    algorithm: Algorithm
    devices: list[jax.Device]
    num_runs: int

    @property
    def blocks(self) -> int:
        """Number of blocks of lanes: at most the clients that take part in a round."""
        cohort_size = compute_cohort_size(self.spec.num_clients, self.spec.participation)
        return self.placement.blocks or min(len(self.devices), cohort_size)

    def choose_num_lanes(
        self, build_schedulers: Callable[[int], Sequence[Scheduler]]
    ) -> LaneChoice:
        """Choose the number of lanes in each block.

        Args:
          build_schedulers: returns schedulers of the first rounds of some runs for a number of
            lanes.

        Returns:
          The number of lanes, the number of runs in parallel on each device, and how long the steps
          of each number that was tried took.
        """
        spec, pairs, blocks = self.spec, self.algorithm.condensation_work, self.blocks
        devices, training = self.devices[:blocks], self.signature.training
        inputs_per_pair = None if pairs is None else pairs.ipc
        workload = Workload(training, spec.batch_size, self._network_label, inputs_per_pair)
        if (lanes := self.placement.lanes) != "auto":
            return LaneChoice(lanes, 1, {}, lookup_conv_impl(workload, devices, lanes))
        if pairs is not None and jax.default_backend() == "cpu":
            return LaneChoice(1, 1, {})  # pairs of a client and a class go in turn

        @functools.cache
        def count_block_steps(lanes: int) -> np.ndarray:
            """Return the steps of the longest lane of each block, `[rounds, blocks]`."""
            return np.concatenate([s.work_counts.block_steps for s in build_schedulers(lanes)])

        def idle_factor(lanes: int) -> float:
            useful_steps = count_block_steps(1).sum()  # of one lane in each block
            num_steps = count_block_steps(lanes).max(1).sum() * blocks * lanes
            return float(num_steps / max(1, useful_steps))

        def count_flops() -> float:
            mean_steps = count_block_steps(1).sum(1).mean()  # in a round
            num_samples = mean_steps * spec.rounds * self.num_runs * spec.batch_size
            return float(num_samples * count_training_flops(training.task.model))

        num_items = compute_cohort_size(spec.num_clients, spec.participation)
        if pairs is not None:
            num_items = int(max(s.work_counts.pairs.max() for s in build_schedulers(1)))
        return choose_lanes(
            workload,
            devices=devices,
            cohort_size=max(1, num_items),
            num_runs=1 if pairs is not None else self.num_runs,
            idle_factor=idle_factor,
            count_flops=count_flops,
            memory_bytes=self.placement.memory,
        )

    def build_plan(self, lane_choice: LaneChoice, schedulers: Sequence[Scheduler]) -> ExecutionPlan:
        """Return the plan of the runs on the devices.

        Args:
          lane_choice: the number of lanes in a block, and of runs in parallel.
          schedulers: the schedulers of some of the runs.

        Returns:
          The plan.
        """
        mesh_axis, num_parallel = self.placement.spread, lane_choice.num_parallel
        lanes, blocks, num_devices = lane_choice.lanes, self.blocks, len(self.devices)
        if (width := self.placement.width) != "auto":
            num_parallel = width
            mesh_axis = RUNS_AXIS if mesh_axis == AUTO and num_parallel > 1 else mesh_axis
        num_parallel = balance_parallel_runs(self.num_runs, num_devices, num_parallel)
        if num_devices < blocks:
            mesh_axis = RUNS_AXIS
        if mesh_axis == AUTO:
            mesh_axis = LANES_AXIS
            if self.num_runs > 1:
                steps = schedulers[0].work_counts.block_steps
                utilization = steps.sum() / max(1, (steps.max(1) * num_devices).sum())
                mesh_axis, num_parallel, *_ = choose_parallelism(
                    self.num_runs,
                    num_devices,
                    lanes=lanes,
                    max_parallel=num_parallel,
                    step_seconds=lane_choice.seconds,
                    utilization=max(utilization, 1e-9),
                )
        if mesh_axis == LANES_AXIS:
            return make_execution_plan(
                lanes,
                self.devices[:blocks],
                blocks=blocks,
                has_sharded_server=blocks > 1 and self._should_shard_server_work(),
            )
        return make_execution_plan(
            lanes, self.devices, mesh_axis=RUNS_AXIS, blocks=blocks, num_parallel=num_parallel
        )

    def _should_shard_server_work(self) -> bool:
        """Return whether devices that share a run also share its server's training."""
        task, batch_size = self.signature.training.task, self.algorithm.server_batch_size
        server_work = self.placement.server_work
        if not batch_size or server_work == REPLICATED_SERVER or not task.model.can_shard_batch:
            return False
        if server_work == SHARDED_SERVER:
            return True
        devices, label = self.devices[: self.blocks], self._network_label
        return choose_server_sharding(task, batch_size=batch_size, devices=devices, label=label)

    @property
    def _network_label(self) -> str:
        """The name of the network in the table of timings."""
        network = self.signature.network
        environment = describe_environment()
        precision = self.spec.precision or environment["matmul_precision"]
        precision += " x64" if environment["x64"] else ""
        options = to_items(self.spec.model_options)
        shape: tuple[object, ...] = network.input_shape
        if network.num_tokens is not None:
            shape = (*shape, f"{network.num_tokens} tokens")
        return f"{self.spec.model} {options} {shape} {network.num_classes} {precision}"


def compute_client_state_bytes(program: CompiledPrograms, spec: ResolvedRunSpec) -> int:
    """Return the bytes of the state that one client of a run has between rounds.

    Args:
      program: the programs.
      spec: the settings of the run.

    Returns:
      The bytes; 0 if clients have no state.
    """
    hp = {name: jax.ShapeDtypeStruct((), np.float32) for name in spec.hyperparameters}
    key = jax.eval_shape(lambda: make_key(0))
    model, init = program.signature.training.task.model, program.algorithm.init
    with without_trace_frames():
        state = jax.eval_shape(lambda hp, key: init(hp, key, model.init(key), 1), hp, key)
    return num_bytes(state.clients)


def choose_client_data(
    placement: Placement,
    spec: ResolvedRunSpec,
    dataset: Dataset,
    signature: Signature,
    algorithm: Algorithm,
) -> str:
    """Choose the place of the clients' training examples: on each device, or on the host.

    Args:
      placement: the choice of the user.
      spec: the settings of one of the runs.
      dataset: the data set.
      signature: the static choices of the runs.
      algorithm: the method.

    Returns:
      "device" or "host".

    Raises:
      ConfigError: if the run needs all examples at once, and the user chose the host.
    """
    readers = {
        f"method {spec.algorithm}": algorithm.fine_tuning is not None
        or algorithm.trains_on_server_data
        or bool(algorithm.round_inputs),
        "skew of labels or images": signature.has_skew,
        "validation": spec.validation is not None,
        "held_out_clients": spec.held_out_clients is not None,
        "gradient_gaps": bool(spec.gradient_gaps),
        "selection of clients by losses": signature.evaluation.records_client_losses,
    }
    reader = next((name for name, needs_all in readers.items() if needs_all), "")
    if placement.client_data == HOST_DATA:
        expected = f"'device' or 'auto': {reader} needs all training examples at once"
        require(not reader, "client_data", placement.client_data, expected)
    if placement.client_data != AUTO:
        return placement.client_data
    return HOST_DATA if is_memory_mapped(dataset.train_inputs) and not reader else DEVICE_DATA


def choose_client_state(
    placement: Placement, program: CompiledPrograms, spec: ResolvedRunSpec, state_bytes: int
) -> str:
    """Choose the place of client states: on each device, a part on each, on the host, or on disk.

    Args:
      placement: the choice of the user.
      program: the programs, with their plan.
      spec: the settings of one of the runs.
      state_bytes: bytes of the state of one client, see `compute_client_state_bytes`.

    Returns:
      "device", "split", "host" or "disk".

    Raises:
      ConfigError: if the method or the number of clients does not allow the user's choice.
    """
    requested, plan, num_clients = placement.client_state, program.plan, spec.num_clients
    if not state_bytes or requested == DEVICE_STATE:
        return DEVICE_STATE
    is_pageable = program.algorithm.can_page_state
    assert plan.mesh is not None
    num_devices = plan.mesh.size if plan.mesh_axis == LANES_AXIS else 1  # of one run
    can_split = (
        num_devices > 1 and not plan.mesh.is_multi_process and num_clients % num_devices == 0
    )
    if requested != AUTO:
        expected = f"'device' or 'auto': {spec.algorithm} needs the states of all clients at once"
        expected += ", to evaluate their own models" if spec.has_client_tests else ""
        require(is_pageable, "client_state", requested, expected)
    if requested == SPLIT_STATE:
        expected = f"'auto', or one process and a multiple of {num_devices} devices as num_clients"
        expected += f" (now {num_clients})"
        require(can_split or num_devices == 1, "client_state", requested, expected)
        return SPLIT_STATE if can_split else DEVICE_STATE  # one device has all of a run's
    if requested in PAGED_STATES:
        return requested
    if not is_pageable:
        return DEVICE_STATE
    available_bytes = placement.memory or usable_free_bytes(plan.mesh.local_devices)
    max_bytes = MAX_STATE_FRACTION * (available_bytes or 0)
    required_bytes = state_bytes * num_clients * plan.num_parallel
    is_too_large = available_bytes is not None and required_bytes > max_bytes
    if not plan.sync_across_processes(int(is_too_large)):
        return DEVICE_STATE
    is_full = compute_cohort_size(num_clients, spec.participation) == num_clients
    if (
        plan.platform != "cpu"
        and can_split
        and (is_full or required_bytes <= max_bytes * num_devices)
    ):
        return SPLIT_STATE
    if is_full:
        return DEVICE_STATE
    num_trained = min(
        num_clients, spec.rounds * compute_cohort_size(num_clients, spec.participation)
    )
    host_bytes = min_over_processes(free_host_bytes(), plan.devices)
    is_too_large = host_bytes is not None and 2 * num_trained * state_bytes > host_bytes
    return DISK_STATE if is_too_large else HOST_STATE
