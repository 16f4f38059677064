"""Compression of the clients' uploads as a setting: `Compressor` and the registry `COMPRESSORS`."""

import itertools
from typing import Any

from fedjax_het.compression.base import Compressor
from fedjax_het.compression.compressors import QSGD, Sign, TopK, Uniform
from fedjax_het.utils.config import config_to_dict, field_types, parse_config
from fedjax_het.utils.errors import display_names, make_value_error, require_name
from fedjax_het.utils.kinds import KindEntry, require_one_value, split_kind_text
from fedjax_het.utils.registry import LIST_COMMAND, Registry

NO_COMPRESSION = "none"
"""Value of the setting `compression` for uploads as they are, like None."""
_KINDS: tuple[type[Compressor], ...] = (TopK, QSGD, Sign, Uniform)
COMPRESSORS: Registry[KindEntry] = Registry(
    "compressor", (KindEntry(kind.name, kind.description, kind) for kind in _KINDS)
)
"""Kinds of compression by name."""


def parse_compression(setting: str | None) -> Compressor | None:
    """Return the compressor of a run.

    Args:
      setting: text `name:field=value,...`, or `name` for the default values; None or "none" for no
        compression.

    Returns:
      The compressor, or None.

    Raises:
      ConfigError: for an unknown kind or field, or a value that does not fit.

    Example:
      >>> from fedjax_het.compression import parse_compression
      >>> parse_compression("topk:fraction=0.1")
      TopK(scope='model', error_feedback=True, fraction=0.1)
    """
    if setting is None or setting == NO_COMPRESSION:
        return None
    name, fields = split_kind_text("compression", setting)
    require_name("compression", name, (*COMPRESSORS, NO_COMPRESSION), listed_by=LIST_COMMAND)
    if name == NO_COMPRESSION:
        raise make_value_error("compression", setting, f"{NO_COMPRESSION} without fields")
    names = field_types(COMPRESSORS[name].make)
    for field, value in fields.items():
        require_name(f"compression {name}", field, names)
        require_one_value(f"compression {name}:{field}", value, names[field])
    with display_names({field: f"compression {name}:{field}" for field in names}):
        return parse_config(COMPRESSORS[name].make, fields)


def format_compression(compressor: Compressor | None) -> str | None:
    """Return the setting `compression` in its canonical form.

    Args:
      compressor: the compressor, or None.

    Returns:
      Text `name:field=value,...` with the field that sets the size and with the fields that differ
      from their defaults, or None.

    Example:
      >>> from fedjax_het.compression import QSGD, format_compression
      >>> format_compression(QSGD(error_feedback=True))
      'qsgd:levels=16,error_feedback=true'
    """
    if compressor is None:
        return None
    values, defaults = config_to_dict(compressor), config_to_dict(type(compressor)())
    names = sorted(values, key=lambda name: name != compressor.strength)
    is_listed = lambda name: name == compressor.strength or values[name] != defaults[name]  # noqa: E731
    return _format_text(compressor.name, {name: values[name] for name in filter(is_listed, names)})


def _format_text(name: str, fields: dict[str, Any]) -> str:
    """Return the text `name:field=value,...`."""
    texts = [
        f"{field}={str(value).lower() if isinstance(value, bool) else value}"
        for field, value in fields.items()
    ]
    return f"{name}:{','.join(texts)}" if texts else name


def to_compression_setting(value: Any) -> Any:
    """Return a value of the setting `compression` without objects.

    Args:
      value: a `Compressor`, None, or a text, which is not checked.

    Returns:
      The text of a compressor; None for None and "none"; any other value as it is.

    Example:
      >>> from fedjax_het.compression import TopK, to_compression_setting
      >>> to_compression_setting(TopK(fraction=0.1))
      'topk:fraction=0.1'
    """
    if isinstance(value, Compressor):
        return format_compression(value)
    return None if value == NO_COMPRESSION else value


def expand_compression(value: Any) -> list[Any]:
    """Return the values of a sweep of which one text of the setting `compression` consists.

    Args:
      value: a value of the setting, such as a text with several values of a field.

    Returns:
      A text for each combination of values; any other value as it is.

    Example:
      >>> from fedjax_het.compression import expand_compression
      >>> expand_compression("topk:fraction=0.01,0.1")
      ['topk:fraction=0.01', 'topk:fraction=0.1']
    """
    if not isinstance(value, str):
        return [value]
    name, fields = split_kind_text("compression", value)
    lists = [item if isinstance(item, list) else [item] for item in fields.values()]
    return [
        _format_text(name, dict(zip(fields, values, strict=True)))
        for values in itertools.product(*lists)
    ]


__all__ = [
    "COMPRESSORS",
    "NO_COMPRESSION",
    "QSGD",
    "Compressor",
    "Sign",
    "TopK",
    "Uniform",
    "expand_compression",
    "format_compression",
    "parse_compression",
    "to_compression_setting",
]
