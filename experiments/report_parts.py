"""What programs leave as parts of an HTML page: tables in Markdown, pictures, what was printed."""

import base64
import html
import io
import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from pathlib import Path

from fedjax_het.common.pictures import DARK
from fedjax_het.common.text import MISSING, html_text, one_line, plain_markdown

WIDE = 1.7  # times as wide as high: several panels side by side
COLOURS = 256  # of a picture on a page
_NUMERIC = re.compile(r"-+:")


def as_html(text: str) -> str:
    """The Markdown that tables are written in: a title, tables with bold cells, lists, paragraphs.
    Titles are of the fourth level."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = next((_shown(line.lstrip("#")) for line in lines if line.startswith("# ")), "table")
    parts = []
    for kind, group in groupby(lines, _kind):
        block = list(group)
        if kind == "table":
            parts.append(_table(block, title))
        elif kind == "note":
            items = "".join(f"<li>{_shown(line[2:])}</li>" for line in block)
            parts.append(f'<ul class="notes">{items}</ul>')
        elif kind == "title":
            parts += [f"<h4>{_shown(line.lstrip('#'))}</h4>" for line in block]
        else:
            parts += [f"<p>{_shown(line)}</p>" for line in block]
    return "\n".join(parts)


def as_cell(text: str) -> str:
    """A cell, bold where all of it is; the stars of a stranger's text are escaped."""
    bold = re.fullmatch(r"\*\*(.+)\*\*", text)
    shown = _shown(bold[1] if bold else text)
    return f"<b>{shown}</b>" if bold else shown


def printable(text: str) -> str:
    """What a program printed, without what a terminal or a browser would obey."""
    return "\n".join(map(one_line, text.splitlines()))


def pictures(files: Iterable[Path]) -> list[Path]:
    """The PNGs that stand on a page, without what stands in for them on a dark one."""
    return [path for path in files if path.suffix == ".png" and not path.stem.endswith(DARK)]


def picture(path: Path, otherwise: str) -> str:
    """A PNG within the page, with what it says of itself, or else this, for those who do not see
    it. On a phone a wide one keeps a width at which it can be read, and scrolls. On a dark page the
    one for dark pages beside it, where there is one."""
    said, wide = description(path)
    alt = html.escape(one_line(said or otherwise))
    name = ' class="wide"' if wide else ""
    dark = path.with_stem(f"{path.stem}{DARK}")
    source = f'<source media="(prefers-color-scheme:dark)" srcset="{_data(dark)}">'
    return (
        f'<figure><div class="view" tabindex="0" role="region" aria-label="{html_text(path.name)}">'
        f"<picture>{source if dark.is_file() else ''}"
        f'<img{name} alt="{alt}" src="{_data(path)}"></picture></div>'
        f"<figcaption>{html_text(path.name)}</figcaption></figure>"
    )


def _data(path: Path) -> str:
    return _embedded(path, path.stat().st_mtime_ns) if path.is_file() else ""


@cache  # a report is written anew after every program
def _embedded(path: Path, changed: int) -> str:
    written = path.read_bytes()
    smaller = min(written, _in_few_colours(written), key=len)
    return f"data:image/png;base64,{base64.b64encode(smaller).decode()}"


def _in_few_colours(png: bytes) -> bytes:
    """A third of the size, and lines and text lose nothing. What is transparent, or no picture,
    stays."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(png)) as image:
            if image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                return png
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    except (OSError, UnidentifiedImageError):
        return png
    kept = io.BytesIO()
    few.save(kept, "PNG", optimize=True)
    return kept.getvalue()


def description(path: Path) -> tuple[str, bool]:
    """What a PNG says that it shows, empty where it says nothing; and whether it is wide."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return str(image.info.get("Description", "")), image.width > WIDE * image.height
    except (OSError, UnidentifiedImageError):
        return "", False


def _kind(line: str) -> str:
    if line.startswith("|"):
        return "table"
    if line.startswith("- "):
        return "note"
    return "title" if re.match("#+ ", line) else "text"


def _table(lines: list[str], title: str) -> str:
    rows = [_cells(line) for line in lines]
    rule = rows[1] if len(rows) > 1 and all(re.fullmatch(":?-+:?", c) for c in rows[1]) else []
    heads, rows = rows[0], rows[2 if rule else 1 :]
    classes = [' class="n"' if _NUMERIC.fullmatch(cell) else "" for cell in rule]
    classes += [""] * (len(heads) - len(classes))
    same = _alike(heads, rows)
    told = {i: text for i, text in same.items() if text != MISSING}
    said = "".join(f"<span>{as_cell(heads[i])}: {as_cell(text)}</span>" for i, text in told.items())
    kept = [i for i in range(len(heads)) if i not in same]
    head = "".join(
        f'<th scope="col"{classes[i]} aria-sort="none">'
        f'<button type="button">{as_cell(heads[i])}</button></th>'
        for i in kept
    )
    body = "\n".join(
        "<tr>" + "".join(f"<td{classes[i]}>{as_cell(row[i])}</td>" for i in kept) + "</tr>"
        for row in rows
    )
    return (
        (f'<p class="same">{said}</p>' if said else "")
        + f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table class="sortable"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _alike(heads: list[str], rows: list[list[str]]) -> dict[int, str]:
    """The columns that say one thing in all rows, and what: it is said once, above the table."""
    if len(rows) < 3 or any(len(row) != len(heads) for row in rows):
        return {}
    texts = {i: {row[i] for row in rows} for i in range(len(heads))}
    same = {i: next(iter(found)) for i, found in texts.items() if len(found) == 1}
    return same if len(same) < len(heads) else {}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _shown(text: str) -> str:
    return html_text(plain_markdown(text.strip()))
