"""Typed settings and arguments, validated by their annotations with pydantic.

    @dataclass(frozen=True)
    class Options(Config):
        steps: PositiveInt = 20
        "Steps of the server after each round."
        option: Literal["I", "II"] = "II"

    parse_config(Options, {"steps": 5})     # Options(steps=5, option="II")
    parse_config(Options, {"steps": 0})     # ConfigError: steps = 0: expected a whole number >= 1

    @validate_arguments
    def load(path: str | os.PathLike, *, size: PositiveInt | None = None) -> Dataset: ...

    load("here", size="2")      # ConfigError: size = '2': expected a whole number >= 1

A field of a `Config` is an `int`, `float`, `bool`, `str` or `Literal`, a tuple of one of them, or a
union of them and `None`. Numbers may have `Bounds`. Types are strict: "1" is no number and True no
integer. Scalars of NumPy and JAX become Python's. Parameters annotated as arrays, parameters
without an annotation, and the items of sequences of numbers are left to the function itself.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import keyword
import math
import numbers
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from fedjax_het.utils.errors import make_value_error, require, require_name

P = typing.ParamSpec("P")
R = TypeVar("R")
ConfigT = TypeVar("ConfigT", bound="Config")

VALIDATED_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions with validated arguments, by module and name."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""Largest number of float32."""
MIN_NORMAL_FLOAT32 = float(np.finfo(np.float32).tiny)
"""Smallest normal number of float32; most devices flush smaller numbers to 0."""
_UNION: Any = typing.Union
_cache: Any = functools.cache  # mypy finds classes of dataclasses unhashable
_get_type_hints = functools.partial(typing.get_type_hints, include_extras=True)
_UNIONS = (_UNION, types.UnionType)
_LISTS = (list, Sequence, Iterable)
_MAPPINGS = (dict, Mapping)
_DESCRIPTIONS: dict[Any, str] = {
    bool: "True or False",
    str: "a word",
    Callable: "a function",
    **dict.fromkeys(_MAPPINGS, "values by name"),
}


class Bounds(NamedTuple):
    """Interval of valid numbers.

    Attributes:
      low: lower limit.
      high: upper limit.
      open_low: whether the lower limit itself is invalid.
      open_high: whether the upper limit itself is invalid.

    Example:
      >>> from fedjax_het.methods import Bounds
      >>> Bounds(0, 1, open_low=True).contains(0), str(Bounds(0, 1, open_low=True))
      (False, 'in (0, 1]')
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        """Return whether the interval contains a number.

        Open limits are also compared in float32, the precision of devices.
        """
        smaller, larger = sorted((value, _to_float32(value)))
        is_above_low = smaller > self.low if self.open_low else value >= self.low
        is_below_high = larger < self.high if self.open_high else value <= self.high
        return is_above_low and is_below_high

    def __str__(self) -> str:
        """Return the interval as text after "a number", e.g. ">= 1"; "" if it is unbounded."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"{'>' if self.open_low else '>='} {_format_exactly(self.low)}"
        brackets = "[("[self.open_low], "])"[self.open_high]
        low, high = _format_exactly(self.low), _format_exactly(self.high)
        return f"in {brackets[0]}{low}, {high}{brackets[1]}"


def _format_exactly(number: float) -> str:
    """Return a number with as many digits as it has."""
    text = f"{number:g}"
    return text if float(text) == number else f"{number:.17g}"


def _to_float32(value: float) -> float:
    """Return a number as devices store it; infinite if float32 cannot store it."""
    if abs(value) > MAX_FLOAT32:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < MIN_NORMAL_FLOAT32 else float(np.float32(value))


NonNegativeInt = Annotated[int, Bounds(0)]
"""Annotation of a whole number >= 0."""
PositiveInt = Annotated[int, Bounds(1)]
"""Annotation of a whole number >= 1."""
NonNegativeFloat = Annotated[float, Bounds(0)]
"""Annotation of a number >= 0."""
PositiveFloat = Annotated[float, Bounds(0, open_low=True)]
"""Annotation of a number > 0."""
UnitInterval = Annotated[float, Bounds(0, 1)]
"""Annotation of a number in [0, 1]."""
MomentumCoefficient = Annotated[float, Bounds(0, 1, open_high=True)]  # 1 would never decay
"""Annotation of a momentum, a number in [0, 1)."""
DecayFactor = Annotated[float, Bounds(0, 1, open_low=True)]
"""Annotation of the factor of a decay, a number in (0, 1]."""


