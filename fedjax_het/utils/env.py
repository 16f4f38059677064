"""Environment variables that the package reads, the import of JAX, and the cache folder.

Each variable is read and checked where it is needed; a bad value is a `ConfigError`. A variable
that makes the import of JAX fail is removed from the environment and reported where devices are
first needed. Settings of JAX that the package does not support are reported there, too. The module
does not use pydantic-settings, whose import would add 0.1 s to `import fedjax_het`.
"""

import contextlib
import errno
import functools
import hashlib
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.utils.errors import ConfigError, make_value_error, summarize_error

MAX_SECONDS = 1e9
"""Largest number of seconds between checkpoints."""
MAX_CPU_DEVICES = 4096
"""Largest number of CPU devices."""
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_FOLDER = "a folder that can be created and written to, or an unset variable"


class Variable(NamedTuple):
    """An environment variable that the package reads.

    Attributes:
      name: name of the variable.
      expected: valid values, in words.
      parse: function of the text that returns the value. It raises ValueError, OSError or
        RuntimeError for a bad text.
    """

    name: str
    expected: str
    parse: Callable[[str], Any]


def _parse_number(low: float, high: float, text: str) -> float:
    number = float(text)
    if not low <= number <= high:
        raise ValueError
    return number


def _parse_folder(text: str) -> Path:
    """Return the path of a folder that need not exist."""
    if not text.strip():
        raise ValueError
    path = Path(text).expanduser()
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises if a parent is a file
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return path


def _parse_writable_folder(text: str) -> Path:
    """Create a folder that only the user can read, and return its path."""
    path = _parse_folder(text)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        return path


def _parse_xdg_cache_home(text: str) -> Path | None:
    """Return None for an empty or relative path, as the XDG specification requires."""
    text = os.path.expanduser(text)
    return _parse_writable_folder(f"{text}/fedjax_het").parent if os.path.isabs(text) else None


def _parse_device_count(text: str) -> int:
    return int(_parse_number(1, MAX_CPU_DEVICES, text if text.isdecimal() else ""))


def _parse_xla_flags(text: str) -> str:
    """Check the flags; XLA ends the process for an unknown flag and ignores other words."""
    words = text.split()
    is_file = bool(words) and not words[0].startswith("-")  # XLA reads flags from it
    if not (Path(text).is_file() if is_file else all(word.startswith("--") for word in words)):
        raise ValueError
    for word in words:
        name, _, value = word.partition("=")
        if name == _DEVICES_FLAG:
            _parse_device_count(value)
    return text


