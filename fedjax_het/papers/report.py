"""The report of all tables and figures: one HTML page that needs no other file, and Markdown.

The templates are in `report_templates/`. Programs write tables in Markdown, which markdown-it
reads, and figures as PNG files, which the page contains.
"""

import base64
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from fedjax_het.papers.archived_results import ArchivedResults
from fedjax_het.papers.programs import ProgramModule
from fedjax_het.runtime.result_store import list_run_files
from fedjax_het.utils.io import read_stored_file
from fedjax_het.utils.text import MISSING, to_one_line

PAPERS = {
    "dynafed": "DynaFed (Pi et al., CVPR 2023)",
    "fedaf": "FedAF (Wang et al., 2024)",
    "fedamp": "FedAMP (Huang et al., AAAI 2021)",
    "fsl": "FSL (Mai et al., 2022)",
    "niid_bench": "NIID-Bench (Li et al., ICDE 2022)",
    "pfllib": "PFLlib's leaderboard (Zhang et al., JMLR 2025)",
}
MIN_WIDE_PIXELS = 900  # width of a figure whose texts are unreadable at the width of a phone
PALETTE_SIZE = 256  # colors of a figure on the page
MIN_CONSTANT_ROWS = 3  # rows from which a column with one value is stated once, above the table

# Titles, tables, lists and bold cells. No links, images or HTML: texts may be a stranger's.
_MARKDOWN = MarkdownIt("zero").enable(["table", "list", "heading", "emphasis", "escape"])


# Contents of the report


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of a paper."""

    paper: str
    module: ProgramModule

    @property
    def stem(self) -> str:
        """Name within the paper, such as `table1`."""
        return self.module.item

    @property
    def name(self) -> str:
        """Name among all papers, such as `dynafed-table1`."""
        return f"{self.paper}-{self.stem}"

    @property
    def title(self) -> str:
        """First line of the program's docstring."""
        return self.module.description

    @property
    def script(self) -> str:
        """Path of the program in a checkout."""
        return f"experiments/{self.module.name.replace('.', '/')}.py"


@dataclass
class ProgramRecord:
    """Outcome of a program."""

    name: str
    version: str
    status: int
    seconds: float
    files: list[str]
    text: str
    """Last lines that the program printed, if it failed."""
    command: str = ""
    made_by: str = ""
    """Versions and device."""
    when: str = ""


ArchiveRecords = list[tuple[ArchivedResults, ProgramRecord]]


@dataclass
class ReportEntry:
    """A section of the report: new results, and archived ones."""

    item: PaperItem
    record: ProgramRecord | None = None
    archives: ArchiveRecords = field(default_factory=list)


StudyRecords = dict[str, ArchiveRecords]
"""By paper, the archived results that belong to no table or figure."""


def format_state(record: ProgramRecord | None) -> str:
    """Format the exit status of a program and its time."""
    if record is None:
        return "not made"
    state = f"FAILED with exit status {record.status} after " if record.status else ""
    minutes = record.seconds / 60
    return state + (f"{minutes:.1f} min" if minutes >= 2 else f"{record.seconds:.0f} s")


def summarize_entries(entries: Sequence[ReportEntry]) -> str:
    """Return a sentence with the number of finished items, their time and the failures."""
    records = [entry.record for entry in entries if entry.record]
    seconds = sum(record.seconds for record in records)
    text = f"{len(records)} of {len(entries)} tables and figures, {seconds / 60:.1f} minutes in all"
    records += [record for entry in entries for _, record in entry.archives]
    failed = ", ".join(record.name for record in records if record.status)
    return f"{text}; failed: {failed}." if failed else f"{text}; none failed."