# --- annotations


def union_members(annotation: Any) -> list[Any]:
    """Return the members of a union except None; for another annotation, the annotation itself."""
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


def get_search_range(annotation: Any) -> "SearchRange | None":
    """Return the range that an annotation declares for a search; None without a range."""
    (annotation,) = union_members(annotation)
    metadata = getattr(annotation, "__metadata__", ())
    return next((extra for extra in metadata if isinstance(extra, SearchRange)), None)


def is_supported_annotation(annotation: Any) -> bool:
    """Return whether a field of a `Config` can have an annotation.

    Supported are bool, int, float, str, Literal, a tuple of one of them, and unions; numbers may
    have `Bounds`.
    """
    origin, items = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return isinstance(items[1], Bounds) and is_supported_annotation(items[0])
    if origin in _UNIONS:
        return all(map(is_supported_annotation, union_members(annotation)))
    if origin is tuple:
        return items[1:] == (...,) and is_supported_annotation(items[0])
    return origin is Literal or annotation in (bool, int, float, str)


def describe(annotation: Any, *, brief: bool = False) -> str:
    """Return the valid values of an annotation in words.

    Args:
      annotation: type, with `Bounds` or without.
      brief: for a table of settings: includes None and omits the limits of all numbers.

    Returns:
      Words, e.g. "a whole number >= 1".

    Example:
      >>> from fedjax_het.utils.config import PositiveInt, describe
      >>> describe(PositiveInt | None, brief=True)
      'a whole number >= 1 or None'
    """
    base_class, items = get_origin(annotation) or annotation, get_args(annotation)
    if _is_path(annotation):
        return "a path"
    if base_class in _UNIONS:
        words = [describe(member, brief=brief) for member in union_members(annotation)]
        return " or ".join(words + ["None"] * (brief and accepts_none(annotation)))
    base_type, bounds = split_bounds(annotation)
    has_limit = not brief and math.isinf(bounds.high)
    if base_type is int:
        return f"a whole number {bounds}".rstrip() + (", below 2**31" if has_limit else "")
    if base_type is float:
        return f"a {'finite ' if has_limit else ''}number {bounds}".rstrip()
    if base_class is Literal:
        return " or ".join(map(str, items))
    if base_class is type and items:
        return f"a class that is a {items[0].__name__}"
    if base_class in (tuple, *_LISTS):
        if base_class is tuple and items[-1] is not ...:
            return f"a list of {len(items)}"
        is_known = bool(items) and items[0] is not Any
        return f"a list, each {describe(items[0], brief=brief)}" if is_known else "a list"
    if base_class in _get_array_classes():
        return "an array"
    if base_class in _DESCRIPTIONS:
        return _DESCRIPTIONS[base_class]
    constructors = getattr(base_class, "CONSTRUCTORS", None)
    return f"a {base_class.__name__}" + (f", as {constructors}" if constructors else "")


def _is_path(annotation: Any) -> bool:
    members = map(lambda member: get_origin(member) or member, union_members(annotation))
    return any(member in (Path, os.PathLike) for member in members)


# --- values


def _get_array_classes() -> tuple[type, ...]:
    """Return the classes of arrays; no value is an array of JAX before JAX is imported."""
    return (np.ndarray, sys.modules["jax"].Array) if "jax" in sys.modules else (np.ndarray,)


