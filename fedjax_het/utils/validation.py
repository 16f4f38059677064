"""Validation of arguments, settings and stored records by their annotations, with pydantic.

    @validate_arguments
    def load(path: str | os.PathLike, *, size: PositiveInt | None = None) -> Dataset: ...

    load("here", size="2")      ConfigError: size = '2': expected a whole number >= 1, below 2**31

Types are strict: "1" is no number and True no integer. Scalars of NumPy and jax become Python's.
Parameters annotated as arrays, parameters without an annotation, and the items of sequences of
numbers are left to the function itself.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from fedjax_het.utils.errors import (
    MAX_VALUE_LENGTH,
    ConfigError,
    display_name,
    format_value,
    require_name,
)

P = ParamSpec("P")
R = TypeVar("R")

VALIDATED_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by module and name
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MIN_NORMAL_FLOAT32 = float(np.finfo(np.float32).tiny)  # most devices flush smaller numbers to 0
_UNIONS = (Union, types.UnionType)
_ARRAYS = (np.ndarray, jax.Array)
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)
_DESCRIPTIONS: dict[Any, str] = {
    bool: "True or False",
    str: "a word",
    collections.abc.Callable: "a function",
    **dict.fromkeys(_MAPPINGS, "values by name"),
}
_SHOWN_TYPES = (str, bytes, numbers.Number, os.PathLike, list, tuple, dict, set, *_ARRAYS)


class Bounds(NamedTuple):
    """Interval that a number must lie in; an open end excludes its limit."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        """Return whether the interval holds the value; open ends compare in float32, the devices'
        precision, as well."""
        float32_value = _to_float32(value)
        if (self.open_low and float32_value <= self.low) or (
            self.open_high and float32_value >= self.high
        ):
            return False
        is_above_low = value > self.low if self.open_low else value >= self.low
        is_below_high = value < self.high if self.open_high else value <= self.high
        return bool(is_above_low and is_below_high)

    def __str__(self) -> str:
        """Return the interval as text after "a number", e.g. ">= 1"; "" if it is unbounded."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"{'>' if self.open_low else '>='} {self.low:g}"
        brackets = "[("[self.open_low], "])"[self.open_high]
        return f"in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"


def _to_float32(value: float) -> float:
    """Return a number as devices hold it; infinite if float32 cannot hold it."""
    if abs(value) > MAX_FLOAT32:
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < MIN_NORMAL_FLOAT32 else float(np.float32(value))


def lower_bound(low: float) -> Bounds:
    return Bounds(low)


def exclusive_lower_bound(low: float) -> Bounds:
    return Bounds(low, open_low=True)


NonNegativeInt = Annotated[int, lower_bound(0)]
PositiveInt = Annotated[int, lower_bound(1)]
NonNegativeFloat = Annotated[float, lower_bound(0)]
PositiveFloat = Annotated[float, exclusive_lower_bound(0)]
UnitInterval = Annotated[float, Bounds(0, 1)]
MomentumCoefficient = Annotated[float, Bounds(0, 1, open_high=True)]  # 1 would never decay
DecayFactor = Annotated[float, Bounds(0, 1, open_low=True)]


# --- annotations


def union_members(annotation: Any) -> list[Any]:
    """Return the members of a union other than None; for another annotation, that annotation."""
    if get_origin(annotation) not in _UNIONS:
        return [annotation]
    return [member for member in get_args(annotation) if member is not types.NoneType]


def accepts_none(annotation: Any) -> bool:
    """Return whether an annotation is a union with None."""
    return get_origin(annotation) in _UNIONS and types.NoneType in get_args(annotation)


def split_bounds(annotation: Any) -> tuple[Any, Bounds]:
    """Return the type and the bounds of an annotation, which may be a union with None."""
    (annotation,) = union_members(annotation)
    if get_origin(annotation) is not Annotated:
        return annotation, Bounds()
    base_type, *metadata = get_args(annotation)
    return base_type, next((extra for extra in metadata if isinstance(extra, Bounds)), Bounds())


