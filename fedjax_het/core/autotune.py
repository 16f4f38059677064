"""Choice of lanes, of convolution implementations, and of sharing the server's work.

On a CPU one flat lane per core usually wins; on an accelerator many vmapped lanes do. The best
number depends on the network and the chip, so each candidate trains a few steps, once. The time per
step is then weighted with the steps that a run's own clients make for that number of lanes.

The user's cache folder stores the timings: a table for each kind of device. A row is a workload
(jaxlib, network, optimizer, batch, precision), a column a candidate (lanes and implementation of
convolutions). A candidate that did not fit or failed is stored with the memory that was free; with
more memory it is timed again.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
from pydantic import BaseModel, Field

from fedjax_het.core.autotune_workloads import (
    NUM_SERVER_STEPS,
    Workload,
    WorkloadMemoryError,
    format_key,
    time_client_step,
    time_server_step,
)
from fedjax_het.core.memory import total_free_bytes
from fedjax_het.core.task import Task
from fedjax_het.nn.conv_products import AUTO, CONV_IMPLS, IM2COL, NATIVE, UNROLLED
from fedjax_het.nn.precision import has_auto_convolutions
from fedjax_het.utils.env import get_cache_dir, make_private_dir
from fedjax_het.utils.errors import summarize_error
from fedjax_het.utils.io import write_atomically

log = logging.getLogger("fedjax_het")

SPEEDUP_MARGIN = 0.9  # more lanes must take less than this share of the time that fewer take
MAX_PAIR_LANES = 64  # lanes of pairs that are tried: each holds a batch's activations
MAX_UNROLLED_LANES = 8  # the program grows with the lanes
MAX_SERVER_BATCH_SIZE = 4096  # samples of a timed step of the server; more only take memory
# Minimum number of clients, or pairs, that a device processes in a timing.
NUM_TIMED_CLIENTS, NUM_TIMED_CLIENTS_CPU, NUM_TIMED_PAIRS = 32, 4, 4
RETRY_MEMORY_FACTOR = 1.25  # a candidate that failed is timed again with so much more memory
# On a CPU, a shorter run ends sooner without the compilation of the timings.
MIN_TIMED_FLOPS = 1e11
CACHE_FILE = "lanes.json"


class LaneChoice(NamedTuple):
    """The chosen lanes.

    Attributes:
      lanes: lanes of one run on each device.
      num_parallel: runs whose lanes share a device in parallel.
      seconds: time per client step by lanes per device; empty if not timed.
      conv_impl: implementation of the convolutions that leave it open.
    """

    lanes: int
    num_parallel: int
    seconds: dict[int, float]
    conv_impl: str = AUTO


class Candidate(NamedTuple):
    """A candidate to time.

    Attributes:
      lanes: lanes per device.
      kind: implementation of convolutions; `SERVER` for a step of the server on `lanes` devices.
    """

    lanes: int
    kind: str

    def __str__(self) -> str:
        """Return the column in the table of timings."""
        return f"{self.lanes} {self.kind}"


SERVER = "server"


class Timing(NamedTuple):
    """Timing of one candidate.

    Attributes:
      seconds: seconds per step; None if the candidate failed.
      insufficient_bytes: free bytes on each device with which it failed.
    """

    seconds: Annotated[float, Field(gt=0)] | None
    insufficient_bytes: int = 0

    def is_valid_for(self, free_bytes: int | None) -> bool:
        """Return whether the timing holds with that much free memory (None: unknown)."""
        return (
            self.seconds is not None or free_bytes is None or free_bytes <= self.insufficient_bytes
        )


class _TimingFile(BaseModel, strict=True):
    """The file of timings; one of another format, or with an invalid entry, is ignored."""

    format: Literal[3] = 3
    devices: dict[str, dict[str, dict[str, Timing]]] = {}


def load_timings(device_kind: str) -> dict[str, dict[str, Timing]]:
    """Return the stored timings on a kind of device by workload and candidate."""
    return _load_file().devices.get(device_kind, {})


def _load_file() -> _TimingFile:
    try:
        return _TimingFile.model_validate_json((get_cache_dir() / CACHE_FILE).read_bytes())
    except (OSError, ValueError):
        return _TimingFile()


def save_timings(device_kind: str, workload: str, timings: Mapping[str, Timing]) -> None:
    """Add timings to the file; if it cannot be written, the next run times again.

    Args:
      device_kind: kind of the devices.
      workload: row of the table.
      timings: timings by candidate.
    """
    file = _load_file()
    file.devices.setdefault(device_kind, {}).setdefault(workload, {}).update(timings)
    content = file.model_dump_json(indent=1).encode()
    try:
        path = make_private_dir() / CACHE_FILE
        write_atomically(path, lambda file: file.write(content), private=True)
    except OSError as error:
        log.info("the timings of lanes are not stored: %s", error)


def list_lane_counts(num_devices: int, cohort_size: int, num_runs: int = 1) -> list[int]:
    """List the numbers of lanes per device to time.

    Args:
      num_devices: number of devices.
      cohort_size: clients, or pairs, of a round.
      num_runs: number of runs.

    Returns:
      Numbers of lanes, ascending; the largest fits the clients of all runs.
    """
    max_lanes = max(1, -(-cohort_size // num_devices))
    if jax.default_backend() == "cpu":
        return [v for v in (1, 4) if v <= max_lanes]
    max_lanes *= -(-num_runs // num_devices)
    powers = [4**i for i in range(8) if 4**i < max_lanes]
    return [*powers, max_lanes]


def _list_conv_impls(lanes: int, model) -> list[str]:
    """Return the implementations of convolutions to time with that number of lanes."""
    backend = jax.default_backend()
    if backend == "cpu" or not has_auto_convolutions(model):  # a CPU chooses for each product
        return [AUTO]
    if lanes == 1 or backend == "tpu":
        return [NATIVE, IM2COL]
    # Elsewhere a native convolution of several lanes is a grouped convolution, which is slow.
    return [IM2COL, UNROLLED] if lanes <= MAX_UNROLLED_LANES else [IM2COL]


def choose_lanes(
    workload: Workload,
    *,
    devices: Sequence[jax.Device],
    cohort_size: int,
    num_runs: int = 1,
    idle_factor: Callable[[int], float] = lambda lanes: 1.0,
    count_flops: Callable[[], float] = lambda: math.inf,
    memory_bytes: int | None = None,
) -> LaneChoice:
    """Choose lanes by timings of generated work, stored ones where there are some.

    The clients of one run fill a device's lanes first, then further runs do. To the device, all
    lanes are alike. Candidates that do not fit or fail are left out. If all fail, the
    choice is the fewest lanes, and the run reports the error. On a CPU, the choice for short runs
    without stored timings is the fewest lanes, too.

    Cost: one compilation of local training per candidate, once. With several processes, the choice
    of the first process holds for all.

    Args:
      workload: the work to time.
      devices: devices that share the clients.
      cohort_size: clients, or pairs, of a round.
      num_runs: number of runs.
      idle_factor: `lanes -> factor`, the steps of all lanes of each block, idle ones included, per
        step of the run's own clients; 1 without idle lanes.
      count_flops: returns the floating-point operations of the clients' training in all runs, 0 if
        they are unknown.
      memory_bytes: bytes on each device that may be used (None: the free bytes).

    Returns:
      The choice.
    """
    process_devices = [device for device in devices if device.process_index == jax.process_index()]
    choice = _choose_locally(
        workload, process_devices, cohort_size, num_runs, idle_factor, count_flops, memory_bytes
    )
    if len(process_devices) == len(devices):
        return choice
    # Timings differ between processes, and programs that differ would wait for each other for ever.
    from jax.experimental import multihost_utils

    values = np.array([choice.lanes, choice.num_parallel, CONV_IMPLS.index(choice.conv_impl)])
    lanes, num_parallel, impl = map(int, multihost_utils.broadcast_one_to_all(values))
    return LaneChoice(lanes, num_parallel, choice.seconds, CONV_IMPLS[impl])


def lookup_conv_impl(workload: Workload, devices: Sequence[jax.Device], lanes: int) -> str:
    """Return the fastest implementation of convolutions among the stored timings.

    Args:
      workload: the work.
      devices: devices that share the clients.
      lanes: lanes per device.

    Returns:
      Name of the implementation; "auto" without timings.
    """
    timings = load_timings(devices[0].device_kind).get(workload.format_key(devices), {})
    seconds = {
        impl: timing.seconds
        for impl in CONV_IMPLS
        if (timing := timings.get(str(Candidate(lanes, impl)))) and timing.seconds is not None
    }
    return min(seconds, key=lambda impl: seconds[impl], default=AUTO)


def _choose_locally(
    workload: Workload,
    devices,
    cohort_size,
    num_runs,
    idle_factor,
    count_flops,
    memory_bytes,
) -> LaneChoice:
    max_lanes = None if workload.inputs_per_pair is None else MAX_PAIR_LANES
    run_lane_counts, all_lane_counts = (
        sorted({min(v, max_lanes or v) for v in list_lane_counts(len(devices), cohort_size, runs)})
        for runs in (1, num_runs)
    )
    candidates = [
        Candidate(lanes, impl)
        for lanes in sorted({*run_lane_counts, *all_lane_counts})
        for impl in _list_conv_impls(lanes, workload.training.task.model)
    ]
    if len(candidates) == 1:
        return LaneChoice(candidates[0].lanes, 1, {}, candidates[0].kind)
    free_bytes, key = memory_bytes or total_free_bytes(devices), workload.format_key(devices)
    has_timings = bool(load_timings(devices[0].device_kind).get(key))
    if jax.default_backend() == "cpu" and not has_timings and 0 < count_flops() < MIN_TIMED_FLOPS:
        return LaneChoice(min(run_lane_counts), 1, {})

    if jax.default_backend() == "cpu":
        min_clients = NUM_TIMED_CLIENTS_CPU
    else:
        min_clients = NUM_TIMED_CLIENTS if max_lanes is None else NUM_TIMED_PAIRS

    def time_candidate(candidate: Candidate) -> float:
        lanes, conv_impl = candidate
        num_clients = max(lanes, min_clients)
        return time_client_step(workload, conv_impl, devices, lanes, num_clients, free_bytes)

    timings = _load_or_time(devices, key, candidates, time_candidate, free_bytes)
    slowest_first = sorted(timings, key=lambda candidate: -timings[candidate])
    fastest = {candidate.lanes: candidate for candidate in slowest_first}
    seconds = {lanes: timings[candidate] for lanes, candidate in sorted(fastest.items())}
    fitting_lane_counts = [v for v in run_lane_counts if v in seconds]
    if not fitting_lane_counts:
        return LaneChoice(min(run_lane_counts), 1, {})
    # The lanes of a run must not depend on the number of runs: its rounding would.
    lanes = _select_fastest({v: seconds[v] * idle_factor(v) for v in fitting_lane_counts})
    total_lanes = _select_fastest({v: taken for v, taken in seconds.items() if v >= lanes})
    num_parallel = max(1, total_lanes // lanes)
    return LaneChoice(lanes, num_parallel, seconds, fastest[total_lanes].kind)


def _load_or_time(
    devices: Sequence[jax.Device],
    key: str,
    candidates: Sequence[Candidate],
    time_candidate: Callable[[Candidate], float],
    free_bytes: int | None,
) -> dict[Candidate, float]:
    """Return the seconds of the candidates that fit, from the file or by timing them."""
    device_kind = devices[0].device_kind
    stored = load_timings(device_kind).get(key, {})
    seconds: dict[Candidate, float] = {}
    new_timings: dict[str, Timing] = {}
    failed_kinds: set[str] = set()
    for candidate in sorted(candidates):
        if candidate.kind in failed_kinds:  # more lanes need more memory
            continue
        timing = stored.get(str(candidate))
        if timing is None or not timing.is_valid_for(free_bytes):
            timing = new_timings[str(candidate)] = _time(candidate, time_candidate, free_bytes)
        if timing.seconds is None:
            failed_kinds.add(candidate.kind)
        else:
            seconds[candidate] = timing.seconds
    if new_timings:
        save_timings(device_kind, key, new_timings)
        times = [f"{candidate} lanes {1000 * s:.3g} ms" for candidate, s in seconds.items()]
        log.info("measured time per step and device: %s", ", ".join(times))
    return seconds


def _time(
    candidate: Candidate, time_candidate: Callable[[Candidate], float], free_bytes: int | None
) -> Timing:
    try:
        return Timing(time_candidate(candidate))
    except WorkloadMemoryError as error:
        reason, insufficient_bytes = str(error), error.needed_bytes - 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = summarize_error(error, 120)
        insufficient_bytes = int(RETRY_MEMORY_FACTOR * (free_bytes or 0))
    log.info("lanes: %d per device (%s) are left out: %s", *candidate, reason)
    return Timing(None, insufficient_bytes)


def choose_server_sharding(
    task: Task, *, batch_size: int, devices: Sequence[jax.Device], label: str
) -> bool:
    """Choose whether devices that share a run also share the steps of its server.

    Cost: two compilations of a training step and some steps of SGD on generated data, once.

    Args:
      task: network and normalization.
      batch_size: samples per step, of which at most `MAX_SERVER_BATCH_SIZE` are timed.
      devices: devices that share the run.
      label: the network, and everything else that a step's time depends on.

    Returns:
      Whether sharing is clearly faster.
    """
    can_shard = task.model.can_shard_batch and len(devices) > 1
    is_single_process = all(device.process_index == jax.process_index() for device in devices)
    if not can_shard or not is_single_process:  # a collective per step is too slow for processes
        return False

    timed_batch_size = min(batch_size, MAX_SERVER_BATCH_SIZE)

    def time_candidate(candidate: Candidate) -> float:
        return time_server_step(task, timed_batch_size, devices, is_sharded=candidate.lanes > 1)

    candidates = [Candidate(1, SERVER), Candidate(len(devices), SERVER)]
    key = format_key(label, SERVER, timed_batch_size, devices, NUM_SERVER_STEPS)
    seconds = _load_or_time(devices, key, candidates, time_candidate, None)
    if len(seconds) < len(candidates):
        return False
    return _select_fastest({candidate.lanes: seconds[candidate] for candidate in candidates}) > 1


def _select_fastest(seconds: dict[int, float]) -> int:
    """Return the lanes with the shortest time, if it is clearly shorter than with the fewest."""
    best, fewest = min(seconds, key=lambda lanes: seconds[lanes]), min(seconds)
    return best if seconds[best] < SPEEDUP_MARGIN * seconds[fewest] else fewest
