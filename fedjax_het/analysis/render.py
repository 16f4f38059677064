"""Tables of texts for a terminal, Markdown and LaTeX; numbers as text and CSV."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.console import accept_all_characters
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import (
    DIVERGED,
    MINUS,
    MISSING,
    escape_latex,
    escape_markdown,
    to_one_line,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TableSection:
    """Rows of a table that are compared with each other."""

    rows: Sequence[dict[str, str]]
    """Texts of each row by column."""
    title: str = ""
    """Settings that the rows share; empty if the table has no sections."""
    labels: dict[str, str] | None = None
    """The title as columns, for Markdown: `{"alpha": "0.01"}`."""
    best_cells: frozenset[tuple[int, str]] = frozenset()
    """Row and column of the best values, which are bold in LaTeX."""


@dataclass(frozen=True)
class TextTable:
    """A table of texts with a title, sections and notes.

    Example:
      >>> from fedjax_het.analysis import TextTable, to_markdown
      >>> from fedjax_het.analysis.render import TableSection
      >>> section = TableSection([{"Method": "fedavg", "Accuracy": "81.20"}])
      >>> table = TextTable("Digits.", ["Method"], [section])
      >>> table.value_columns
      ('Accuracy',)
    """

    title: str
    label_columns: Sequence[str]
    """Columns that name a row, aligned to the left."""
    sections: Sequence[TableSection]
    notes: Sequence[str] = ()

    @property
    def value_columns(self) -> tuple[str, ...]:
        """The other columns of the first row, aligned to the right."""
        first_row = next((row for section in self.sections for row in section.rows), {})
        return tuple(name for name in first_row if name not in self.label_columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of a row."""
        return (*self.label_columns, *self.value_columns)

    @property
    def has_section_titles(self) -> bool:
        """Whether a section has a title."""
        return any(section.title for section in self.sections)


def format_number(value: float, format_spec: str = ".2f") -> str:
    """Format a number with a real minus sign, and NaN as a dash.

    Args:
      value: the number.
      format_spec: Python's format specification.

    Returns:
      The text.

    Example:
      >>> from fedjax_het.analysis.render import format_number
      >>> format_number(-0.5), format_number(float("nan"))
      ('−0.50', '—')
    """
    return MISSING if math.isnan(value) else f"{value:{format_spec}}".replace("-", MINUS)


def format_p_value(value: float) -> str:
    """Format a p-value with three decimals, or as `<0.001`."""
    return "<0.001" if value < 0.001 else format_number(value, ".3f")


def choose_number_format(values: Iterable[float]) -> str:
    """Choose one format for all values: four digits, or whole numbers if one is 10,000 or more."""
    magnitudes = [abs(value) for value in values if not math.isnan(value)]
    return ",.0f" if max(magnitudes, default=0) >= 10_000 else ".4g"


def format_mean_std(
    mean: float,
    std: float,
    *,
    diverged: bool = False,
    ended_early: bool = False,
    format_spec: str = ".2f",
) -> str:
    """Format a mean and a standard deviation.

    Args:
      mean: the mean; NaN if there is no run.
      std: the standard deviation; NaN if there is none.
      diverged: whether runs diverged and are not in the mean.
      ended_early: whether runs ended early and are not in the mean.
      format_spec: Python's format specification of both numbers.

    Returns:
      For example `64.00 ± 2.83 †`.
    """
    reason = "diverged" if diverged else "ended early" if ended_early else ""
    if math.isnan(mean):
        return f"{reason} {DIVERGED}" if reason else MISSING
    text = format_number(mean, format_spec)
    text += "" if math.isnan(std) else f" ± {format_number(std, format_spec)}"
    return f"{text} {DIVERGED}" if reason else text


def format_seed_count(num_completed: int, num_planned: int) -> str:
    """Format the number of seeds: `3`, `2 of 3` if some are missing, or a dash if none is planned.

    Args:
      num_completed: number of finished runs.
      num_planned: number of planned runs.

    Returns:
      The text.
    """
    if not num_planned:
        return MISSING
    return f"{num_completed}" + (f" of {num_planned}" if num_completed != num_planned else "")


def find_best_indices(
    values: Sequence[float], *, higher_is_better: bool | None = True, format_spec: str = ".2f"
) -> list[int]:
    """Find the best values as they are printed.

    Args:
      values: numbers; NaN for a missing one.
      higher_is_better: direction of the metric, see `fedjax_het.MetricInfo`.
      format_spec: Python's format specification of the printed values.

    Returns:
      Indices of the best value; none if fewer than two values can be compared, or if the metric has
      no direction.
    """
    printed = {
        k: float(f"{value:{format_spec}}".replace(",", ""))
        for k, value in enumerate(values)
        if not math.isnan(value)
    }
    if len(printed) < 2 or higher_is_better is None:
        return []
    best = max(printed.values()) if higher_is_better else min(printed.values())
    return [k for k, value in printed.items() if value == best]


