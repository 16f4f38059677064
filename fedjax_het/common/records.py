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

from fedjax_het.common.errors import ConfigError, is_whole, require, require_name


class Bounds(NamedTuple):
    """What a number may be: from `low` to `high`, which an open end leaves out."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def allow(self, value: float) -> bool:
        """Whether it is within them, at an open end in single precision too, as devices have it."""
        single = _single(value)
        if (self.open_low and single <= self.low) or (self.open_high and single >= self.high):
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        """As a continuation of "a number"; empty where there are none."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"{'>' if self.open_low else '>='} {self.low:g}"
        brackets = "[("[self.open_low], "])"[self.open_high]
        return f"in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"


LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # what is nearer to 0 is 0 on most devices


def _single(value: float) -> float:
    """A number as devices have it, infinite where it is too large for them."""
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < SMALLEST else float(np.float32(value))


def at_least(low: float) -> Bounds:
    return Bounds(low)


def above(low: float) -> Bounds:
    return Bounds(low, open_low=True)


Whole = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Share = Annotated[float, Bounds(0, 1)]
Momentum = Annotated[float, Bounds(0, 1, open_high=True)]  # 1 would forget nothing
Decay = Annotated[float, Bounds(0, 1, open_low=True)]  # a factor

R = TypeVar("R", bound="Record")


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of typed settings.

    PRESETS: by name, the values that a preset has for fields that are not given; what it leaves out
      is as the class has it. A record with presets has the field `PRESET_FIELD`, which names one.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    PRESET_FIELD: ClassVar[str] = "preset"

    @classmethod
    def adjusted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What is given, with what follows from it; before a preset fills the rest in."""
        return given

    def completed(self: "R") -> "R":
        """The same with what follows from its values, where a field was left to them."""
        return self

    def check(self) -> None:
        """Raise ConfigError for values that do not go together."""


def read(kind: type[R], given: Mapping[str, Any], *, name: str = "option", label: str = "") -> R:
    """The record of the values that are given, a preset's or the defaults in place of the others.

    Where there are presets, None stands for "not given" in a field that cannot be None. `name` is
    what fields are called where one is misspelt, `label` is put before a field's name in other
    messages.
    Raises ConfigError that names the field, its value and what would be right.
    """
    fields = field_types(kind)
    for key in given:
        require_name(name, key, fields)
    unset = {key for key, value in given.items() if value is None and not _takes_none(fields[key])}
    values = {key: value for key, value in given.items() if not (kind.PRESETS and key in unset)}
    values = kind.adjusted(values)
    if kind.PRESETS:
        default = next(f.default for f in dataclasses.fields(kind) if f.name == kind.PRESET_FIELD)
        preset = values.get(kind.PRESET_FIELD, default)
        require_name(label + kind.PRESET_FIELD, preset, kind.PRESETS)
        values = {**kind.PRESETS[preset], **values}
    values = {key: checked(label + key, value, fields[key]) for key, value in values.items()}
    record = kind(**values).completed()
    record.check()
    return record


def as_dict(record: Record) -> dict[str, Any]:
    """The values of a record as JSON has them: what `read` takes."""
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def field_types(kind: type) -> dict[str, Any]:
    """Every field's annotation, by name."""
    # A class can be hashed; mypy looks for that at its instances instead.
    return _field_types(cast(Hashable, kind))


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def plain(value: Any) -> Any:
    """`value` with scalars of NumPy and jax as Python's own, in lists and mappings too; a float32
    is what it is written as (0.1, not 0.10000000149)."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    # Scalars and arrays without axes alike; what is traced has no value yet.
    if isinstance(value, np.generic) or (
        getattr(value, "shape", None) == () and isinstance(value, np.ndarray | jax.Array)
    ):
        found = np.asarray(value)[()]
        few_bits = isinstance(found, np.floating) and found.dtype.itemsize < 8
        return float(str(found)) if few_bits else found.item()
    return value


def checked(argument: str, value: Any, kind: Any) -> Any:
    """`value` as the annotation `kind` has it (a list as a tuple, a whole float as an int's
    float). Raises ConfigError."""
    value = plain(value)
    if value is None and _takes_none(kind):
        return None
    if len(members(kind)) > 1:
        for member in members(kind):
            with contextlib.suppress(ConfigError):
                return checked(argument, value, member)
        require(False, argument, value, _in_words(kind))
    bounds, kind = _bounds(kind), _plain(kind)
    if get_origin(kind) is Literal:
        require_name(argument, value, get_args(kind))
        return value
    if get_origin(kind) is tuple:
        require(_is_list(value), argument, value, "a list")
        return tuple(checked(argument, item, get_args(kind)[0]) for item in value)
    if kind is bool:
        require(isinstance(value, bool), argument, value, "True or False")
    elif kind is int:
        whole = is_whole(value, -math.inf)
        unbounded = math.isinf(bounds.high)
        ok = whole and (abs(value) < 2**31 or not unbounded) and bounds.allow(value)
        below = ", below 2**31" if unbounded else ""
        require(ok, argument, value, f"a whole number {bounds}{below}".replace(" ,", ","))
        return int(value)
    elif kind is float:
        return number(argument, value, bounds)
    elif kind is str:
        require(isinstance(value, str), argument, value, "a word")
    return value


def is_kind(kind: Any) -> bool:
    """Whether `checked` knows an annotation."""
    if get_origin(kind) is Annotated:
        inner, *extras = get_args(kind)
        return any(isinstance(extra, Bounds) for extra in extras) and is_kind(inner)
    if _is_union(kind):
        return all(map(is_kind, members(kind)))
    if get_origin(kind) is tuple:
        item, *more = get_args(kind)
        return more == [...] and is_kind(item)
    return get_origin(kind) is Literal or any(kind is known for known in (bool, int, float, str))


def stored(argument: str, value: Any) -> Any:
    """`value` as JSON has it: numbers, words, truth values and None, lists and mappings of them.
    Raises ConfigError for what is none of these, and for numbers that are not finite."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else plain(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        number(argument, value, Bounds())
        return value
    if _is_list(value):
        return [stored(argument, item) for item in value]
    named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    require(named, argument, value, "a number, a word, True, False, None or a list of them")
    return {key: stored(argument, item) for key, item in value.items()}


