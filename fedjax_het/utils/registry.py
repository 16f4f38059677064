"""Registries of named entries, and the signatures of the functions that users register."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

import docstring_parser

from fedjax_het.utils.config import (
    is_supported_annotation,
    split_words,
    to_json_value,
    union_members,
    validate,
)
from fedjax_het.utils.errors import (
    ConfigError,
    display_name,
    format_value,
    require,
    require_name,
    suggest_name,
)


def get_argument_docs(function: Callable | None) -> dict[str, str]:
    """Return the text about each argument in the docstring of a function, by name.

    Args:
      function: a function with a docstring in Google, NumPy or reST style, or None.

    Returns:
      The texts that are not empty, each on one line.

    Example:
      >>> from fedjax_het.nn import NETWORKS
      >>> from fedjax_het.utils.registry import get_argument_docs
      >>> get_argument_docs(NETWORKS["convnet"].make)["width"]
      'filters of each convolution.'
    """
    parameters = docstring_parser.parse(inspect.getdoc(function) or "").params
    texts = {each.arg_name: " ".join((each.description or "").split()) for each in parameters}
    return {name: text for name, text in texts.items() if text}


class RegistryEntry(Protocol):
    """Protocol of an entry: a name and one line of description."""

    @property
    def name(self) -> str:
        """Name of the entry in settings."""
        ...

    @property
    def description(self) -> str:
        """One line for `fedjax-het list`."""
        ...


def format_entry(entry: Any) -> str:
    """Return a short representation of an entry, without functions and their addresses."""
    return f"{type(entry).__name__}({entry.name!r}: {entry.description})"


EntryT = TypeVar("EntryT", bound=RegistryEntry)
LIST_COMMAND = "fedjax-het list"
"""Command that prints the names of all entries."""
MAX_NAME_LENGTH = 100
"""Largest number of characters of a name, which names of files contain."""


class Registry(dict[str, EntryT]):
    """Entries by name: entries of the package, then of users in the order of registration.

    Entries of users exist until the process ends.

    Args:
      kind: kind of the entries in words, e.g. "data set".
      entries: entries of the package.
      argument: setting that selects an entry, for messages (default: `kind`).

    Example:
      >>> from typing import NamedTuple
      >>> from fedjax_het.utils.registry import Registry
      >>> class Tool(NamedTuple):
      ...     name: str
      ...     description: str
      >>> tools = Registry("tool", [Tool("saw", "for boards")])
      >>> tools.add(Tool("awl", "for holes"))
      >>> list(tools)
      ['saw', 'awl']
    """

    def __init__(self, kind: str, entries: Iterable[EntryT], *, argument: str | None = None):
        entries = tuple(entries)
        super().__init__((entry.name, entry) for entry in entries)
        if len(self) < len(entries):
            raise ValueError(f"two records of the registry of {kind}s have one name")
        self.kind, self.argument = kind, argument or kind
        self.built_in = frozenset(self)

    def require(self, name: str) -> EntryT:
        """Return an entry by its name.

        Args:
          name: name of the entry.

        Returns:
          The entry.

        Raises:
          ConfigError: if the name is unknown; the message suggests similar names.
        """
        require_name(self.argument, name, self, listed_by=LIST_COMMAND)
        return self[name]

    def add(self, entry: EntryT) -> None:
        """Add an entry of a user, or replace one.

        A name of a user can be registered again, e.g. when a cell of a notebook is run twice.
        Results on disk are named by settings, which include names but no code. Their summaries have
        digests of the code, see `runtime.identity`.

        Args:
          entry: the entry. Its name is an identifier of at most `MAX_NAME_LENGTH` characters.

        Raises:
          ConfigError: if the name is no identifier, or the name of an entry of the package.
        """
        name = entry.name
        is_identifier = isinstance(name, str) and name.isidentifier()
        expected = f"letters, digits and underscores, at most {MAX_NAME_LENGTH}"
        require(is_identifier and len(name) <= MAX_NAME_LENGTH, "name", name, expected)
        expected = f"a name that no {self.kind} of the package has"
        require(name not in self.built_in, "name", name, expected)
        self[name] = entry

    def reset(self) -> None:
        """Remove the entries of users."""
        for name in self.keys() - self.built_in:
            del self[name]


_PACKAGE = __name__.partition(".")[0]
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""Default of a parameter without a default."""


