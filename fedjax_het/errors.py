"""One kind of error for bad input: it names the argument, its value and what would be right."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting cannot be used as given; the message is one line. The command line exits with 2."""


def require(condition: bool, argument: str, value: object, expected: str) -> None:
    """Raise `ConfigError` unless `condition` holds, e.g. `require(a > 0, "alpha", a, "a > 0")`."""
    if not condition:
        raise ConfigError(f"{argument} = {value!r}: expected {expected}")


def require_name(argument: str, value: str, valid: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `valid`, naming the nearest of them first."""
    names = list(valid)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(f"{argument} = {value!r} is unknown: {hint}(valid: {', '.join(names)})")
