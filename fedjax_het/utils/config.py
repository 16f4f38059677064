"""Typed settings: frozen dataclasses whose annotations are their documentation and their checks.

    @dataclass(frozen=True)
    class Options(Record):
        steps: Count = 20
        "Steps of the server after each round."
        option: Literal["I", "II"] = "II"

    read(Options, {"steps": 5})        # Options(steps=5, option="II")
    read(Options, {"steps": 0})        # ConfigError: steps = 0: expected a whole number >= 1

A field is an `int`, a `float`, a `bool`, a `str`, a `Literal`, a tuple of these, or one of them or
`None`; bounds are `Annotated` to it.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import keyword
import math
import numbers
import os
import textwrap
import types
from collections.abc import Hashable, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import numpy as np

from fedjax_het.utils.errors import ConfigError, is_integer_at_least, require, require_name


class Bounds(NamedTuple):
    """What a number may be: from `low` to `high`, which an open end leaves out."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        """Whether it is within them, at an open end in single precision too, as devices have it."""
        float32_value = _to_float32(value)
        if (self.open_low and float32_value <= self.low) or (
            self.open_high and float32_value >= self.high
        ):
            return False
        is_above_low = value > self.low if self.open_low else value >= self.low
        is_below_high = value < self.high if self.open_high else value <= self.high
        return bool(is_above_low and is_below_high)

    def __str__(self) -> str:
        """As a continuation of "a number"; empty where there are none."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"{'>' if self.open_low else '>='} {self.low:g}"
        brackets = "[("[self.open_low], "])"[self.open_high]
        return f"in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"


MAX_FLOAT32 = float(np.finfo(np.float32).max)
MIN_NORMAL_FLOAT32 = float(np.finfo(np.float32).tiny)  # what is nearer to 0 is 0 on most devices


def _to_float32(value: float) -> float:
    """A number as devices have it, infinite where it is too large for them."""
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
MomentumCoefficient = Annotated[float, Bounds(0, 1, open_high=True)]  # 1 would forget nothing
DecayFactor = Annotated[float, Bounds(0, 1, open_low=True)]  # a factor

ConfigT = TypeVar("ConfigT", bound="Config")


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of typed settings.

    PRESETS: by name, the values that a preset has for fields that are not given; what it leaves out
      is as the class has it. A record with presets has the field `PRESET_FIELD`, which names one.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    PRESET_FIELD: ClassVar[str] = "preset"

    @classmethod
    def normalize_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What is given, with what follows from it; before a preset fills the rest in."""
        return values

    def with_derived_fields(self: "ConfigT") -> "ConfigT":
        """The same with what follows from its values, where a field was left to them."""
        return self

    def check(self) -> None:
        """Raise ConfigError for values that do not go together."""


def parse_config(
    config_class: type[ConfigT],
    overrides: Mapping[str, Any],
    *,
    field_term: str = "option",
    field_prefix: str = "",
) -> ConfigT:
    """The record of the values that are given, a preset's or the defaults in place of the others.

    Where there are presets, None stands for "not given" in a field that cannot be None. `name` is
    what fields are called where one is misspelt, `label` is put before a field's name in other
    messages.
    Raises ConfigError that names the field, its value and what would be right.
    """
    fields = field_types(config_class)
    for key in overrides:
        require_name(field_term, key, fields)
    unset_fields = {
        key for key, value in overrides.items() if value is None and not _accepts_none(fields[key])
    }
    values = {
        key: value
        for key, value in overrides.items()
        if not (config_class.PRESETS and key in unset_fields)
    }
    values = config_class.normalize_values(values)
    if config_class.PRESETS:
        default = next(
            f.default
            for f in dataclasses.fields(config_class)
            if f.name == config_class.PRESET_FIELD
        )
        preset = values.get(config_class.PRESET_FIELD, default)
        require_name(field_prefix + config_class.PRESET_FIELD, preset, config_class.PRESETS)
        values = {**config_class.PRESETS[preset], **values}
    values = {
        key: validate(field_prefix + key, value, fields[key]) for key, value in values.items()
    }
    config = config_class(**values).with_derived_fields()
    config.check()
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The values of a record as JSON has them: what `read` takes."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def field_types(dataclass_type: type) -> dict[str, Any]:
    """Every field's annotation, by name."""
    # A class can be hashed; mypy looks for that at its instances instead.
    return _field_types(cast(Hashable, dataclass_type))


