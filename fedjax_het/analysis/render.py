"""Tables of texts for a terminal, Markdown and LaTeX; numbers as text and CSV."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.console import accept_all_characters
from fedjax_het.utils.errors import display_name, require
from fedjax_het.utils.text import (
    DIVERGED,
    EQUAL,
    MINUS,
    MISSING,
    escape_latex,
    escape_markdown,
    to_one_line,
)

if TYPE_CHECKING:
    import pandas as pd

_GAP = 3  # spaces between columns
_INDENT = "  "  # of rows under a section's title, and of the further lines of a cell
_PIPE_WIDTH = 100  # characters of a note's line in a pipe
_MIN_LABEL_WIDTH = 20  # characters of a label before it is wrapped
_MAX_NOTE_LINES, _MAX_LINES_PER_NOTE = 8, 2


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
    """Title above the table."""
    label_columns: Sequence[str]
    """Columns that name a row, aligned to the left."""
    sections: Sequence[TableSection]
    """Groups of rows, each with a title or without."""
    notes: Sequence[str] = ()
    """Notes below the table."""
    minor_columns: Sequence[str] = ()
    """Columns that a narrow terminal leaves out, the least important column first."""

    @property
    def value_columns(self) -> tuple[str, ...]:
        """The other columns of the first row with content, aligned to the right."""
        first_row = next((row for section in self.sections for row in section.rows), {})
        return self._select_filled([name for name in first_row if name not in self.label_columns])

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns with content."""
        return (*self._select_filled(self.label_columns), *self.value_columns)

    def _select_filled(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that have content in a row; all of them if none has."""
        rows = [row for section in self.sections for row in section.rows]
        filled = [name for name in names if any(row[name] not in ("", MISSING) for row in rows)]
        return tuple(filled or names)

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


def format_difference(mean: float, spread: float) -> str:
    """Format a difference and its spread over seeds with one decimal.

    Args:
      mean: the difference; NaN if there is none.
      spread: standard deviation or half width of an interval; NaN if there is none.

    Returns:
      For example `+1.3 ± 0.4`.
    """
    return ("+" if mean >= 0 else "") + format_mean_std(mean, spread, format_spec=".1f")


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


_MAX_EQUAL_DIFFERENCE = 0.01  # points
_EQUAL_NOTE = (
    f"{EQUAL} The mean is FedAvg's within {_MAX_EQUAL_DIFFERENCE} points: with these settings the "
    "method does not differ from FedAvg."
)


def equals_baseline(value: float, baseline: float) -> bool:
    """Return whether two accuracies in percent are equal to two decimals.

    Args:
      value: mean of a method; NaN for a missing one.
      baseline: mean of FedAvg.

    Returns:
      Whether they differ by at most 0.01 points; False for NaN.
    """
    return round(abs(value - baseline), 2) <= _MAX_EQUAL_DIFFERENCE


def add_equal_note(notes: Sequence[str], sections: Sequence[TableSection]) -> list[str]:
    """Add a note about the mark of equal means if a row has it.

    Args:
      notes: notes below the table.
      sections: sections of the table.

    Returns:
      All notes.
    """
    texts = (text for section in sections for row in section.rows for text in row.values())
    return [*notes, *([_EQUAL_NOTE] if any(text.endswith(f" {EQUAL}") for text in texts) else [])]


@validate_arguments
def print_table(
    table: TextTable, *, console: Any = None, wide: bool = False, notes_file: str = ""
) -> None:
    """Print a table with rich: sections under their titles, then the notes.

    On a terminal the table fits the terminal's width. Headings and labels are wrapped, then minor
    columns are left out, and the other columns are printed in blocks. A value is never wrapped.
    In a pipe the output is the whole table as plain text without control codes.

    Args:
      table: the table.
      console: a `rich.console.Console`; default: standard output.
      wide: whether all columns and notes are printed, whatever the terminal's width.
      notes_file: file that has all notes. With it, a terminal shows at most eight lines of notes.

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
    from rich.console import Console
    from rich.text import Text

    is_usable = console is None or callable(getattr(console, "print", None))
    require(is_usable, "console", console, "a rich.console.Console, or None for the terminal")
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=_PIPE_WIDTH, color_system=None, highlight=False)
    is_limited = bool(getattr(console, "is_terminal", False)) and not wide
    blocks = _arrange_columns(table, console.width if is_limited else math.inf)

    def print_line(text: str, **options: Any) -> None:
        console.print(Text(to_one_line(text)), **options)  # not markup: a text may hold brackets

    def print_cells(block: dict[str, int], texts: Sequence[str], **style: str) -> None:
        cells = [_wrap_cell(text, width) for text, width in zip(texts, block.values(), strict=True)]
        for lines in itertools.zip_longest(*cells, fillvalue=""):
            aligned = [
                _pad(text, width, is_label=name in table.label_columns)
                for text, (name, width) in zip(lines, block.items(), strict=True)
            ]
            # No cell is cut: lines may be longer than the terminal.
            print_line("   ".join(aligned), soft_wrap=True, **style)

    with accept_all_characters():
        print_line(table.title, style="bold")
        for block in blocks:
            print_cells(block, [to_one_line(name) for name in block], style="bold")
            num_characters = sum(block.values()) + _GAP * (len(block) - 1)
            print_line("─" * num_characters, soft_wrap=True)
            for section in table.sections:
                if section.title:
                    print_line(section.title, style="bold")
                for row in section.rows:
                    print_cells(block, _list_row_texts(table, block, row))
            console.print()
        if not blocks:
            console.print()
        printed = {name for block in blocks for name in block}
        if left_out := [name for name in table.columns if blocks and name not in printed]:
            names = ", ".join(map(to_one_line, left_out))
            print_line(f"Columns without room: {names}. {display_name('wide')} prints all columns.")
        for note in _shorten_notes(table.notes, console.width, notes_file if is_limited else ""):
            print_line(note)


