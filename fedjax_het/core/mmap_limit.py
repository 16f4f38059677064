"""What a process that compiles many programs runs out of: memory maps.

On Linux a process may have 65,530 (`vm.max_map_count`), and on a CPU every compiled program takes
some hundreds, a few for each of its kernels: after one or two hundred programs that are kept, the
next mapping fails and with it the process, by a segmentation fault somewhere inside XLA.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import jax

MAX_MMAP_FRACTION = 0.4  # of the maps that a process may have; the next program adds its own


def count_memory_maps() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def read_max_memory_maps() -> int | None:
    """That a process may have; None where the system does not tell."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None


def is_near_mmap_limit() -> bool:
    max_maps = read_max_memory_maps()
    return max_maps is not None and count_memory_maps() > MAX_MMAP_FRACTION * max_maps


def evict_programs_if_needed(*evict_callbacks: Callable[[], None]) -> None:
    """Where it is crowded, let go of compiled programs: by each of `forget`, then of all that jax
    keeps, which are compiled or read from the cache folder again if they are called again."""
    for evict in (*evict_callbacks, jax.clear_caches):
        if not is_near_mmap_limit():
            return
        evict()
        gc.collect()
