"""One kind of error for bad input: it names the argument, its value and what would be right."""

import contextlib
import contextvars
import difflib
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from fedjax_het.utils import console
from fedjax_het.utils.text import to_one_line

MAX_VALUE_LENGTH = 100  # characters of a value in a message
_PLAIN_TYPES = (str, bytes, numbers.Number, list, tuple, dict, set)
# What arguments are called where the user wrote them, by their names in Python; see `display_names`.
_PYTHON_NAMES: Mapping[str, str] = MappingProxyType({})
_DISPLAY_NAMES = contextvars.ContextVar("written", default=_PYTHON_NAMES)


class ConfigError(ValueError):
    """A setting cannot be used as given; the message is one line. The command line exits with 2."""

    def __init__(self, message: object = ""):
        super().__init__(to_one_line(str(message)))


@contextlib.contextmanager
def display_names(names: Mapping[str, str]) -> Iterator[None]:
    """In here, messages call these arguments by other names, e.g. `{"hp": "--hp"}` where they are
    flags of a command line; those that are not named keep what they are called around. Names of
    inner ones are read by outer ones: `{"steps": "options steps"}` in `{"options": "--option"}`
    makes "--option steps"."""
    inner_names = {name: display_name(alias) for name, alias in names.items()}
    token = _DISPLAY_NAMES.set({**_DISPLAY_NAMES.get(), **inner_names})
    try:
        yield
    finally:
        _DISPLAY_NAMES.reset(token)


def display_names_within(
    setting: str, names: Iterable[str]
) -> contextlib.AbstractContextManager[None]:
    """In here, messages call these names what a user gives under that setting: "options steps"."""
    return display_names({name: f"{setting} {name}" for name in names})


def display_name(argument: str) -> str:
    """Return the user's name of an argument: "hp prox_mu" is "--hp prox_mu" on a command line.

    The text after the first name stays, as in "groups[0]"; commas separate several arguments.
    """
    if ", " in argument:
        return ", ".join(map(display_name, argument.split(", ")))
    name = re.split(r"[ \[]", argument, maxsplit=1)[0]
    return _DISPLAY_NAMES.get().get(name, name) + argument[len(name) :]


def format_value(value: object) -> str:
    """A value for a message: in one line, and short; a path as the text that it is. Of an object
    that takes more than a line, only its type is shown."""
    value = str(value) if isinstance(value, PurePath) else value
    try:
        text = repr(value) if isinstance(value, str) else " ".join(repr(value).split())
    except Exception:  # of a class of the user's own
        text = "<at 0x>"
    is_plain = isinstance(value, _PLAIN_TYPES)
    if re.match(r"<.*at 0x", text) or (len(text) > MAX_VALUE_LENGTH and not is_plain):
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 4]} ..."


def make_value_error(argument: str, value: object, expected: str) -> ConfigError:
    """Return the error of a value that cannot be used: "alpha = 0: expected a number > 0"."""
    return ConfigError(f"{display_name(argument)} = {format_value(value)}: expected {expected}")


def require(condition: bool, argument: str, value: object, expected: str) -> None:
    """Raise `ConfigError` unless `condition` holds, e.g. `require(a > 0, "alpha", a, "a > 0")`."""
    if not condition:
        raise make_value_error(argument, value, expected)


def is_integer_at_least(value: object, minimum: float) -> bool:
    """Whether `value` is an integer (of Python or NumPy, no truth value) of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return int(value) >= minimum


def require_name(argument: str, value: object, valid: Iterable[object]) -> None:
    """Raise `ConfigError` unless `value` is one of `valid`, naming the nearest of them first."""
    names = list(valid)
    if any(type(value) is type(name) and value == name for name in names):
        return
    valid_names = [str(name) for name in names]
    text = value[:MAX_VALUE_LENGTH] if isinstance(value, str) else ""
    suggestions = difflib.get_close_matches(text, valid_names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, suggestions))}? " if suggestions else ""
    valid_text = f"(valid: {', '.join(valid_names)})" if valid_names else "none is taken here"
    setting_text = f"{display_name(argument)} = {format_value(value)}"
    raise ConfigError(f"{setting_text} is unknown: {hint}{valid_text}")


def require_columns(argument: str, frame: Any, names: Iterable[str]) -> None:
    """Raise `ConfigError` unless a data frame has these columns."""
    for name in names:
        if name not in frame.columns:
            expected = f"a column {name!r} (it has {', '.join(map(str, frame.columns[:20]))})"
            raise ConfigError(f"{display_name(argument)}: expected {expected}")


def run_with_exit_status(main: Callable[[], int], *, name: str, interrupt_message: str) -> int:
    """Return `main()`'s exit status; 2 for a ConfigError and 130 for Ctrl-C, each with one line on
    stderr; 141 where nobody reads on (`... | head`), without a line.

    Args:
      main: function that runs a command.
      name: name of the program, which begins the line.
      interrupt_message: line after Ctrl-C.
    """
    with console.preserve_output_mode():
        try:
            status = main()
            sys.stdout.flush()
            return status
        except ConfigError as error:
            console.print_error(f"{name}: {error}")
            return 2
        except KeyboardInterrupt:
            console.print_error(f"{name}: {interrupt_message}")
            return 130
        except BrokenPipeError:
            # What is left in the buffer would raise once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