def to_python_scalar(value: Any) -> Any:
    """Convert scalars of NumPy and JAX to Python numbers, also in lists and mappings.

    A float32 becomes the number that it is written as: 0.1, not 0.10000000149.
    """
    if isinstance(value, dict):
        return {to_python_scalar(key): to_python_scalar(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_python_scalar(item) for item in value)
    is_array = isinstance(value, (np.generic, *_get_array_classes()))
    if is_array and value.shape == ():
        scalar = np.asarray(value)[()]
        is_low_precision = isinstance(scalar, np.floating) and scalar.dtype.itemsize < 8
        return float(str(scalar)) if is_low_precision else scalar.item()
    return value


def is_list(value: Any, annotation: Any = tuple) -> bool:
    """Return whether a user would call a value a list; a data frame is none.

    Args:
      value: any value.
      annotation: type of the list, on which the accepted containers depend.

    Returns:
      True for a list.
    """
    if hasattr(value, "ndim"):
        return value.ndim > 0 and (value.ndim == 1 or isinstance(value, _get_array_classes()))
    base_class = get_origin(annotation) or annotation
    if base_class is tuple:
        return isinstance(value, list | tuple | range)
    if isinstance(value, str | bytes):
        return False
    if base_class is Iterable:  # keys of a mapping are words
        takes_words = get_args(annotation) == (str,)
        return isinstance(value, Iterable) and (takes_words or not isinstance(value, Mapping))
    return isinstance(value, Collection) and not isinstance(value, Mapping | Set)


def _convert(annotation: Any, value: Any) -> Any:
    """Return a value in the type of its annotation; pydantic validates the items afterwards.

    Raises:
      ValueError: if the value is of another type or out of bounds.
    """
    base_class, items = get_origin(annotation) or annotation, get_args(annotation)
    if _is_path(annotation):
        return _require_path(value)
    if base_class in _UNIONS:
        return value
    if base_class in (tuple, *_LISTS):
        is_valid = is_list(value, annotation)
        if is_valid and base_class is tuple:
            value = tuple(value)
            is_valid = items[-1] is ... or len(value) == len(items)
        elif is_valid and not isinstance(value, list | tuple):
            value = list(value)
    elif base_class in _MAPPINGS:
        is_valid = isinstance(value, Mapping)
        is_valid = is_valid and (items[:1] != (str,) or all(isinstance(key, str) for key in value))
        value = dict(value) if is_valid else value
    elif base_class is type and items:
        is_valid = isinstance(value, type) and issubclass(value, items)
    else:
        base_type, bounds = split_bounds(annotation)
        if base_type in (int, float, bool, str) or base_class is Literal:
            value = to_python_scalar(value)
        if base_type in (int, float):
            return _convert_number(base_type, bounds, value)
        if base_class is Literal:
            is_valid = any(type(value) is type(item) and value == item for item in items)
        else:
            is_valid = isinstance(value, base_class)
    if not is_valid:
        raise ValueError
    return value


def _convert_number(number_type: type, bounds: Bounds, value: Any) -> float:
    """Return a number of any library as Python's. Raises ValueError out of bounds."""
    abstract_type = numbers.Integral if number_type is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, abstract_type):
        raise ValueError
    number = number_type(value)
    max_size = MAX_FLOAT32 if number_type is float else 2**31 - 1
    is_limited = number_type is float or math.isinf(bounds.high)
    is_too_large = is_limited and abs(number) > max_size
    if is_too_large and number_type is float and math.isfinite(number) and number > bounds.low:
        raise ValueError(f"float32 stores numbers up to {MAX_FLOAT32:.2g}")
    if is_too_large or not bounds.contains(number):
        raise ValueError
    return number


def _require_path(value: Any) -> Any:
    """Return a path, which need not exist, with the home folder in place of `~`.

    Raises:
      ValueError: with the system's reason.
    """
    is_text = isinstance(value, str | os.PathLike) and len(os.fspath(value)) > 0
    if not is_text or "\0" in str(value):
        raise ValueError
    try:
        path = Path(value).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(getattr(error, "strerror", None) or error) from None
    return path if str(value).startswith("~") else value


# --- pydantic


def validate(argument: str, value: Any, annotation: Any) -> Any:
    """Validate a value by an annotation.

    Args:
      argument: name of the value in messages, see `utils.errors.display_names`.
      value: the user's value.
      annotation: type, with `Bounds` or without.

    Returns:
      The value in the type of the annotation: a list as a tuple, an int as a float.

    Raises:
      ConfigError: if the value does not fit, in one line.

    Example:
      >>> from fedjax_het.utils.config import PositiveInt, validate
      >>> validate("sizes", [1, 2], tuple[PositiveInt, ...])
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
        raise make_value_error(argument, value, details["msg"]) from None


def validate_fields(values: Mapping[str, Any], fields: Any, *, prefix: str = "") -> dict[str, Any]:
    """Validate values by the annotations of a class.

    Args:
      values: values by name; names that the class lacks are ignored.
      fields: class with annotations.
      prefix: text before a field's name in messages.

    Returns:
      The validated values by name.

    Raises:
      ConfigError: for a value that does not fit.
    """
    is_dataclass = dataclasses.is_dataclass(fields)
    types_by_name = field_types(fields) if is_dataclass else _get_type_hints(fields)
    return {
        name: validate(prefix + name, values[name], annotation)
        for name, annotation in types_by_name.items()
        if name in values
    }


@functools.cache
def _get_adapter(annotation: Any, members: tuple[Any, ...]) -> TypeAdapter[Any]:
    """Return an annotation's adapter; `members` tells apart unions that differ in order alone."""
    return TypeAdapter(_to_pydantic(annotation), config={"strict": True})


