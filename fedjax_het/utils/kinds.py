"""Settings that combine kinds of a registry, such as `skew` and `system`.

A setting is a mapping of `kind.field` to values. Users also write a text `kind:field=value,...`, an
object of a kind, or a list of texts and objects.
"""

import dataclasses
import math
import re
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_origin

from fedjax_het.utils.config import (
    Config,
    config_to_dict,
    field_types,
    parse_config,
    parse_literal,
    to_json_value,
    union_members,
    validate,
)
from fedjax_het.utils.errors import (
    ConfigError,
    describe_error,
    display_name,
    display_names,
    make_value_error,
    require,
    require_name,
)
from fedjax_het.utils.registry import LIST_COMMAND, Registry, format_entry, get_summary_line

_FIELD_SEPARATOR = re.compile(r",(?=\w+=)")  # other commas separate values


@dataclass(frozen=True, kw_only=True)
class Kind(Config, ABC):
    """A kind with its parameters: a value of a setting that combines kinds."""

    name: ClassVar[str]
    "Word that names the kind in settings."
    description: ClassVar[str]
    "One line for `fedjax-het list`."
    strength: ClassVar[str]
    "Name of the field that states how much the kind changes a run; empty: the kind has no field."
    neutral: ClassVar[float | None] = 0
    "Value of the strength at which the kind changes nothing; None: no value does."

    def __post_init__(self) -> None:
        """Validate the fields, and convert them to their types.

        Raises:
          ConfigError: for a value that does not fit its annotation.
        """
        for field, annotation in field_types(type(self)).items():
            value = getattr(self, field)
            # Infinity is no valid number, and the neutral strength of some kinds.
            if not _is_infinite_and_neutral(type(self), {field: value}):
                object.__setattr__(self, field, validate(f"{self.name}:{field}", value, annotation))
        self.check()

    @property
    def is_neutral(self) -> bool:
        """Whether the kind changes nothing."""
        return self.neutral is not None and getattr(self, self.strength) == self.neutral

    def list_warnings(self, run: Any) -> list[str]:
        """Return warnings of fields, or of the whole kind, without effect in a run.

        Args:
          run: resolved settings of the run.

        Returns:
          Lines that name the setting, the kind and the field.
        """
        return []


KindT = TypeVar("KindT", bound=Kind)
T = TypeVar("T")


class KindEntry(NamedTuple):
    """Entry of a kind in a registry.

    Example:
      >>> from fedjax_het.skews import SKEWS
      >>> SKEWS["noise"].make.__name__
      'Noise'
    """

    name: str
    "Word that names the kind in settings."
    description: str
    "One line for `fedjax-het list`."
    make: type[Any]
    "Class of the kind, whose fields are its parameters."

    def __repr__(self) -> str:
        return format_entry(self)


