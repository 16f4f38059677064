"""Output of a process: progress, messages and errors as text, as JSON objects, or not at all.

The flags `--json` and `--quiet` of a command choose the mode. Results go to stdout in every mode;
everything else goes to stderr.
"""

import codecs
import contextlib
import io
import json
import logging
import math
import re
import shutil
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_het.utils.text import to_one_line

TEXT, JSON, QUIET = "words", "json", "quiet"
# Texts for signs of the package's tables that the encoding of an output lacks, as ASCII does.
_SUBSTITUTES = {"±": "+-", "×": "x", "†": "+", "‡": "++", "−": "-", "—": "-", "–": "-", "─": "-"}
_SUBSTITUTES |= {"≈": "~", "…": "...", "◂": "<", "\ufffd": "?"}
_ENCODING_ERRORS = "fedjax_het.substitute"
_MAX_REPEATED_TEXT = 70  # characters of a warning that a line on its count contains
# The mode belongs to the process: the messages of all its modules share stdout and stderr.
_output_mode = TEXT


def output_mode() -> str:
    """Return the mode of this process: `TEXT`, `JSON` or `QUIET`."""
    return _output_mode


def set_output_mode(*, quiet: bool = False, as_json: bool = False) -> None:
    """Set the mode until the innermost `preserve_output_mode` ends.

    Args:
      quiet: print errors only. Quiet takes precedence over JSON.
      as_json: print JSON objects. If both flags are False, the mode stays.
    """
    global _output_mode
    _output_mode = QUIET if quiet else JSON if as_json else _output_mode
    if _output_mode != TEXT:
        log_to_stderr(logging.WARNING)


def parse_output_flags(argv: Sequence[str]) -> None:
    """Set the mode that `--quiet` or `--json` chooses, before the command line is checked."""
    set_output_mode(quiet="--quiet" in argv, as_json="--json" in argv)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    r"""Return texts for characters that an encoding lacks, e.g. `\u72d7` for U+72D7."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    texts = (_SUBSTITUTES.get(c, ascii(c)[1:-1]) for c in characters)
    return "".join(texts), error.end


codecs.register_error(_ENCODING_ERRORS, _substitute)


@contextlib.contextmanager
def accept_all_characters() -> Iterator[None]:
    """Return a context in which stdout and stderr substitute characters that they cannot encode.

    Their encoding may be ASCII, as with `LC_ALL=C`. A line of a finished command would otherwise
    end it with a UnicodeEncodeError.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    previous_errors = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors=_ENCODING_ERRORS)
    try:
        yield
    finally:
        for stream, errors in zip(streams, previous_errors, strict=True):
            with contextlib.suppress(OSError, ValueError):  # its reader may have stopped
                stream.reconfigure(errors=errors)


@contextlib.contextmanager
def preserve_output_mode() -> Iterator[None]:
    """Restore the mode at the end of the context.

    In the context, outputs accept all characters, and a warning is one line without its source.
    """
    global _output_mode
    previous_mode, previous_showwarning = _output_mode, warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        with accept_all_characters():
            yield
    finally:
        _output_mode, warnings.showwarning = previous_mode, previous_showwarning


def log_event(event: str, **fields: Any) -> None:
    """Print a JSON object on stderr; numbers that JSON lacks become null.

    Args:
      event: value of the key "event".
      **fields: further keys and values.
    """
    json_fields = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
    print(json.dumps({"event": event, **json_fields}, allow_nan=False), file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Print the error that ends a command; every mode shows it."""
    if _output_mode == JSON:
        log_event("error", message=text)
    else:
        print(text, file=sys.stderr)


def print_status(line: str) -> None:
    """Print a line about completed work: on stdout in text mode, as JSON object in JSON mode."""
    if _output_mode == JSON:
        log_event("status", message=line)
    elif _output_mode == TEXT:
        with accept_all_characters():
            print(line, flush=True)


def print_wrapped(text: str) -> None:
    """Print lines; on a terminal, lines that are too long are wrapped at words.

    The further lines of `  name  description` start below the description, others are indented.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in text.split("\n"):
        if not width or len(line) <= width:
            print(line)
            continue
        columns = re.match(r" *\S+ {2,}", line)
        indent = len(columns[0]) if columns else len(line) - len(line.lstrip()) + 4
        indent = indent if indent < width // 2 else 4
        print(textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False))


def is_text_terminal() -> bool:
    """Return whether stdout is a terminal that shows text, without `--json` and `--quiet`."""
    return sys.stdout.isatty() and _output_mode == TEXT


def print_json(values: Mapping[str, Any]) -> None:
    """Print a JSON object in one line on stdout."""
    print(json.dumps(values, allow_nan=False), flush=True)


def print_summary(values: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print the end of a command.

    Args:
      values: numbers and texts that JSON can hold, printed as one line of JSON to a pipe or a file,
        and to a terminal with `--json` or `--quiet`.
      lines: the summary as text, printed to a terminal.
    """
    if is_text_terminal():
        print(*map(to_one_line, lines), sep="\n", flush=True)
    else:
        print_json(values)


def suppress_results_if_quiet() -> contextlib.AbstractContextManager[object]:
    """Return a context in which quiet mode discards stdout, for output that people read."""
    if _output_mode == QUIET:
        return contextlib.redirect_stdout(io.StringIO())
    return contextlib.nullcontext()


def log_to_stderr(level: int) -> None:
    """Print the log messages of the package from a level on; quiet mode prints errors only."""
    logger = logging.getLogger("fedjax_het")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        # The import of absl's logging, e.g. by tensorflow-datasets, adds a handler to the root.
        logger.propagate = False
    logger.setLevel(level)


@contextlib.contextmanager
def count_repeated_warnings() -> Iterator[None]:
    """Return a context in which a warning of the package's log that occurs again is only counted.

    Warnings that differ in numbers only count as one warning. At the end of the context, the log
    has a line for each warning that occurred more than once: the number of times and the beginning
    of the text.
    """
    logger, counts = logging.getLogger("fedjax_het"), defaultdict[str, Counter[str]](Counter)

    def is_first(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        texts = counts[re.sub(r"\d+", "0", text)]
        texts[text] += 1
        return texts.total() == 1

    logger.addFilter(is_first)
    try:
        yield
    finally:
        logger.removeFilter(is_first)
        for texts in counts.values():
            if texts.total() > 1:
                numbers = " with other numbers" if len(texts) > 1 else ""
                start = textwrap.shorten(next(iter(texts)), _MAX_REPEATED_TEXT, placeholder=" ...")
                logger.warning("%d times%s: %s", texts.total(), numbers, start)


class _StderrHandler(logging.Handler):
    """Writes to the current stderr, which a progress area may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record in the current mode."""
        try:
            text = to_one_line(record.getMessage())  # results may contain foreign text
            if _output_mode == JSON:
                log_event("log", level=record.levelname.lower(), message=text)
            elif _output_mode == TEXT or record.levelno >= logging.ERROR:
                print(text, file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if _output_mode == JSON:
        log_event("log", level="warning", message=to_one_line(f"{category.__name__}: {message}"))
    elif _output_mode == TEXT:
        kind = "" if category is UserWarning else f"{category.__name__}: "
        print(to_one_line(f"{kind}{message}"), file=sys.stderr, flush=True)
