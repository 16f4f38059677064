"""Command lines read by tyro, whose errors become one line."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from fedjax_het.common.errors import ConfigError, exit_status, require, written_as
from fedjax_het.common.records import checked

_BOX = re.compile("[\u2500-\u257f]+|-{5,}")
_HELP = re.compile(r"(for full helptext|argument helptext|usage:).*", re.IGNORECASE)

T = TypeVar("T")


def one_line_errors(read: Callable[[], T]) -> T:
    """What `read()`, a call of tyro's, returns; ConfigError where it would print an error and exit.

    Help, which ends a program with status 0, is printed as ever.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read()
    except SystemExit as error:
        if not error.code:
            raise
        text = " ".join(_BOX.sub(" ", said.getvalue()).split())
        raise ConfigError(
            _HELP.sub("", text).strip() or "the command line cannot be read"
        ) from None


def run_program(
    asked: Callable[..., Any],
    work: Callable[..., int],
    argv: Sequence[str] | None,
    about: str | None = None,
    *,
    stopped: str = "stopped",
) -> int:
    """The exit status of a program whose command line is read and checked by annotations.

    Args:
      asked: a dataclass, of which `work` gets a record; or `work` itself, a function whose
        arguments are the flags.
      argv: the words (default: `sys.argv`). about: the description, for its help. stopped: what is
        said after Ctrl-C.
    Bad words are one line with the flag, and the status 2.
    """
    kinds = _kinds_of(asked)

    def status() -> int:
        import tyro

        # Of a function tyro would make the call itself, where what it prints is taken for errors.
        @functools.wraps(asked)
        def read(*args: Any, **kwargs: Any) -> Any:
            return asked(*args, **kwargs) if dataclasses.is_dataclass(asked) else kwargs

        parsed = one_line_errors(
            lambda: tyro.cli(
                asked if dataclasses.is_dataclass(asked) else read,
                args=argv,
                description=about,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        )
        given = parsed if isinstance(parsed, dict) else vars(parsed)
        with written_as(flags_of(kinds)):
            for name, kind in kinds.items():
                checked(name, given[name], kind)
                require(given[name] != "", name, "", "a word")  # a folder of that name is this one
            return work(**parsed) if isinstance(parsed, dict) else work(parsed)

    return exit_status(status, name="error", stopped=stopped)


def flags_of(names: Any) -> dict[str, str]:
    """What arguments are called on a command line, by their names in Python."""
    return {name: f"--{name.replace('_', '-')}" for name in names}


def _kinds_of(asked: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(asked, include_extras=True)
    if dataclasses.is_dataclass(asked):
        return {field.name: hints[field.name] for field in dataclasses.fields(asked)}
    return {name: hints[name] for name in inspect.signature(asked).parameters}