@functools.cache
def _field_types(dataclass_type: Any) -> dict[str, Any]:
    hints = get_type_hints(dataclass_type, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(dataclass_type)}


def to_python_scalar(value: Any) -> Any:
    """`value` with scalars of NumPy and jax as Python's own, in lists and mappings too; a float32
    is what it is written as (0.1, not 0.10000000149)."""
    if isinstance(value, dict):
        return {to_python_scalar(key): to_python_scalar(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_python_scalar(item) for item in value)
    # Scalars and arrays without axes alike; what is traced has no value yet.
    if isinstance(value, np.generic) or (
        getattr(value, "shape", None) == () and isinstance(value, np.ndarray | jax.Array)
    ):
        scalar = np.asarray(value)[()]
        is_low_precision = isinstance(scalar, np.floating) and scalar.dtype.itemsize < 8
        return float(str(scalar)) if is_low_precision else scalar.item()
    return value


def validate(argument: str, value: Any, annotation: Any) -> Any:
    """`value` as the annotation `kind` has it (a list as a tuple, a whole float as an int's
    float). Raises ConfigError."""
    value = to_python_scalar(value)
    if value is None and _accepts_none(annotation):
        return None
    if len(union_members(annotation)) > 1:
        for member in union_members(annotation):
            with contextlib.suppress(ConfigError):
                return validate(argument, value, member)
        require(False, argument, value, _describe_annotation(annotation))
    bounds, annotation = _get_bounds(annotation), _get_base_type(annotation)
    if get_origin(annotation) is Literal:
        require_name(argument, value, get_args(annotation))
        return value
    if get_origin(annotation) is tuple:
        require(_is_list_like(value), argument, value, "a list")
        return tuple(validate(argument, item, get_args(annotation)[0]) for item in value)
    if annotation is bool:
        require(isinstance(value, bool), argument, value, "True or False")
    elif annotation is int:
        is_integer = is_integer_at_least(value, -math.inf)
        unbounded = math.isinf(bounds.high)
        ok = is_integer and (abs(value) < 2**31 or not unbounded) and bounds.contains(value)
        below = ", below 2**31" if unbounded else ""
        require(ok, argument, value, f"a whole number {bounds}{below}".replace(" ,", ","))
        return int(value)
    elif annotation is float:
        return validate_number(argument, value, bounds)
    elif annotation is str:
        require(isinstance(value, str), argument, value, "a word")
    return value


def is_supported_annotation(annotation: Any) -> bool:
    """Whether `checked` knows an annotation."""
    if get_origin(annotation) is Annotated:
        inner_annotation, *metadata = get_args(annotation)
        return any(isinstance(extra, Bounds) for extra in metadata) and is_supported_annotation(
            inner_annotation
        )
    if _is_union(annotation):
        return all(map(is_supported_annotation, union_members(annotation)))
    if get_origin(annotation) is tuple:
        item, *rest = get_args(annotation)
        return rest == [...] and is_supported_annotation(item)
    return get_origin(annotation) is Literal or any(
        annotation is base_type for base_type in (bool, int, float, str)
    )


def to_json_value(argument: str, value: Any) -> Any:
    """`value` as JSON has it: numbers, words, truth values and None, lists and mappings of them.
    Raises ConfigError for what is none of these, and for numbers that are not finite."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else to_python_scalar(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        validate_number(argument, value, Bounds())
        return value
    if _is_list_like(value):
        return [to_json_value(argument, item) for item in value]
    has_string_keys = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    require(
        has_string_keys, argument, value, "a number, a word, True, False, None or a list of them"
    )
    return {key: to_json_value(argument, item) for key, item in value.items()}


def _is_list_like(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | jax.Array) and value.ndim > 0
    return is_array or isinstance(value, list | tuple | range)


def validate_number(argument: str, value: Any, bounds: Bounds) -> float:
    """`value` as a float within bounds. Raises ConfigError; a truth value is no number."""
    value = to_python_scalar(value)
    float_value = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of a whole number beyond all floats
            float_value = float(value)
    ok = abs(float_value) <= MAX_FLOAT32 and bounds.contains(float_value)
    noun = "share" if bounds == Bounds(0, 1) else "number"
    noun = f"a {'finite ' if math.isinf(bounds.high) else ''}{noun} {bounds}"
    require(ok, argument, value, noun.rstrip())
    return float_value


class HyperParameter(NamedTuple):
    """A numeric hyper-parameter: its default and what it may be."""

    default: float
    bounds: Bounds


def hyperparameters_of(config: Config) -> dict[str, HyperParameter]:
    """The numeric hyper-parameters that a record's values are the defaults of; a field that is None
    is none of this configuration."""
    fields = field_types(type(config))
    return {
        name: HyperParameter(float(getattr(config, name)), _get_bounds(annotation))
        for name, annotation in fields.items()
        if getattr(config, name) is not None
    }


def make_config_class(name: str, defaults: Mapping[str, float]) -> type[Config]:
    """A record of numbers >= 0, of which only the defaults are given. Raises ConfigError."""
    for key in defaults:
        is_valid_name = isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
        require(is_valid_name, "numbers", key, "names of letters, digits and underscores")
    fields = [
        (
            key,
            NonNegativeFloat,
            dataclasses.field(default=validate_number(key, value, lower_bound(0))),
        )
        for key, value in defaults.items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=(Config,), frozen=True)


def document_fields(config_class: type[Config]) -> dict[str, tuple[str, str]]:
    """By field: what it may be, in words, and what its record's source says of it ("" if nothing).

    That is the text that stands after the field, here or in a class that this one is made of.
    """
    texts: dict[str, str] = {}
    for base_class in reversed(config_class.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # of a notebook, or made at run time
            texts |= _parse_field_docs(inspect.getsource(base_class))
    field_docs = {
        name: (_describe_annotation(type_), texts.get(name, ""))
        for name, type_ in field_types(config_class).items()
    }
    if config_class.PRESETS:
        words = " or ".join(config_class.PRESETS)
        field_docs[config_class.PRESET_FIELD] = (
            words,
            "Where options and numbers come from that are not given.",
        )
    return field_docs


def _parse_field_docs(source: str) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, following in itertools.pairwise(definition.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        value = following.value if isinstance(following, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[field.target.id] = " ".join(value.value.split())
    return texts


def _describe_annotation(annotation: Any) -> str:
    if _is_union(annotation):
        alternatives = " or ".join(map(_describe_annotation, union_members(annotation)))
        return f"{alternatives} or None" if _accepts_none(annotation) else alternatives
    bounds, base_type = _get_bounds(annotation), _get_base_type(annotation)
    if get_origin(base_type) is Literal:
        return " or ".join(map(str, get_args(base_type)))
    if get_origin(base_type) is tuple:
        return f"a list, each {_describe_annotation(get_args(base_type)[0])}"
    type_names = {bool: "True or False", str: "a word", int: "a whole number", float: "a number"}
    limit = "" if bounds == Bounds() else f" {bounds}"
    return type_names.get(base_type, str(base_type)) + limit


def _accepts_none(annotation: Any) -> bool:
    return _is_union(annotation) and types.NoneType in get_args(annotation)


def union_members(annotation: Any) -> list[Any]:
    """What a union is of besides None; the kind itself if it is none."""
    if not _is_union(annotation):
        return [annotation]
    return [member for member in get_args(annotation) if member is not types.NoneType]


def _get_single_member(annotation: Any) -> Any:
    (member,) = union_members(annotation)
    return member


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _get_bounds(annotation: Any) -> Bounds:
    annotation = _get_single_member(annotation)
    if get_origin(annotation) is Annotated:
        return next(extra for extra in get_args(annotation)[1:] if isinstance(extra, Bounds))
    return Bounds()


def _get_base_type(annotation: Any) -> Any:
    annotation = _get_single_member(annotation)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


__all__ = [
    "MAX_FLOAT32",
    "Bounds",
    "Config",
    "ConfigError",
    "DecayFactor",
    "HyperParameter",
    "MomentumCoefficient",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "UnitInterval",
    "config_to_dict",
    "document_fields",
    "exclusive_lower_bound",
    "field_types",
    "hyperparameters_of",
    "is_supported_annotation",
    "lower_bound",
    "make_config_class",
    "parse_config",
    "to_json_value",
    "to_python_scalar",
    "union_members",
    "validate",
    "validate_number",
]