class KindSetting(Generic[KindT]):
    """A setting that combines kinds.

    Args:
      name: name of the setting.
      base: base class of the kinds.
      kinds: classes of the kinds, in the order in which a run applies them.
      example: a valid text, for messages.
      other_names: names that the setting accepts in addition to kinds.

    Attributes:
      registry: the kinds by name.

    Example:
      >>> from fedjax_het.skews import SKEW_SETTING
      >>> SKEW_SETTING.to_settings("noise:std=0.3")
      {'noise.std': 0.3}
    """

    def __init__(
        self,
        name: str,
        base: type[KindT],
        kinds: Iterable[type[KindT]],
        *,
        example: str,
        other_names: Collection[str] = (),
    ):
        self.name, self.base, self._other_names = name, base, tuple(other_names)
        self._example = example
        self._expected = f"a list of {name}s such as {example!r}, see `{LIST_COMMAND}`"
        entries = (KindEntry(kind.name, kind.description, kind) for kind in kinds)
        self.registry: Registry[KindEntry] = Registry(name, entries)

    def parse(self, settings: Mapping[str, Any]) -> tuple[KindT, ...]:
        """Return the kinds of a run.

        Args:
          settings: values by kind and field, see `to_settings`. A kind without a field has the
            value True and stands for the default strength.

        Returns:
          The kinds that change anything, in the order of the registry.

        Raises:
          ConfigError: for an unknown kind or field, or a value that does not fit.
        """
        fields_by_name: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            name, _, field = key.partition(".")
            for names in ((*self.registry, *self._other_names), self.registry):
                require_name(self.name, name, names, listed_by=LIST_COMMAND)
            fields = fields_by_name.setdefault(name, {})
            if value is not True or field:
                make = self.registry[name].make
                types = field_types(make)
                if not field:
                    expected = "True, as the kind has no field"
                    if make.strength:
                        expected = f"keys kind.field such as '{name}.{make.strength}'"
                    raise make_value_error(self.name, {key: value}, expected)
                require_name(f"{self.name} {name}", field, types)
                fields[field] = value
        kinds: list[KindT] = []
        for name, entry in self.registry.items():
            if name in fields_by_name:
                fields, types = fields_by_name[name], field_types(entry.make)
                is_neutral = _is_infinite_and_neutral(entry.make, fields)
                if is_neutral:  # infinity is no valid value of a field
                    fields = {n: v for n, v in fields.items() if n != entry.make.strength}
                for field, value in fields.items():
                    require_one_value(f"{self.name} {name}:{field}", value, types[field])
                with display_names({field: f"{self.name} {name}:{field}" for field in types}):
                    kind = parse_config(entry.make, fields)
                if not is_neutral:
                    kinds.append(kind)
        return tuple(kind for kind in kinds if not kind.is_neutral)

    def resolve(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[KindT, ...]]:
        """Return validated settings in the order of the registry.

        They contain the strength of each kind and the fields that differ from their defaults.
        Neutral kinds are left out.

        Args:
          settings: values by kind and field, see `to_settings`.

        Returns:
          The settings with converted values, and the kinds.

        Raises:
          ConfigError: for an unknown kind or field, or a value that does not fit.
        """
        kinds = self.parse(settings)
        resolved = {name: value for kind in kinds for name, value in _to_fields(kind).items()}
        return resolved, kinds

    def to_settings(self, value: Any) -> dict[str, Any]:
        """Return the setting in its canonical form, values by kind and field.

        Args:
          value: None; a mapping of `kind.field` to values; an object of a kind; a text
            `kind:field=value,...`, or `kind` for the default strength; or a list of objects and
            texts. Several values of a field, as in `noise:std=0.1,0.3`, are values of a sweep.

        Returns:
          Values by `kind.field`. Every named kind has its strength.

        Raises:
          ConfigError: for another value, and a field that is given twice. `parse` checks names and
            values, so that a user's kind can be registered after this function reads a text.
        """
        if value is None:
            return {}
        if isinstance(value, Mapping):
            # Settings are stored as JSON, which has no infinity.
            return {key: "inf" if item == math.inf else item for key, item in value.items()}
        if isinstance(value, str | self.base):
            value = [value]
        if not isinstance(value, Iterable):
            raise make_value_error(self.name, value, self._expected)
        settings: dict[str, Any] = {}
        for item in value:
            if isinstance(item, list | tuple):
                expected = f"one list of {self.name}s; a sweep has several values of a field"
                raise make_value_error(self.name, value, f"{expected}, as in 'kind:field=1,2'")
            if not isinstance(item, str | self.base):
                raise make_value_error(self.name, item, self._expected)
            fields = self._parse_text(item) if isinstance(item, str) else _to_fields(item)
            for name, field_value in fields.items():
                if name in settings:
                    raise make_value_error(self.name, item, f"{name.partition('.')[0]} once")
                settings[name] = field_value
        return settings

    def register(self, kind: type, bases: tuple[type, ...]) -> None:
        """Register a kind of the user.

        Args:
          kind: the user's class, a frozen dataclass with the class variables `name` and `strength`.
          bases: classes of which it must inherit one.

        Raises:
          ConfigError: if `kind` is no such class, or if its name belongs to a kind of the package,
            is another value of the setting, or is not an identifier.
        """
        names = ", ".join(base.__name__ for base in bases)
        require(issubclass(kind, bases), "kind", kind, f"a subclass of {names}")
        make: Any = kind
        label = make.__name__
        for function in sorted(make.__abstractmethods__):
            require(False, f"function {function} of {label}", None, "a function of the class")
        is_dataclass = "__dataclass_fields__" in vars(kind)
        require(is_dataclass, "kind", label, "a class with @dataclass(frozen=True, kw_only=True)")
        for variable in ("name", "strength"):
            value = getattr(kind, variable, None)
            require(
                isinstance(value, str), f"{label}.{variable}", value, "a text, a class variable"
            )
        missing = (dataclasses.MISSING, dataclasses.MISSING)
        for field in dataclasses.fields(kind):
            has_default = (field.default, field.default_factory) != missing
            require(has_default, f"field {field.name} of {label}", None, "a default")
        require_name(f"{label}.strength", make.strength, field_types(make))
        expected = f"a name that is no other value of the setting {self.name}"
        require(make.name not in self._other_names, f"{label}.name", make.name, expected)
        # A dataclass without a docstring has its signature as docstring.
        summary = get_summary_line(kind)
        default = f"a {self.name} of the user" if summary.startswith(f"{label}(") else summary
        description = getattr(kind, "description", None) or default
        self.registry.add(KindEntry(make.name, description, make))

    def is_one_value(self, value: Any) -> bool:
        """Return whether a value of a grid is the setting of one run, not a list of settings."""
        items = value if isinstance(value, list | tuple) else ()
        return value is not None and all(isinstance(item, str | self.base) for item in items)

    def _parse_text(self, text: str) -> dict[str, Any]:
        """Return the fields of a text `kind:field=value,...`."""
        name, values = split_kind_text(self.name, text)
        if "=" in name:
            raise make_value_error(self.name, text, f"a kind and its fields, as in {self._example}")
        if not name.isidentifier():  # no user's kind either
            require_name(
                self.name, name, (*self.registry, *self._other_names), listed_by=LIST_COMMAND
            )
        fields = {f"{name}.{field}": value for field, value in values.items()}
        if name in self.registry:  # a kind of a user may be registered later
            default = self.registry[name].make()
            if default.strength:
                strength = getattr(default, default.strength)
                fields.setdefault(f"{name}.{default.strength}", strength)
        return fields or {name: True}


