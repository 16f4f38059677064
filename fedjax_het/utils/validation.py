"""The doors of the package: what a public function is given is checked by the function's own
annotations, before it does anything.

    @door
    def load(path: str | os.PathLike, *, size: Count | None = None) -> Dataset: ...

    load("here", size="2")      ConfigError: size = '2': expected a whole number >= 1, below 2**31

Scalars of NumPy and jax arrive as Python's. What is annotated as an array, or not at all, and the
items of lists of numbers, are the function's own to check.
"""

import collections.abc
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import numpy as np

from fedjax_het.utils.config import validate
from fedjax_het.utils.errors import ConfigError, display_name, format_value, require

P = ParamSpec("P")
R = TypeVar("R")

VALIDATED_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by module and name
_SCALAR_TYPES = (bool, int, float, str)
_ARRAY_TYPES = (np.ndarray, jax.Array)
_MAX_SHOWN_ITEMS = 5  # items of a value that is shown whole
_LIST_TYPES = (list, collections.abc.Sequence, collections.abc.Iterable)
_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose arguments are checked. Raises ConfigError, which names the argument."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says it as Python does
        annotations = parameter_types(function)
        for name in bound.arguments.keys() & annotations.keys():
            bound.arguments[name] = validate_type(name, bound.arguments[name], annotations[name])
        return function(*bound.args, **bound.kwargs)

    VALIDATED_FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = wrapper
    return wrapper


@functools.cache
def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's parameters are annotated as, by name."""
    annotations = {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in _VARIADIC_KINDS and parameter.annotation is not parameter.empty
    }
    local_names: dict[str, Any] = {}
    if any(
        isinstance(annotation, str) and "pd." in annotation for annotation in annotations.values()
    ):
        import pandas

        local_names["pd"] = pandas  # which modules import for type checkers alone
    annotation_holder: Any = types.SimpleNamespace(__annotations__=annotations)
    module_globals = vars(sys.modules[function.__module__])
    return get_type_hints(annotation_holder, module_globals, local_names, include_extras=True)


def validate_named_tuple(name: str, record: Any) -> Any:
    """A named tuple whose fields are of their annotations' kinds. Raises ConfigError."""
    hints = get_type_hints(type(record), include_extras=True)
    values = {
        field: validate_type(f"{name}.{field}", getattr(record, field), hints[field])
        for field in record._fields
    }
    return record._replace(**values)


def validate_type(argument: str, value: Any, annotation: Any) -> Any:
    """`value` as the annotation has it. Raises ConfigError."""
    members = (
        get_args(annotation)
        if get_origin(annotation) in (Union, types.UnionType)
        else (annotation,)
    )
    if value is None and types.NoneType in members:
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if any(_is_path_type(member) for member in members):
        _require_path(argument, value)
        return value
    errors: list[ConfigError] = []
    for member in members:
        try:
            return _validate_member(argument, value, member)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    expected = dict.fromkeys(str(error).rpartition(": expected ")[2] for error in errors)
    raise ConfigError(
        f"{display_name(argument)} = {_format_short(value)}: expected {' or '.join(expected)}"
    )


