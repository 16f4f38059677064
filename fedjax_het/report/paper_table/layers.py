"""Settings of runs in layers: the paper's, the data set's, the preset's, the row's."""

from dataclasses import fields
from typing import Any

from fedjax_het.settings.spec import RunSpec

_SPEC_FIELDS = {f.name for f in fields(RunSpec)}


def merge_settings(*layers: dict[str, Any]) -> dict[str, Any]:
    """Settings of which a later layer wins; hyper-parameters and options one by one."""
    merged_settings: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            merged_settings[name] = (
                {**merged_settings.get(name, {}), **value} if isinstance(value, dict) else value
            )
    return merged_settings


def classify_variant_settings(method: str, variant: dict[str, Any]) -> dict[str, Any]:
    """A variant's settings as fields of `RunSpec`: its own, or a method's option or number."""
    from fedjax_het.algorithms import METHODS

    settings: dict[str, Any] = {}
    for name, value in variant.items():
        if name in _SPEC_FIELDS:
            settings[name] = value
        else:
            kind = "options" if name in METHODS[method].option_names else "hp"
            settings.setdefault(kind, {})[name] = value
    return settings
