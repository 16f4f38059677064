"""How much memory there is to put federations into.

How much memory a program takes: at least, as it was traced, and exactly, once compiled.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

USABLE_FRACTION = 0.9  # of what is free; allocators waste some
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Limit, use, and what of the use the system takes back when it needs it: of version 2 and 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file ", "active_file ")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file ", "total_active_file "),
    ),
)


def usable_free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that may be taken on each of the devices; None where nobody tells.

    CPU devices share the machine's memory, or what a container or a limit of the process allows.
    """
    free = total_free_bytes(devices)
    return None if free is None else int(USABLE_FRACTION * free)


def total_free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The same with what allocators waste: more is nowhere."""
    process_devices = local_devices(devices)
    stats = [device.memory_stats() for device in process_devices]
    if all(s and "bytes_limit" in s for s in stats):
        free = min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)
    else:
        host_bytes = free_host_bytes() if process_devices[0].platform == "cpu" else None
        free = None if host_bytes is None else host_bytes // len(process_devices)
    return min_over_processes(free, devices)


def memory_limit_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that this program may ever take on each of the devices; None where nobody tells, as of
    CPUs and of devices that are only described. The same for all processes."""
    try:
        stats = [device.memory_stats() for device in local_devices(devices)]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    has_limits = all(s and "bytes_limit" in s for s in stats) and bool(stats)
    return min_over_processes(min(s["bytes_limit"] for s in stats) if has_limits else None, devices)


def local_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def min_over_processes(free: int | None, devices: Sequence[jax.Device]) -> int | None:
    """The least of what the processes of these devices have, so that all decide alike: one that
    went on alone would wait for the others for ever. All must call this."""
    if len({device.process_index for device in devices}) == 1:
        return free
    from jax.experimental import multihost_utils

    # Devices have no whole numbers of so many bits.
    bytes_by_process = multihost_utils.process_allgather(
        np.float32(np.inf if free is None else free)
    )
    min_bytes = float(np.min(bytes_by_process))
    return None if np.isinf(min_bytes) else int(min_bytes)


def free_host_bytes() -> int | None:
    """Bytes that this process may still take of the host's memory; None where nobody tells."""
    candidates = [
        max(0, num_bytes)
        for num_bytes in (_free_address_space(), *_free_cgroup_bytes())
        if num_bytes is not None
    ]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        candidates.append(1024 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not candidates:
            candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return min(candidates) if candidates else None


def _free_address_space() -> int | None:
    """What `ulimit -v` leaves."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            return limit - num_pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_cgroup_bytes() -> Iterator[int]:
    """What each of the groups that this process is in leaves of its limit, if it has one."""
    folders = {_CGROUP_ROOT, _CGROUP_ROOT / "memory"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                process_group = _CGROUP_ROOT / controllers / name.lstrip("/")
                folders |= {
                    process_group,
                    *(parent for parent in process_group.parents if _CGROUP_ROOT in parent.parents),
                }
    for folder in folders:
        for limit, usage, reclaimable_keys in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                limit_bytes = int((folder / limit).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                reclaimable_bytes = sum(
                    int(line.split()[1]) for line in lines if line.startswith(reclaimable_keys)
                )
                yield limit_bytes - int((folder / usage).read_text()) + reclaimable_bytes


# What these make is in memory: XLA fuses what is done value by value, but not what it calls a
# library for, nor what a loop carries or collects.
_MATERIALIZING_PRIMITIVES = ("dot_general", "conv_general_dilated", "scan", "while", "sort")


def _count_bytes(tree: Any) -> int:
    """Of arrays or of their shapes, in full."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compute_compiled_bytes(program: Any, inputs: tuple) -> int:
    """What a jitted program needs on each device, arguments and results with it, as the compiler
    says. Compiles it; nothing is allocated for it."""
    return get_compiled_bytes(program.lower(*inputs).compile())


def get_compiled_bytes(compiled: Any) -> int:
    """The same of one that is compiled."""
    memory_stats = compiled.memory_analysis()
    return (
        memory_stats.argument_size_in_bytes
        + memory_stats.output_size_in_bytes
        - memory_stats.alias_size_in_bytes
        + memory_stats.temp_size_in_bytes
    )


def lower_bound_bytes(jaxpr: Any) -> int:
    """The most that one step of a traced program (a `ClosedJaxpr`, or `Jaxpr`) makes at a time, on
    each device: the program cannot do with less.

    Cost: a pass over what was traced.
    """
    return max(_materialized_bytes(getattr(jaxpr, "jaxpr", jaxpr)), default=0)


def _materialized_bytes(jaxpr: Any) -> Iterator[int]:
    live_variables = {id(var) for var in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        live_outputs = [var for var in equation.outvars if id(var) in live_variables]
        if not live_outputs and not equation.effects:
            continue  # XLA leaves it out, too
        live_variables |= {id(var) for var in equation.invars}
        has_single_iteration = equation.params.get("length") == 1  # a loop of one step is no loop
        if equation.primitive.name in _MATERIALIZING_PRIMITIVES and not has_single_iteration:
            yield _count_bytes([var.aval for var in live_outputs])
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _materialized_bytes(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
