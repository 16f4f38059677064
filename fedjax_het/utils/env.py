"""Environment variables: each is read and checked where it is needed; a bad one is a `ConfigError`.

This module reads them without pydantic-settings: `import fedjax_het` reads the cache folder, and
importing that library would add 0.1 s to it. A variable that stops the import of jax is removed
from the environment and reported where devices are first needed.
"""

import contextlib
import errno
import functools
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_het.utils.errors import ConfigError, format_value

MAX_SECONDS = 1e9
MAX_CPU_DEVICES = 4096
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


class EnvironmentVariable(NamedTuple):
    """An environment variable that the package reads.

    expected: the valid values, in words.
    parse: returns the value of a text; raises ValueError, OSError or RuntimeError for a bad one.
    """

    name: str
    expected: str
    parse: Callable[[str], Any]


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise ValueError
    return seconds


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
    """Create a folder for the user alone; it must be writable."""
    path = _parse_folder(text)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        return path


def _parse_writable_or_remote(text: str) -> str:
    return text if "://" in text else str(_parse_writable_folder(text))


def _parse_xdg_cache_home(text: str) -> Path | None:
    """Return None for an empty or relative path, as the XDG specification requires."""
    return (
        _parse_writable_folder(str(Path(text) / "fedjax_het")).parent
        if os.path.isabs(text)
        else None
    )


def _parse_device_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_CPU_DEVICES):
        raise ValueError
    return int(text)


def _parse_fraction(text: str) -> float:
    fraction = float(text)
    if not 0 < fraction <= 1:
        raise ValueError
    return fraction


def _parse_xla_flags(text: str) -> str:
    """Check what XLA does not: it ends the process for an unknown flag and ignores other words."""
    words = text.split()
    if words and not words[0].startswith("-"):
        if not Path(text).is_file():  # XLA reads flags from it
            raise ValueError
    elif not all(word.startswith("--") for word in words):
        raise ValueError
    for word in words:
        name, _, value = word.partition("=")
        if name == _DEVICES_FLAG:
            _parse_device_count(value)
    return text


CHECKPOINT_SECONDS = EnvironmentVariable(
    "FEDJAX_HET_CHECKPOINT_SECONDS",
    "seconds between checkpoints, a number from 0, for after every chunk of rounds, to 1e9",
    _parse_seconds,
)
CACHE_DIR = EnvironmentVariable(
    "FEDJAX_HET_CACHE",
    "a folder that can be made and written to, or none of the name",
    _parse_writable_folder,
)
XDG_CACHE_HOME = EnvironmentVariable(
    "XDG_CACHE_HOME",
    "a folder that can be made and written to, or none of the name",
    _parse_xdg_cache_home,
)
TFDS_DATA_DIR = EnvironmentVariable(
    "TFDS_DATA_DIR", "a folder of prepared data sets, or none of the name", _parse_folder
)
CINIC10_DIR = EnvironmentVariable(
    "CINIC10_DIR", "the folder of CINIC-10's train/ and test/", _parse_folder
)
RAY_ADDRESS = EnvironmentVariable(
    "RAY_ADDRESS", "'auto', HOST:PORT or ray://HOST:PORT, or none of the name", lambda text: text
)
JAX_CPU_DEVICES = EnvironmentVariable(
    "JAX_NUM_CPU_DEVICES", f"a whole number from 1 to {MAX_CPU_DEVICES}", _parse_device_count
)
JAX_COMPILATION_CACHE_DIR = EnvironmentVariable(
    "JAX_COMPILATION_CACHE_DIR",
    "a folder that can be made and written to",
    _parse_writable_or_remote,
)
XLA_FLAGS = EnvironmentVariable(
    "XLA_FLAGS", f"flags --NAME=VALUE ({_DEVICES_FLAG}: 1 to {MAX_CPU_DEVICES})", _parse_xla_flags
)
MEMORY_FRACTION = EnvironmentVariable(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "the share of a device's memory that jax takes, up to 1",
    _parse_fraction,
)
VARIABLES = (
    *(CHECKPOINT_SECONDS, CACHE_DIR, XDG_CACHE_HOME, TFDS_DATA_DIR, CINIC10_DIR, RAY_ADDRESS),
    *(JAX_CPU_DEVICES, JAX_COMPILATION_CACHE_DIR, XLA_FLAGS, MEMORY_FRACTION),
)
# Variables that a run may need only after hours.
_RUN_VARIABLES = (CHECKPOINT_SECONDS, CACHE_DIR, XDG_CACHE_HOME)
_JAX_VARIABLES = (JAX_CPU_DEVICES, JAX_COMPILATION_CACHE_DIR, XLA_FLAGS, MEMORY_FRACTION)

