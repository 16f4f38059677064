"""Where runs go: on which devices, in how many lanes, how many of them at a time, and where the
states of their clients are. Speed and memory depend on it; results do not, beyond rounding."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.common.environment import environment
from fedjax_het.common.errors import is_whole, require, require_name
from fedjax_het.common.records import plain
from fedjax_het.engine.memory import free_bytes
from fedjax_het.engine.plan import AXIS, RUNS, Plan, make_plan
from fedjax_het.engine.probe import (
    LaneChoice,
    Work,
    choose_lanes,
    choose_sharing,
    known_convolutions,
)
from fedjax_het.engine.schedule import Scheduler, cohort_size
from fedjax_het.running.places import balanced, best_places
from fedjax_het.running.programs import Program, Signature, client_state_bytes, training_of
from fedjax_het.settings.spec import ResolvedSpec

AUTO = "auto"
# Where the states of all clients are: all on each device, a part on each, or on the host.
DEVICE_STATE, SPLIT_STATE, HOST_STATE = "device", "split", "host"
SHARED, ALONE = "shared", "alone"  # what devices that share a federation do of its server's work
# Of a device's memory: if all clients' states take more, they are on the host. Checking a program's
# numbers holds four copies on every device, and CPU devices share the memory with the host.
STATE_SHARE = 1 / 8
MOST_LANES, MOST_BYTES = 2**16, 2**60  # more are something else


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
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("lanes", "width"):
            value = getattr(self, name)
            ok = (isinstance(value, str) and value == AUTO) or _is_count(value, MOST_LANES)
            require(ok, name, value, f"'auto' or a whole number >= 1, at most {MOST_LANES}")
        for name, most in (("blocks", MOST_LANES), ("memory", MOST_BYTES)):
            value = getattr(self, name)
            ok = value is None or _is_count(value, most)
            require(ok, name, value, f"a whole number >= 1, at most {most}, or None")
        require_name("spread", self.spread, (AUTO, AXIS, RUNS))
        require_name("server_work", self.server_work, (AUTO, SHARED, ALONE))
        require_name(
            "client_state", self.client_state, (AUTO, DEVICE_STATE, SPLIT_STATE, HOST_STATE)
        )
        require(
            self.devices is None
            or _is_count(self.devices, MOST_LANES)
            or _are_devices(self.devices),
            "devices",
            self.devices,
            "a whole number >= 1, a sequence of jax devices, or None for all",
        )

    @property
    def on_chosen_cpus(self) -> bool:
        """Whether CPU devices were asked for."""
        if not isinstance(self.devices, Sequence):
            return False
        return all(device.platform == "cpu" for device in self.devices)

    def present_devices(self) -> list[jax.Device]:
        """The devices. Raises ConfigError if there are fewer."""
        if isinstance(self.devices, Sequence):
            return list(self.devices)
        there = jax.devices()
        fits = self.devices is None or self.devices <= len(there)
        require(fits, "devices", self.devices, f"1 to {len(there)}, the devices that there are")
        return there[: self.devices]


def _is_count(value: Any, most: int) -> bool:
    return is_whole(value, 1) and int(value) <= most


def _are_devices(found: Any) -> bool:
    sequence = isinstance(found, Sequence) and len(found) > 0
    return sequence and all(isinstance(device, jax.Device) for device in found)


def blocks_of(placement: Placement, devices: Sequence[jax.Device], spec: ResolvedSpec) -> int:
    """Blocks of lanes: no more than clients that take part in a round."""
    sampled = cohort_size(spec.num_clients, spec.participation)
    return placement.blocks or min(len(devices), sampled)


def lanes_of(
    placement: Placement,
    signature: Signature,
    algorithm: Algorithm,
    devices: Sequence[jax.Device],
    blocks: int,
    specs: Sequence[ResolvedSpec],
    planned: Callable[[int], Sequence[Scheduler]],
    count: int,
) -> LaneChoice:
    """How many lanes there are in each block, for so many runs.

    planned(lanes): schedules of the first rounds of some of them.
    """
    spec, pairs = specs[0], algorithm.pairs
    images = None if pairs is None else pairs.ipc
    work = Work(training_of(signature), spec.batch_size, _label(signature), images)
    if placement.lanes != AUTO:
        lanes = int(placement.lanes)
        return LaneChoice(lanes, 1, {}, known_convolutions(work, devices[:blocks], lanes))
    if pairs is not None and jax.default_backend() == "cpu":
        return LaneChoice(1, 1, {})  # pairs go in turn

    @functools.cache
    def steps(lanes: int) -> np.ndarray:
        """[rounds, blocks] of the longest lanes."""
        return np.concatenate([scheduler.work.block_steps for scheduler in planned(lanes)])

    def waiting(lanes: int) -> float:
        useful = steps(1).sum()  # of one lane in each block
        return float(steps(lanes).max(1).sum() * blocks * lanes / max(1, useful))

    taking_part = cohort_size(spec.num_clients, spec.participation)
    if pairs is not None:
        taking_part = int(max(scheduler.work.pairs.max() for scheduler in planned(1)))
    return choose_lanes(
        work,
        devices=devices[:blocks],
        cohort_size=max(1, taking_part),
        federations=1 if pairs is not None else count,
        waiting=waiting,
        memory=placement.memory,
    )


def shares_server(
    placement: Placement,
    signature: Signature,
    algorithm: Algorithm,
    devices: Sequence[jax.Device],
) -> bool:
    """Whether devices that share a federation share its server's work."""
    task, batch_size = training_of(signature).task, algorithm.server_batch
    if not batch_size or placement.server_work == ALONE or not task.model.spreads:
        return False
    if placement.server_work == SHARED:
        return True
    return choose_sharing(task, batch_size=batch_size, devices=devices, label=_label(signature))


