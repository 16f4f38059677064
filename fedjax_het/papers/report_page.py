"""The report of all tables and figures: one page of HTML that needs no other file, and Markdown."""

import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from fedjax_het.papers.report_html import (
    CSS,
    SCRIPT,
    escape_control_characters,
    markdown_to_html,
    picture_to_html,
    select_pictures,
)
from fedjax_het.papers.report_items import (
    PAPERS,
    PaperItem,
    ProgramRecord,
    ReportEntry,
    StudyRecords,
    format_state,
    group_by_paper,
    summarize_entries,
)
from fedjax_het.utils.text import escape_html


def render_html(
    title: str, entries: Sequence[ReportEntry], studies: StudyRecords, provenance: str
) -> str:
    """One file: contents, then a section for each table and figure, and what is kept at a larger
    scale below it.

    about: how the whole was made.
    """
    name = html.escape(title)
    body = [
        f"<h1>{name}</h1>",
        f"<p>{html.escape(summarize_entries(entries))}</p>",
        f'<p class="made">{provenance}</p>',
        *_render_contents(entries, studies),
    ]
    for paper, members in group_by_paper(entries):
        body.append(f'<section><h2 id="{paper}">{html.escape(PAPERS[paper])}</h2>')
        for entry in members:
            body += _render_section(entry)
        for archive, record in studies.get(paper, ()):
            body += _render_archive(archive.name, archive.title, record)
        body.append("</section>")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title><style>{CSS}</style></head><body>",
            *body,
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _render_contents(entries: Sequence[ReportEntry], studies: StudyRecords) -> Iterator[str]:
    yield '<nav class="contents" id="contents" aria-label="Contents"><h2>Contents</h2>'
    for paper, members in group_by_paper(entries):
        yield f'<p><a href="#{paper}">{html.escape(PAPERS[paper])}</a></p><ul>'
        for item, record, archives in (
            (entry.item, entry.record, entry.archives) for entry in members
        ):
            archive_links = "".join(
                f' · <a href="#{archive.name}">kept: {escape_html(archive.source.name)}</a>'
                for archive, _ in archives
            )
            link = f'<a href="#{item.name}">{escape_html(item.title)}</a>'
            yield f'<li>{link} <span class="state">{_render_state(record)}{archive_links}</span></li>'
        for archive, _ in studies.get(paper, ()):
            yield f'<li><a href="#{archive.name}">{escape_html(archive.title)}</a></li>'
        yield "</ul>"
    yield "</nav>"


def _render_section(entry: ReportEntry) -> Iterator[str]:
    item, record = entry.item, entry.record
    yield f'<article id="{item.name}"><h3>{escape_html(item.title)}</h3>'
    yield _render_provenance(record, f"<code>{_script_path(item)}</code>, {_render_state(record)}")
    yield from _render_record(record, item.title)
    for archive, archive_record in entry.archives:
        yield from _render_archive(archive.name, archive.title, archive_record)
    yield '<p class="top"><a href="#contents">Contents</a></p></article>'


def _render_archive(name: str, title: str, record: ProgramRecord) -> Iterator[str]:
    yield f'<div class="kept" id="{name}"><h3>{escape_html(title)}</h3>'
    yield _render_provenance(
        record, "drawn anew of its runs" if record.seconds else "as it was drawn"
    )
    yield from _render_record(record, title)
    yield "</div>"


def _render_provenance(record: ProgramRecord | None, description: str) -> str:
    parts = [description]
    if record is not None:
        parts += [f"<code>{escape_html(record.command)}</code>"] if record.command else []
        parts += [escape_html(text) for text in (record.made_by, record.when) if text]
    return f'<p class="made">{" · ".join(parts)}</p>'


def _render_record(record: ProgramRecord | None, title: str) -> Iterator[str]:
    if record is None:
        return
    if record.text:
        yield f'<pre tabindex="0">{html.escape(escape_control_characters(record.text))}</pre>'
    files = [Path(file) for file in record.files]
    yield from (markdown_to_html(file.read_text()) for file in files if file.suffix == ".md")
    for file in select_pictures(files):
        yield picture_to_html(file, f"{title} Picture {file.stem}.")


def _render_state(record: ProgramRecord | None) -> str:
    failed = record is not None and record.status != 0
    return f'<span class="failed">{format_state(record)}</span>' if failed else format_state(record)


def _script_path(item: PaperItem) -> str:
    return f"experiments/{item.module.name.replace('.', '/')}.py"


def render_markdown(title: str, entries: Sequence[ReportEntry], folder: Path) -> str:
    """The same of what was made now, with links to the pictures from `folder`."""
    parts = [f"# {title}", "", summarize_entries(entries), ""]
    parts += ["| paper | item | wall-clock |", "| --- | --- | ---: |"]
    for entry in entries:
        link = f"[{entry.item.stem}](#{entry.item.name})"
        parts.append(f"| {entry.item.paper} | {link} | {format_state(entry.record)} |")
    for paper, members in group_by_paper(entries):
        parts += ["", f"## {PAPERS[paper]}"]
        for item, record in ((entry.item, entry.record) for entry in members):
            parts += ["", f'<a id="{item.name}"></a>', "", f"### {item.title}", ""]
            parts += [f"`{_script_path(item)}`, {format_state(record)}."]
            parts += _markdown_record(item, record, folder)
    return "\n".join(parts) + "\n"


def _markdown_record(item: PaperItem, record: ProgramRecord | None, folder: Path) -> Iterator[str]:
    if record and record.text:
        fence = "`" * (2 + max(map(len, re.findall("`+", f"{record.text}`"))))
        yield from ("", fence, escape_control_characters(record.text), fence)
    files = [Path(file) for file in record.files] if record else []
    for path in (path for path in files if path.suffix == ".md"):
        text = path.read_text().strip()  # its title is below this page's headings
        yield from ("", re.sub(r"^# (.*)", r"**\1**", text, count=1))
    for path in select_pictures(files):
        link = quote(os.path.relpath(path, folder).replace(os.sep, "/"))
        yield from ("", f"![{item.name}: {path.stem}]({link})")
