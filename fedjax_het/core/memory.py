"""Memory: free bytes of devices and host, needs of programs, and the limit of memory maps.

Linux allows a process 65,530 memory maps (`vm.max_map_count`). Every compiled program on a CPU uses
some hundreds, a few for each kernel. After one or two hundred stored programs the next mapping
fails, and the process ends with a segmentation fault inside XLA. `evict_programs_if_needed`
prevents this.
"""

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_het.nn.flops import iter_inner_jaxprs

MAX_CACHED_PROGRAMS = 8
"""Number of signatures whose programs a process stores; each takes 10 to 25 MB on a CPU."""
USABLE_FRACTION = 0.9  # of the free bytes; allocators waste some
MAX_MMAP_FRACTION = 0.4  # of the maps that a process may have; the next program adds more
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Limit, use, and the part of the use that the system can reclaim, in versions 2 and 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file ", "active_file ")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file ", "total_active_file "),
    ),
)


def usable_free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes that programs may use on each device: 90 % of `total_free_bytes`."""
    free = total_free_bytes(devices)
    return None if free is None else int(USABLE_FRACTION * free)


def total_free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the free bytes of each device, or None if they are unknown.

    CPU devices share the free memory of the host, see `free_host_bytes`. All processes of the
    devices must call this function, and get the same number.
    """
    process_devices = local_devices(devices)
    stats = [device.memory_stats() for device in process_devices]
    free = None
    if all(s and "bytes_limit" in s for s in stats):
        free = min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)
    elif process_devices[0].platform == "cpu" and (host_bytes := free_host_bytes()) is not None:
        free = host_bytes // len(process_devices)
    return min_over_processes(free, devices)


def memory_limit_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes of each device that this program may ever use, or None if it is unknown.

    It is unknown for CPUs and for devices that are only described. All processes of the devices
    must call this function, and get the same number.
    """
    try:
        stats = [device.memory_stats() for device in local_devices(devices)]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    return min_over_processes(
        min(limits) if limits and len(limits) == len(stats) else None, devices
    )


def local_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Return the devices of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def min_over_processes(value: int | None, devices: Sequence[jax.Device]) -> int | None:
    """Return the smallest value of the processes of these devices.

    Processes that decided differently would wait for each other for ever. All of them must call
    this function.

    Args:
      value: the value of this process; None: unknown.
      devices: the devices.

    Returns:
      The smallest known value, or None.
    """
    if len({device.process_index for device in devices}) == 1:
        return value
    from jax.experimental import multihost_utils

    # Devices have no integers of that many bits.
    values = multihost_utils.process_allgather(np.float32(np.inf if value is None else value))
    smallest = float(np.min(values))
    return None if np.isinf(smallest) else int(smallest)


def free_host_bytes() -> int | None:
    """Return the bytes of the host's memory that this process may still use.

    The machine, the cgroups of the process and `ulimit -v` limit them. The result is None if the
    system does not report any.
    """
    candidates = [max(0, free) for free in (*_free_address_space(), *_free_cgroup_bytes())]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        candidates.append(1024 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not candidates:
            candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return min(candidates, default=None)


def _free_address_space() -> Iterator[int]:
    """Yield the bytes that `ulimit -v` leaves, if there is a limit."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            num_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
            yield limit - num_pages * os.sysconf("SC_PAGE_SIZE")


def _free_cgroup_bytes() -> Iterator[int]:
    """Yield the bytes that the limit of each cgroup of this process leaves."""
    folders = {_CGROUP_ROOT, _CGROUP_ROOT / "memory"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                group = _CGROUP_ROOT / controllers / name.lstrip("/")
                folders |= {
                    path for path in (group, *group.parents) if _CGROUP_ROOT in path.parents
                }
    for folder in folders:
        for limit, usage, reclaimable in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                free = int((folder / limit).read_text(encoding="utf-8")) - int(
                    (folder / usage).read_text(encoding="utf-8")
                )
                lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                yield free + sum(int(x.split()[1]) for x in lines if x.startswith(reclaimable))


def compute_compiled_bytes(program: Any, inputs: tuple) -> int:
    """Compile a jitted program and return the bytes that it needs, see `get_compiled_bytes`.

    Args:
      program: the jitted function.
      inputs: its arguments, arrays or shapes; nothing is allocated.

    Returns:
      Bytes on each device.
    """
    return get_compiled_bytes(program.lower(*inputs).compile())


def get_compiled_bytes(compiled: Any) -> int:
    """Return the bytes on each device for a compiled program, its arguments and its results."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


# XLA fuses elementwise operations, but stores the results of library calls and the values that a
# loop carries or collects.
_MATERIALIZING_PRIMITIVES = ("dot_general", "conv_general_dilated", "scan", "while", "sort")


def lower_bound_bytes(jaxpr: Any) -> int:
    """Return a lower bound of the bytes on each device: the largest result of one operation.

    Cost: a pass over the traced program.

    Args:
      jaxpr: the program, a `ClosedJaxpr` or `Jaxpr`.

    Returns:
      Number of bytes.
    """
    return max(_iter_materialized_bytes(getattr(jaxpr, "jaxpr", jaxpr)), default=0)


def _iter_materialized_bytes(jaxpr: Any) -> Iterator[int]:
    live_variables = {id(var) for var in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        live_outputs = [var for var in equation.outvars if id(var) in live_variables]
        if not live_outputs and not equation.effects:
            continue  # XLA leaves it out, too
        live_variables |= {id(var) for var in equation.invars}
        has_single_iteration = equation.params.get("length") == 1  # a loop of one step is no loop
        if equation.primitive.name in _MATERIALIZING_PRIMITIVES and not has_single_iteration:
            yield sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in live_outputs)
        for inner in iter_inner_jaxprs(equation):
            yield from _iter_materialized_bytes(inner)


def count_memory_maps() -> int:
    """Return the number of memory maps of this process; 0 if the system does not report it."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def read_max_memory_maps() -> float:
    """Return the number of memory maps that a process may have; infinite if it is unknown."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return math.inf


def is_near_mmap_limit() -> bool:
    """Return whether the next compiled programs might exceed the limit of memory maps."""
    return count_memory_maps() > MAX_MMAP_FRACTION * read_max_memory_maps()


def release_freed_memory() -> None:
    """Return free memory of the C library to the system, on Linux.

    XLA's compiler frees its memory in small blocks, which the C library would otherwise retain:
    some MB for each new program. Cost: some milliseconds.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def evict_programs_if_needed(*evict_callbacks: Callable[[], None]) -> None:
    """Drop compiled programs while the process is near the limit of memory maps.

    Programs that are called again are compiled again, or read from the cache folder.

    Args:
      *evict_callbacks: called in order, before `jax.clear_caches`, until enough maps are free.
    """
    for evict in (*evict_callbacks, jax.clear_caches):
        if not is_near_mmap_limit():
            return
        evict()
        gc.collect()