def _label(signature: Signature) -> str:
    """The network, as timings name it."""
    shape, num_classes = signature.input_shape, signature.num_classes
    precision = signature.precision or environment()["matmul_precision"]
    return f"{signature.model} {signature.model_options} {shape} {num_classes} {precision}"


def plan_of(
    placement: Placement,
    devices: Sequence[jax.Device],
    blocks: int,
    choice: LaneChoice,
    schedulers: Sequence[Scheduler],
    count: int,
    shares_server: Callable[[], bool],
) -> Plan:
    """The plan of so many federations, of which some have these schedulers.

    shares_server(): whether their server's work is shared, asked where it could be.
    """
    spread, width = placement.spread, choice.width
    if placement.width != AUTO:
        width = int(placement.width)
        spread = RUNS if spread == AUTO and width > 1 else spread
    width = balanced(count, len(devices), width)
    if len(devices) < blocks:
        spread = RUNS
    if spread == AUTO:
        spread, width = _fastest_spread(schedulers, count, len(devices), choice, width)
    if spread == AXIS:
        shares = blocks > 1 and shares_server()
        return make_plan(choice.lanes, devices[:blocks], blocks=blocks, shares_server=shares)
    return make_plan(choice.lanes, devices, spread=RUNS, blocks=blocks, width=width)


def _fastest_spread(
    schedulers: Sequence[Scheduler], count: int, devices: int, choice: LaneChoice, most: int
) -> tuple[str, int]:
    """Whether devices should share every federation, or have federations of their own, and how many
    of these side by side."""
    if count == 1:
        return AXIS, 1
    work = schedulers[0].work
    together = work.block_steps.sum() / max(1, (work.block_steps.max(1) * devices).sum())
    best = best_places(
        count,
        devices,
        lanes=choice.lanes,
        most=most,
        seconds=choice.seconds,
        together=max(together, 1e-9),
    )
    return best.spread, best.width


def narrower_plan(plan: Plan, width: int) -> Plan:
    """`width` federations at a time on each device; 0: one at a time on all devices."""
    assert plan.mesh is not None
    if width:
        return plan._replace(width=width)
    devices = list(plan.mesh.devices.flat)
    return make_plan(plan.lanes, devices[: plan.blocks], blocks=plan.blocks)


def client_state_of(placement: Placement, program: Program, spec: ResolvedSpec) -> str:
    """Where clients' states are to be: on the devices, a part on each, or on the host."""
    size, asked = client_state_bytes(program, spec), placement.client_state
    if not size or asked == DEVICE_STATE:
        return DEVICE_STATE
    pageable, plan = program.algorithm.pageable, program.plan
    if asked in (SPLIT_STATE, HOST_STATE):
        require(
            pageable,
            "client_state",
            asked,
            f"'device' or 'auto': {spec.algorithm} needs the states of all clients at once"
            + (", to score their own models" if spec.tests_clients else ""),
        )
    if asked == SPLIT_STATE and len(plan.devices) > 1 and plan.spreads == AXIS:
        fits = _can_split(plan, spec)
        expected = (
            f"'auto', or of one process a num_clients that {len(plan.devices)} devices divide"
        )
        require(fits, "client_state", asked, f"{expected} (there are {spec.num_clients})")
        return SPLIT_STATE
    if asked == SPLIT_STATE:  # one device has all of a run's
        return DEVICE_STATE
    if asked == HOST_STATE:
        return HOST_STATE
    if not pageable:
        return DEVICE_STATE
    assert plan.mesh is not None
    allowed = placement.memory or free_bytes(plan.mesh.local_devices)
    needed = size * spec.num_clients * plan.width
    if not plan.agreed(int(allowed is not None and needed > STATE_SHARE * allowed)):
        return DEVICE_STATE
    all_take_part = cohort_size(spec.num_clients, spec.participation) == spec.num_clients
    if plan.platform != "cpu" and _can_split(plan, spec):
        few = all_take_part or needed <= STATE_SHARE * (allowed or 0) * len(plan.devices)
        if few:
            return SPLIT_STATE
    return DEVICE_STATE if all_take_part else HOST_STATE


def _can_split(plan: Plan, spec: ResolvedSpec) -> bool:
    """Whether several devices of one process could each hold as many clients' states."""
    assert plan.mesh is not None
    several = plan.spreads == AXIS and len(plan.devices) > 1 and not plan.mesh.is_multi_process
    return several and spec.num_clients % len(plan.devices) == 0