_invalid_jax_env_vars: dict[str, tuple[str, str]] = {}  # by name, the value and jax's message


def get_value(variable: EnvironmentVariable) -> Any:
    """Return a variable's value; None if it is not set. Raises ConfigError."""
    text = os.environ.get(variable.name)
    return None if text is None else _parse_variable(variable, text)


def get_text(variable: EnvironmentVariable) -> str:
    """Return a variable's text without a check; "" if it is not set."""
    return os.environ.get(variable.name, "")


def get_environ() -> Mapping[str, str]:
    """Return all environment variables, for code that looks at those of other programs."""
    return os.environ


@functools.lru_cache
def _parse_variable(variable: EnvironmentVariable, text: str) -> Any:
    try:
        return variable.parse(text)
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error) if isinstance(error, RuntimeError) else getattr(error, "strerror", None)
        raise _make_variable_error(variable.name, text, variable.expected, reason) from None


def _make_variable_error(
    name: str, text: str, expected: str, reason: str | None = None
) -> ConfigError:
    return ConfigError(
        f"{name} = {format_value(text)}: expected {expected}{f' ({reason})' if reason else ''}"
    )


def get_checkpoint_seconds(default: float) -> float:
    """Return the least number of seconds between checkpoints."""
    seconds = get_value(CHECKPOINT_SECONDS)
    return default if seconds is None else seconds


def require_variables(*, devices: bool = True) -> None:
    """Raise ConfigError for a bad variable that a run reads, before the run starts.

    Args:
      devices: also require devices, see `require_devices`.
    """
    for variable in _RUN_VARIABLES:
        get_value(variable)
    if devices:
        require_devices()


def require_devices() -> None:
    """Start jax's backend. Raises ConfigError for variables that prevent it, and without devices."""
    for name, (text, reason) in _invalid_jax_env_vars.items():
        raise _make_variable_error(name, text, "what jax takes, or none of the name", reason)
    for variable in _JAX_VARIABLES:
        get_value(variable)
    import jax

    try:
        jax.devices()
    except Exception as error:  # each kind of device raises its own
        reason = " ".join(str(error).split())[:200]
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms:
            raise ConfigError(f"jax finds no devices: {reason}") from error
        expected = "platforms that there are here, e.g. 'cpu', or none of the name"
        raise _make_variable_error("JAX_PLATFORMS", platforms, expected, reason) from error


def import_jax() -> None:
    """Import jax. A variable of jax's that makes the import fail is removed from the environment and
    reported by `require_devices`; other errors are raised."""
    while True:
        try:
            importlib.import_module("jax")
            return
        except ImportError:
            raise
        except Exception as error:
            if not _unset_invalid_variable(error):
                raise


def _unset_invalid_variable(error: Exception) -> bool:
    """Remove the variable that makes the import of jax fail, and return whether there is one.

    It is a variable whose name or value the error contains, and without which the error differs.
    """
    message = " ".join(str(error).split())
    lowercase_message = message.lower()
    names = sorted(name for name in os.environ if name.startswith("JAX_"))
    names = [
        name
        for name in names
        if name.lower() in lowercase_message or os.environ[name].lower() in lowercase_message
    ]
    for name in sorted(names, key=lambda name: name.lower() not in lowercase_message):
        with _unset_temporarily(name) as text:
            _unload_jax()
            try:
                importlib.import_module("jax")
                is_same_error = False
            except Exception as retry_error:
                is_same_error = str(retry_error) == str(error)
        if not is_same_error:
            _invalid_jax_env_vars[name] = (text, message)
            del os.environ[name]
            return True
    return False


@contextlib.contextmanager
def _unset_temporarily(name: str) -> Iterator[str]:
    text = os.environ.pop(name)
    try:
        yield text
    finally:
        os.environ[name] = text


def _unload_jax() -> None:
    """Remove the modules that a failed import of jax left."""
    for module in [name for name in sys.modules if name.split(".")[0] == "jax"]:
        del sys.modules[module]