def _is_list(value: Any) -> bool:
    axes = isinstance(value, np.ndarray | jax.Array) and value.ndim > 0
    return axes or isinstance(value, list | tuple | range)


def number(argument: str, value: Any, bounds: Bounds) -> float:
    """`value` as a float within bounds. Raises ConfigError; a truth value is no number."""
    value = plain(value)
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of a whole number beyond all floats
            found = float(value)
    ok = abs(found) <= LARGEST and bounds.allow(found)
    word = "share" if bounds == Bounds(0, 1) else "number"
    word = f"a {'finite ' if math.isinf(bounds.high) else ''}{word} {bounds}"
    require(ok, argument, value, word.rstrip())
    return found


class Number(NamedTuple):
    """A numeric hyper-parameter: its default and what it may be."""

    default: float
    bounds: Bounds


def numbers_of(record: Record) -> dict[str, Number]:
    """The numeric hyper-parameters that a record's values are the defaults of; a field that is None
    is none of this configuration."""
    fields = field_types(type(record))
    return {
        name: Number(float(getattr(record, name)), _bounds(kind))
        for name, kind in fields.items()
        if getattr(record, name) is not None
    }


def record_of(name: str, defaults: Mapping[str, float]) -> type[Record]:
    """A record of numbers >= 0, of which only the defaults are given. Raises ConfigError."""
    for key in defaults:
        word = isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
        require(word, "numbers", key, "names of letters, digits and underscores")
    fields = [
        (key, NonNegative, dataclasses.field(default=number(key, value, at_least(0))))
        for key, value in defaults.items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=(Record,), frozen=True)


def documentation(kind: type[Record]) -> dict[str, tuple[str, str]]:
    """By field: what it may be, in words, and what its record's source says of it ("" if nothing).

    That is the text that stands after the field, here or in a class that this one is made of.
    """
    texts: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # of a notebook, or made at run time
            texts |= _texts_after_fields(inspect.getsource(part))
    told = {
        name: (_in_words(type_), texts.get(name, "")) for name, type_ in field_types(kind).items()
    }
    if kind.PRESETS:
        words = " or ".join(kind.PRESETS)
        told[kind.PRESET_FIELD] = (words, "Where options and numbers come from that are not given.")
    return told


def _texts_after_fields(source: str) -> dict[str, str]:
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


def _in_words(kind: Any) -> str:
    if _is_union(kind):
        several = " or ".join(map(_in_words, members(kind)))
        return f"{several} or None" if _takes_none(kind) else several
    bounds, plain = _bounds(kind), _plain(kind)
    if get_origin(plain) is Literal:
        return " or ".join(map(str, get_args(plain)))
    if get_origin(plain) is tuple:
        return f"a list, each {_in_words(get_args(plain)[0])}"
    words = {bool: "True or False", str: "a word", int: "a whole number", float: "a number"}
    limit = "" if bounds == Bounds() else f" {bounds}"
    return words.get(plain, str(plain)) + limit


def _takes_none(kind: Any) -> bool:
    return _is_union(kind) and types.NoneType in get_args(kind)


def members(kind: Any) -> list[Any]:
    """What a union is of besides None; the kind itself if it is none."""
    if not _is_union(kind):
        return [kind]
    return [member for member in get_args(kind) if member is not types.NoneType]


def _not_none(kind: Any) -> Any:
    (only,) = members(kind)
    return only


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _bounds(kind: Any) -> Bounds:
    kind = _not_none(kind)
    if get_origin(kind) is Annotated:
        return next(extra for extra in get_args(kind)[1:] if isinstance(extra, Bounds))
    return Bounds()


def _plain(kind: Any) -> Any:
    kind = _not_none(kind)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


__all__ = [
    "LARGEST",
    "Bounds",
    "ConfigError",
    "Count",
    "Decay",
    "Momentum",
    "NonNegative",
    "Number",
    "Positive",
    "Record",
    "Share",
    "Whole",
    "above",
    "as_dict",
    "at_least",
    "checked",
    "documentation",
    "field_types",
    "is_kind",
    "members",
    "number",
    "numbers_of",
    "plain",
    "read",
    "record_of",
    "stored",
]