def _to_pydantic(annotation: Any) -> Any:
    """Return an annotation whose failures pydantic reports with the text of `describe`."""
    base_class, items = get_origin(annotation) or annotation, get_args(annotation)
    if base_class is Any or isinstance(annotation, TypeVar) or base_class in _get_array_classes():
        return Any
    if accepts_none(annotation):
        return _to_pydantic(_UNION[tuple(union_members(annotation))]) | None
    target: Any = Any
    if base_class in _UNIONS and not _is_path(annotation):
        members = _UNION[tuple(map(_to_pydantic, items))]
        target = Annotated[members, Field(union_mode="left_to_right")]
    elif base_class is tuple:
        members = tuple(item if item is ... else _to_pydantic(item) for item in items)
        target = types.GenericAlias(tuple, members)
    elif base_class in _LISTS and items and items[0] not in (int, float):
        target = types.GenericAlias(Sequence, (_to_pydantic(items[0]),))
    elif base_class in _MAPPINGS and items:
        target = types.GenericAlias(dict, (Any, _to_pydantic(items[1])))
    return Annotated[target, WrapValidator(functools.partial(_check, annotation))]


def _check(annotation: Any, value: Any, handler: Callable[[Any], Any]) -> Any:
    """Validate a value; a failure has the text of `describe`, or the text of an item."""
    reason = ""
    try:
        return handler(_convert(annotation, value))
    except ValidationError:
        if (get_origin(annotation) or annotation) in (tuple, *_LISTS, *_MAPPINGS):
            raise
    except (ValueError, OverflowError) as error:
        reason = f" ({error})" if str(error) else ""
    context = {"text": describe(annotation) + reason, "annotation": annotation}
    raise PydanticCustomError("expected", "{text}", context)


# --- functions and records


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its annotations validate its arguments.

    Args:
      function: function with annotated parameters.

    Returns:
      The function. A call whose argument does not fit raises a ConfigError that names the argument.

    Example:
      >>> from fedjax_het import ConfigError
      >>> from fedjax_het.utils.config import PositiveInt, validate_arguments
      >>> @validate_arguments
      ... def draw(count: PositiveInt) -> list[int]:
      ...     return list(range(count))
      >>> try:
      ...     draw(0)
      ... except ConfigError as error:
      ...     print(error)
      count = 0: expected a whole number >= 1, below 2**31
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, annotation in parameter_types(function).items():
            if name in bound.arguments:
                bound.arguments[name] = validate(name, bound.arguments[name], annotation)
        return function(*bound.args, **bound.kwargs)

    VALIDATED_FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = wrapper
    return wrapper


@functools.cache
def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters by name, without `*args` and `**kwargs`."""
    annotations = {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.annotation is not parameter.empty
    }
    module_names = dict(getattr(function, "__globals__", {}))
    if any("pd." in text for text in annotations.values() if isinstance(text, str)):
        module_names["pd"] = importlib.import_module("pandas")  # imported for type checkers only
    holder = types.SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(holder, module_names, include_extras=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """Base class of typed settings, frozen dataclasses.

    Attributes:
      PRESETS: by name of a preset, its values for fields that the user leaves out. Other fields
        have their defaults.
      PRESET_FIELD: field that names the preset, in a class with presets.

    Example:
      >>> from dataclasses import dataclass
      >>> from fedjax_het.utils.config import Config, PositiveInt, parse_config
      >>> @dataclass(frozen=True)
      ... class Options(Config):
      ...     steps: PositiveInt = 20
      >>> parse_config(Options, {"steps": 5})
      Options(steps=5)
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    PRESET_FIELD: ClassVar[str] = "preset"

    @classmethod
    def normalize_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the user's values with derived values, before a preset adds others."""
        return values

    def with_derived_fields(self: "ConfigT") -> "ConfigT":
        """Return the settings with unset fields computed from other fields."""
        return self

    def check(self) -> None:
        """Check combinations of values.

        Raises:
          ConfigError: for values that cannot be combined.
        """


