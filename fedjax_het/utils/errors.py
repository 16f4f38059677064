"""Errors about bad input: one line that names the argument, its value and the valid values."""

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

MAX_VALUE_LENGTH = 100
"""Largest number of characters of a value in a message."""
_MIN_SIMILARITY = 0.65  # of a suggested name, as difflib measures it between 0 and 1
_MAX_LISTED_NAMES = 12
_PLAIN_TYPES = (str, bytes, numbers.Number, list, tuple, dict, set)
# Names of arguments in messages, by their names in Python. A context variable keeps threads apart;
# the alternative, a parameter of every check, would pass through all functions that validate.
_PYTHON_NAMES: Mapping[str, str] = MappingProxyType({})
_DISPLAY_NAMES = contextvars.ContextVar("written", default=_PYTHON_NAMES)


class ConfigError(ValueError):
    """Raised for a setting, an argument or a file that cannot be used.

    The message is one line: the argument, its value and the expected values. The command line
    prints it and exits with status 2.

    Example:
      >>> from fedjax_het import ConfigError, RunSpec
      >>> try:
      ...     RunSpec(alpha=-1)
      ... except ConfigError as error:
      ...     print(error)
      alpha = -1: expected a finite number > 0
    """

    def __init__(self, message: object = ""):
        super().__init__(to_one_line(str(message)))


@contextlib.contextmanager
def display_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make messages call arguments by other names inside the context.

    A context may be nested in another one: `{"steps": "options steps"}` inside
    `{"options": "--option"}` makes "--option steps".

    Args:
      names: new names by the names of the arguments, e.g. `{"hp": "--hp"}`. Other arguments keep
        the names of the surrounding context.

    Yields:
      None.

    Example:
      >>> from fedjax_het.utils.errors import display_name, display_names
      >>> with display_names({"hp": "--hp"}):
      ...     display_name("hp prox_mu")
      '--hp prox_mu'
    """
    inner_names = {name: display_name(alias) for name, alias in names.items()}
    token = _DISPLAY_NAMES.set({**_DISPLAY_NAMES.get(), **inner_names})
    try:
        yield
    finally:
        _DISPLAY_NAMES.reset(token)


def display_names_within(
    setting: str, names: Iterable[str]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which messages name entries of a mapping together with its setting.

    Args:
      setting: name of the mapping, e.g. "options".
      names: keys of the mapping. The key "steps" is called "options steps".

    Returns:
      The context manager.
    """
    return display_names({name: f"{setting} {name}" for name in names})


def display_name(argument: str) -> str:
    """Return the name that the user gave to an argument, e.g. "--hp prox_mu" for "hp prox_mu".

    The text around the first name stays, as in "groups[0]", "len(groups)" and "shape of groups".
    Commas separate several arguments.
    """
    names = _DISPLAY_NAMES.get()
    if argument in names:  # a name of a user, which may hold spaces and commas
        return names[argument]
    if ", " in argument:
        return ", ".join(map(display_name, argument.split(", ")))
    if length := re.fullmatch(r"len\((\w+)\)", argument):
        return f"len({display_name(length[1])})"
    if part := re.fullmatch(r"(dtype|format|largest|range|shape) of (.+)", argument):
        return f"{part[1]} of {display_name(part[2])}"
    name = re.split(r"[ \[]", argument, maxsplit=1)[0]
    return names.get(name, name) + argument[len(name) :]


def format_value(value: object) -> str:
    """Return a value as text for a message: one line of at most `MAX_VALUE_LENGTH` characters.

    A path is shown as text. An object with a long representation is shown by its type.
    """
    value = str(value) if isinstance(value, PurePath) else value
    try:
        text = repr(value) if isinstance(value, str) else " ".join(repr(value).split())
    except Exception:  # `__repr__` of a user's class
        text = "<at 0x>"
    is_plain = isinstance(value, _PLAIN_TYPES)
    if re.match(r"<.*at 0x", text) or (len(text) > MAX_VALUE_LENGTH and not is_plain):
        name = type(value).__name__
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 4]} ..."


def describe_error(error: Exception) -> str:
    """Return type and message of an exception in one line.

    Example:
      >>> from fedjax_het.utils.errors import describe_error
      >>> describe_error(ValueError("too" + chr(10) + "long"))
      'ValueError: too long'
    """
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def summarize_error(error: Exception, max_length: int = 200) -> str:
    """Return the beginning of the message of a foreign exception in one line.

    Args:
      error: the exception.
      max_length: maximum number of characters.

    Returns:
      The message without its type.

    Example:
      >>> from fedjax_het.utils.errors import summarize_error
      >>> summarize_error(ValueError("too" + chr(10) + "long"), max_length=5)
      'too l'
    """
    return " ".join(str(error).split())[:max_length]


def make_value_error(argument: str, value: object, expected: str) -> ConfigError:
    """Return the error of a value that cannot be used.

    Args:
      argument: name of the argument.
      value: the value.
      expected: the valid values, in words.

    Returns:
      The error, to be raised.

    Example:
      >>> from fedjax_het.utils.errors import make_value_error
      >>> print(make_value_error("alpha", 0, "a number > 0"))
      alpha = 0: expected a number > 0
    """
    name = display_name(argument)
    is_missing_flag = value is None and name.startswith("--")
    subject = f"{name} is missing" if is_missing_flag else f"{name} = {format_value(value)}"
    return ConfigError(f"{subject}: expected {expected}")


