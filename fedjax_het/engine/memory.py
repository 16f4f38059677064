"""How much memory there is to put federations into."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

SPARE = 0.9  # of what is free; allocators waste some
_CGROUPS = Path("/sys/fs/cgroup")
# Limit, use, and what of the use the system takes back when it needs it: of version 2 and 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file ", "active_file ")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file ", "total_active_file "),
    ),
)


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that may be taken on each of the devices; None where nobody tells.

    CPU devices share the machine's memory, or what a container or a limit of the process allows.
    """
    free = all_free_bytes(devices)
    return None if free is None else int(SPARE * free)


def all_free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The same with what allocators waste: more is nowhere."""
    own = own_devices(devices)
    stats = [device.memory_stats() for device in own]
    if all(s and "bytes_limit" in s for s in stats):
        free = min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)
    else:
        ram = free_ram() if own[0].platform == "cpu" else None
        free = None if ram is None else ram // len(own)
    return least_of_processes(free, devices)


def whole_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that this program may ever take on each of the devices; None where nobody tells, as of
    CPUs and of devices that are only described. The same for all processes."""
    try:
        stats = [device.memory_stats() for device in own_devices(devices)]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None
    known = all(s and "bytes_limit" in s for s in stats) and bool(stats)
    return least_of_processes(min(s["bytes_limit"] for s in stats) if known else None, devices)


def own_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def least_of_processes(free: int | None, devices: Sequence[jax.Device]) -> int | None:
    """The least of what the processes of these devices have, so that all decide alike: one that
    went on alone would wait for the others for ever. All must call this."""
    if len({device.process_index for device in devices}) == 1:
        return free
    from jax.experimental import multihost_utils

    # Devices have no whole numbers of so many bits.
    everyones = multihost_utils.process_allgather(np.float32(np.inf if free is None else free))
    least = float(np.min(everyones))
    return None if np.isinf(least) else int(least)


def free_ram() -> int | None:
    """Bytes that this process may still take of the host's memory; None where nobody tells."""
    known = [max(0, left) for left in (_address_space(), *_cgroups()) if left is not None]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        known.append(1024 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not known:
            known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return min(known) if known else None


def _address_space() -> int | None:
    """What `ulimit -v` leaves."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            taken = int(Path("/proc/self/statm").read_text().split()[0])
            return limit - taken * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroups() -> Iterator[int]:
    """What each of the groups that this process is in leaves of its limit, if it has one."""
    folders = {_CGROUPS, _CGROUPS / "memory"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds in ("", "memory"):
                own = _CGROUPS / kinds / name.lstrip("/")
                folders |= {own, *(above for above in own.parents if _CGROUPS in above.parents)}
    for folder in folders:
        for limit, used, taken_back in _CGROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most = int((folder / limit).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                files = sum(int(line.split()[1]) for line in lines if line.startswith(taken_back))
                yield most - int((folder / used).read_text()) + files
