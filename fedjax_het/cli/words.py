"""The words of a command line as values, and what commands share."""

import json
import logging
from typing import Annotated, Any

import tyro

from fedjax_het.common.errors import ConfigError
from fedjax_het.common.text import one_line

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
ServerOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="server-option", metavar="NAME=VALUE", help=_SERVER_HELP),
]


def pairs(argument: str, items: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and values of words such as prox_mu=0.01. ConfigError for other words."""
    found: list[tuple[str, str]] = []
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals and text):
            raise ConfigError(f"{argument} = {item!r}: expected NAME=VALUE, e.g. prox_mu=0.01")
        given = dict(found).get(name)
        if given is not None:
            raise ConfigError(
                f"{argument} {name} = {text!r}: expected it once; it is {given!r} already"
            )
        found.append((name, text))
    return found


def literals(argument: str, items: tuple[str, ...]) -> dict[str, Any]:
    """Values by name, each as `literal` reads it."""
    return {name: literal(text) for name, text in pairs(argument, items)}


def number(argument: str, name: str, text: str) -> float:
    """ConfigError for what is none."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{argument} {name} = {text!r}: expected a number") from None


def count(argument: str, text: str) -> int | str:
    """A whole number, or "auto"."""
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= len(text) <= 9 or int(text) < 1:
        raise ConfigError(f"{argument} = {text!r}: expected 'auto' or a whole number >= 1")
    return int(text)


def literal(text: str) -> Any:
    """A number, a truth value or a list if it reads as such, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text


def log_to_stderr(level: int) -> None:
    """What the package logs from this level on."""
    log = logging.getLogger("fedjax_het")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines())
        log.addHandler(handler)
        # What imports absl's logging, as tensorflow-datasets does, gives the root a handler, too.
        log.propagate = False
    log.setLevel(level)


class _Lines(logging.Formatter):
    """Of data sets and results that may be a stranger's: a line is a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))
