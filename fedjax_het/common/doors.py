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

from fedjax_het.common.errors import ConfigError, require, shown, written
from fedjax_het.common.records import checked

P = ParamSpec("P")
R = TypeVar("R")

DOORS: dict[str, Callable[..., Any]] = {}  # by module and name
_SIMPLE = (bool, int, float, str)
_ARRAYS = (np.ndarray, jax.Array)
_FEW = 5  # items of a value that is shown whole
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def door(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose arguments are checked. Raises ConfigError, which names the argument."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says it as Python does
        kinds = kinds_of(function)
        for name in given.arguments.keys() & kinds.keys():
            given.arguments[name] = of_kind(name, given.arguments[name], kinds[name])
        return function(*given.args, **given.kwargs)

    DOORS[f"{function.__module__}.{function.__qualname__}"] = entered
    return entered


@functools.cache
def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's parameters are annotated as, by name."""
    found = {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in _VARIABLE and parameter.annotation is not parameter.empty
    }
    local: dict[str, Any] = {}
    if any(isinstance(kind, str) and "pd." in kind for kind in found.values()):
        import pandas

        local["pd"] = pandas  # which modules import for type checkers alone
    names: Any = types.SimpleNamespace(__annotations__=found)
    here = vars(sys.modules[function.__module__])
    return get_type_hints(names, here, local, include_extras=True)


def of_own_kinds(name: str, record: Any) -> Any:
    """A named tuple whose fields are of their annotations' kinds. Raises ConfigError."""
    hints = get_type_hints(type(record), include_extras=True)
    found = {
        field: of_kind(f"{name}.{field}", getattr(record, field), hints[field])
        for field in record._fields
    }
    return record._replace(**found)


def of_kind(argument: str, value: Any, kind: Any) -> Any:
    """`value` as the annotation has it. Raises ConfigError."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None and types.NoneType in members:
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if any(_is_path(member) for member in members):
        _require_path(argument, value)
        return value
    wrong: list[ConfigError] = []
    for member in members:
        try:
            return _of(argument, value, member)
        except ConfigError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    expected = dict.fromkeys(str(error).rpartition(": expected ")[2] for error in wrong)
    raise ConfigError(f"{written(argument)} = {_seen(value)}: expected {' or '.join(expected)}")


def _of(argument: str, value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if getattr(kind, "_is_protocol", False):
        names = [name for name, each in vars(kind).items() if callable(each) and name[0] != "_"]
        has = all(callable(getattr(value, name, None)) for name in names)
        require(has, argument, _Seen(value), f"what has {', '.join(names)}")
        kind = Callable if "__call__" in vars(kind) else Any
    if kind is Any or isinstance(kind, TypeVar) or kind in _ARRAYS:
        return value
    if kind in _SIMPLE or origin in (Annotated, Literal):
        return checked(argument, value, kind)
    if kind is Callable or origin is collections.abc.Callable:
        require(callable(value), argument, value, "a function")
        return value
    if origin is type:
        (base,) = get_args(kind)
        ok = isinstance(value, type) and issubclass(value, base)
        require(ok, argument, value, f"a class that is a {base.__name__}")
        return value
    base, items = origin or kind, get_args(kind)
    if base is tuple:
        return _tuple(argument, value, items)
    if base in (dict, Mapping, collections.abc.Mapping):
        named = isinstance(value, Mapping)
        if named and items[:1] == (str,):
            named = all(isinstance(key, str) for key in value)
        require(named, argument, _Seen(value), "values by name")
        for key in value if items[1:] else ():
            of_kind(f"{argument}[{key!r}]", value[key], items[1])
        return value
    if base in _LISTS:
        return _list(argument, value, base, items)
    if not isinstance(value, base):
        made = getattr(base, "MADE_BY", None)
        expected = f"a {base.__name__}" + (f", as {made}" if made else "")
        raise ConfigError(f"{written(argument)} = {_seen(value)}: expected {expected}")
    return value


def _tuple(argument: str, value: Any, items: tuple[Any, ...]) -> tuple[Any, ...]:
    require(isinstance(value, list | tuple), argument, _Seen(value), "a list")
    if items[-1:] == (Ellipsis,):
        items = items[:1] * len(value)
    require(len(value) == len(items), argument, value, f"a list of {len(items)}")
    pairs = zip(value, items, strict=True)
    return tuple(of_kind(f"{argument}[{i}]", item, kind) for i, (item, kind) in enumerate(pairs))


def _list(argument: str, value: Any, base: type, items: tuple[Any, ...]) -> Any:
    once = base is collections.abc.Iterable  # then what can be gone through once will do
    (kind,) = items or (Any,)
    of = {str: " of words", int: " of numbers", float: " of numbers"}.get(kind, "")
    if not of and isinstance(kind, type) and kind not in _ARRAYS:
        of = f" of {kind.__name__}s"
    ok = _is_list(value, once) and (kind is str or not isinstance(value, Mapping))
    require(ok, argument, _Seen(value), f"a list{of}")
    if kind in (int, float):
        return value
    if not (isinstance(value, list | tuple) or (kind in _ARRAYS and hasattr(value, "ndim"))):
        value = list(value)  # whose truth is whether it is empty
    for i, item in enumerate(value):
        of_kind(f"{argument}[{i}]", item, kind)
    return value


def _is_list(value: Any, once: bool) -> bool:
    if isinstance(value, str | bytes) or (not once and isinstance(value, Mapping | Set)):
        return False
    if hasattr(value, "ndim"):  # of a data frame what is gone through is its columns
        return value.ndim > 0 and (value.ndim == 1 or isinstance(value, np.ndarray | jax.Array))
    return isinstance(value, Iterable) and (once or hasattr(value, "__len__"))


def _is_path(kind: Any) -> bool:
    return kind is Path or (get_origin(kind) or kind) is os.PathLike


def _require_path(argument: str, value: Any) -> None:
    """Of something that need not be there."""
    ok = isinstance(value, str | os.PathLike) and os.fspath(value) not in ("", b"")
    require(ok and "\0" not in str(value), argument, _Seen(value), "a path")
    try:
        os.stat(Path(value).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        said = f"{written(argument)} = {shown(value)}: expected a path ({why})"
        raise ConfigError(said) from None


class _Seen:
    """What something is: of much, its kind alone."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return _seen(self.value)


def _seen(value: Any) -> str:
    simple = value is None or isinstance(value, str | bool | int | float | os.PathLike)
    small = isinstance(value, list | tuple | dict | set) and len(value) <= _FEW
    return shown(value) if simple or small else f"a {type(value).__name__}"