def is_supported_annotation(annotation: Any) -> bool:
    """Return whether an annotation may be a field of a `Config`: bool, int, float, str, Literal, a
    tuple of one of them, or a union; numbers may have `Bounds`."""
    origin, items = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return isinstance(items[1], Bounds) and is_supported_annotation(items[0])
    if origin in _UNIONS:
        return all(map(is_supported_annotation, union_members(annotation)))
    if origin is tuple:
        return items[1:] == (...,) and is_supported_annotation(items[0])
    return origin is Literal or annotation in (bool, int, float, str)


def describe(annotation: Any, *, brief: bool = False) -> str:
    """Return the values that an annotation allows, in words.

    Args:
      annotation: type, with `Bounds` or without.
      brief: for a table of settings: names None and leaves out the limits of all numbers.
    """
    origin, items = get_origin(annotation), get_args(annotation)
    if _is_path(annotation):
        return "a path"
    if origin in _UNIONS:
        words = [describe(member, brief=brief) for member in union_members(annotation)]
        return " or ".join(words + ["None"] * (brief and accepts_none(annotation)))
    base_type, bounds = split_bounds(annotation)
    base_class: Any = origin or annotation
    if base_type is int:
        limit = "" if brief or math.isfinite(bounds.high) else ", below 2**31"
        return f"a whole number {bounds}".rstrip() + limit
    if base_type is float:
        finite = "" if brief or math.isfinite(bounds.high) else "finite "
        return f"a {finite}number {bounds}".rstrip()
    if origin is Literal:
        return " or ".join(map(str, items))
    if origin is type:
        return f"a class that is a {items[0].__name__}"
    if base_class is tuple:
        if items[-1:] == (...,):
            return f"a list, each {describe(items[0], brief=brief)}"
        return f"a list of {len(items)}"
    if base_class in _LISTS:
        item = items[0] if items else Any
        if item in (str, int, float):
            return "a list of words" if item is str else "a list of numbers"
        has_name = isinstance(item, type) and item not in _ARRAYS
        return f"a list of {item.__name__}s" if has_name else "a list"
    if getattr(annotation, "_is_protocol", False):
        return f"what has {', '.join(_methods(annotation))}"
    if base_class in _DESCRIPTIONS:
        return _DESCRIPTIONS[base_class]
    constructors = getattr(base_class, "CONSTRUCTORS", None)
    return f"a {base_class.__name__}" + (f", as {constructors}" if constructors else "")


def _is_path(annotation: Any) -> bool:
    members = map(lambda member: get_origin(member) or member, union_members(annotation))
    return any(member in (Path, os.PathLike) for member in members)


def _methods(protocol: type) -> list[str]:
    return [name for name, item in vars(protocol).items() if callable(item) and name[0] != "_"]


# --- values


def to_python_scalar(value: Any) -> Any:
    """Return `value` with the scalars of NumPy and jax as Python's, in lists and mappings too.

    A float32 becomes the number that it is written as: 0.1, not 0.10000000149. Traced values, which
    have no value yet, stay.
    """
    if isinstance(value, dict):
        return {to_python_scalar(key): to_python_scalar(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_python_scalar(item) for item in value)
    return _to_scalar(value)


def _to_scalar(value: Any) -> Any:
    if isinstance(value, np.generic) or (
        isinstance(value, _ARRAYS) and getattr(value, "shape", None) == ()
    ):
        scalar = np.asarray(value)[()]
        is_low_precision = isinstance(scalar, np.floating) and scalar.dtype.itemsize < 8
        return float(str(scalar)) if is_low_precision else scalar.item()
    return value


def _to_number(kind: type, bounds: Bounds, value: Any) -> Any:
    """Return a number of any library as Python's; other values stay. Raises ValueError out of
    bounds."""
    value = _to_scalar(value)
    number_type = numbers.Integral if kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, number_type):
        return value
    number = kind(value)
    max_size = MAX_FLOAT32 if kind is float else 2**31 - 1
    is_limited = kind is float or math.isinf(bounds.high)
    if not bounds.contains(number) or (is_limited and not abs(number) <= max_size):
        raise ValueError
    return number