def _validate_member(argument: str, value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if getattr(annotation, "_is_protocol", False):
        names = [
            name
            for name, attribute in vars(annotation).items()
            if callable(attribute) and name[0] != "_"
        ]
        has_methods = all(callable(getattr(value, name, None)) for name in names)
        require(has_methods, argument, _ShortRepr(value), f"what has {', '.join(names)}")
        annotation = Callable if "__call__" in vars(annotation) else Any
    if annotation is Any or isinstance(annotation, TypeVar) or annotation in _ARRAY_TYPES:
        return value
    if annotation in _SCALAR_TYPES or origin in (Annotated, Literal):
        return validate(argument, value, annotation)
    if annotation is Callable or origin is collections.abc.Callable:
        require(callable(value), argument, value, "a function")
        return value
    if origin is type:
        (base_class,) = get_args(annotation)
        ok = isinstance(value, type) and issubclass(value, base_class)
        require(ok, argument, value, f"a class that is a {base_class.__name__}")
        return value
    base_class, item_types = origin or annotation, get_args(annotation)
    if base_class is tuple:
        return _validate_tuple(argument, value, item_types)
    if base_class in (dict, Mapping, collections.abc.Mapping):
        has_string_keys = isinstance(value, Mapping)
        if has_string_keys and item_types[:1] == (str,):
            has_string_keys = all(isinstance(key, str) for key in value)
        require(has_string_keys, argument, _ShortRepr(value), "values by name")
        for key in value if item_types[1:] else ():
            validate_type(f"{argument}[{key!r}]", value[key], item_types[1])
        return value
    if base_class in _LIST_TYPES:
        return _validate_list(argument, value, base_class, item_types)
    if not isinstance(value, base_class):
        creators = getattr(base_class, "CONSTRUCTORS", None)
        expected = f"a {base_class.__name__}" + (f", as {creators}" if creators else "")
        raise ConfigError(f"{display_name(argument)} = {_format_short(value)}: expected {expected}")
    return value


def _validate_tuple(argument: str, value: Any, item_types: tuple[Any, ...]) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), argument, _ShortRepr(value), "a list")
    if item_types[-1:] == (Ellipsis,):
        item_types = item_types[:1] * len(value)
    require(len(value) == len(item_types), argument, value, f"a list of {len(item_types)}")
    pairs = zip(value, item_types, strict=True)
    return tuple(
        validate_type(f"{argument}[{i}]", item, item_type)
        for i, (item, item_type) in enumerate(pairs)
    )


def _validate_list(argument: str, value: Any, base: type, item_types: tuple[Any, ...]) -> Any:
    allow_single_pass = (
        base is collections.abc.Iterable
    )  # then what can be gone through once will do
    (item_type,) = item_types or (Any,)
    item_text = {str: " of words", int: " of numbers", float: " of numbers"}.get(item_type, "")
    if not item_text and isinstance(item_type, type) and item_type not in _ARRAY_TYPES:
        item_text = f" of {item_type.__name__}s"
    ok = _is_list_like(value, allow_single_pass) and (
        item_type is str or not isinstance(value, Mapping)
    )
    require(ok, argument, _ShortRepr(value), f"a list{item_text}")
    if item_type in (int, float):
        return value
    if not (
        isinstance(value, list | tuple) or (item_type in _ARRAY_TYPES and hasattr(value, "ndim"))
    ):
        value = list(value)  # whose truth is whether it is empty
    for i, item in enumerate(value):
        validate_type(f"{argument}[{i}]", item, item_type)
    return value


def _is_list_like(value: Any, allow_single_pass: bool) -> bool:
    if isinstance(value, str | bytes) or (
        not allow_single_pass and isinstance(value, Mapping | Set)
    ):
        return False
    if hasattr(value, "ndim"):  # of a data frame what is gone through is its columns
        return value.ndim > 0 and (value.ndim == 1 or isinstance(value, np.ndarray | jax.Array))
    return isinstance(value, Iterable) and (allow_single_pass or hasattr(value, "__len__"))


def _is_path_type(annotation: Any) -> bool:
    return annotation is Path or (get_origin(annotation) or annotation) is os.PathLike


def _require_path(argument: str, value: Any) -> None:
    """Of something that need not be there."""
    ok = isinstance(value, str | os.PathLike) and os.fspath(value) not in ("", b"")
    require(ok and "\0" not in str(value), argument, _ShortRepr(value), "a path")
    try:
        os.stat(Path(value).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{display_name(argument)} = {format_value(value)}: expected a path ({reason})"
        raise ConfigError(message) from None


class _ShortRepr:
    """What something is: of much, its kind alone."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return _format_short(self.value)


def _format_short(value: Any) -> str:
    is_scalar = value is None or isinstance(value, str | bool | int | float | os.PathLike)
    is_small = isinstance(value, list | tuple | dict | set) and len(value) <= _MAX_SHOWN_ITEMS
    return format_value(value) if is_scalar or is_small else f"a {type(value).__name__}"
