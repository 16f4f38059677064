"""The report of all tables and figures: one HTML page that needs no other file, and Markdown.

The templates are in `report_templates/`. Programs leave tables in Markdown, which markdown-it reads,
and figures as PNG files, which the page contains.
"""

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from fedjax_het.analysis.figures.output import DARK_SUFFIX
from fedjax_het.papers.report_items import (
    PAPERS,
    ProgramRecord,
    ReportEntry,
    StudyRecords,
    format_state,
    group_by_paper,
    summarize_entries,
)
from fedjax_het.utils.text import MISSING, to_one_line

WIDE_ASPECT_RATIO = 1.7  # width / height of a figure with several panels side by side
PALETTE_SIZE = 256  # colors of a figure on the page
MIN_CONSTANT_ROWS = 3  # rows from which a column with one value is stated once, above the table

# Titles, tables, lists and bold cells. No links, images or HTML: a text may be a stranger's.
_MARKDOWN = MarkdownIt("zero").enable(["table", "list", "heading", "emphasis", "escape"])


class TableCell(NamedTuple):
    """A cell of a table on the page."""

    content: Markup
    attributes: Markup = Markup("")

    @property
    def text(self) -> str:
        return self.content.striptags()


class PictureView(NamedTuple):
    """A figure on the page."""

    name: str
    alt: str
    source: str
    """Data URI."""
    dark_source: str
    """Data URI of the figure for dark pages; empty if there is none."""
    is_wide: bool
    """Whether a phone shows the figure at a readable width, with a scroll bar."""


def render_html(
    title: str,
    entries: Sequence[ReportEntry],
    studies: StudyRecords,
    *,
    command: str,
    provenance: str,
) -> str:
    """Render the report as one HTML file: contents, then a section for each table and figure.

    Args:
      title: title of the page.
      entries: tables and figures with their records and kept results.
      studies: kept results by paper that belong to no table or figure.
      command: command that made the report.
      provenance: version, machine and date.
    """
    return _render(
        "report.html", title, entries, studies=studies, command=command, provenance=provenance
    )


def render_markdown(title: str, entries: Sequence[ReportEntry], folder: Path) -> str:
    """Render the report of the new results as Markdown, without kept results.

    Args:
      title: title of the report.
      entries: tables and figures with their records.
      folder: folder of the report, from which it links to figures.
    """
    return _render("report.md", title, entries, folder=folder)


def _render(template: str, title: str, entries: Sequence[ReportEntry], **values: Any) -> str:
    return (
        _get_environment()
        .get_template(template)
        .render(
            title=title,
            summary=summarize_entries(entries),
            papers=list(group_by_paper(entries)),
            paper_titles=PAPERS,
            **values,
        )
    )


@cache
def _get_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("report_templates")),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "fenced": _format_fenced,
        "format_state": format_state,
        "markdown_texts": _read_markdown_texts,
        "one_line": to_one_line,
        "picture_links": _list_picture_links,
        "pictures": _make_picture_views,
        "printable": escape_control_characters,
        "tables": _read_tables,
    }
    return environment


# Tables


def markdown_to_html(text: str) -> Markup:
    """Convert the Markdown of a table to HTML: titles of level 4, sortable tables, notes as a list.

    Args:
      text: title, tables with bold cells, lists and paragraphs.
    """
    tokens = _MARKDOWN.parse(text)
    headings = [body for head, body in pairwise(tokens) if head.type == "heading_open"]
    title = _render_inline(headings[0]).striptags() if headings else "table"
    parts: list[str] = []
    pending: list[Token] = []
    table: list[Token] = []
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = "h4"
        if token.type == "bullet_list_open":
            token.attrSet("class", "notes")
        if token.type == "table_open" or table:
            table.append(token)
        else:
            pending.append(token)
        if token.type == "table_close":
            parts += [_MARKDOWN.renderer.render(pending, _MARKDOWN.options, {})]
            parts += [_render_table(table, title)]
            pending, table = [], []
    parts.append(_MARKDOWN.renderer.render(pending, _MARKDOWN.options, {}))
    return Markup("".join(parts))


def _render_inline(token: Token) -> Markup:
    return Markup(_MARKDOWN.renderer.render([token], _MARKDOWN.options, {}))