CHECKPOINT_SECONDS = Variable(
    "FEDJAX_HET_CHECKPOINT_SECONDS",
    "seconds between checkpoints, from 0 (after every chunk of rounds) to 1e9",
    functools.partial(_parse_number, 0, MAX_SECONDS),
)
CACHE_DIR = Variable("FEDJAX_HET_CACHE", _FOLDER, _parse_writable_folder)
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", _FOLDER, _parse_xdg_cache_home)
TFDS_DATA_DIR = Variable("TFDS_DATA_DIR", "a folder of data sets, or unset", _parse_folder)
CINIC10_DIR = Variable("CINIC10_DIR", "CINIC-10's folder with train/", _parse_folder)
RAY_ADDRESS = Variable("RAY_ADDRESS", "'auto', HOST:PORT or ray://HOST:PORT", str)
JAX_CPU_DEVICES = Variable("JAX_NUM_CPU_DEVICES", f"1 to {MAX_CPU_DEVICES}", _parse_device_count)
JAX_COMPILATION_CACHE_DIR = Variable(
    "JAX_COMPILATION_CACHE_DIR",
    _FOLDER,
    lambda text: text if "://" in text else str(_parse_writable_folder(text)),
)
XLA_FLAGS = Variable(
    "XLA_FLAGS", f"flags --NAME=VALUE ({_DEVICES_FLAG}: 1 to {MAX_CPU_DEVICES})", _parse_xla_flags
)
MEMORY_FRACTION = Variable(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "the fraction of a device's memory that JAX reserves, at most 1",
    functools.partial(_parse_number, math.ulp(0), 1),
)
# Variables that a run may need after hours; they are checked before it starts.
_RUN_VARIABLES = (CHECKPOINT_SECONDS, CACHE_DIR, XDG_CACHE_HOME)
_JAX_VARIABLES = (JAX_CPU_DEVICES, JAX_COMPILATION_CACHE_DIR, XLA_FLAGS, MEMORY_FRACTION)
# Settings of JAX with which the package's programs fail: the values, and what is expected instead.
_ON, _GUARDED = (True,), ("disallow", "disallow_explicit")
_UNSUPPORTED_JAX_SETTINGS = {
    "jax_debug_nans": (_ON, "False, as NaN marks values that were not measured"),
    "jax_debug_infs": (_ON, "False, as infinity marks bounds that were not reached"),
    "jax_check_tracer_leaks": (_ON, "False"),
    "jax_disable_jit": (_ON, "False (debug=True of simulate runs without compilation)"),
    "jax_numpy_dtype_promotion": (("strict",), "'standard'"),
    "jax_numpy_rank_promotion": (("raise",), "'allow' or 'warn'"),
    **{
        f"jax_transfer_guard_{direction}": (_GUARDED, "'allow' or 'log'")
        for direction in ("host_to_device", "device_to_device", "device_to_host")
    },
}
VARIABLES = (*_RUN_VARIABLES, TFDS_DATA_DIR, CINIC10_DIR, RAY_ADDRESS, *_JAX_VARIABLES)
"""All variables that the package reads."""

# Values and JAX's messages by variable. JAX is imported once in a process, before any function of
# the package could receive them.
_invalid_jax_env_vars: dict[str, tuple[str, str]] = {}


def get_value(variable: Variable, default: Any = None) -> Any:
    """Return the value of a variable.

    Args:
      variable: the variable.
      default: value of a variable that is not set.

    Returns:
      The parsed value.

    Raises:
      ConfigError: for a bad value.
    """
    text = os.environ.get(variable.name)
    return default if text is None else _parse_variable(variable, text)


def get_text(variable: Variable) -> str:
    """Return the unchecked text of a variable; "" if it is not set."""
    return os.environ.get(variable.name, "")


