"""The user's cache folder: decoded data, timings, compiled programs. All of it can be remade."""

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from fedjax_het.utils import env
from fedjax_het.utils.errors import ConfigError

MIN_COMPILE_SECONDS = 0.1  # what took less is compiled again


def get_cache_dir() -> Path:
    """$FEDJAX_HET_CACHE, else $XDG_CACHE_HOME/fedjax_het, else ~/.cache/fedjax_het. Raises
    ConfigError where such a variable names no folder that can be used."""
    cache_dir = env.get_value(env.CACHE_DIR)
    if cache_dir is not None:
        return cache_dir
    xdg_cache_home = env.get_value(env.XDG_CACHE_HOME)
    return (xdg_cache_home or Path(os.path.expanduser("~/.cache"))) / "fedjax_het"


def make_private_dir(path: Path | None = None) -> Path:
    """`path` (default: the root), made for the user alone where it did not exist.

    Raises OSError where that cannot be.
    """
    path = path or get_cache_dir()
    for folder in (*reversed(path.parents), path):  # `parents=True` would leave these to the umask
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def enable_compilation_cache() -> None:
    """Point jax's persistent compilation cache at the user's cache folder, for the user alone.

    A cache that the user has chosen, and JAX_ENABLE_COMPILATION_CACHE=0, stand. Programs compiled
    for this processor are kept apart: a home folder may be shared by machines that differ.
    """
    import jax

    # jax adds its settings to `jax.config` at run time: its types do not name them.
    jax_config: Any = jax.config
    if jax_config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = make_private_dir(get_program_cache_dir())
    except (OSError, ConfigError):  # then every start compiles; a run tells of a variable
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def get_program_cache_dir() -> Path:
    """Of what is known of programs compiled for this processor."""
    return get_cache_dir() / "xla" / _hash_cpu_features()


@functools.cache
def _hash_cpu_features() -> str:
    """A short name for the processor's instruction set."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
