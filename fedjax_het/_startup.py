"""Settings of JAX that must be made before a backend starts.

On a CPU, many small clients train fastest on one lane per core, each on its own device. The host
platform is therefore configured with one device per core. A user's own setting takes precedence.

`import fedjax_het` does not import JAX, whose import takes longer than that of everything else. The
settings are made as soon as JAX is imported, by the package or by the user.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError

MIN_COMPILE_SECONDS = 0.1
"""Compilation time in seconds from which a program is cached."""


def configure_jax_when_imported() -> None:
    """Make the settings now if JAX has been imported, otherwise as the last step of its import."""
    if "jax" in sys.modules:
        _configure_jax()
    else:
        sys.meta_path.insert(0, _JaxFinder())


class _JaxFinder(importlib.abc.MetaPathFinder):
    """Finds the package `jax` for its first import, and extends the import by the settings."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_configure(module: ModuleType) -> None:
            env.import_without_invalid_variables(lambda: execute(module))
            _configure_jax()

        # The loader stays JAX's own, which finds the package's sources and files.
        vars(spec.loader)["exec_module"] = execute_and_configure
        return spec


def _configure_jax() -> None:
    request_one_cpu_device_per_core()
    enable_compilation_cache()


def _get_jax_config() -> Any:
    """Return `jax.config`; JAX adds its settings at run time, so that its types lack them."""
    import jax

    return jax.config


def count_available_cores() -> int:
    """Return the number of cores that this process may use, including the limit of a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def request_one_cpu_device_per_core() -> None:
    """Configure JAX with one CPU device per core, unless the user has chosen a number."""
    if "xla_force_host_platform_device_count" in env.get_text(env.XLA_FLAGS):
        return
    config = _get_jax_config()
    if env.get_text(env.JAX_CPU_DEVICES) or config.jax_num_cpu_devices != -1:
        return
    with contextlib.suppress(RuntimeError):  # a running backend keeps its devices
        config.update("jax_num_cpu_devices", count_available_cores())


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache in the user's cache folder.

    A cache that the user has chosen, and JAX_ENABLE_COMPILATION_CACHE=0, take precedence. Each type
    of processor has its own folder, since machines that differ may share a home folder.
    """
    config = _get_jax_config()
    if (folder := config.jax_compilation_cache_dir) is not None:
        config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        return
    try:
        folder = env.make_private_dir(env.get_program_cache_dir())
    except (OSError, ConfigError):  # every start compiles; a run reports a bad variable
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
