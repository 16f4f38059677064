"""Kinds of heterogeneity as settings that combine: `Skew` and the registry `SKEWS`.

A run applies its skews in the order of `SKEWS`: numbers of examples, labels, drift, images.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_het.skews.amounts import AmountSkew, LongTail, PowerLaw, Quantity
from fedjax_het.skews.base import FeatureSkew, LevelSkew, Skew, SkewKind
from fedjax_het.skews.drift import ClassArrival, ClientChurn, DriftSkew, LabelDrift
from fedjax_het.skews.feature import (
    Blur,
    Color,
    Contrast,
    Inversion,
    Noise,
    PixelPermutation,
    Resolution,
    Rotation,
)
from fedjax_het.skews.labels import ConceptShift, LabelNoise, LabelSkew
from fedjax_het.utils.config import (
    config_to_dict,
    field_types,
    parse_config,
    parse_literal,
    to_json_value,
)
from fedjax_het.utils.errors import display_names, make_value_error, require_name
from fedjax_het.utils.registry import LIST_COMMAND, Registry

_FIELD_SEPARATOR = re.compile(r",(?=\w+=)")  # other commas separate values

_KINDS: tuple[type[Skew], ...] = (
    *(LongTail, Quantity, PowerLaw),
    *(LabelNoise, ConceptShift),
    *(LabelDrift, ClassArrival, ClientChurn),
    *(Rotation, Inversion, Contrast, Color, Blur, Resolution, PixelPermutation, Noise),
)
SKEWS: Registry[SkewKind] = Registry(
    "skew", (SkewKind(kind.name, kind.description, kind) for kind in _KINDS)
)
"""Kinds of skews by name, in the order of their application."""


def parse_skews(settings: Mapping[str, Any]) -> tuple[Skew, ...]:
    """Return the skews of a run.

    Args:
      settings: values by name and field, such as `{"noise.std": 0.3}`, see `to_skew_settings`.

    Returns:
      The skews that change anything, in the order of `SKEWS`.

    Raises:
      ConfigError: for an unknown kind or field, or a value that does not fit.

    Example:
      >>> from fedjax_het.skews import parse_skews
      >>> parse_skews({"noise.std": 0.3, "rotation.degrees": 0.0})
      (Noise(levels='ramp', groups=2, std=0.3),)
    """
    fields_by_name: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, _, field = key.partition(".")
        require_name("skew", name, SKEWS, listed_by=LIST_COMMAND)
        require_name(f"skew {name}", field, field_types(SKEWS[name].make))
        fields_by_name.setdefault(name, {})[field] = value
    skews = []
    for name in SKEWS:
        if name in fields_by_name:
            fields = fields_by_name[name]
            with display_names(
                {field: f"skew {name}:{field}" for field in field_types(SKEWS[name].make)}
            ):
                skews.append(parse_config(SKEWS[name].make, fields))
    return tuple(skew for skew in skews if not skew.is_neutral)


def to_skew_settings(value: Any) -> dict[str, Any]:
    """Return the setting `skew` in its canonical form, values by name and field.

    Args:
      value: None; a mapping of `name.field` to values; a `Skew`; a text `name:field=value,...`,
        or `name` for the default strength; or a list of skews and texts. Several values of a
        field, as in `noise:std=0.1,0.3`, are values of a sweep.

    Returns:
      Values by `name.field`. Every named skew has its strength.

    Raises:
      ConfigError: for another value, and a field that is given twice.

    Example:
      >>> from fedjax_het.skews import Noise, to_skew_settings
      >>> to_skew_settings(["quantity:alpha=0.5", Noise(std=0.1)])
      {'quantity.alpha': 0.5, 'noise.std': 0.1}
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str | Skew):
        value = [value]
    expected = "a list of skews such as 'noise:std=0.3', see `fedjax-het list`"
    if not isinstance(value, Iterable):
        raise make_value_error("skew", value, expected)
    settings: dict[str, Any] = {}
    for item in value:
        if not isinstance(item, str | Skew):
            raise make_value_error("skew", item, expected)
        fields = _parse_text(item) if isinstance(item, str) else _to_fields(item)
        for name, field_value in fields.items():
            if name in settings:
                raise make_value_error("skew", item, f"{name} once")
            settings[name] = field_value
    return settings


def _to_fields(skew: Skew) -> dict[str, Any]:
    """Return the fields of a skew that differ from their defaults, and its strength."""
    values, defaults = config_to_dict(skew), config_to_dict(type(skew)())
    return {
        f"{skew.name}.{name}": to_json_value(name, value)
        for name, value in values.items()
        if name == skew.strength or value != defaults[name]
    }


def _parse_text(text: str) -> dict[str, Any]:
    """Return the fields of a text `name:field=value,...`."""
    name, _, rest = text.partition(":")
    require_name("skew", name, (*SKEWS, *PARTITION_SKEWS), listed_by=LIST_COMMAND)
    fields: dict[str, Any] = {}
    for item in filter(None, _FIELD_SEPARATOR.split(rest)):
        field, separator, value = item.partition("=")
        if not separator:
            raise make_value_error("skew", text, f"{name}:field=value,...")
        values = [parse_literal(word) for word in value.split(",")]
        fields[f"{name}.{field}"] = values if len(values) > 1 else values[0]
    if name in SKEWS:
        default = SKEWS[name].make()
        fields.setdefault(f"{name}.{default.strength}", getattr(default, default.strength))
    return fields or {name: True}


PARTITION_SKEWS = {
    "label": "dirichlet",
    "label_quantity": "classes_per_client",
    "domain": "by_domain",
}
"""Partitions that the setting `skew` also accepts, by the name of the skew."""

__all__ = [
    "SKEWS",
    "AmountSkew",
    "Blur",
    "ClassArrival",
    "ClientChurn",
    "Color",
    "ConceptShift",
    "Contrast",
    "DriftSkew",
    "FeatureSkew",
    "Inversion",
    "LabelDrift",
    "LabelNoise",
    "LabelSkew",
    "LevelSkew",
    "LongTail",
    "Noise",
    "PixelPermutation",
    "PowerLaw",
    "Quantity",
    "Resolution",
    "Rotation",
    "Skew",
    "SkewKind",
    "parse_skews",
    "to_skew_settings",
]
