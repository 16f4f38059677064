"""Command lines read by tyro, whose errors become one line."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import TypeVar

from fedjax_het.common.errors import ConfigError

_BOX = re.compile("[\u2500-\u257f]+")
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
