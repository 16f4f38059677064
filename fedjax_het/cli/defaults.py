"""What `--help` says of a flag that is not given: its value, or those that protocols have."""

import dataclasses
import functools
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from fedjax_het.common.records import union_members
from fedjax_het.settings.spec import RunSpec

CommandT = TypeVar("CommandT", bound=type)


def with_default_hints(command_class: CommandT) -> CommandT:
    """The same record for tyro's help: settings that are left to protocols say what these have, and
    what is none, and is explained, says nothing besides."""
    fields = []
    hints = get_type_hints(command_class, include_extras=True)
    for field in dataclasses.fields(command_class):
        default_hint = _get_default_hint(field)
        if default_hint is None:
            continue
        annotation = hints[field.name]
        hint = tyro.conf.arg(help_behavior_hint=default_hint, metavar=_format_metavar(annotation))
        fields.append((field.name, Annotated[annotation, hint], _copy_field(field)))
    hinted_class: Any = dataclasses.make_dataclass(
        command_class.__name__,
        fields,
        bases=(command_class,),
        frozen=True,
        namespace={"__doc__": command_class.__doc__},
    )
    return hinted_class


def _copy_field(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    if field.default is not dataclasses.MISSING:
        return dataclasses.field(default=field.default)
    return dataclasses.field()


def _get_default_hint(field: dataclasses.Field) -> str | None:
    """What tyro is to say of a field's default; None: what it says by itself."""
    protocol_hint = _collect_protocol_hints().get(field.name)
    if protocol_hint is not None:
        return f"({protocol_hint})"
    is_empty = field.default in (None, ()) or field.default_factory in (dict, tuple)
    run_default = getattr(RunSpec, field.name, None)  # of a run, where a sweep takes a list
    if is_empty and run_default is not None:
        return f"(default: {run_default})"
    return "" if is_empty else None


def _format_metavar(annotation: Any) -> str | None:
    """What stands for a value, without the word None, which nobody has to write; None: as tyro has
    it."""
    names = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}", Path: "PATH"}
    words = []
    for member in union_members(annotation):
        base_type = get_args(member)[0] if get_origin(member) is Annotated else member
        if get_origin(base_type) is Literal:
            words.append("{" + ",".join(map(str, get_args(base_type))) + "}")
        elif base_type is not NoneType:
            if base_type not in names:
                return None
            words.append(names[base_type])
    return "|".join(words)


@functools.cache
def _collect_protocol_hints() -> dict[str, str]:
    """For each setting that protocols fill, what they say of FedAvg on Fashion-MNIST."""
    from fedjax_het.algorithms import METHODS
    from fedjax_het.settings.protocols import PROTOCOLS, get_protocol_defaults

    values: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        settings, _, _ = get_protocol_defaults(protocol, METHODS["fedavg"], "fashion_mnist", None)
        for name, value in settings.items():
            if not isinstance(value, dict):
                values.setdefault(name, {})[protocol] = value
    return {
        name: _format_protocol_hint(values_by_protocol, len(PROTOCOLS))
        for name, values_by_protocol in values.items()
    }


def _format_protocol_hint(values: dict[str, Any], num_protocols: int) -> str:
    words = {protocol: _format_default(value) for protocol, value in values.items()}
    if len(words) == num_protocols and len(set(words.values())) == 1:
        return f"default: {next(iter(words.values()))}"
    return "by protocol: " + ", ".join(f"{name} {value}" for name, value in words.items())


def _format_default(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
