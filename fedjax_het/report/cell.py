"""One cell of a paper's table: its place, and the runs that fill it."""

from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedjax_het.common.errors import ConfigError
from fedjax_het.report.grouping import describe_settings
from fedjax_het.settings.spec import RunSpec

AVERAGE = "average"
# What places a cell besides its row and its domain: settings of its runs.
COLUMN_SETTINGS = ("dataset", "model", "alpha", "classes")


@dataclass(frozen=True)
class TableCell:
    """One cell of a paper's table: its place, and the runs (one per seed) that fill it."""

    dataset: str
    model: str
    alpha: float | None
    method: str
    """The row: a method, or a variant as `parse_row` reads it."""
    runs: tuple[RunSpec, ...] = ()
    """Empty where the method has no implementation."""
    domain: str | None = None
    """In a table of domains: whose test images count; `AVERAGE`: the mean over domains."""
    classes: int | None = None
    """In a table of clients with few labels each: how many."""

    @property
    def level(self) -> float | str | None:
        """The column: alpha, labels per client or the domain; None of a table without any."""
        levels = (self.domain, self.classes, self.alpha)
        return next((level for level in levels if level is not None), None)

    @property
    def column_key(self) -> tuple:
        """What it shares with the other rows of its column."""
        return self.dataset, self.model, self.level

    @property
    def column_label(self) -> str:
        """Its place in words, but for the row."""
        column_settings = {name: getattr(self, name) for name in COLUMN_SETTINGS}
        return describe_settings(column_settings) + (f", {self.domain}" if self.domain else "")


def add_row_setting(row: str, name: str, value: Any) -> str:
    """The row with one more setting, or with another value of one that it has."""
    method, variant = parse_row(row)
    settings = {**variant, name: value}
    return f"{method}({', '.join(f'{key}={setting_value!r}' for key, setting_value in settings.items())})"


def parse_row(row: str) -> tuple[str, dict[str, Any]]:
    """A row's method, and the settings that make it a variant of the method.

    `parse_row("fedaf(ipc=10)")` is `("fedaf", {"ipc": 10})`. ConfigError for what reads otherwise.
    """
    method, separator, arguments_text = row.partition("(")
    pairs = arguments_text.removesuffix(")").split(",") if separator else []
    try:
        value_texts = dict(pair.split("=") for pair in pairs)
        return method, {
            name.strip(): literal_eval(value.strip()) for name, value in value_texts.items()
        }
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"methods = {row!r}: expected a method, or one with settings: 'fedaf(ipc=10)'"
        ) from error


def format_row(row: str, *, omit: Mapping[str, Any] | None = None) -> str:
    """A row in few words, for figures: `dynafed(synthetic='real')` is "dynafed, real". without:
    settings that go without saying."""
    method, settings = parse_row(row)
    parts = [
        value if isinstance(value, str) else name if value is True else f"{name} {value}"
        for name, value in settings.items()
        if (omit or {}).get(name) != value
    ]
    return ", ".join([method, *parts])