def _list_row_texts(table: TextTable, names: Iterable[str], row: dict[str, str]) -> list[str]:
    """Return the texts of a row; the first is indented if sections have titles."""
    first, *others = (to_one_line(row[name]) for name in names)
    return [f"{_INDENT if table.has_section_titles else ''}{first}", *others]


def _arrange_columns(table: TextTable, max_width: float) -> list[dict[str, int]]:
    """Choose the columns of a printed table and their widths.

    Args:
      table: the table.
      max_width: number of characters of a line.

    Returns:
      By block, the widths of its columns; each block has the columns of labels. None without rows.
    """
    from rich.cells import cell_len

    rows = [row for section in table.sections for row in section.rows]
    columns = table.columns
    lines = [[to_one_line(n) for n in columns], *(_list_row_texts(table, columns, r) for r in rows)]
    texts = dict(zip(columns, zip(*lines, strict=True), strict=True))
    widths = {name: max(map(cell_len, column)) for name, column in texts.items()}

    def count_characters(names: Iterable[str]) -> int:
        return sum(widths[name] + _GAP for name in names) - _GAP

    if not rows or count_characters(columns) <= max_width:
        return [widths] if rows else []
    full_widths = dict(widths)
    labels = [name for name in columns if name in table.label_columns]
    for name, (heading, *cells) in texts.items():
        words = heading.split()
        if name in labels:
            words += [word for cell in cells for word in cell.split()]
            longest = max([_MIN_LABEL_WIDTH, *map(cell_len, words)])
        else:
            longest = max([*map(cell_len, words), *map(cell_len, cells)])
        widths[name] = min(widths[name], longest)
    remaining = list(columns)
    for name in table.minor_columns:
        if count_characters(remaining) > max_width and name in remaining:
            remaining.remove(name)
    blocks: list[list[str]] = []
    block = list(labels)
    for name in remaining[len(labels) :]:
        if len(block) > len(labels) and count_characters([*block, name]) > max_width:
            blocks.append(block)
            block = list(labels)
        block.append(name)
    blocks.append(block)
    room = int(max_width) - max(map(count_characters, blocks))
    for name in remaining:
        gain = max(0, min(full_widths[name] - widths[name], room))
        widths[name], room = widths[name] + gain, room - gain
    return [{name: widths[name] for name in names} for names in blocks]


def _wrap_cell(text: str, width: int) -> list[str]:
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + len(_INDENT))
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=indent, **options)


def _pad(text: str, width: int, *, is_label: bool) -> str:
    from rich.cells import cell_len

    padding = " " * (width - cell_len(text))
    return text + padding if is_label else padding + text


def _shorten_notes(notes: Sequence[str], width: int, notes_file: str) -> list[str]:
    """Shorten notes to `_MAX_NOTE_LINES` lines, of which the last names the file with all notes.

    Args:
      notes: the notes.
      width: number of characters of a line.
      notes_file: file with all notes; empty: nothing is shortened.

    Returns:
      The notes.
    """
    notes = [to_one_line(note) for note in notes]
    counts = [len(textwrap.wrap(note, width)) for note in notes]
    if not notes_file or sum(counts) <= _MAX_NOTE_LINES:
        return notes
    # Notes of marks are needed to read the table.
    pairs = sorted(
        zip(notes, counts, strict=True), key=lambda pair: pair[0][:1] not in (DIVERGED, EQUAL)
    )
    shown: list[str] = []
    room = _MAX_NOTE_LINES - 1
    for note, count in pairs:
        num_lines = min(count, _MAX_LINES_PER_NOTE, room)
        if num_lines:
            # Lines that end at words may be a little shorter than the width.
            limit = len(note) if num_lines == count else num_lines * (width - 6)
            shown.append(textwrap.shorten(note, limit, placeholder=" …"))
            room -= num_lines
    return [*shown, f"All notes are in {notes_file}."]


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
    columns = [*labels, *table.columns]
    num_labels = len(columns) - len(table.value_columns)

    def format_line(texts: Iterable[str]) -> str:
        return f"| {' | '.join(map(escape_markdown, texts))} |"

    lines = [
        f"# {escape_markdown(table.title)}",
        "",
        format_line(columns),
        f"|{' --- |' * num_labels}{' ---: |' * len(table.value_columns)}",
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
    num_values = len(table.value_columns)
    alignment = "l" * (len(columns) - num_values) + "r" * num_values

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
    table_notes = [*table.notes]
    if any(section.best_cells for section in table.sections):
        table_notes.append("Bold: the best value of a column among rows that are compared.")
    if table_notes:
        notes = r"\\".join(f"\n{escape_latex(note)}" for note in table_notes)
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
