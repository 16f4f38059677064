"""Signatures of functions that users write: their keyword parameters and documentation."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_type_hints

from fedjax_het.utils.config import to_json_value
from fedjax_het.utils.errors import ConfigError, display_name, format_value
from fedjax_het.utils.validation import is_supported_annotation, validate

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""Stands for the default of a parameter without one."""


def get_keyword_parameters(
    function: Callable[..., Any], *, exclude: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the parameters that a call can name, in order, with their defaults or `REQUIRED`.

    Args:
      function: any callable; one written in C has no known parameters.
      exclude: names to leave out, because the package passes them itself.
    """
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for parameter in _list_parameters(function)
        if parameter.kind in _KEYWORD_KINDS and parameter.name not in set(exclude)
    }


def call_with_supported(
    function: Callable[..., Any], available: Mapping[str, Any], **extra: Any
) -> Any:
    """Call `function` with the `available` arguments that its signature has, and with `extra`."""
    supported = {
        name: available[name] for name in get_keyword_parameters(function) if name in available
    }
    return function(**supported, **extra)


def check_arguments(
    owner: str, arguments: Mapping[str, Any], parameters: Mapping[str, Any], noun: str
) -> None:
    """Raise ConfigError for an unknown argument, naming the nearest one, or a missing argument.

    Args:
      owner: whose parameters they are, e.g. "partition 'dirichlet'".
      arguments: values by name.
      parameters: defaults by name, or `REQUIRED`.
      noun: "parameter" or "option".
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
    """Return the arguments as JSON has them, validated by the annotations of their parameters.

    Annotations that a field of a `Config` may not have are ignored; None stays if it is the default.

    Args:
      owner: whose parameters they are, for messages.
      arguments: values by name.
      function: function or class with these parameters.
      parameters: defaults by name, or `REQUIRED`.
      noun: "parameter" or "option".

    Raises:
      ConfigError: see `check_arguments`; also for a value that does not fit.
    """
    check_arguments(owner, arguments, parameters, noun)
    try:
        annotations = get_type_hints(function, include_extras=True)
    except Exception:  # names imported for type checkers alone, or a function written in C
        annotations = {}
    values = dict(arguments)
    for name, value in arguments.items():
        is_default = value is None and parameters[name] is None
        if is_supported_annotation(annotations.get(name)) and not is_default:
            values[name] = to_json_value(name, validate(name, value, annotations[name]))
    return values


def get_summary_line(function: Any) -> str:
    """Return the first line of a function's docstring; "" if it has none."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else function.__doc__
    return (text or "").strip().split("\n")[0].rstrip(".")


def get_qualified_name(function: Any) -> str:
    """Return a function's name for a message."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function written in C
        return []
