"""How many lanes to run on each device, by which convolutions, and whether devices share the
server's work: short timings, remembered.

On a CPU one flat lane per core usually wins; on an accelerator many vmapped lanes do. Which, and
how many, depends on the network and the chip, so each candidate trains a few steps, once. What the
timings say of a step is then weighed with the steps that a run's own clients make of so many lanes.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jaxlib
import numpy as np

from fedjax_het.core.autotune.cache import Timing, load_timings, save_timings
from fedjax_het.core.autotune.workloads import (
    NUM_SERVER_STEPS,
    STEPS_PER_CLIENT,
    WorkloadMemoryError,
    time_client_step,
    time_server_step,
)
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.memory import total_free_bytes
from fedjax_het.core.task import Task
from fedjax_het.nn.conv_products import AUTO, CONV_IMPLS, IM2COL, NATIVE, UNROLLED
from fedjax_het.nn.precision import configure_compute, has_auto_convolutions

log = logging.getLogger("fedjax_het")

SPEEDUP_MARGIN = 0.9  # more lanes must take less than this share of the time that fewer take
MAX_PAIR_LANES = 64  # lanes of pairs that are tried: each holds a batch's activations
MAX_UNROLLED_LANES = 8  # lanes: the program grows with them
NUM_TIMED_CLIENTS, NUM_TIMED_CLIENTS_CPU, NUM_TIMED_PAIRS = (
    32,
    4,
    4,
)  # that a device goes through in a timing, at least
RETRY_MEMORY_FACTOR = (
    1.25  # of the memory in which a candidate failed: it is tried again where there is more
)


class LaneChoice(NamedTuple):
    """`seconds[v]` is the time per client step with v lanes on each device; empty if not timed."""

    lanes: int  # of one federation
    num_parallel: int  # federations whose lanes are side by side on a device
    seconds: dict[int, float]
    conv_impl: str = AUTO  # what convolutions that leave it open are computed by


class Candidate(NamedTuple):
    """A candidate."""

    lanes: int
    conv_impl: str

    @property
    def name(self) -> str:
        return f"{self.lanes} {self.conv_impl}"


class Workload(NamedTuple):
    """What is timed: the steps of clients that train, or of pairs that condense.

    label: the network, and whatever else a step's time depends on besides optimiser and batch.
    images: that a pair of a client and a class condenses; None where clients train.
    """

    training: LocalTraining
    batch_size: int
    label: str
    images_per_pair: int | None = None

    def cache_key(self, devices: Sequence[jax.Device]) -> str:
        """As the table has it."""
        work_kind = (
            self.training.optimizer
            if self.images_per_pair is None
            else f"pairs of {self.images_per_pair}"
        )
        key_parts = (jaxlib.__version__, self.label, work_kind, f"batch {self.batch_size}")
        return "|".join(
            map(str, (*key_parts, f"{len(devices)} devices", f"{STEPS_PER_CLIENT} steps"))
        )

    @property
    def min_work_items(self) -> int:
        """Clients, or pairs, of each device in a timing, at least."""
        if jax.default_backend() == "cpu":
            return NUM_TIMED_CLIENTS_CPU
        return NUM_TIMED_CLIENTS if self.images_per_pair is None else NUM_TIMED_PAIRS


def list_lane_counts(num_devices: int, cohort_size: int, num_runs: int = 1) -> list[int]:
    """Numbers of lanes per device worth a try, of as many federations as there are."""
    max_lanes = max(1, -(-cohort_size // num_devices))
    if jax.default_backend() == "cpu":
        return [v for v in (1, 4) if v <= max_lanes]
    max_lanes *= -(-num_runs // num_devices)
    powers = [4**i for i in range(8) if 4**i < max_lanes]
    return [*powers, max_lanes]


def list_conv_impls(lanes: int, *, has_open_convolutions: bool) -> list[str]:
    """Ways to compute convolutions worth a try under so many lanes. A CPU chooses for each product;
    elsewhere than on a TPU a native one of several lanes is a grouped one, which is slow."""
    backend = jax.default_backend()
    if not has_open_convolutions or backend == "cpu":
        return [AUTO]
    if lanes == 1 or backend == "tpu":
        return [NATIVE, IM2COL]
    return [IM2COL, UNROLLED] if lanes <= MAX_UNROLLED_LANES else [IM2COL]


def choose_lanes(
    workload: Workload,
    *,
    devices: Sequence[jax.Device],
    cohort_size: int,
    num_runs: int = 1,
    idle_factor: Callable[[int], float] = lambda lanes: 1.0,
    memory_bytes: int | None = None,
) -> LaneChoice:
    """Time each candidate on made-up data, or recall what was found before.

    A device's lanes are those of one federation as far as its clients go round, then those of
    further federations: to the device, they are all the same. Candidates that do not fit, or fail,
    are left out; where all do, it is the fewest lanes, whose run then says what is wrong.

    Args:
      cohort_size: clients, or pairs, of a round.
      waiting: lanes of each block -> steps that they take for each step of the run's own clients,
        those of idle lanes included; 1 where none waits.
      memory: bytes on each device that may be taken (None: what is free).
    Cost: one compilation of local training per candidate, once. Processes that share the devices
      take the first one's word.
    """
    process_devices = [device for device in devices if device.process_index == jax.process_index()]
    search_args = (cohort_size, num_runs, idle_factor, memory_bytes)
    if len(process_devices) == len(devices):
        return _choose_from_timings(workload, devices, *search_args)
    # Timings differ between processes, and programs that differ would wait for each other for ever.
    from jax.experimental import multihost_utils

    local_choice = _choose_from_timings(workload, process_devices, *search_args)
    choice_values = np.array(
        [local_choice.lanes, local_choice.num_parallel, CONV_IMPLS.index(local_choice.conv_impl)]
    )
    lanes, num_parallel, impl = map(int, multihost_utils.broadcast_one_to_all(choice_values))
    return LaneChoice(lanes, num_parallel, local_choice.seconds, CONV_IMPLS[impl])


def lookup_conv_impl(workload: Workload, devices: Sequence[jax.Device], lanes: int) -> str:
    """What was found fastest for so many lanes, without timing anything."""
    timings = load_timings(devices[0].device_kind, workload.cache_key(devices))
    seconds_by_impl = {
        impl: timings.get(Candidate(lanes, impl).name, Timing(None)).seconds for impl in CONV_IMPLS
    }
    measured_seconds = {
        impl: seconds for impl, seconds in seconds_by_impl.items() if seconds is not None
    }
    return min(measured_seconds, key=lambda impl: measured_seconds[impl], default=AUTO)


def _choose_from_timings(
    workload: Workload, devices, cohort_size, num_runs, idle_factor, memory_bytes
) -> LaneChoice:
    run_lane_counts = list_lane_counts(len(devices), cohort_size)
    lane_counts = sorted({*run_lane_counts, *list_lane_counts(len(devices), cohort_size, num_runs)})
    if workload.images_per_pair is not None:
        run_lane_counts, lane_counts = (
            sorted({min(v, MAX_PAIR_LANES) for v in counts})
            for counts in (run_lane_counts, lane_counts)
        )
    has_open_convolutions = jax.default_backend() != "cpu" and has_auto_convolutions(
        workload.training.task.model
    )
    candidates = [
        Candidate(v, c)
        for v in lane_counts
        for c in list_conv_impls(v, has_open_convolutions=has_open_convolutions)
    ]
    if len(candidates) == 1:
        return LaneChoice(candidates[0].lanes, 1, {}, candidates[0].conv_impl)
    candidate_seconds, is_new = _time_candidates(workload, devices, candidates, memory_bytes)
    seconds: dict[int, float] = {}
    impls: dict[int, str] = {}
    for candidate, candidate_time in sorted(
        candidate_seconds.items(), key=lambda item: -item[1]
    ):  # the fastest stays
        seconds[candidate.lanes], impls[candidate.lanes] = candidate_time, candidate.conv_impl
    fitting_lane_counts = [v for v in run_lane_counts if v in seconds]
    if not fitting_lane_counts:
        return LaneChoice(min(run_lane_counts), 1, {})
    # They do not depend on how many federations there are: a federation's numbers would.
    lanes = _select_fastest({v: seconds[v] * idle_factor(v) for v in fitting_lane_counts})
    fastest_total_lanes = _select_fastest(
        {v: candidate_time for v, candidate_time in seconds.items() if v >= lanes}
    )
    choice = LaneChoice(
        lanes,
        max(1, fastest_total_lanes // lanes),
        dict(sorted(seconds.items())),
        impls[fastest_total_lanes],
    )
    if is_new:
        log.info(
            "lanes: %d per device, federations: %d, convolutions: %s (seconds per client step: %s)",
            *(choice.lanes, choice.num_parallel, choice.conv_impl, choice.seconds),
        )
    return choice


def _time_candidates(
    workload: Workload,
    devices: Sequence[jax.Device],
    candidates: Sequence[Candidate],
    memory_bytes: int | None,
) -> tuple[dict[Candidate, float], bool]:
    """Seconds of those that fit, and whether any was timed now."""
    free_bytes = memory_bytes or total_free_bytes(devices)
    kind, name = devices[0].device_kind, workload.cache_key(devices)
    cached_timings = {
        candidate: timing
        for candidate, timing in load_timings(kind, name).items()
        if timing.is_valid_for(free_bytes)
    }
    new_timings: dict[str, Timing] = {}
    min_failed_lanes: dict[str, int] = {}  # lanes by implementation: more of them need more memory
    for candidate in sorted(candidates):
        if candidate.lanes > min_failed_lanes.get(candidate.conv_impl, math.inf):
            continue
        if candidate.name not in cached_timings:
            new_timings[candidate.name] = _time_candidate(workload, devices, candidate, free_bytes)
        if {**cached_timings, **new_timings}[candidate.name].seconds is None:
            min_failed_lanes[candidate.conv_impl] = candidate.lanes
    if new_timings:
        save_timings(kind, name, new_timings)
    seconds_by_candidate = {
        candidate: {**cached_timings, **new_timings}.get(candidate.name, Timing(None)).seconds
        for candidate in candidates
    }
    return {
        candidate: seconds
        for candidate, seconds in seconds_by_candidate.items()
        if seconds is not None
    }, bool(new_timings)


def _time_candidate(
    workload: Workload, devices: Sequence[jax.Device], candidate: Candidate, free_bytes: int | None
) -> Timing:
    """Of one candidate, or why it is none."""
    task = workload.training.task
    model = configure_compute(task.model, conv_impl=candidate.conv_impl)
    training = workload.training._replace(task=task._replace(model=model))
    num_work_items = max(candidate.lanes, workload.min_work_items)
    timing_args = (
        training,
        workload.images_per_pair,
        workload.batch_size,
        devices,
        candidate.lanes,
        num_work_items,
        free_bytes,
    )
    try:
        return Timing(time_client_step(*timing_args))
    except WorkloadMemoryError as error:
        reason, insufficient_bytes = str(error), error.needed_bytes - 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason, insufficient_bytes = (
            " ".join(str(error).split())[:120],
            int(RETRY_MEMORY_FACTOR * (free_bytes or 0)),
        )
    log.info("lanes: %d per device (convolutions: %s) are left out: %s", *candidate, reason)
    return Timing(None, insufficient_bytes)


def choose_server_sharding(
    task: Task, *, batch_size: int, devices: Sequence[jax.Device], label: str
) -> bool:
    """Whether devices that share a federation should share the steps of its server, too.

    Times some steps of SGD on made-up data, alike on all devices and shared, or recalls what was
    found for `label` before. Cost: two compilations of a training step, once.
    """
    can_shard = task.model.can_shard_batch and len(devices) > 1
    is_single_process = all(device.process_index == jax.process_index() for device in devices)
    if not can_shard or not is_single_process:  # a collective every step is not for processes
        return False
    key_parts = (jaxlib.__version__, label, "server", f"batch {batch_size}")
    cache_key = "|".join(
        map(str, (*key_parts, f"{len(devices)} devices", f"{NUM_SERVER_STEPS} steps"))
    )
    kind = devices[0].device_kind
    num_devices_by_candidate = {"alone": 1, "shared": len(devices)}
    timings = {
        candidate: timing
        for candidate, timing in load_timings(kind, cache_key).items()
        if candidate in num_devices_by_candidate
    }
    if len(timings) < len(num_devices_by_candidate):
        timings = {
            candidate: Timing(
                time_server_step(task, batch_size, devices, is_sharded=num_devices > 1)
            )
            for candidate, num_devices in num_devices_by_candidate.items()
        }
        save_timings(kind, cache_key, timings)
        log.info("server's work by devices that do all of it or share it (seconds): %s", timings)
    return (
        _select_fastest(
            {
                num_devices_by_candidate[candidate]: timing.seconds or 0.0
                for candidate, timing in timings.items()
            }
        )
        > 1
    )


def _select_fastest(seconds: dict[int, float]) -> int:
    """The number of lanes that takes least, if it is clearly less than the fewest take."""
    best, fewest = min(seconds, key=lambda lanes: seconds[lanes]), min(seconds)
    return best if seconds[best] < SPEEDUP_MARGIN * seconds[fewest] else fewest
