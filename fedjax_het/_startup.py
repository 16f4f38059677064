"""Settings of JAX that must be made before a backend starts.

On a CPU, many small clients train fastest on one lane per core, each on its own device. The host
platform is therefore configured with one device per core. A user's own setting takes precedence.
"""

import contextlib
import os
from typing import Any

import jax

from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError

MIN_COMPILE_SECONDS = 0.1
"""Compilation time in seconds from which a program is cached."""
# JAX adds its settings to `jax.config` at run time, so that its types lack them.
_JAX_CONFIG: Any = jax.config


def count_available_cores() -> int:
    """Return the number of cores that this process may use, including the limit of a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def request_one_cpu_device_per_core() -> None:
    """Configure JAX with one CPU device per core, unless the user has chosen a number."""
    if "xla_force_host_platform_device_count" in env.get_text(env.XLA_FLAGS):
        return
    if env.get_text(env.JAX_CPU_DEVICES) or _JAX_CONFIG.jax_num_cpu_devices != -1:
        return
    with contextlib.suppress(RuntimeError):  # a running backend keeps its devices
        jax.config.update("jax_num_cpu_devices", count_available_cores())


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache in the user's cache folder.

    A cache that the user has chosen, and JAX_ENABLE_COMPILATION_CACHE=0, take precedence. Each type
    of processor has its own folder, since machines that differ may share a home folder.
    """
    if (folder := _JAX_CONFIG.jax_compilation_cache_dir) is not None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        return
    try:
        folder = env.make_private_dir(env.get_program_cache_dir())
    except (OSError, ConfigError):  # every start compiles; a run reports a bad variable
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
