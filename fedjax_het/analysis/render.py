"""One table of texts, as a terminal, Markdown or LaTeX shows it; and numbers as text or CSV."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fedjax_het.utils.config import validate_arguments
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

    rows: tuple[dict[str, str], ...]
    """Each by the name of the column."""
    title: str = ""
    """What the rows have in common; empty where a table is not divided."""
    labels: dict[str, str] | None = None
    """The title as columns, for Markdown: `{"alpha": "0.01"}`."""
    best_cells: frozenset[tuple[int, str]] = frozenset()
    """Row and column of the best values: bold in LaTeX."""


@dataclass(frozen=True)
class TextTable:
    """A table of texts with a title, sections and notes."""

    title: str
    label_columns: tuple[str, ...]
    """Columns that name a row: on the left, aligned to the left."""
    value_columns: tuple[str, ...]
    """The other columns, aligned to the right."""
    sections: tuple[TableSection, ...]
    notes: tuple[str, ...] = ()


def format_number(value: float, format_spec: str = ".2f") -> str:
    """A number with a real minus sign; `form` is Python's format of it."""
    return MISSING if math.isnan(value) else f"{value:{format_spec}}".replace("-", MINUS)


def format_p_value(value: float) -> str:
    """A p-value."""
    return "<0.001" if value < 0.001 else format_number(value, ".3f")


def choose_number_format(values: Iterable[float]) -> str:
    """A format for all of these: four digits, or whole numbers where there are large ones."""
    magnitudes = [abs(value) for value in values if not math.isnan(value)]
    return ",.0f" if max(magnitudes, default=0) >= 10_000 else ".4g"


def format_mean_std(
    mean: float, std: float, *, diverged: bool = False, format_spec: str = ".2f"
) -> str:
    """`64.00 ± 2.83 †`; the mean alone where there is no deviation."""
    if math.isnan(mean):
        return f"diverged {DIVERGED}" if diverged else MISSING
    deviation = [] if math.isnan(std) else ["±", format_number(std, format_spec)]
    return " ".join(
        [format_number(mean, format_spec), *deviation, *([DIVERGED] if diverged else [])]
    )


def format_seed_count(num_completed: int, num_planned: int) -> str:
    """How many seeds were run: `3`, or `2 of 3` where some are missing."""
    if not num_planned:
        return MISSING
    return (
        str(num_completed) if num_completed == num_planned else f"{num_completed} of {num_planned}"
    )


def find_best_indices(values: Sequence[float]) -> list[int]:
    """The places of the highest value as printed. None where fewer than two can be compared."""
    rounded_values = {
        index: round(value, 2) for index, value in enumerate(values) if not math.isnan(value)
    }
    if len(rounded_values) < 2:
        return []
    return [
        index for index, value in rounded_values.items() if value == max(rounded_values.values())
    ]


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
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    is_usable = console is None or callable(getattr(console, "print", None))
    require(is_usable, "console", console, "a rich.console.Console, or None for the terminal")
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=100, color_system=None, highlight=False)
    table = _make_printable(table)
    columns = (*table.label_columns, *table.value_columns)
    rows = [row for section in table.sections for row in section.rows]
    widths = {n: max(len(n), *(len(row[n]) for row in rows)) for n in columns} if rows else {}
    has_titles = any(section.title for section in table.sections)
    if rows and has_titles:
        widths[columns[0]] += 2

    def make_grid(header: bool) -> Table:
        rich_table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=header, pad_edge=False)
        for name in columns:
            justify: Literal["left", "right"] = "left" if name in table.label_columns else "right"
            heading_text = _make_rich_texts(name)[0]
            rich_table.add_column(heading_text, justify=justify, width=widths[name], no_wrap=True)
        return rich_table

    def print_untruncated(rich_table: Table) -> None:
        width = console.width
        console.width = 10_000  # no cell is cut
        console.print(rich_table)
        console.width = width

    console.print(*_make_rich_texts(table.title), style="bold")
    if rows:
        print_untruncated(make_grid(header=True))
    for section in table.sections:
        if section.title:
            console.print(*_make_rich_texts(section.title), style="bold")
        body = make_grid(header=False)
        for row in section.rows:
            texts = [row[name] for name in columns]
            body.add_row(*_make_rich_texts("  " + texts[0] if has_titles else texts[0], *texts[1:]))
        print_untruncated(body)
    console.print()
    for note in table.notes:
        console.print(*_make_rich_texts(note))


