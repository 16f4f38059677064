"""Environment variables: each is read where it is needed, and checked there, in one place.

What is wrong with one is a `ConfigError` that names it. Nothing is read at import but what jax
itself reads then: a variable that would stop that is put aside, and told where devices are first
needed.
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

from fedjax_het.common.errors import ConfigError, shown

MOST_SECONDS = 1e9
MOST_CPU_DEVICES = 4096
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


class Variable(NamedTuple):
    """One that is read.

    expected: what would be right, in words. read: its value of a text; ValueError, OSError or
    RuntimeError for one that is none.
    """

    name: str
    expected: str
    read: Callable[[str], Any]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS):
        raise ValueError
    return seconds


def _path(text: str) -> Path:
    """Of a folder that need not be there."""
    if not text.strip():
        raise ValueError
    path = Path(text).expanduser()
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises where what is above is a file
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return path


def _writable(text: str) -> Path:
    """Of a folder that is made, for the user alone, and can be written to."""
    path = _path(text)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        return path


def _writable_or_remote(text: str) -> str:
    return text if "://" in text else str(_writable(text))


def _of_caches(text: str) -> Path | None:
    """As the XDG base directory specification has it: what is empty or relative is none."""
    return _writable(str(Path(text) / "fedjax_het")).parent if os.path.isabs(text) else None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_CPU_DEVICES):
        raise ValueError
    return int(text)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError
    return share


def _flags(text: str) -> str:
    """XLA itself ends the process where it does not know a flag, and says nothing of others."""
    words = text.split()
    if words and not words[0].startswith("-"):
        if not Path(text).is_file():  # of which it reads flags
            raise ValueError
    elif not all(word.startswith("--") for word in words):
        raise ValueError
    for word in words:
        name, _, value = word.partition("=")
        if name == _DEVICES_FLAG:
            _count(value)
    return text


CHECKPOINT_SECONDS = Variable(
    "FEDJAX_HET_CHECKPOINT_SECONDS",
    "seconds between checkpoints, a number from 0, for after every chunk of rounds, to 1e9",
    _seconds,
)
CACHE = Variable(
    "FEDJAX_HET_CACHE", "a folder that can be made and written to, or none of the name", _writable
)
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME", "a folder that can be made and written to, or none of the name", _of_caches
)
TFDS_DATA_DIR = Variable(
    "TFDS_DATA_DIR", "a folder of prepared data sets, or none of the name", _path
)
CINIC10_DIR = Variable("CINIC10_DIR", "the folder of CINIC-10's train/ and test/", _path)
RAY_ADDRESS = Variable(
    "RAY_ADDRESS", "'auto', HOST:PORT or ray://HOST:PORT, or none of the name", lambda text: text
)
JAX_CPU_DEVICES = Variable(
    "JAX_NUM_CPU_DEVICES", f"a whole number from 1 to {MOST_CPU_DEVICES}", _count
)
JAX_CACHE = Variable(
    "JAX_COMPILATION_CACHE_DIR", "a folder that can be made and written to", _writable_or_remote
)
XLA_FLAGS = Variable(
    "XLA_FLAGS", f"flags --NAME=VALUE ({_DEVICES_FLAG}: 1 to {MOST_CPU_DEVICES})", _flags
)
MEMORY_SHARE = Variable(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "the share of a device's memory that jax takes, up to 1",
    _share,
)
VARIABLES = (
    *(CHECKPOINT_SECONDS, CACHE, XDG_CACHE_HOME, TFDS_DATA_DIR, CINIC10_DIR, RAY_ADDRESS),
    *(JAX_CPU_DEVICES, JAX_CACHE, XLA_FLAGS, MEMORY_SHARE),
)
# What a run may need after hours, if not at once.
_OF_RUNS = (CHECKPOINT_SECONDS, CACHE, XDG_CACHE_HOME)
_OF_JAX = (JAX_CPU_DEVICES, JAX_CACHE, XLA_FLAGS, MEMORY_SHARE)

_put_aside: dict[str, tuple[str, str]] = {}  # by name, the value and what jax said of it


def value_of(variable: Variable) -> Any:
    """Its value; None where it is not set. Raises ConfigError."""
    text = os.environ.get(variable.name)
    return None if text is None else _read(variable, text)


def text_of(variable: Variable) -> str:
    """As it stands, unchecked; "" where it is not set."""
    return os.environ.get(variable.name, "")


def of_others() -> Mapping[str, str]:
    """All that the environment says, for those who look at what other programs have set."""
    return os.environ


@functools.lru_cache
def _read(variable: Variable, text: str) -> Any:
    try:
        return variable.read(text)
    except (ValueError, OSError, RuntimeError) as error:
        why = str(error) if isinstance(error, RuntimeError) else getattr(error, "strerror", None)
        raise _wrong(variable.name, text, variable.expected, why) from None


def _wrong(name: str, text: str, expected: str, why: str | None = None) -> ConfigError:
    return ConfigError(f"{name} = {shown(text)}: expected {expected}{f' ({why})' if why else ''}")


def checkpoint_seconds(usual: float) -> float:
    """At least so many seconds are between checkpoints."""
    found = value_of(CHECKPOINT_SECONDS)
    return usual if found is None else found


def require_variables(*, devices: bool = True) -> None:
    """That those which runs read can be used, before the first. Raises ConfigError.

    devices: also that there are some here, see `require_devices`.
    """
    for variable in _OF_RUNS:
        value_of(variable)
    if devices:
        require_devices()


def require_devices() -> None:
    """Start jax's backend, if none runs. Raises ConfigError for variables that do not let it, and
    where it finds no devices."""
    for name, (text, why) in _put_aside.items():
        raise _wrong(name, text, "what jax takes, or none of the name", why)
    for variable in _OF_JAX:
        value_of(variable)
    import jax

    try:
        jax.devices()
    except Exception as error:  # of whatever kind of device
        why = " ".join(str(error).split())[:200]
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms:
            raise ConfigError(f"jax finds no devices: {why}") from error
        expected = "platforms that there are here, e.g. 'cpu', or none of the name"
        raise _wrong("JAX_PLATFORMS", platforms, expected, why) from error


def import_jax() -> None:
    """Import it. A variable of jax's whose value stops that is put aside first, for whoever needs
    devices to be told; what else stops it is raised."""
    while True:
        try:
            importlib.import_module("jax")
            return
        except ImportError:
            raise
        except Exception as error:
            if not _puts_aside(error):
                raise


def _puts_aside(error: Exception) -> bool:
    """Whether a variable stops jax, which is then put aside: one that the error names, or else one
    without which it is another error or none."""
    said = " ".join(str(error).split())
    known = said.lower()
    names = sorted(name for name in os.environ if name.startswith("JAX_"))
    names = [name for name in names if name.lower() in known or os.environ[name].lower() in known]
    for name in sorted(names, key=lambda name: name.lower() not in known):
        with _without(name) as text:
            _forget_jax()
            try:
                importlib.import_module("jax")
                same = False
            except Exception as other:
                same = str(other) == str(error)
        if not same:
            _put_aside[name] = (text, said)
            del os.environ[name]
            return True
    return False


@contextlib.contextmanager
def _without(name: str) -> Iterator[str]:
    text = os.environ.pop(name)
    try:
        yield text
    finally:
        os.environ[name] = text


def _forget_jax() -> None:
    """What was imported before it stopped."""
    for module in [name for name in sys.modules if name.split(".")[0] == "jax"]:
        del sys.modules[module]
