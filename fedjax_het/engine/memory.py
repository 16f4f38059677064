"""How much memory there is to put federations into."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import jax

SPARE = 0.9  # of what is free; allocators waste some
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that may be taken on each of the devices; None where nobody tells.

    CPU devices share the machine's memory, or what a container allows.
    """
    stats = [device.memory_stats() for device in devices]
    if all(s and "bytes_limit" in s for s in stats):
        return int(SPARE * min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats))
    free = _free_ram() if devices[0].platform == "cpu" else None
    return None if free is None else int(SPARE * free / len(devices))


def _free_ram() -> int | None:
    known = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        known.append(1024 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not known:
            known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    for limit, used in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            known.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(known) if known else None
