"""What must be decided before jax starts a backend.

On a CPU the fastest way to train many small clients is one lane per core, each on a device of
its own, so the host platform is asked for as many devices as there are cores. This sets a
configuration value only: no backend starts, and a user's own setting wins.
"""

import contextlib
import os
from typing import Any

import jax

from fedjax_het.utils import env


def count_available_cores() -> int:
    """Cores that this process may run on (a container's limit included where the OS tells)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def request_one_cpu_device_per_core() -> None:
    if "xla_force_host_platform_device_count" in env.get_text(env.XLA_FLAGS):
        return
    # jax adds its settings to `jax.config` at run time: its types do not name them.
    jax_config: Any = jax.config
    num_cpu_devices = jax_config.jax_num_cpu_devices
    if env.get_text(env.JAX_CPU_DEVICES) or num_cpu_devices != -1:
        return
    with contextlib.suppress(RuntimeError):  # a backend runs already: use the devices it has
        jax.config.update("jax_num_cpu_devices", count_available_cores())