def require_one_value(argument: str, value: Any, annotation: Any) -> None:
    """Raise ConfigError for a list of values of a field that has one value.

    Args:
      argument: name of the field, for messages.
      value: the value of the user.
      annotation: type of the field.
    """
    has_lists = any(get_origin(member) is tuple for member in union_members(annotation))
    expected = "one value: only a sweep accepts several"
    require(has_lists or not isinstance(value, list | tuple), argument, value, expected)


def call_kind(setting: str, kind: Kind, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of a kind, which may be a user's, and report its errors in one line.

    Args:
      setting: name of the setting that has the kind.
      kind: the kind.
      function: the function.
      *args: its arguments.
      **kwargs: its keyword arguments.

    Returns:
      The result of the function.

    Raises:
      ConfigError: if the function raises an error.
    """
    try:
        return function(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        reason = describe_error(error)[:300]
        name = f"{display_name(setting)} {kind.name!r}"
        raise ConfigError(f"{name} fails ({reason})") from error


def split_kind_text(setting: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split a text that names a kind and its parameters.

    Args:
      setting: name of the setting, for messages.
      text: text `kind:field=value,...`, or `kind`. Several values of a field, as in
        `kind:field=1,2`, are a list.

    Returns:
      The name of the kind, and the values by field.

    Raises:
      ConfigError: for a field without a value, and a field that is given twice.

    Example:
      >>> from fedjax_het.utils.kinds import split_kind_text
      >>> split_kind_text("skew", "rotation:degrees=0,90,groups=4")
      ('rotation', {'degrees': [0, 90], 'groups': 4})
    """
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for item in filter(None, _FIELD_SEPARATOR.split(rest)):
        field, separator, value = item.partition("=")
        if not separator or not field:
            raise make_value_error(setting, text, f"{name}:field=value,...")
        if field in fields:
            raise make_value_error(setting, text, f"{field} once")
        values = [parse_literal(word) for word in value.split(",")]
        fields[field] = values if len(values) > 1 else values[0]
    return name, fields


def _is_infinite_and_neutral(kind: type[Kind], fields: Mapping[str, Any]) -> bool:
    """Return whether the strength is infinite, and the kind then changes nothing."""
    return kind.neutral == math.inf and fields.get(kind.strength) in (math.inf, "inf")


def _to_fields(kind: Kind) -> dict[str, Any]:
    """Return the fields of a kind that differ from their defaults, and its strength."""
    values, defaults = config_to_dict(kind), config_to_dict(type(kind)())
    fields = {
        f"{kind.name}.{name}": to_json_value(name, value)
        for name, value in values.items()
        if name == kind.strength or value != defaults[name]
    }
    return fields or {kind.name: True}