def is_list(value: Any, annotation: Any = tuple) -> bool:
    """Return whether a value is what a user would call a list; a data frame is none."""
    if hasattr(value, "ndim"):
        return value.ndim > 0 and (value.ndim == 1 or isinstance(value, _ARRAYS))
    base_class = get_origin(annotation) or annotation
    if base_class is tuple:
        return isinstance(value, list | tuple | range)
    takes_words = get_args(annotation) == (str,)  # as the keys of a mapping are
    if base_class is collections.abc.Iterable and (takes_words or not isinstance(value, Mapping)):
        return isinstance(value, base_class) and not isinstance(value, str | bytes)
    is_keyed = isinstance(value, Mapping | collections.abc.Set | str | bytes)
    return isinstance(value, collections.abc.Collection) and not is_keyed


def _require_form(
    annotation: Any, value: Any, *, copy: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a value as `copy` makes it, for pydantic to validate its items.

    Raises:
      ValueError: if the value is of another type than the annotation's.
    """
    base_class, items = get_origin(annotation) or annotation, get_args(annotation)
    if _is_path(annotation):
        return _require_path(value)
    if base_class is tuple:
        is_valid = is_list(value) and (items[-1:] == (...,) or len(value) == len(items))
        value = tuple(value) if is_valid else value
    elif base_class in _LISTS:
        is_valid = is_list(value, annotation)
        is_kept = isinstance(value, list | tuple) or hasattr(value, "ndim")
        value = list(value) if is_valid and not is_kept else value
    elif base_class in _MAPPINGS:
        is_valid = isinstance(value, Mapping)
        if is_valid and items[:1] == (str,):
            is_valid = all(isinstance(key, str) for key in value)
    elif getattr(annotation, "_is_protocol", False):
        is_valid = "__call__" not in vars(annotation) or callable(value)
        is_valid &= all(callable(getattr(value, name, None)) for name in _methods(annotation))
    elif base_class is type and items:
        is_valid = isinstance(value, type) and issubclass(value, items)
    else:
        is_valid = isinstance(value, base_class)
    if not is_valid:
        raise ValueError
    return copy(value)


def _require_path(value: Any) -> Any:
    """Return a path, which need not exist. Raises ValueError with the system's reason."""
    is_text = isinstance(value, str | os.PathLike) and os.fspath(value) not in ("", b"")
    if not is_text or "\0" in str(value):
        raise ValueError
    try:
        os.stat(Path(value).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(getattr(error, "strerror", None) or error) from None
    return value


# --- pydantic


def validate(argument: str, value: Any, annotation: Any) -> Any:
    """Return `value` as its annotation has it: a list as a tuple, an int as a float.

    Args:
      argument: name of the value in messages, see `utils.errors.display_names`.
      value: what the user gave.
      annotation: type, with `Bounds` or without.

    Raises:
      ConfigError: if the value does not fit, in one line.

    Example:
      >>> validate("sizes", [1, np.int64(2)], tuple[PositiveInt, ...])
      (1, 2)
    """
    try:
        return _get_adapter(annotation, tuple(union_members(annotation))).validate_python(value)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        context, value = details["ctx"], to_python_scalar(details["input"])
        argument += "".join(f"[{key!r}]" for key in details["loc"])
        if get_origin(context["annotation"]) is Literal:
            require_name(argument, value, get_args(context["annotation"]))
        message = f"{display_name(argument)} = {_show(value)}: expected {details['msg']}"
        raise ConfigError(message) from None


def validate_number(argument: str, value: Any, bounds: Bounds) -> float:
    """Return `value` as a float within bounds. Raises ConfigError."""
    return validate(argument, value, Annotated[float, bounds])


def validate_fields(values: Mapping[str, Any], fields: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return the values that a class annotates, as its annotations have them. Raises ConfigError.

    Args:
      values: by name; names that the class does not have, and None, are left out.
      fields: class with annotations.
      prefix: text before a field's name in messages.
    """
    return {
        name: validate(prefix + name, values[name], annotation)
        for name, annotation in get_type_hints(fields, include_extras=True).items()
        if name in values
    }


@functools.cache
def _get_adapter(annotation: Any, members: tuple[Any, ...]) -> TypeAdapter[Any]:
    """Return an annotation's adapter; `members` tells apart unions that differ in order alone."""
    return TypeAdapter(_to_pydantic(annotation), config={"strict": True})


def _to_pydantic(annotation: Any) -> Any:
    """Return an annotation whose failures pydantic reports with the text of `describe`."""
    items, base_class = get_args(annotation), get_origin(annotation) or annotation
    if base_class is Any or isinstance(annotation, TypeVar) or base_class in _ARRAYS:
        return Any
    if accepts_none(annotation):
        return _to_pydantic(operator.getitem(Union, tuple(union_members(annotation)))) | None
    convert: Any = functools.partial(_require_form, annotation)
    if _is_path(annotation):
        return Annotated[Any, _check(annotation, convert)]
    if base_class in _UNIONS:
        members: Any = operator.getitem(Union, tuple(map(_to_pydantic, items)))
        members = Annotated[members, Field(union_mode="left_to_right")]
        return Annotated[members, _check(annotation, lambda value: value)]
    base_type, bounds = split_bounds(annotation)
    if base_type in (int, float):
        convert = functools.partial(_to_number, base_type, bounds)
        return Annotated[base_type, _check(annotation, convert)]
    if base_type in (bool, str) or base_class is Literal:
        return Annotated[annotation, _check(annotation, _to_scalar)]
    target: Any = Any
    if base_class is tuple:
        converted = tuple(item if item is ... else _to_pydantic(item) for item in items)
        target = types.GenericAlias(tuple, converted)
    elif base_class in (*_LISTS, *_MAPPINGS) and items and items[0] not in (int, float):
        item = _to_pydantic(items[-1])
        if item is not Any:  # else the value itself is returned
            copy, parts = (list, (item,)) if base_class in _LISTS else (dict, (Any, item))
            target = types.GenericAlias(copy, parts)
            convert = functools.partial(_require_form, annotation, copy=copy)
    return Annotated[target, _check(annotation, convert)]


def _check(annotation: Any, convert: Callable[[Any], Any]) -> WrapValidator:
    """Return a validator that reports a failure with the text of `describe`.

    Failures of the items of a list or mapping have their own report.
    """
    has_items = (get_origin(annotation) or annotation) in (tuple, *_LISTS, *_MAPPINGS)

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        reason = ""
        try:
            result = handler(convert(value))
            return tuple(result) if type(value) is tuple and type(result) is list else result
        except ValidationError:
            if has_items:
                raise
        except (ValueError, OverflowError) as error:
            reason = f" ({error})" if str(error) else ""
        context = {"text": describe(annotation) + reason, "annotation": annotation}
        raise PydanticCustomError("expected", "{text}", context)

    return WrapValidator(check)


def _show(value: Any) -> str:
    """Return a value for a message; only the type of an object that takes more than a line."""
    if inspect.isroutine(value):
        return "a function"
    text = format_value(value)
    if re.match(r"<.* at 0x[0-9a-f]+>", text):
        return f"a {type(value).__name__}"
    is_short = value is None or len(text) < MAX_VALUE_LENGTH or isinstance(value, _SHOWN_TYPES)
    return text if is_short else f"a {type(value).__name__}"


# --- functions and records


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with arguments that are validated by their annotations.

    Raises:
      ConfigError: at a call whose argument does not fit; the message names the argument.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which raises Python's own message
        for name, annotation in parameter_types(function).items():
            if name in bound.arguments:
                bound.arguments[name] = validate(name, bound.arguments[name], annotation)
        return function(*bound.args, **bound.kwargs)

    VALIDATED_FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = wrapper
    return wrapper


@functools.cache
def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters by name, without *args and **kwargs."""
    annotations = {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.annotation is not parameter.empty
    }
    local_names: dict[str, Any] = {}
    if any("pd." in text for text in annotations.values() if isinstance(text, str)):
        import pandas

        local_names["pd"] = pandas  # which modules import for type checkers alone
    annotation_holder: Any = types.SimpleNamespace(__annotations__=annotations)
    module_globals = vars(sys.modules[function.__module__])
    return get_type_hints(annotation_holder, module_globals, local_names, include_extras=True)


def validate_named_tuple(name: str, record: Any) -> Any:
    """Return a named tuple whose fields are as their annotations have them. Raises ConfigError."""
    return record._replace(**validate_fields(record._asdict(), type(record), prefix=f"{name}."))
