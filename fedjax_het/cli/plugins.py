"""Flag `--import`: files and modules of a user that register entries before a command runs."""

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from fedjax_het.utils.errors import ConfigError, describe_error, require

IMPORT_HELP = (
    "Every command takes --import FILE.py or --import MODULE. The code runs first and may register "
    "methods, networks, data sets, partitions, skews or sources."
)
"""Text on the flag in the help of `fedjax-het`."""


def split_imports(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into other words and the values of `--import`.

    Raises:
      ConfigError: for a value that is neither a Python file nor a name of a module.
    """
    remaining, imports = [], []
    words = iter(argv)
    for word in words:
        flag, equals, name = word.partition("=")
        if flag != "--import":
            remaining.append(word)
            continue
        name = os.path.expanduser(name if equals else next(words, ""))
        is_valid = name.endswith(".py") or all(map(str.isidentifier, name.split(".")))
        require(is_valid, "--import", name, "a file or a module, e.g. mine.py")
        imports.append(name)
    return remaining, imports


@functools.cache
def import_plugins_once(names: tuple[str, ...]) -> None:
    """Import files and modules in a Ray process, which runs several tasks of a sweep."""
    for name in names:
        import_plugin(name)


def import_plugin(name: str) -> None:
    """Run a Python file, or import a module of the current folder or an installed module.

    Raises:
      ConfigError: if there is no such file or module, and for an error of the code.
    """
    try:
        _import_file_or_module(name)
    except ConfigError:
        raise
    except Exception as error:  # of a user's code
        raise ConfigError(f"--import = {name!r}: {_describe_with_line(error)}") from error


def _describe_with_line(error: Exception) -> str:
    """Return file, line, type and message of an error of a user's code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__)
        and not frame.filename.startswith("<frozen")
    ]
    if not frames:  # such as a file that is no text
        return describe_error(error)
    frame = [f for f in frames if f.filename == frames[0].filename][-1]  # not in a library
    return f"{frame.filename}, line {frame.lineno}: {describe_error(error)}"


def _import_file_or_module(name: str) -> None:
    if name.endswith(".py"):
        path = Path(name)
        require(path.is_file(), "--import", name, "a file; there is none")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0] and error.name != name:
            raise
        require(False, "--import", name, "a module; there is none")