def parse_config(config_class: type[ConfigT], overrides: Mapping[str, Any]) -> ConfigT:
    """Create settings from the user's values; a preset or the defaults provide the others.

    Args:
      config_class: dataclass of the settings.
      overrides: values by field. A list of words may be a text with commas, see `split_words`.

    Returns:
      An instance of `config_class` with values of the annotated types.

    Raises:
      ConfigError: for an unknown field or a value that does not fit, in one line.
    """
    fields = field_types(config_class)
    for key in overrides:
        require_name("option", key, fields)
    values = config_class.normalize_values(dict(overrides))
    if config_class.PRESETS:
        field = config_class.PRESET_FIELD
        preset = values.get(field, config_class.__dataclass_fields__[field].default)
        require_name(field, preset, config_class.PRESETS)
        values = {**config_class.PRESETS[preset], **values}
    values = {
        key: validate(key, split_words(key, v, fields[key]), fields[key])
        for key, v in values.items()
    }
    config = config_class(**values).with_derived_fields()
    config.check()
    return config


def split_words(argument: str, value: Any, annotation: Any) -> Any:
    """Return the words between the commas of a text if an annotation is a list of words.

    Args:
      argument: name of the value in messages.
      value: the user's value.
      annotation: type of the value.

    Returns:
      The words as a list; another value, or a value of another annotation, unchanged.

    Raises:
      ConfigError: if a word is empty.

    Example:
      >>> from fedjax_het.utils.config import split_words
      >>> split_words("layers", "hidden2, head", tuple[str, ...])
      ['hidden2', 'head']
      >>> split_words("layer", "hidden2, head", str)
      'hidden2, head'
    """
    members = union_members(annotation)
    is_list_of_words = str not in members and any(
        get_origin(member) in (tuple, *_LISTS) and get_args(member)[:1] == (str,)
        for member in members
    )
    if not is_list_of_words or not isinstance(value, str):
        return value
    words = [word.strip() for word in value.strip().removeprefix("[").removesuffix("]").split(",")]
    require(all(words), argument, value, "words with commas between them")
    return words


def config_to_dict(config: Config) -> dict[str, Any]:
    """Return settings as JSON stores them, the input of `parse_config`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


@_cache
def field_types(dataclass_type: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields by name.

    Bounds in the metadata of a field are part of its annotation.
    """
    hints = _get_type_hints(dataclass_type)
    return {
        f.name: _add_bounds(hints[f.name], f.metadata["bounds"])
        if "bounds" in f.metadata
        else hints[f.name]
        for f in dataclasses.fields(dataclass_type)
    }


def _add_bounds(annotation: Any, bounds: Bounds) -> Any:
    if get_origin(annotation) in _UNIONS:
        return _UNION[tuple(_add_bounds(member, bounds) for member in get_args(annotation))]
    return Annotated[annotation, bounds] if annotation in (int, float) else annotation


def to_json_value(argument: str, value: Any, *, requires_finite: bool = True) -> Any:
    """Convert a value to JSON: number, text, bool, None, and lists and dicts of them.

    Args:
      argument: name of the value in messages.
      value: the user's value.
      requires_finite: whether numbers must be finite. False: the caller checks numbers later, and
        its message has the valid range.

    Returns:
      The converted value.

    Raises:
      ConfigError: for other types, and for numbers that are not finite if this is required.
    """
    value = os.fspath(value) if isinstance(value, os.PathLike) else to_python_scalar(value)
    if value is None or isinstance(value, bool | str):
        return value
    convert = functools.partial(to_json_value, argument, requires_finite=requires_finite)
    if isinstance(value, int | float):
        if requires_finite:
            validate(argument, value, float)
        return value
    if is_list(value, tuple):
        return [convert(item) for item in value]
    is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    require(is_mapping, argument, value, "a number, a word, True, False, None or a list of them")
    return {key: convert(item) for key, item in value.items()}