def _make_printable(table: TextTable) -> TextTable:
    """The table with every text in one printable line."""

    def make_row_printable(texts: dict[str, str]) -> dict[str, str]:
        return {to_one_line(name): to_one_line(text) for name, text in texts.items()}

    return replace(
        table,
        title=to_one_line(table.title),
        label_columns=tuple(map(to_one_line, table.label_columns)),
        value_columns=tuple(map(to_one_line, table.value_columns)),
        sections=tuple(
            replace(
                section,
                title=to_one_line(section.title),
                rows=tuple(map(make_row_printable, section.rows)),
            )
            for section in table.sections
        ),
        notes=tuple(map(to_one_line, table.notes)),
    )


def _make_rich_texts(*texts: str) -> list:
    from rich.text import Text

    return [Text(text) for text in texts]  # not markup: a text may hold brackets


@validate_arguments
def to_markdown(table: TextTable) -> str:
    """Format a table as Markdown: a heading, a table whose first columns are the sections, and a list of notes.

    Args:
      table: the table. Texts are escaped.
    """
    labels = list(dict.fromkeys(n for section in table.sections for n in section.labels or ()))
    names = [*labels, *table.label_columns]
    lines = [
        f"# {escape_markdown(table.title)}",
        "",
        _format_markdown_row([*names, *table.value_columns]),
        f"|{' --- |' * len(names)}{' ---: |' * len(table.value_columns)}",
    ]
    for section in table.sections:
        for row in section.rows:
            row_texts = {**(section.labels or {}), **row}
            lines.append(
                _format_markdown_row([row_texts[name] for name in (*names, *table.value_columns)])
            )
    return "\n".join([*lines, "", *[f"- {escape_markdown(note)}" for note in table.notes], ""])


def _format_markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, texts)) + " |"


@validate_arguments
def to_latex(table: TextTable) -> str:
    """Format a table as LaTeX (`\\usepackage{booktabs}`), the best values of a section in bold.

    Args:
      table: the table. Texts are escaped.
    """
    columns = (*table.label_columns, *table.value_columns)
    has_titles = any(section.title for section in table.sections)
    alignment = "l" * len(table.label_columns) + "r" * len(table.value_columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\caption{{{escape_latex(table.title)}}}",
        rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}",
        r"\toprule",
        _format_latex_row([escape_latex(name) for name in columns]),
    ]
    for section in table.sections:
        lines.append(r"\midrule")
        if section.title:
            title = rf"\multicolumn{{{len(columns)}}}{{@{{}}l}}{{{escape_latex(section.title)}}}"
            lines.append(_format_latex_row([title]))
        for row_index, row in enumerate(section.rows):
            row_texts = [
                rf"\textbf{{{escape_latex(row[n])}}}"
                if (row_index, n) in section.best_cells
                else escape_latex(row[n])
                for n in columns
            ]
            lines.append(
                _format_latex_row(
                    [r"\quad " + row_texts[0] if has_titles else row_texts[0], *row_texts[1:]]
                )
            )
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        notes_text = r"\\".join(f"\n{escape_latex(note)}" for note in table.notes)
        lines += ["", r"\medskip", rf"\parbox{{\linewidth}}{{\footnotesize{notes_text}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _format_latex_row(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


@validate_arguments
def to_csv(frame: "pd.DataFrame") -> str:
    """Format numbers as CSV with twelve digits; missing values are empty.

    Args:
      frame: the numbers.
    """
    return frame.to_csv(index=False, float_format="%.12g", lineterminator="\n")