def get_environ() -> Mapping[str, str]:
    """Return all environment variables, for code that reads variables of other programs."""
    return os.environ


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that can move its cursor; TERM=dumb names one without.

    Args:
      stream: stdout or stderr.
    """
    return stream.isatty() and get_environ().get("TERM") not in ("dumb", "unknown")


def has_color(stream: Any) -> bool:
    """Return whether output to a stream is colored.

    NO_COLOR switches colors off, and FORCE_COLOR or CLICOLOR_FORCE on, also in a pipe. Otherwise a
    terminal has colors, unless CLICOLOR is 0.

    Args:
      stream: stdout or stderr.
    """
    environ = get_environ()
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name) not in (None, "", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return is_terminal(stream) and environ.get("CLICOLOR") != "0"


@functools.lru_cache
def _parse_variable(variable: Variable, text: str) -> Any:
    try:
        return variable.parse(text)
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error) if isinstance(error, RuntimeError) else getattr(error, "strerror", None)
        expected = variable.expected + (f" ({reason})" if reason else "")
        raise make_value_error(variable.name, text, expected) from None


def require_variables(*, devices: bool = True) -> None:
    """Check the variables that a run reads, before the run starts.

    Args:
      devices: also require devices, see `require_devices`.

    Raises:
      ConfigError: for a bad value, and without devices.
    """
    for variable in _RUN_VARIABLES:
        get_value(variable)
    if devices:
        require_devices()


def require_devices() -> None:
    """Start JAX's backend.

    Raises:
      ConfigError: for a variable that prevents it, for a setting of JAX with which programs of the
        package fail, and without devices.
    """
    for name, (text, reason) in _invalid_jax_env_vars.items():
        raise make_value_error(
            name, text, f"a value that JAX accepts, or an unset variable ({reason})"
        )
    for variable in _JAX_VARIABLES:
        get_value(variable)
    import jax

    for name, (unsupported_values, expected) in _UNSUPPORTED_JAX_SETTINGS.items():
        value = getattr(jax.config, name, None)
        value = getattr(value, "value", value)  # of an enumeration
        if value in unsupported_values:
            raise make_value_error(name, value, expected)
    try:
        jax.devices()
    except Exception as error:  # each kind of device raises another type
        reason = summarize_error(error)
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms:
            raise ConfigError(f"jax finds no devices: {reason}") from error
        expected = f"platforms of this machine, e.g. 'cpu', or an unset variable ({reason})"
        raise make_value_error("JAX_PLATFORMS", platforms, expected) from error


def import_without_invalid_variables(execute: Callable[[], None]) -> None:
    """Import JAX.

    A variable of JAX that makes the import fail is removed from the environment, and reported by
    `require_devices`. Other errors are raised.

    Args:
      execute: function that executes the module `jax`.
    """
    error = _get_import_error(execute)
    while error is not None:
        error = _unset_invalid_variable(error, execute)


def _get_import_error(execute: Callable[[], None]) -> Exception | None:
    """Execute the module `jax`, and return the error that a variable may have caused."""
    for module in [module for module in sys.modules if module.startswith("jax.")]:
        del sys.modules[module]  # a failed import left it
    try:
        execute()
    except ImportError:
        raise
    except Exception as error:
        return error
    return None


def _unset_invalid_variable(error: Exception, execute: Callable[[], None]) -> Exception | None:
    """Remove the variable that makes the import of JAX fail, and return the next error, if any.

    The error contains the name or the value of such a variable, and differs without the variable.
    An error without such a variable is raised.
    """
    message = str(error)
    for name, text in sorted(os.environ.items()):
        is_named = name.lower() in message.lower() or text.lower() in message.lower()
        if not (name.startswith("JAX_") and is_named):
            continue
        del os.environ[name]
        retry_error = _get_import_error(execute)
        if str(retry_error) == message:
            os.environ[name] = text
            continue
        _invalid_jax_env_vars[name] = (text, " ".join(message.split()))
        return retry_error
    raise error


# --- the cache folder


def get_cache_dir() -> Path:
    """Return the cache folder, which contains decoded data, timings and compiled programs.

    Returns:
      $FEDJAX_HET_CACHE, $XDG_CACHE_HOME/fedjax_het or ~/.cache/fedjax_het, the first that is set.

    Raises:
      ConfigError: if a variable names a folder that cannot be used.
    """
    cache_dir = get_value(CACHE_DIR)
    if cache_dir is not None:
        return cache_dir
    xdg_cache_home = get_value(XDG_CACHE_HOME)
    return (xdg_cache_home or Path(os.path.expanduser("~/.cache"))) / "fedjax_het"


def make_private_dir(path: Path | None = None) -> Path:
    """Create a folder, and its parents, that only the user can read.

    Args:
      path: path of the folder (default: the cache folder).

    Returns:
      The path. A folder that exists keeps its mode.

    Raises:
      OSError: if the folder cannot be created.
    """
    path = path or get_cache_dir()
    for folder in (*reversed(path.parents), path):  # `parents=True` would leave these to the umask
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def get_program_cache_dir() -> Path:
    """Return the folder of programs that are compiled for this processor."""
    return get_cache_dir() / "xla" / _hash_cpu_features()


@functools.cache
def _hash_cpu_features() -> str:
    """Return a short name for the processor's instruction set."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
