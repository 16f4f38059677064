"""The words of a command line as values, and what commands share.

What `--help` says of a flag that is not given: its value, or those that protocols have.
"""

import contextlib
import dataclasses
import functools
import json
import math
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils.config import union_members
from fedjax_het.utils.errors import require

HP_HELP = "Numeric hyper-parameters of the method, e.g. --hp prox_mu=0.01 local_lr=0.05."
OPTION_HELP = "Static choices of the method, e.g. --option preset=code."
_PARTITION_HELP = (
    "What else the partition takes, e.g. --partition-option dominating_share=0.9 "
    "groups=[[0,1],[2,3]]."
)
_NETWORK_HELP = "What else the network takes, e.g. --network-option hidden=[64,64]."
_SERVER_HELP = "What the source of the server's examples takes, e.g. --server-option size=500."
PartitionOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="partition-option", metavar="NAME=VALUE", help=_PARTITION_HELP),
]
NetworkOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="network-option", metavar="NAME=VALUE", help=_NETWORK_HELP),
]
OptimizerOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        name="optimizer-option",
        metavar="NAME=VALUE",
        help="Truth values of the local optimizer, e.g. --optimizer-option nesterov=true.",
    ),
]
ServerOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="server-option", metavar="NAME=VALUE", help=_SERVER_HELP),
]


def parse_pairs(argument: str, items: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and values of words such as prox_mu=0.01. ConfigError for other words."""
    parsed_pairs: list[tuple[str, str]] = []
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals and text):
            require(False, argument, item, "NAME=VALUE, e.g. prox_mu=0.01")
        previous_text = dict(parsed_pairs).get(name)
        if previous_text is not None:
            require(False, f"{argument} {name}", text, f"it once; it is {previous_text!r} already")
        parsed_pairs.append((name, text))
    return parsed_pairs


def parse_literals(argument: str, items: tuple[str, ...]) -> dict[str, Any]:
    """Values by name, each as `literal` reads it."""
    return {name: parse_literal(text) for name, text in parse_pairs(argument, items)}


def parse_number(argument: str, name: str, text: str) -> float:
    """ConfigError for what is none."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text)
    require(not math.isnan(value), f"{argument} {name}", text, "a number")
    return value


def parse_count(argument: str, text: str) -> int | str:
    """A whole number, or "auto"."""
    if text == "auto":
        return text
    ok = text.isdecimal() and len(text) <= 9 and int(text) >= 1
    require(ok, argument, text, "'auto' or a whole number >= 1")
    return int(text)


def parse_literal(text: str) -> Any:
    """A number, a truth value or a list if it reads as such, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


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
    from fedjax_het.config.protocols import PROTOCOLS, get_protocol_defaults

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
