"""Typed settings: frozen dataclasses whose annotations document and validate their fields.

    @dataclass(frozen=True)
    class Options(Config):
        steps: PositiveInt = 20
        "Steps of the server after each round."
        option: Literal["I", "II"] = "II"

    parse_config(Options, {"steps": 5})     # Options(steps=5, option="II")
    parse_config(Options, {"steps": 0})     # ConfigError: steps = 0: expected a whole number >= 1

A field is an `int`, a `float`, a `bool`, a `str`, a `Literal`, a tuple of one of them, or a union of
them and `None`; numbers may have `Bounds`.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import keyword
import os
import textwrap
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, get_type_hints

from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.validation import (
    MAX_FLOAT32,
    Bounds,
    DecayFactor,
    MomentumCoefficient,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    accepts_none,
    describe,
    exclusive_lower_bound,
    is_list,
    is_supported_annotation,
    lower_bound,
    split_bounds,
    to_python_scalar,
    union_members,
    validate,
    validate_number,
)

ConfigT = TypeVar("ConfigT", bound="Config")


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of typed settings.

    PRESETS: by name, the values of a preset for fields that the user leaves out; other fields have
      their defaults. A class with presets has the field `PRESET_FIELD`, which names one.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    PRESET_FIELD: ClassVar[str] = "preset"

    @classmethod
    def normalize_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the given values with those that follow from them, before a preset adds others."""
        return values

    def with_derived_fields(self: "ConfigT") -> "ConfigT":
        """Return the settings with unset fields filled from the other fields."""
        return self

    def check(self) -> None:
        """Raise ConfigError for values that cannot be combined."""


def parse_config(
    config_class: type[ConfigT],
    overrides: Mapping[str, Any],
    *,
    field_term: str = "option",
    field_prefix: str = "",
) -> ConfigT:
    """Create settings from the given values; a preset or the defaults fill in the others.

    Args:
      config_class: dataclass of the settings. If it has presets, None in a field that cannot be
        None stands for "not given".
      overrides: values by field.
      field_term: term for a field in the message about an unknown one.
      field_prefix: text before a field's name in other messages.

    Returns:
      An instance of `config_class` whose values are as its annotations have them.

    Raises:
      ConfigError: for an unknown field or a value that does not fit, in one line.
    """
    fields = field_types(config_class)
    for key in overrides:
        require_name(field_term, key, fields)
    unset_fields = {
        key for key, value in overrides.items() if value is None and not accepts_none(fields[key])
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
    """Return the values of settings as JSON has them, the input of `parse_config`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def field_types(dataclass_type: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields by name."""
    # A class is hashable; mypy looks at its instances instead.
    return _field_types(cast(Hashable, dataclass_type))


@functools.cache
def _field_types(dataclass_type: Any) -> dict[str, Any]:
    hints = get_type_hints(dataclass_type, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(dataclass_type)}


def to_json_value(argument: str, value: Any) -> Any:
    """Return `value` as JSON has it: a number, text, bool or None, or lists and dicts of them.

    Raises:
      ConfigError: for other values and for numbers that are not finite; it names `argument`.
    """
    value = os.fspath(value) if isinstance(value, os.PathLike) else to_python_scalar(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        validate_number(argument, value, Bounds())
        return value
    if is_list(value, tuple):
        return [to_json_value(argument, item) for item in value]
    has_string_keys = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    require(
        has_string_keys, argument, value, "a number, a word, True, False, None or a list of them"
    )
    return {key: to_json_value(argument, item) for key, item in value.items()}


class HyperParameter(NamedTuple):
    """Default and bounds of a numeric hyper-parameter."""

    default: float
    bounds: Bounds


def hyperparameters_of(config: Config) -> dict[str, HyperParameter]:
    """Return the numeric hyper-parameters whose defaults are the values of a record; fields that
    are None are left out."""
    fields = field_types(type(config))
    return {
        name: HyperParameter(float(getattr(config, name)), split_bounds(annotation)[1])
        for name, annotation in fields.items()
        if getattr(config, name) is not None
    }


def make_config_class(name: str, defaults: Mapping[str, float]) -> type[Config]:
    """Create a class of settings that are numbers >= 0, with these defaults. Raises ConfigError."""
    for key in defaults:
        is_valid_name = isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
        require(is_valid_name, "hyperparameters", key, "names of letters, digits and underscores")
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
    """Return, by field, its allowed values in words and its documentation.

    The documentation is the string after the field in the source of the class or a base class; ""
    if there is none.
    """
    texts = get_field_docs(config_class)
    field_docs = {
        name: (describe(type_, brief=True), texts.get(name, ""))
        for name, type_ in field_types(config_class).items()
    }
    if config_class.PRESETS:
        words = " or ".join(config_class.PRESETS)
        field_docs[config_class.PRESET_FIELD] = (
            words,
            "Where options and numbers come from that are not given.",
        )
    return field_docs


def get_field_docs(dataclass_type: type) -> dict[str, str]:
    """Return the string after each field in the source of a dataclass or of a base class."""
    texts: dict[str, str] = {}
    for base_class in reversed(dataclass_type.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # a class without source, e.g. of a notebook
            texts |= _parse_field_docs(inspect.getsource(base_class))
    return texts


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
    "get_field_docs",
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
