"""What functions that users write take: by their signatures, never by lists of names."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_type_hints

from fedjax_het.common.errors import ConfigError, shown, written
from fedjax_het.common.records import checked, is_kind, stored

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""The default of a parameter that has none."""


def parameters_of(function: Callable[..., Any], *, besides: Iterable[str] = ()) -> dict[str, Any]:
    """The parameters that can be given by name, with their defaults or `REQUIRED`, in order.

    besides: names that are left out, since the package fills them in itself.
    """
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for parameter in _parameters(function)
        if parameter.kind in _NAMED and parameter.name not in set(besides)
    }


def call_with(function: Callable[..., Any], offered: Mapping[str, Any], **more: Any) -> Any:
    """`function`, called with those of `offered` that its signature has, and with `more`."""
    taken = {name: offered[name] for name in parameters_of(function) if name in offered}
    return function(**taken, **more)


def check_given(
    owner: str, given: Mapping[str, Any], parameters: Mapping[str, Any], kind: str
) -> None:
    """Raise `ConfigError` for a name in `given` that `parameters` lacks, naming the nearest of its
    own, and for one that must be given and is not.

    owner: whose they are, e.g. "partition 'dirichlet'"; kind: "parameter" or "option".
    """
    takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
    for name, value in given.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            what = f"{written(name)} = {shown(value)}"
            raise ConfigError(f"{what}: {owner} has no {kind} {shown(name)} ({takes}){hint}")
    for name, default in parameters.items():
        if default is REQUIRED and name not in given:
            raise ConfigError(f"{owner} needs {written(name)} ({takes})")


def checked_given(
    owner: str, given: Mapping[str, Any], function: Any, parameters: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """`given`, each value as JSON has it and as its parameter's annotation asks, where that is one
    of a record's (`common.records`); None where that is the default.

    function: whose parameters they are, a function or a class. Raises `ConfigError`, see
    `check_given`.
    """
    check_given(owner, given, parameters, kind)
    kinds = _annotations(function)

    def fitting(name: str, value: Any) -> Any:
        asked = kinds.get(name)
        default = value is None and parameters[name] is None
        known = is_kind(asked) and not default
        return stored(name, checked(name, value, asked)) if known else value

    return {name: fitting(name, value) for name, value in given.items()}


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # of what is imported for type checkers alone, or written in C
        return {}


def first_line(function: Any) -> str:
    """The first line of a function's own docstring, "" where it has none."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else function.__doc__
    return (text or "").strip().split("\n")[0].rstrip(".")


def called(function: Any) -> str:
    """What to call a function in a message."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function written in C
        return []
