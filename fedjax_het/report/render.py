"""One table of texts, as a terminal, Markdown or LaTeX shows it; and numbers as text or CSV."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require
from fedjax_het.common.text import (
    DIVERGED,
    MINUS,
    MISSING,
    latex_text,
    markdown_text,
    one_line,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Section:
    """Rows to be compared with each other."""

    rows: tuple[dict[str, str], ...]
    """Each by the name of the column."""
    title: str = ""
    """What the rows have in common; empty where a table is not divided."""
    labels: dict[str, str] | None = None
    """The title as columns, for Markdown: `{"alpha": "0.01"}`."""
    best: frozenset[tuple[int, str]] = frozenset()
    """Row and column of the best values: bold in LaTeX."""


@dataclass(frozen=True)
class TextTable:
    """A table as people read it."""

    title: str
    names: tuple[str, ...]
    """Columns that name a row: on the left, aligned to the left."""
    values: tuple[str, ...]
    """The other columns, aligned to the right."""
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()


def number_text(value: float, form: str = ".2f") -> str:
    """A number with a real minus sign; `form` is Python's format of it."""
    return MISSING if math.isnan(value) else f"{value:{form}}".replace("-", MINUS)


def p_text(value: float) -> str:
    """A p-value."""
    return "<0.001" if value < 0.001 else number_text(value, ".3f")


def number_form(values: Iterable[float]) -> str:
    """A format for all of these: four digits, or whole numbers where there are large ones."""
    known = [abs(value) for value in values if not math.isnan(value)]
    return ",.0f" if max(known, default=0) >= 10_000 else ".4g"


def plus_minus(mean: float, std: float, *, diverged: bool = False, form: str = ".2f") -> str:
    """`64.00 ± 2.83 †`; the mean alone where there is no deviation."""
    if math.isnan(mean):
        return f"diverged {DIVERGED}" if diverged else MISSING
    deviation = [] if math.isnan(std) else ["±", number_text(std, form)]
    return " ".join([number_text(mean, form), *deviation, *([DIVERGED] if diverged else [])])


def seeds_text(made: int, planned: int) -> str:
    """How many seeds were run: `3`, or `2 of 3` where some are missing."""
    if not planned:
        return MISSING
    return str(made) if made == planned else f"{made} of {planned}"


def best_of(values: Sequence[float]) -> list[int]:
    """The places of the highest value as printed. None where fewer than two can be compared."""
    known = {place: round(value, 2) for place, value in enumerate(values) if not math.isnan(value)}
    if len(known) < 2:
        return []
    return [place for place, value in known.items() if value == max(known.values())]


@door
def print_table(table: TextTable, *, console: Any = None) -> None:
    """Print a table by rich: its sections under their titles, then the notes.

    In a terminal it has a little weight, and a line that is too long for it wraps; in a pipe it is
    plain text without any control code, and notes have 100 columns.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    usable = console is None or callable(getattr(console, "print", None))
    require(usable, "console", console, "a rich.console.Console, or None for the terminal")
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=100, color_system=None, highlight=False)
    table = _shown(table)
    columns = (*table.names, *table.values)
    rows = [row for section in table.sections for row in section.rows]
    widths = {n: max(len(n), *(len(row[n]) for row in rows)) for n in columns} if rows else {}
    titled = any(section.title for section in table.sections)
    if rows and titled:
        widths[columns[0]] += 2

    def grid(header: bool) -> Table:
        grid = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=header, pad_edge=False)
        for name in columns:
            justify: Literal["left", "right"] = "left" if name in table.names else "right"
            heading = _plain(name)[0]
            grid.add_column(heading, justify=justify, width=widths[name], no_wrap=True)
        return grid

    def print_whole(grid: Table) -> None:
        width = console.width
        console.width = 10_000  # no cell is cut
        console.print(grid)
        console.width = width

    console.print(*_plain(table.title), style="bold")
    if rows:
        print_whole(grid(header=True))
    for section in table.sections:
        if section.title:
            console.print(*_plain(section.title), style="bold")
        body = grid(header=False)
        for row in section.rows:
            texts = [row[name] for name in columns]
            body.add_row(*_plain("  " + texts[0] if titled else texts[0], *texts[1:]))
        print_whole(body)
    console.print()
    for note in table.notes:
        console.print(*_plain(note))


def _shown(table: TextTable) -> TextTable:
    """The table with every text in one printable line."""

    def row(texts: dict[str, str]) -> dict[str, str]:
        return {one_line(name): one_line(text) for name, text in texts.items()}

    return replace(
        table,
        title=one_line(table.title),
        names=tuple(map(one_line, table.names)),
        values=tuple(map(one_line, table.values)),
        sections=tuple(
            replace(section, title=one_line(section.title), rows=tuple(map(row, section.rows)))
            for section in table.sections
        ),
        notes=tuple(map(one_line, table.notes)),
    )


def _plain(*texts: str) -> list:
    from rich.text import Text

    return [Text(text) for text in texts]  # not markup: a text may hold brackets


@door
def to_markdown(table: TextTable) -> str:
    """A Markdown section: title, table, notes as a list. Titles of sections become columns."""
    labels = list(dict.fromkeys(n for section in table.sections for n in section.labels or ()))
    names = [*labels, *table.names]
    lines = [
        f"# {markdown_text(table.title)}",
        "",
        _markdown_row([*names, *table.values]),
        f"|{' --- |' * len(names)}{' ---: |' * len(table.values)}",
    ]
    for section in table.sections:
        for row in section.rows:
            texts = {**(section.labels or {}), **row}
            lines.append(_markdown_row([texts[name] for name in (*names, *table.values)]))
    return "\n".join([*lines, "", *[f"- {markdown_text(note)}" for note in table.notes], ""])


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, texts)) + " |"


@door
def to_latex(table: TextTable) -> str:
    """A LaTeX table that needs `\\usepackage{booktabs}`; the best of a section in bold."""
    columns = (*table.names, *table.values)
    titled = any(section.title for section in table.sections)
    alignment = "l" * len(table.names) + "r" * len(table.values)
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\small",
        rf"\caption{{{latex_text(table.title)}}}",
        rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}",
        r"\toprule",
        _latex_row([latex_text(name) for name in columns]),
    ]
    for section in table.sections:
        lines.append(r"\midrule")
        if section.title:
            title = rf"\multicolumn{{{len(columns)}}}{{@{{}}l}}{{{latex_text(section.title)}}}"
            lines.append(_latex_row([title]))
        for place, row in enumerate(section.rows):
            texts = [
                rf"\textbf{{{latex_text(row[n])}}}"
                if (place, n) in section.best
                else latex_text(row[n])
                for n in columns
            ]
            lines.append(_latex_row([r"\quad " + texts[0] if titled else texts[0], *texts[1:]]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        notes = r"\\".join(f"\n{latex_text(note)}" for note in table.notes)
        lines += ["", r"\medskip", rf"\parbox{{\linewidth}}{{\footnotesize{notes}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _latex_row(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


@door
def to_csv(frame: "pd.DataFrame") -> str:
    """The numbers themselves, of twelve digits; what is missing is empty."""
    return frame.to_csv(index=False, float_format="%.12g", lineterminator="\n")
