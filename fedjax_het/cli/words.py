"""The words of a command line as values, and what commands share."""

import contextlib
import json
import math
from typing import Annotated, Any

import tyro

from fedjax_het.common.errors import require

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