def parse_literal(text: str) -> Any:
    """Return the number, bool or list that a text represents in JSON or YAML, otherwise the text.

    Example:
      >>> from fedjax_het.utils.config import parse_literal
      >>> [parse_literal(text) for text in ("3", ".5", "-2.", "true", "[1, 2]", "word")]
      [3, 0.5, -2.0, True, [1, 2], 'word']
    """
    if re.fullmatch(r"[-+]?(\.\d+|\d+\.\d*)([eE][-+]?\d+)?", text):
        return float(text)
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


class SearchRange(NamedTuple):
    """Range of a numeric hyperparameter in which a search draws values.

    Attributes:
      low: smallest value.
      high: largest value.
      is_log: whether values are uniform on a logarithmic scale; otherwise on a linear scale.

    Example:
      >>> from fedjax_het.methods import SearchRange
      >>> SearchRange(0.01, 1.0).interpolate(0.5)
      0.1
    """

    low: float
    high: float
    is_log: bool = True

    def interpolate(self, share: float) -> float:
        """Return the value at a share in [0, 1] of the way from `low` to `high`.

        Returns:
          The value, rounded to three significant digits.
        """
        if self.is_log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + share * (self.high - self.low)
        return float(f"{value:.3g}")

    def __str__(self) -> str:
        """Return the range as text, e.g. "0.01 to 1"."""
        return f"{self.low:g} to {self.high:g}"


class HyperParameter(NamedTuple):
    """Default and bounds of a numeric hyperparameter.

    Example:
      >>> from fedjax_het.methods import METHODS
      >>> METHODS["fedavg"].collect_hyperparameters(None, {}, num_clients=10)["server_lr"].default
      1.0
    """

    default: float
    """Value of runs that do not set the hyperparameter."""
    bounds: Bounds
    """Valid values."""
    search_range: SearchRange | None = None
    """Values that `tune` draws; None: `tune` does not vary the hyperparameter."""


def hyperparameters_of(config: Config) -> dict[str, HyperParameter]:
    """Return the hyperparameters whose defaults are the values of a record.

    Fields that are None are left out.
    """
    fields = field_types(type(config))
    return {
        name: HyperParameter(
            float(getattr(config, name)), split_bounds(annotation)[1], get_search_range(annotation)
        )
        for name, annotation in fields.items()
        if getattr(config, name) is not None
    }


def make_config_class(name: str, defaults: Mapping[str, float]) -> type[Config]:
    """Create a class of settings that are numbers >= 0.

    Args:
      name: name of the class.
      defaults: default values by field.

    Returns:
      The class.

    Raises:
      ConfigError: for a field that is no identifier, and for an invalid default.
    """
    for key in defaults:
        is_valid_name = isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
        require(is_valid_name, "hyperparameters", key, "names of letters, digits and underscores")
    fields = {
        key: dataclasses.field(default=validate(key, value, NonNegativeFloat))
        for key, value in defaults.items()
    }
    annotated = [(key, NonNegativeFloat, field) for key, field in fields.items()]
    return dataclasses.make_dataclass(name, annotated, bases=(Config,), frozen=True)


def document_fields(config_class: type[Config]) -> dict[str, tuple[str, str]]:
    """Return the valid values in words and the documentation of each field.

    The documentation is the string after the field in the source of the class or of a base class;
    "" if there is none.
    """
    texts = get_field_docs(config_class)
    field_docs = {
        name: (describe(type_, brief=True), texts.get(name, ""))
        for name, type_ in field_types(config_class).items()
    }
    if config_class.PRESETS:
        text = "Preset that provides the options and hyperparameters that are not given."
        field_docs[config_class.PRESET_FIELD] = (" or ".join(config_class.PRESETS), text)
    return field_docs


def get_field_docs(dataclass_type: type) -> dict[str, str]:
    """Return the string after each field in the source of a dataclass or of a base class."""
    texts: dict[str, str] = {}
    for base_class in reversed(dataclass_type.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # a class without source, e.g. in a notebook
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base_class))).body
            assert isinstance(definition, ast.ClassDef)
            for statements in itertools.pairwise(definition.body):
                match statements:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        texts[name] = " ".join(text.split())
    return texts