def describe_provenance(files: Iterable[str], default: str) -> str:
    """Describe versions and devices of the runs in the folders of some files.

    Args:
      files: files of tables and figures.
      default: text if the folders have no runs.

    Returns:
      The text.
    """
    summaries = []
    for folder in {Path(file).parent for file in files}:
        for path in list_run_files(folder):
            try:
                summaries.append(dict(json.loads(read_stored_file(path))["summary"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    versions, jax_versions, devices = (
        " and ".join(sorted({str(summary[name]) for summary in summaries if summary.get(name)}))
        for name in ("fedjax_het", "jax", "device")
    )
    return f"fedjax_het {versions}, jax {jax_versions}, on {devices}" if versions else default


# Pages


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
      entries: tables and figures with their records and archived results.
      studies: archived results by paper that belong to no table or figure.
      command: command that made the report.
      provenance: version, machine and date.

    Returns:
      The page.
    """
    values = {"studies": studies, "command": command, "provenance": provenance}
    return _render("report.html", title, entries, **values)


def render_markdown(title: str, entries: Sequence[ReportEntry], folder: Path) -> str:
    """Render the report of the new results as Markdown, without archived results.

    Args:
      title: title of the report.
      entries: tables and figures with their records.
      folder: folder of the report, from which it links to figures.

    Returns:
      The text.
    """
    return _render("report.md", title, entries, folder=folder)


def _render(template: str, title: str, entries: Sequence[ReportEntry], **values: Any) -> str:
    by_paper = {
        paper: [entry for entry in entries if entry.item.paper == paper] for paper in PAPERS
    }
    values |= {
        "title": title,
        "summary": summarize_entries(entries),
        "papers": [(paper, members) for paper, members in by_paper.items() if members],
        "paper_titles": PAPERS,
    }
    return _get_environment().get_template(template).render(values)


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


class TableCell(NamedTuple):
    """A cell of a table on the page."""

    content: Markup
    attributes: Markup = Markup("")

    @property
    def text(self) -> str:
        """Text without markup."""
        return self.content.striptags()


def markdown_to_html(text: str) -> Markup:
    """Convert the Markdown of a table to HTML: titles of level 4, sortable tables, notes as a list.

    Args:
      text: title, tables with bold cells, lists and paragraphs.

    Returns:
      The HTML.
    """
    tokens = _MARKDOWN.parse(text)
    headings = [body for head, body in pairwise(tokens) if head.type == "heading_open"]
    title = _render_tokens(headings[:1]).striptags() if headings else "table"
    parts: list[str] = []
    pending: list[Token] = []
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = "h4"
        if token.type == "bullet_list_open":
            token.attrSet("class", "notes")
        if token.type == "table_open":
            parts.append(_render_tokens(pending))
            pending = []
        pending.append(token)
        if token.type == "table_close":
            parts.append(_render_table(pending, title))
            pending = []
    return Markup("".join([*parts, _render_tokens(pending)]))


def _render_tokens(tokens: list[Token]) -> Markup:
    return Markup(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))


def _render_table(tokens: list[Token], title: str) -> str:
    number = Markup(' class="n"')
    cells = [
        TableCell(
            _render_tokens([body]),
            number if "right" in str(cell.attrs.get("style")) else Markup(""),
        )
        for cell, body in pairwise(tokens)
        if cell.type in ("th_open", "td_open")
    ]
    num_columns = sum(token.type == "th_open" for token in tokens)
    lines = [cells[start : start + num_columns] for start in range(0, len(cells), num_columns)]
    headers, *rows = lines
    constants = _find_constant_columns(rows, num_columns)
    varying = [column for column in range(num_columns) if column not in constants]
    stated = [
        (headers[column].content, cell.content)
        for column, cell in constants.items()
        if cell.text != MISSING
    ]
    headers, *rows = ([line[column] for column in varying] for line in lines)
    parts: Any = _get_environment().get_template("parts.html").module
    return parts.table(title, headers, rows, stated)


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
    return [
        markdown_to_html(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".md"
    ]


def _read_markdown_texts(record: ProgramRecord) -> list[str]:
    """Return the tables with bold titles, since the report has its own headings."""
    texts = [
        Path(file).read_text(encoding="utf-8").strip()
        for file in record.files
        if file.endswith(".md")
    ]
    return [re.sub(r"^# (.*)", r"**\1**", text, count=1) for text in texts]


# Text of programs


def escape_control_characters(text: str) -> str:
    """Replace control characters in the lines that a program printed."""
    return "\n".join(map(to_one_line, text.splitlines()))


def _format_fenced(text: str) -> str:
    fence = "`" * (2 + max(map(len, re.findall("`+", f"{text}`"))))
    return f"{fence}\n{escape_control_characters(text)}\n{fence}"


# Figures


class PictureView(NamedTuple):
    """A figure on the page."""

    caption: str
    alt: str
    source: str
    """Data URI."""
    is_wide: bool
    """Whether a phone shows the figure at a readable width, with a scroll bar."""


def _list_pictures(record: ProgramRecord) -> list[Path]:
    return [Path(file) for file in record.files if file.endswith(".png")]


def _list_picture_links(record: ProgramRecord, folder: Path) -> list[tuple[str, str]]:
    return [
        (path.stem, quote(os.path.relpath(path, folder).replace(os.sep, "/")))
        for path in _list_pictures(record)
    ]


def _make_picture_views(record: ProgramRecord, title: str) -> list[PictureView]:
    return [
        make_picture_view(path, f"{title} Picture {path.stem}.", caption=title)
        for path in _list_pictures(record)
    ]


def make_picture_view(path: Path, alt: str, *, caption: str = "") -> PictureView:
    """Read a PNG file.

    Args:
      path: the file.
      alt: alternative text of the figure.
      caption: caption if the file has no description.

    Returns:
      The figure on the page.
    """
    source, is_wide, description = _encode_picture(path, path.stat().st_mtime_ns)
    return PictureView(description or caption or alt, alt, source, is_wide)


@cache  # the report is written again after every program
def _encode_picture(path: Path, mtime_ns: int) -> tuple[str, bool, str]:
    """Return the data URI of a file, whether the figure is wide, and its description.

    A palette reduces a PNG to a third of its size. A transparent or invalid file stays as it is.
    """
    from PIL import Image, UnidentifiedImageError

    content, is_wide, description = path.read_bytes(), False, ""
    try:
        with Image.open(io.BytesIO(content)) as image:
            description = to_one_line(str(image.info.get("Description", "")))
            is_wide = image.width > MIN_WIDE_PIXELS
            if image.convert("RGBA").getchannel("A").getextrema() == (255, 255):
                buffer = io.BytesIO()
                colors = image.convert("RGB").quantize(PALETTE_SIZE, dither=Image.Dither.NONE)
                colors.save(buffer, "PNG", optimize=True)
                content = min(content, buffer.getvalue(), key=len)
    except (OSError, UnidentifiedImageError):
        pass
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return source, is_wide, description
