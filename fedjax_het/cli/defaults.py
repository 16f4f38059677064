"""What `--help` says of a flag that is not given: its value, or those that protocols have."""

import dataclasses
import functools
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from fedjax_het.common.records import members
from fedjax_het.settings.spec import RunSpec

R = TypeVar("R", bound=type)


def with_defaults_said(record: R) -> R:
    """The same record for tyro's help: settings that are left to protocols say what these have, and
    what is none, and is explained, says nothing besides."""
    fields = []
    hints = get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        said = _said_of(field)
        if said is None:
            continue
        kind = hints[field.name]
        hint = tyro.conf.arg(help_behavior_hint=said, metavar=_metavar(kind))
        fields.append((field.name, Annotated[kind, hint], _again(field)))
    made: Any = dataclasses.make_dataclass(
        record.__name__, fields, bases=(record,), frozen=True, namespace={"__doc__": record.__doc__}
    )
    return made


def _again(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    if field.default is not dataclasses.MISSING:
        return dataclasses.field(default=field.default)
    return dataclasses.field()


def _said_of(field: dataclasses.Field) -> str | None:
    """What tyro is to say of a field's default; None: what it says by itself."""
    said = _by_protocol().get(field.name)
    if said is not None:
        return f"({said})"
    empty = field.default in (None, ()) or field.default_factory in (dict, tuple)
    alone = getattr(RunSpec, field.name, None)  # of a run, where a sweep takes a list
    if empty and alone is not None:
        return f"(default: {alone})"
    return "" if empty else None


def _metavar(kind: Any) -> str | None:
    """What stands for a value, without the word None, which nobody has to write; None: as tyro has
    it."""
    names = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}", Path: "PATH"}
    words = []
    for member in members(kind):
        bare = get_args(member)[0] if get_origin(member) is Annotated else member
        if get_origin(bare) is Literal:
            words.append("{" + ",".join(map(str, get_args(bare))) + "}")
        elif bare is not NoneType:
            if bare not in names:
                return None
            words.append(names[bare])
    return "|".join(words)


@functools.cache
def _by_protocol() -> dict[str, str]:
    """For each setting that protocols fill, what they say of FedAvg on Fashion-MNIST."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.settings.protocols import PROTOCOLS, protocol_values

    values: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        settings, _, _ = protocol_values(protocol, METHODS["fedavg"], "fashion_mnist", None)
        for name, value in settings.items():
            if not isinstance(value, dict):
                values.setdefault(name, {})[protocol] = value
    return {name: _said(found, len(PROTOCOLS)) for name, found in values.items()}


def _said(values: dict[str, Any], protocols: int) -> str:
    words = {protocol: _short(value) for protocol, value in values.items()}
    if len(words) == protocols and len(set(words.values())) == 1:
        return f"default: {next(iter(words.values()))}"
    return "by protocol: " + ", ".join(f"{name} {value}" for name, value in words.items())


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