def _render_table(tokens: list[Token], title: str) -> str:
    cells = [
        TableCell(
            _render_inline(body),
            Markup(' class="n"') if "right" in str(cell.attrs.get("style")) else Markup(""),
        )
        for cell, body in pairwise(tokens)
        if cell.type in ("th_open", "td_open")
    ]
    num_columns = sum(token.type == "th_open" for token in tokens)
    headers, *rows = (
        cells[start : start + num_columns] for start in range(0, len(cells), num_columns)
    )
    constants = _find_constant_columns(rows, num_columns)
    varying = [column for column in range(num_columns) if column not in constants]
    parts: Any = _get_environment().get_template("parts.html").module
    return parts.table(
        title,
        [headers[column] for column in varying],
        [[row[column] for column in varying] for row in rows],
        [
            (headers[column].content, cell.content)
            for column, cell in constants.items()
            if cell.text != MISSING
        ],
    )


def _find_constant_columns(
    rows: Sequence[Sequence[TableCell]], num_columns: int
) -> dict[int, TableCell]:
    """Return the columns with the same text in all rows and their cells, unless all columns are."""
    if len(rows) < MIN_CONSTANT_ROWS:
        return {}
    constants = {
        column: rows[0][column]
        for column in range(num_columns)
        if len({row[column].content for row in rows}) == 1
    }
    return constants if len(constants) < num_columns else {}


def _read_tables(record: ProgramRecord) -> list[Markup]:
    files = map(Path, record.files)
    return [markdown_to_html(file.read_text()) for file in files if file.suffix == ".md"]


def _read_markdown_texts(record: ProgramRecord) -> list[str]:
    """Return the tables with bold titles, since the report has headings of its own."""
    texts = [Path(file).read_text().strip() for file in record.files if file.endswith(".md")]
    return [re.sub(r"^# (.*)", r"**\1**", text, count=1) for text in texts]


# Text of programs


def escape_control_characters(text: str) -> str:
    """Replace control characters in the lines that a program printed."""
    return "\n".join(map(to_one_line, text.splitlines()))


def _format_fenced(text: str) -> str:
    fence = "`" * (2 + max(map(len, re.findall("`+", f"{text}`"))))
    return f"{fence}\n{escape_control_characters(text)}\n{fence}"


# Figures


def select_pictures(files: Iterable[Path]) -> list[Path]:
    """Select the PNG files, without the variants for dark pages."""
    return [path for path in files if path.suffix == ".png" and not path.stem.endswith(DARK_SUFFIX)]


def _list_picture_links(record: ProgramRecord, folder: Path) -> list[tuple[str, str]]:
    return [
        (path.stem, quote(os.path.relpath(path, folder).replace(os.sep, "/")))
        for path in select_pictures(map(Path, record.files))
    ]


def _make_picture_views(record: ProgramRecord, title: str) -> list[PictureView]:
    return [
        make_picture_view(file, f"{title} Picture {file.stem}.")
        for file in select_pictures(map(Path, record.files))
    ]


def make_picture_view(path: Path, default_alt: str) -> PictureView:
    """Read a PNG file and its variant for dark pages.

    Args:
      path: the PNG file.
      default_alt: alternative text of a file that has none of its own.
    """
    description, is_wide = read_picture_description(path)
    dark = path.with_stem(f"{path.stem}{DARK_SUFFIX}")
    return PictureView(
        path.name, description or default_alt, _data_uri(path), _data_uri(dark), is_wide
    )


def _data_uri(path: Path) -> str:
    return _encode_picture(path, path.stat().st_mtime_ns) if path.is_file() else ""


@cache  # the report is written again after every program
def _encode_picture(path: Path, mtime_ns: int) -> str:
    png = path.read_bytes()
    smaller = min(png, _quantize_colors(png), key=len)
    return f"data:image/png;base64,{base64.b64encode(smaller).decode()}"


def _quantize_colors(png: bytes) -> bytes:
    """Reduce a PNG to a palette, a third of the size; a transparent or invalid one is returned as is."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(png)) as image:
            if image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                return png
            quantized = image.convert("RGB").quantize(PALETTE_SIZE, dither=Image.Dither.NONE)
    except (OSError, UnidentifiedImageError):
        return png
    buffer = io.BytesIO()
    quantized.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def read_picture_description(path: Path) -> tuple[str, bool]:
    """Return the alternative text stored in a PNG file, or "", and whether the figure is wide."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            is_wide = image.width > WIDE_ASPECT_RATIO * image.height
            return str(image.info.get("Description", "")), is_wide
    except (OSError, UnidentifiedImageError):
        return "", False
