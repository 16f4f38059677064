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

from fedjax_het.utils.text import to_one_line

TEXT, JSON, QUIET = "words", "json", "quiet"
_LOGGER_NAME = "fedjax_het"
_output_mode = TEXT


def output_mode() -> str:
    """That of this process: "words", "json" or "quiet"."""
    return _output_mode


def set_output_mode(*, quiet: bool = False, as_json: bool = False) -> None:
    """The manner until the innermost `preserve_output_mode` ends; quiet goes before JSON."""
    global _output_mode
    _output_mode = QUIET if quiet else JSON if as_json else _output_mode
    if _output_mode != TEXT:
        warnings.showwarning = _show_warning
        log_to_stderr(logging.WARNING)


def parse_output_flags(argv: Sequence[str]) -> None:
    """Set the output mode that a command line's --quiet or --json chooses, before it is checked."""
    set_output_mode(quiet="--quiet" in argv, as_json="--json" in argv)


@contextlib.contextmanager
def preserve_output_mode() -> Iterator[None]:
    """What is chosen in here holds in here."""
    global _output_mode
    previous_mode, previous_showwarning = _output_mode, warnings.showwarning
    try:
        yield
    finally:
        _output_mode, warnings.showwarning = previous_mode, previous_showwarning


def log_event(event: str, **fields: Any) -> None:
    """A JSON object on standard error: the event's name, then the fields; numbers that JSON does
    not have are null."""
    json_fields = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
    print(json.dumps({"event": event, **json_fields}, allow_nan=False), file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """What a command ends with instead of its work; heard in every manner."""
    if _output_mode == JSON:
        log_event("error", message=text)
    else:
        print(text, file=sys.stderr)


def print_status(line: str) -> None:
    """A line about what is done: on standard output where it is told in words."""
    if _output_mode == JSON:
        log_event("status", message=line)
    elif _output_mode == TEXT:
        print(line, flush=True)


def suppress_results_if_quiet() -> contextlib.AbstractContextManager[object]:
    """In here standard output is read by people: where it is quiet nothing reaches it."""
    if _output_mode == QUIET:
        return contextlib.redirect_stdout(io.StringIO())
    return contextlib.nullcontext()


def log_to_stderr(level: int) -> None:
    """What the package logs from this level on; errors alone where it is quiet."""
    logger = logging.getLogger(_LOGGER_NAME)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_OneLineFormatter())
        logger.addHandler(handler)
        # What imports absl's logging, as tensorflow-datasets does, gives the root a handler, too.
        logger.propagate = False
    logger.setLevel(level)


class _StderrHandler(logging.Handler):
    """Writes to what standard error is at that time: above a progress area, where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if _output_mode == JSON:
                log_event("log", level=record.levelname.lower(), message=text)
            elif _output_mode == TEXT or record.levelno >= logging.ERROR:
                print(text, file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _OneLineFormatter(logging.Formatter):
    """Of data sets and results that may be a stranger's: a line is a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return to_one_line(super().formatMessage(record))


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if _output_mode == JSON:
        log_event("log", level="warning", message=to_one_line(f"{category.__name__}: {message}"))