def require(condition: bool, argument: str, value: object, expected: str) -> None:
    """Raise an error unless a condition holds.

    Args:
      condition: whether the value can be used.
      argument: name of the argument.
      value: the value.
      expected: the valid values, in words.

    Raises:
      ConfigError: if the condition is false.

    Example:
      >>> from fedjax_het.utils.errors import ConfigError, require
      >>> try:
      ...     require(False, "steps", 0, "a number > 0")
      ... except ConfigError as error:
      ...     print(error)
      steps = 0: expected a number > 0
    """
    if not condition:
        raise make_value_error(argument, value, expected)


def is_integer_at_least(value: object, minimum: float) -> bool:
    """Return whether a value is an integer of Python or NumPy of at least a minimum; bool is none.

    Args:
      value: any value.
      minimum: smallest valid integer.

    Returns:
      True for a valid integer.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return int(value) >= minimum


def require_name(
    argument: str, value: object, valid: Iterable[object], *, listed_by: str = ""
) -> None:
    """Raise an error unless a value is one of the valid names.

    The message suggests the most similar name. If no name is similar, it lists the valid names.

    Args:
      argument: name of the argument.
      value: the value.
      valid: valid names, in the order of the message.
      listed_by: command that lists the valid names, which replaces a long list in the message.

    Raises:
      ConfigError: if the value is unknown.

    Example:
      >>> from fedjax_het.utils.errors import ConfigError, require_name
      >>> try:
      ...     require_name("partition", "idd", ["iid", "dirichlet"])
      ... except ConfigError as error:
      ...     print(error)
      partition = 'idd' is unknown: did you mean 'iid'?
    """
    names = list(valid)
    if any(type(value) is type(name) and value == name for name in names):
        return
    valid_names = [str(name) for name in names]
    words = [name for name in names if isinstance(name, str)]
    suggestion = suggest_name(value, words) if isinstance(value, str) else None
    if suggestion is not None:
        hint = f"did you mean {suggestion!r}?"
    elif listed_by and len(valid_names) > _MAX_LISTED_NAMES:
        hint = f"see `{listed_by}`"
    else:
        kind = "" if words else "one of the numbers "
        hint = f"expected {kind}{', '.join(valid_names)}" if names else "no name is valid here"
    raise ConfigError(f"{display_name(argument)} = {format_value(value)} is unknown: {hint}")


def suggest_name(text: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to a text; None if no name is near enough.

    A text such as `fmnist` stands for `fashion_mnist`: initials and the last word.

    Args:
      text: the text. Leading dashes of flags do not count.
      names: names that can be suggested.

    Returns:
      One of the names, or None.

    Example:
      >>> from fedjax_het.utils.errors import suggest_name
      >>> suggest_name("--alpah", ["--alpha", "--lanes"]), suggest_name("--rate", ["--lanes"])
      ('--alpha', None)
    """
    bare_names = {name.lstrip("-").lower(): name for name in reversed(list(names))}
    bare_text = text[:MAX_VALUE_LENGTH].lstrip("-").lower()
    for bare_name, name in bare_names.items():
        *first_words, last_word = re.split("[_-]", bare_name)
        if first_words and bare_text == "".join(word[:1] for word in first_words) + last_word:
            return name
    matches = difflib.get_close_matches(bare_text, bare_names, n=1, cutoff=_MIN_SIMILARITY)
    return bare_names[matches[0]] if matches else None


def require_columns(argument: str, frame: Any, names: Iterable[str]) -> None:
    """Raise an error unless a data frame has all columns.

    Args:
      argument: name of the data frame in the message.
      frame: pandas data frame.
      names: required columns.

    Raises:
      ConfigError: for the first missing column.
    """
    for name in names:
        if name not in frame.columns:
            expected = f"a column {name!r} (it has {', '.join(map(str, frame.columns[:20]))})"
            raise ConfigError(f"{display_name(argument)}: expected {expected}")


def run_with_exit_status(main: Callable[[], int], *, name: str, interrupt_message: str) -> int:
    """Run a command and turn its exceptions into exit statuses.

    Args:
      main: function that runs the command and returns its exit status.
      name: name of the program, which starts the line on stderr.
      interrupt_message: text of the line after Ctrl-C; notes of the exception replace the part
        after a semicolon.

    Returns:
      The status of `main`, or the status of an exception: 2 for a ConfigError and 130 for Ctrl-C,
      each with one line on stderr, and 141 without a line for a closed stdout (`... | head`).
    """
    with console.preserve_output_mode():
        try:
            status = main()
            sys.stdout.flush()
            return status
        except ConfigError as error:
            console.print_error(f"{name}: {error}")
            return 2
        except KeyboardInterrupt as error:
            if notes := getattr(error, "__notes__", []):
                interrupt_message = "; ".join([interrupt_message.partition(";")[0], *notes])
            console.print_error(f"{name}: {interrupt_message}")
            return 130
        except SystemExit as error:  # of SIGTERM, if it has notes
            if notes := getattr(error, "__notes__", []):
                console.print_error("; ".join([f"{name}: terminated", *notes]))
            raise
        except BrokenPipeError:
            # The rest of the buffer would raise again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
