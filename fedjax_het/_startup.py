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
from fedjax_het.utils.errors import ConfigError

MIN_COMPILE_SECONDS = 0.1  # what took less is compiled again
# jax adds its settings to `jax.config` at run time: its types do not name them.
_JAX_CONFIG: Any = jax.config


def count_available_cores() -> int:
    """Cores that this process may run on (a container's limit included where the OS tells)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def request_one_cpu_device_per_core() -> None:
    if "xla_force_host_platform_device_count" in env.get_text(env.XLA_FLAGS):
        return
    if env.get_text(env.JAX_CPU_DEVICES) or _JAX_CONFIG.jax_num_cpu_devices != -1:
        return
    with contextlib.suppress(RuntimeError):  # a backend runs already: use the devices it has
        jax.config.update("jax_num_cpu_devices", count_available_cores())


def enable_compilation_cache() -> None:
    """Point jax's persistent compilation cache at the user's cache folder, for the user alone.

    A cache that the user has chosen, and JAX_ENABLE_COMPILATION_CACHE=0, stand. Programs compiled
    for this processor are kept apart: a home folder may be shared by machines that differ.
    """
    if _JAX_CONFIG.jax_compilation_cache_dir is not None:
        return
    try:
        folder = env.make_private_dir(env.get_program_cache_dir())
    except (OSError, ConfigError):  # then every start compiles; a run tells of a variable
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