@validate_arguments
def print_table(table: TextTable, *, console: Any = None) -> None:
    """Print a table with rich: sections under their titles, then the notes.

    In a pipe the output is plain text without control codes, and notes have 100 columns. Lines of
    the table are never cut.

    Args:
      table: the table.
      console: a `rich.console.Console`; default: standard output.

    Raises:
      ConfigError: if `console` cannot print.

    Example:
      >>> from fedjax_het.analysis import TextTable, print_table
      >>> from fedjax_het.analysis.render import TableSection
      >>> section = TableSection([{"Method": "fedavg", "Accuracy": "81.20"}])
      >>> print_table(TextTable("Digits.", ["Method"], [section]))
      Digits.
      ...
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    is_usable = console is None or callable(getattr(console, "print", None))
    require(is_usable, "console", console, "a rich.console.Console, or None for the terminal")
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=100, color_system=None, highlight=False)
    indent = "  " if table.has_section_titles else ""
    headings = [to_one_line(name) for name in table.columns]
    grids = []
    for section in table.sections:
        rows = [[to_one_line(row[name]) for name in table.columns] for row in section.rows]
        grids.append([[indent + first, *others] for first, *others in rows])
    lines = [headings, *itertools.chain(*grids)]
    widths = [max(map(cell_len, texts)) for texts in zip(*lines, strict=True)]

    def print_line(text: str, **options: Any) -> None:
        console.print(Text(to_one_line(text)), **options)  # not markup: a text may hold brackets

    def print_cells(texts: Sequence[str], **style: str) -> None:
        cells = []
        for index, (text, width) in enumerate(zip(texts, widths, strict=True)):
            padding = " " * (width - cell_len(text))
            cells.append(text + padding if index < len(table.label_columns) else padding + text)
        print_line("   ".join(cells), soft_wrap=True, **style)  # no cell is cut

    with accept_all_characters():
        print_line(table.title, style="bold")
        if any(grids):
            print_cells(headings, style="bold")
            print_line("─" * (sum(widths) + 3 * len(widths) - 3), soft_wrap=True)
        for section, grid in zip(table.sections, grids, strict=True):
            if section.title:
                print_line(section.title, style="bold")
            for texts in grid:
                print_cells(texts)
        console.print()
        for note in table.notes:
            print_line(note)


@validate_arguments
def to_markdown(table: TextTable) -> str:
    """Format a table as Markdown: a heading, one table, and a list of notes.

    Args:
      table: the table; the labels of its sections are its first columns. Texts are escaped.

    Returns:
      The text.

    Example:
      >>> from fedjax_het.analysis import TextTable, to_markdown
      >>> from fedjax_het.analysis.render import TableSection
      >>> section = TableSection([{"Method": "fedavg", "Accuracy": "81.20"}])
      >>> print(to_markdown(TextTable("Digits.", ["Method"], [section])).strip())
      # Digits.
      <BLANKLINE>
      | Method | Accuracy |
      | --- | ---: |
      | fedavg | 81.20 |
    """
    labels = list(dict.fromkeys(n for section in table.sections for n in section.labels or ()))
    names = [*labels, *table.label_columns]
    columns = [*names, *table.value_columns]

    def format_line(texts: Iterable[str]) -> str:
        return f"| {' | '.join(map(escape_markdown, texts))} |"

    lines = [
        f"# {escape_markdown(table.title)}",
        "",
        format_line(columns),
        f"|{' --- |' * len(names)}{' ---: |' * len(table.value_columns)}",
    ]
    for section in table.sections:
        for row in section.rows:
            texts = {**(section.labels or {}), **row}
            lines.append(format_line(texts[name] for name in columns))
    return "\n".join([*lines, "", *[f"- {escape_markdown(note)}" for note in table.notes], ""])


@validate_arguments
def to_latex(table: TextTable) -> str:
    r"""Format a table as LaTeX (`\usepackage{booktabs}`), the best values of a section in bold.

    Args:
      table: the table. Texts are escaped.

    Returns:
      The text.

    Example:
      >>> from fedjax_het.analysis import TextTable, to_latex
      >>> from fedjax_het.analysis.render import TableSection
      >>> section = TableSection([{"Method": "fedavg", "Accuracy": "81.20"}])
      >>> text = to_latex(TextTable("Digits.", ["Method"], [section]))
      >>> "fedavg & 81.20" in text
      True
    """
    columns, indent = table.columns, r"\quad " if table.has_section_titles else ""
    alignment = "l" * len(table.label_columns) + "r" * len(table.value_columns)

    def format_line(texts: Iterable[str]) -> str:
        return " & ".join(texts) + r" \\"

    lines = [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\caption{{{escape_latex(table.title)}}}",
        rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}",
        r"\toprule",
        format_line(map(escape_latex, columns)),
    ]
    for section in table.sections:
        lines.append(r"\midrule")
        if section.title:
            title = rf"\multicolumn{{{len(columns)}}}{{@{{}}l}}{{{escape_latex(section.title)}}}"
            lines.append(format_line([title]))
        for index, row in enumerate(section.rows):
            texts = {name: escape_latex(row[name]) for name in columns}
            best = [name for name in columns if (index, name) in section.best_cells]
            texts |= {name: rf"\textbf{{{texts[name]}}}" for name in best}
            lines.append(indent + format_line(texts.values()))
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        notes = r"\\".join(f"\n{escape_latex(note)}" for note in table.notes)
        lines += ["", r"\medskip", rf"\parbox{{\linewidth}}{{\footnotesize{notes}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


@validate_arguments
def to_csv(frame: "pd.DataFrame") -> str:
    r"""Format numbers as CSV with twelve digits; missing values are empty.

    Args:
      frame: the numbers.

    Returns:
      The text.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import to_csv
      >>> to_csv(pd.DataFrame({"alpha": [0.1], "mean": [float("nan")]}))
      'alpha,mean\n0.1,\n'
    """
    return frame.to_csv(index=False, float_format="%.12g", lineterminator="\n")