def get_keyword_parameters(
    function: Callable[..., Any], *, exclude: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the parameters that a call can pass by name, in order.

    Args:
      function: any callable; a function written in C has no known parameters.
      exclude: names to leave out, because the package passes them itself.

    Returns:
      Defaults by name, or `REQUIRED`.

    Example:
      >>> from fedjax_het.utils.registry import get_keyword_parameters
      >>> get_keyword_parameters(lambda rng, alpha, size=3: None, exclude=("rng",))
      {'alpha': REQUIRED, 'size': 3}
    """
    try:
        parameters = _list_parameters(function)
    except TypeError:  # an object without a hash
        parameters = _list_parameters.__wrapped__(function)
    return {name: default for name, default in parameters if name not in exclude}


@functools.lru_cache(maxsize=1000)  # inspection takes a tenth of the resolution of settings
def _list_parameters(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Return name and default of each parameter that a call can pass by name."""
    # A metaclass, such as flax.nnx's, hides the signature of `__init__`.
    is_hidden = isinstance(function, type) and type(function).__call__ is not type.__call__
    target = cast(Any, function).__init__ if is_hidden else function
    try:
        parameters = [*inspect.signature(target).parameters.values()][is_hidden:]
    except (TypeError, ValueError):  # a function written in C
        return ()
    return tuple(
        (p.name, REQUIRED if p.default is p.empty else p.default)
        for p in parameters
        if p.kind in _KEYWORD_KINDS
    )


def call_with_supported(
    function: Callable[..., Any], available: Mapping[str, Any], **extra: Any
) -> Any:
    """Call a function with those available arguments that its signature has.

    Args:
      function: the function.
      available: arguments by name.
      **extra: further arguments, which are always passed.

    Returns:
      The return value of the function.
    """
    names = get_keyword_parameters(function).keys() & available.keys()
    supported = {name: available[name] for name in names}
    return function(**supported, **extra)


def validate_keyword_arguments(
    owner: str,
    arguments: Mapping[str, Any],
    function: Any,
    parameters: Mapping[str, Any],
    noun: str,
    available: Sequence[str] = (),
) -> dict[str, Any]:
    """Validate arguments by the annotations of their parameters.

    Annotations that a field of a `Config` cannot have are ignored. A parameter without annotation
    whose default is a truth value, a number or a text requires a value of this kind. None is valid
    for a parameter whose default is None. A list of words may be a text with commas.

    Args:
      owner: owner of the parameters in messages.
      arguments: values by name.
      function: function or class with these parameters.
      parameters: defaults by name, or `REQUIRED`.
      noun: "parameter" or "option".
      available: names of the arguments that the package passes to a user's function.

    Returns:
      The arguments as JSON stores them.

    Raises:
      ConfigError: for an unknown or missing argument, and for a value that does not fit.
    """
    accepted_text = f"(it takes {', '.join(map(display_name, parameters)) or 'none'})"
    for name, value in arguments.items():
        if name not in parameters:
            suggestion = suggest_name(name, parameters)
            hint = f"; did you mean {suggestion!r}?" if suggestion else ""
            problem = f"{owner} has no {noun} {format_value(name)} {accepted_text}{hint}"
            raise ConfigError(f"{display_name(name)} = {format_value(value)}: {problem}")
    for name, default in parameters.items():
        if default is REQUIRED and name not in arguments:
            problem = f"{owner} needs {display_name(name)} {accepted_text}"
            if available and not str(getattr(function, "__module__", "")).startswith(_PACKAGE):
                problem += f"; the package passes {', '.join(available)}, by these names"
            raise ConfigError(problem)
    try:
        annotations = get_type_hints(function, include_extras=True)
    except Exception:  # names imported for type checkers alone, or a function written in C
        annotations = {}
    values = dict(arguments)
    for name, value in arguments.items():
        is_default = value is None and parameters[name] is None
        if is_supported_annotation(annotations.get(name)) and not is_default:
            value = split_words(name, value, annotations[name])
            values[name] = to_json_value(name, validate(name, value, annotations[name]))
        elif name not in annotations:
            _require_kind_of_default(name, value, parameters[name])
    return values


def _require_kind_of_default(name: str, value: Any, default: Any) -> None:
    """Raise ConfigError unless a value is a truth value, number or text like its default."""
    kinds = ((bool, bool, "True or False"), (int | float, Real, "a number"), (str, str, "a text"))
    for kind, accepted, text in kinds:
        if isinstance(default, kind):
            is_valid = isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)
            hint = f"like the default {default!r}; `grid` and `sweep` take several values"
            require(is_valid, name, value, f"{text}, {hint}")
            return


def get_list_depth(function: Any, name: str) -> int:
    """Return the number of nested lists in the values of a parameter.

    Args:
      function: function or class with the parameter.
      name: name of the parameter; an unknown name has depth 0.

    Returns:
      0 for a number or a text, 1 for a list of them, 2 for a list of lists; by the annotation or
      the default, whichever is larger.

    Example:
      >>> from fedjax_het.utils.registry import get_list_depth
      >>> def split(labels, *, groups: tuple[tuple[int, ...], ...] | None = None, sizes=(3, 4)): ...
      >>> [get_list_depth(split, name) for name in ("labels", "sizes", "groups")]
      [0, 1, 2]
    """
    try:
        annotation = get_type_hints(function).get(name)
    except Exception:  # names imported for type checkers alone, or a function written in C
        annotation = None
    default = get_keyword_parameters(function).get(name)
    return max(_get_annotation_depth(annotation), count_list_depth(default))


def _get_annotation_depth(annotation: Any) -> int:
    members = union_members(annotation)
    if len(members) > 1:
        return max(map(_get_annotation_depth, members))
    container = get_origin(members[0]) or members[0]
    if not (isinstance(container, type) and issubclass(container, Sequence)) or container is str:
        return 0
    return 1 + max(map(_get_annotation_depth, get_args(members[0])), default=0)


def count_list_depth(value: Any) -> int:
    """Return the number of nested lists in a value: 0 for a number, a text or a mapping.

    Args:
      value: any value. Other iterables count as one list.

    Returns:
      The number of levels.

    Example:
      >>> from fedjax_het.utils.registry import count_list_depth
      >>> [count_list_depth(value) for value in ("ab", range(3), [[0, 1], [2]])]
      [0, 1, 2]
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return 0
    items = value if isinstance(value, list | tuple) else ()
    return 1 + max(map(count_list_depth, items), default=0)


def get_summary_line(function: Any) -> str:
    """Return the first line of a function's docstring without its period, or ""."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else function.__doc__
    return (text or "").strip().split("\n")[0].rstrip(".")


def get_qualified_name(function: Any) -> str:
    """Return a function's name for a message."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
