"""How a process tells what it is at: in words, as JSON objects, or not at all.

A command's `--json` and `--quiet` choose it, for whatever the command calls. What a command is
asked for goes to standard output in any manner; all that is told here, to standard error.
"""

import contextlib
import io
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_het.common.text import one_line

WORDS, JSON, QUIET = "words", "json", "quiet"
FLAGS = {"--json": JSON, "--quiet": QUIET}
HELP = (
    "--json: progress, notes and errors on standard error as one JSON object a line. "
    "--quiet: none of them but errors."
)
_LOGGER = "fedjax_het"
_chosen = WORDS


def manner() -> str:
    """That of this process: "words", "json" or "quiet"."""
    return _chosen


def choose(*, quiet: bool = False, as_json: bool = False) -> None:
    """The manner until the innermost `scoped` ends; quiet goes before JSON."""
    global _chosen
    _chosen = QUIET if quiet else JSON if as_json else _chosen
    if _chosen != WORDS:
        warnings.showwarning = _warned
        log_to_stderr(logging.WARNING)


def chosen_by(words: Sequence[str]) -> list[str]:
    """Chooses what the flags among a program's words name: -> the other words."""
    choose(quiet="--quiet" in words, as_json="--json" in words)
    return [word for word in words if word not in FLAGS]


@contextlib.contextmanager
def scoped() -> Iterator[None]:
    """What is chosen in here holds in here."""
    global _chosen
    before, shown_by = _chosen, warnings.showwarning
    try:
        yield
    finally:
        _chosen, warnings.showwarning = before, shown_by


def tell(event: str, **fields: Any) -> None:
    """A JSON object on standard error: the event's name, then the fields; numbers that JSON does
    not have are null."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
    print(json.dumps({"event": event, **known}, allow_nan=False), file=sys.stderr, flush=True)


def tell_error(text: str) -> None:
    """What a command ends with instead of its work; heard in every manner."""
    if _chosen == JSON:
        tell("error", message=text)
    else:
        print(text, file=sys.stderr)


def say(line: str) -> None:
    """A line about what is done: on standard output where it is told in words."""
    if _chosen == JSON:
        tell("status", message=line)
    elif _chosen == WORDS:
        print(line, flush=True)


def results_shown() -> contextlib.AbstractContextManager[object]:
    """In here standard output is read by people: where it is quiet nothing reaches it."""
    if _chosen == QUIET:
        return contextlib.redirect_stdout(io.StringIO())
    return contextlib.nullcontext()


def log_to_stderr(level: int) -> None:
    """What the package logs from this level on; errors alone where it is quiet."""
    log = logging.getLogger(_LOGGER)
    if not any(isinstance(handler, _Told) for handler in log.handlers):
        handler = _Told()
        handler.setFormatter(_Lines())
        log.addHandler(handler)
        # What imports absl's logging, as tensorflow-datasets does, gives the root a handler, too.
        log.propagate = False
    log.setLevel(level)


class _Told(logging.Handler):
    """Writes to what standard error is at that time: above a progress area, where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if _chosen == JSON:
                tell("log", level=record.levelname.lower(), message=text)
            elif _chosen == WORDS or record.levelno >= logging.ERROR:
                print(text, file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _Lines(logging.Formatter):
    """Of data sets and results that may be a stranger's: a line is a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


def _warned(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if _chosen == JSON:
        tell("log", level="warning", message=one_line(f"{category.__name__}: {message}"))
