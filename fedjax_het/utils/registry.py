"""Registries of named entries, those of the package and of users, and signatures of their functions."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar, get_type_hints

from fedjax_het.utils.config import is_supported_annotation, to_json_value, validate
from fedjax_het.utils.errors import ConfigError, display_name, format_value, require, require_name


class RegistryEntry(Protocol):
    """What every registry holds: something with a name and one line about it."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...


EntryT = TypeVar("EntryT", bound=RegistryEntry)
MAX_NAME_LENGTH = 100  # names of files are made of them


class Registry(dict[str, EntryT]):
    """Records by name, the package's own first, then users' in the order in which they were added.

        NETWORKS = Registry("network", (mlp.NETWORK, convnet.NETWORK), argument="model")
        NETWORKS["mlp"]                KeyError for an unknown name, as of any mapping
        NETWORKS.require("mpl")        ConfigError: model = 'mpl' is unknown: did you mean 'mlp'?
        NETWORKS.add(Network(...))     what users' `register_network` calls

    kind: what a record is, in words: "network", "data set".
    argument: the setting that chooses among the names, for messages; `kind` unless given.

    What users add lasts as long as the process.
    """

    def __init__(self, kind: str, entries: Iterable[EntryT], *, argument: str | None = None):
        entries = tuple(entries)
        super().__init__((entry.name, entry) for entry in entries)
        if len(self) < len(entries):
            raise ValueError(f"two records of the registry of {kind}s have one name")
        self.kind, self.argument = kind, argument or kind
        self.built_in = frozenset(self)

    def require(self, name: str, *, argument: str | None = None) -> EntryT:
        """The record of that name; ConfigError with the nearest names where there is none."""
        require_name(argument or self.argument, name, self)
        return self[name]

    def add(self, entry: EntryT) -> None:
        """Make a record of the user's own known, as long as this process lasts.

        A user's own name may be given again, as when a notebook's cell is run twice; the newest
        record counts. Results on disk are named by settings, names among them, and not by code:
        give what has changed a new name, or its results a new folder.

        Raises: ConfigError if the name is no identifier, or is one of the package's own.
        """
        name = entry.name
        is_identifier = isinstance(name, str) and name.isidentifier()
        expected = f"letters, digits and underscores, at most {MAX_NAME_LENGTH}"
        require(is_identifier and len(name) <= MAX_NAME_LENGTH, "name", name, expected)
        expected = f"one that no {self.kind} of the package has"
        require(name not in self.built_in, "name", name, expected)
        self[name] = entry

    def reset(self) -> None:
        """Forget what users added."""
        for name in self.keys() - self.built_in:
            del self[name]


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
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return {}
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for parameter in parameters
        if parameter.kind in _KEYWORD_KINDS and parameter.name not in set(exclude)
    }


def call_with_supported(
    function: Callable[..., Any], available: Mapping[str, Any], **extra: Any
) -> Any:
    """Call `function` with the `available` arguments that its signature has, and with `extra`."""
    names = get_keyword_parameters(function).keys() & available.keys()
    supported = {name: available[name] for name in names}
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
    accepted_text = f"(it takes {', '.join(parameters) or 'none'})"
    for name, value in arguments.items():
        if name not in parameters:
            suggestions = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
            problem = f"{owner} has no {noun} {format_value(name)} {accepted_text}{hint}"
            raise ConfigError(f"{display_name(name)} = {format_value(value)}: {problem}")
    for name, default in parameters.items():
        if default is REQUIRED and name not in arguments:
            raise ConfigError(f"{owner} needs {display_name(name)} {accepted_text}")


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
