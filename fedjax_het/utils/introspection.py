"""What functions that users write take: by their signatures, never by lists of names."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_type_hints

from fedjax_het.utils.config import is_supported_annotation, to_json_value, validate
from fedjax_het.utils.errors import ConfigError, display_name, format_value

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""The default of a parameter that has none."""


def get_keyword_parameters(
    function: Callable[..., Any], *, exclude: Iterable[str] = ()
) -> dict[str, Any]:
    """The parameters that can be given by name, with their defaults or `REQUIRED`, in order.

    besides: names that are left out, since the package fills them in itself.
    """
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for parameter in _list_parameters(function)
        if parameter.kind in _KEYWORD_KINDS and parameter.name not in set(exclude)
    }


def call_with_supported(
    function: Callable[..., Any], available: Mapping[str, Any], **extra: Any
) -> Any:
    """`function`, called with those of `offered` that its signature has, and with `more`."""
    supported = {
        name: available[name] for name in get_keyword_parameters(function) if name in available
    }
    return function(**supported, **extra)


def check_arguments(
    owner: str, arguments: Mapping[str, Any], parameters: Mapping[str, Any], noun: str
) -> None:
    """Raise `ConfigError` for a name in `given` that `parameters` lacks, naming the nearest of its
    own, and for one that must be given and is not.

    owner: whose they are, e.g. "partition 'dirichlet'"; kind: "parameter" or "option".
    """
    accepted_text = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
    for name, value in arguments.items():
        if name not in parameters:
            suggestions = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
            value_text = f"{display_name(name)} = {format_value(value)}"
            raise ConfigError(
                f"{value_text}: {owner} has no {noun} {format_value(name)} ({accepted_text}){hint}"
            )
    for name, default in parameters.items():
        if default is REQUIRED and name not in arguments:
            raise ConfigError(f"{owner} needs {display_name(name)} ({accepted_text})")


def validate_keyword_arguments(
    owner: str,
    arguments: Mapping[str, Any],
    function: Any,
    parameters: Mapping[str, Any],
    noun: str,
) -> dict[str, Any]:
    """`given`, each value as JSON has it and as its parameter's annotation asks, where that is one
    of a record's (`utils.config`); None where that is the default.

    function: whose parameters they are, a function or a class. Raises `ConfigError`, see
    `check_arguments`.
    """
    check_arguments(owner, arguments, parameters, noun)
    annotations = _annotations(function)

    def validate_value(name: str, value: Any) -> Any:
        annotation = annotations.get(name)
        is_default = value is None and parameters[name] is None
        is_validated = is_supported_annotation(annotation) and not is_default
        return to_json_value(name, validate(name, value, annotation)) if is_validated else value

    return {name: validate_value(name, value) for name, value in arguments.items()}


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # of what is imported for type checkers alone, or written in C
        return {}


def get_summary_line(function: Any) -> str:
    """The first line of a function's own docstring, "" where it has none."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else function.__doc__
    return (text or "").strip().split("\n")[0].rstrip(".")


def get_qualified_name(function: Any) -> str:
    """What to call a function in a message."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function written in C
        return []
