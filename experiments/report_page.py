"""The report of all tables and figures: one page of HTML that needs no other file, and Markdown."""

import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from experiments.report_items import (
    PAPERS,
    Entry,
    Item,
    Record,
    Studies,
    by_paper,
    state_text,
    summary,
)
from experiments.report_parts import as_html, picture, pictures, printable
from experiments.report_style import CSS, SCRIPT
from fedjax_het.common.text import html_text


def page(title: str, entries: Sequence[Entry], studies: Studies, about: str) -> str:
    """One file: contents, then a section for each table and figure, and what is kept at a larger
    scale below it.

    about: how the whole was made.
    """
    name = html.escape(title)
    body = [
        f"<h1>{name}</h1>",
        f"<p>{html.escape(summary(entries))}</p>",
        f'<p class="made">{about}</p>',
        *_contents(entries, studies),
    ]
    for paper, members in by_paper(entries):
        body.append(f'<section><h2 id="{paper}">{html.escape(PAPERS[paper])}</h2>')
        for entry in members:
            body += _section(entry)
        for kept, record in studies.get(paper, ()):
            body += _kept(kept.name, kept.title, record)
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


def _contents(entries: Sequence[Entry], studies: Studies) -> Iterator[str]:
    yield '<nav class="contents" id="contents" aria-label="Contents"><h2>Contents</h2>'
    for paper, members in by_paper(entries):
        yield f'<p><a href="#{paper}">{html.escape(PAPERS[paper])}</a></p><ul>'
        for item, record, all_kept in ((each.item, each.record, each.kept) for each in members):
            more = "".join(
                f' · <a href="#{kept.name}">kept: {html_text(kept.source.name)}</a>'
                for kept, _ in all_kept
            )
            link = f'<a href="#{item.name}">{html_text(item.title)}</a>'
            yield f'<li>{link} <span class="state">{_state(record)}{more}</span></li>'
        for kept, _ in studies.get(paper, ()):
            yield f'<li><a href="#{kept.name}">{html_text(kept.title)}</a></li>'
        yield "</ul>"
    yield "</nav>"


def _section(entry: Entry) -> Iterator[str]:
    item, record = entry.item, entry.record
    yield f'<article id="{item.name}"><h3>{html_text(item.title)}</h3>'
    yield _made(record, f"<code>{_place(item)}</code>, {_state(record)}")
    yield from _of_record(record, item.title)
    for kept, shown in entry.kept:
        yield from _kept(kept.name, kept.title, shown)
    yield '<p class="top"><a href="#contents">Contents</a></p></article>'


def _kept(name: str, title: str, record: Record) -> Iterator[str]:
    yield f'<div class="kept" id="{name}"><h3>{html_text(title)}</h3>'
    yield _made(record, "drawn anew of its runs" if record.seconds else "as it was drawn")
    yield from _of_record(record, title)
    yield "</div>"


def _made(record: Record | None, what: str) -> str:
    parts = [what]
    if record is not None:
        parts += [f"<code>{html_text(record.command)}</code>"] if record.command else []
        parts += [html_text(text) for text in (record.made_by, record.when) if text]
    return f'<p class="made">{" · ".join(parts)}</p>'


def _of_record(record: Record | None, title: str) -> Iterator[str]:
    if record is None:
        return
    if record.text:
        yield f'<pre tabindex="0">{html.escape(printable(record.text))}</pre>'
    files = [Path(file) for file in record.files]
    yield from (as_html(file.read_text()) for file in files if file.suffix == ".md")
    for file in pictures(files):
        yield picture(file, f"{title} Picture {file.stem}.")


def _state(record: Record | None) -> str:
    failed = record is not None and record.status != 0
    return f'<span class="failed">{state_text(record)}</span>' if failed else state_text(record)


def _place(item: Item) -> str:
    return f"experiments/{item.module.name.replace('.', '/')}.py"


def markdown(title: str, entries: Sequence[Entry], folder: Path) -> str:
    """The same of what was made now, with links to the pictures from `folder`."""
    parts = [f"# {title}", "", summary(entries), ""]
    parts += ["| paper | item | wall-clock |", "| --- | --- | ---: |"]
    for entry in entries:
        link = f"[{entry.item.stem}](#{entry.item.name})"
        parts.append(f"| {entry.item.paper} | {link} | {state_text(entry.record)} |")
    for paper, members in by_paper(entries):
        parts += ["", f"## {PAPERS[paper]}"]
        for item, record in ((entry.item, entry.record) for entry in members):
            parts += ["", f'<a id="{item.name}"></a>', "", f"### {item.title}", ""]
            parts += [f"`{_place(item)}`, {state_text(record)}."]
            parts += _markdown_of(item, record, folder)
    return "\n".join(parts) + "\n"


def _markdown_of(item: Item, record: Record | None, folder: Path) -> Iterator[str]:
    if record and record.text:
        fence = "`" * (2 + max(map(len, re.findall("`+", f"{record.text}`"))))
        yield from ("", fence, printable(record.text), fence)
    files = [Path(file) for file in record.files] if record else []
    for path in (path for path in files if path.suffix == ".md"):
        text = path.read_text().strip()  # its title is below this page's headings
        yield from ("", re.sub(r"^# (.*)", r"**\1**", text, count=1))
    for path in pictures(files):
        link = quote(os.path.relpath(path, folder).replace(os.sep, "/"))
        yield from ("", f"![{item.name}: {path.stem}]({link})")
