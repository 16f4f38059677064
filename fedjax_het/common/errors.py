"""One kind of error for bad input: it names the argument, its value and what would be right."""

import difflib
import numbers
import os
import sys
from collections.abc import Callable, Iterable


class ConfigError(ValueError):
    """A setting cannot be used as given; the message is one line. The command line exits with 2."""


def require(condition: bool, argument: str, value: object, expected: str) -> None:
    """Raise `ConfigError` unless `condition` holds, e.g. `require(a > 0, "alpha", a, "a > 0")`."""
    if not condition:
        raise ConfigError(f"{argument} = {value!r}: expected {expected}")


def is_whole(value: object, least: float) -> bool:
    """Whether `value` is an integer (of Python or NumPy, no truth value) of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    return int(value) >= least


def require_name(argument: str, value: str, valid: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `valid`, naming the nearest of them first."""
    names = list(valid)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), map(str, names), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(
        f"{argument} = {value!r} is unknown: {hint}(valid: {', '.join(map(str, names))})"
    )


def exit_status(work: Callable[[], int], *, name: str, stopped: str) -> int:
    """`work()`'s exit status; 2 for a ConfigError and 130 for Ctrl-C, each told in one line; 141
    where nobody reads on (`... | head`), about which there is nothing to say."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: {stopped}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is left in the buffer would raise once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
