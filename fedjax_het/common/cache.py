"""The user's cache folder: decoded data, timings, compiled programs. All of it can be remade."""

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from fedjax_het.common import variables
from fedjax_het.common.errors import ConfigError

MIN_COMPILE_SECONDS = 0.1  # what took less is compiled again


def cache_root() -> Path:
    """$FEDJAX_HET_CACHE, else $XDG_CACHE_HOME/fedjax_het, else ~/.cache/fedjax_het. Raises
    ConfigError where such a variable names no folder that can be used."""
    own = variables.value_of(variables.CACHE)
    if own is not None:
        return own
    caches = variables.value_of(variables.XDG_CACHE_HOME)
    return (caches or Path(os.path.expanduser("~/.cache"))) / "fedjax_het"


def private_folder(path: Path | None = None) -> Path:
    """`path` (default: the root), made for the user alone where it did not exist.

    Raises OSError where that cannot be.
    """
    path = path or cache_root()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def keep_compiled_programs() -> None:
    """Point jax's persistent compilation cache at the user's cache folder, for the user alone.

    A cache that the user has chosen, and JAX_ENABLE_COMPILATION_CACHE=0, stand. Programs compiled
    for this processor are kept apart: a home folder may be shared by machines that differ.
    """
    import jax

    # jax adds its settings to `jax.config` at run time: its types do not name them.
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None:
        return
    try:
        private_folder()
        private_folder(programs_folder().parent)
        folder = private_folder(programs_folder())
    except (OSError, ConfigError):  # then every start compiles; a run tells of a variable
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def programs_folder() -> Path:
    """Of what is known of programs compiled for this processor."""
    return cache_root() / "xla" / _processor()


@functools.cache
def _processor() -> str:
    """A short name for the processor's instruction set."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
