"""What programs leave as parts of an HTML page: tables in Markdown, pictures, what was printed."""

import base64
import html
import io
import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from pathlib import Path

from fedjax_het.common.pictures import DARK_SUFFIX
from fedjax_het.common.text import MISSING, escape_html, to_one_line, unescape_markdown

WIDE_ASPECT_RATIO = 1.7  # times as wide as high: several panels side by side
PALETTE_SIZE = 256  # of a picture on a page
_NUMERIC = re.compile(r"-+:")


def markdown_to_html(text: str) -> str:
    """The Markdown that tables are written in: a title, tables with bold cells, lists, paragraphs.
    Titles are of the fourth level."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = next(
        (_inline_to_html(line.lstrip("#")) for line in lines if line.startswith("# ")), "table"
    )
    parts = []
    for kind, group in groupby(lines, _block_kind):
        block = list(group)
        if kind == "table":
            parts.append(_table_to_html(block, title))
        elif kind == "note":
            items = "".join(f"<li>{_inline_to_html(line[2:])}</li>" for line in block)
            parts.append(f'<ul class="notes">{items}</ul>')
        elif kind == "title":
            parts += [f"<h4>{_inline_to_html(line.lstrip('#'))}</h4>" for line in block]
        else:
            parts += [f"<p>{_inline_to_html(line)}</p>" for line in block]
    return "\n".join(parts)


def cell_to_html(text: str) -> str:
    """A cell, bold where all of it is; the stars of a stranger's text are escaped."""
    bold = re.fullmatch(r"\*\*(.+)\*\*", text)
    content = _inline_to_html(bold[1] if bold else text)
    return f"<b>{content}</b>" if bold else content


def escape_control_characters(text: str) -> str:
    """What a program printed, without what a terminal or a browser would obey."""
    return "\n".join(map(to_one_line, text.splitlines()))


def select_pictures(files: Iterable[Path]) -> list[Path]:
    """The PNGs that stand on a page, without what stands in for them on a dark one."""
    return [path for path in files if path.suffix == ".png" and not path.stem.endswith(DARK_SUFFIX)]


def picture_to_html(path: Path, default_text: str) -> str:
    """A PNG within the page, with what it says of itself, or else this, for those who do not see
    it. On a phone a wide one keeps a width at which it can be read, and scrolls. On a dark page the
    one for dark pages beside it, where there is one."""
    embedded_description, is_wide = read_picture_description(path)
    alt = html.escape(to_one_line(embedded_description or default_text))
    name = ' class="wide"' if is_wide else ""
    dark = path.with_stem(f"{path.stem}{DARK_SUFFIX}")
    source = f'<source media="(prefers-color-scheme:dark)" srcset="{_data_uri(dark)}">'
    return (
        f'<figure><div class="view" tabindex="0" role="region" aria-label="{escape_html(path.name)}">'
        f"<picture>{source if dark.is_file() else ''}"
        f'<img{name} alt="{alt}" src="{_data_uri(path)}"></picture></div>'
        f"<figcaption>{escape_html(path.name)}</figcaption></figure>"
    )


def _data_uri(path: Path) -> str:
    return _encode_picture(path, path.stat().st_mtime_ns) if path.is_file() else ""


@cache  # a report is written anew after every program
def _encode_picture(path: Path, mtime_ns: int) -> str:
    png = path.read_bytes()
    smaller = min(png, _quantize_colors(png), key=len)
    return f"data:image/png;base64,{base64.b64encode(smaller).decode()}"


def _quantize_colors(png: bytes) -> bytes:
    """A third of the size, and lines and text lose nothing. What is transparent, or no picture,
    stays."""
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
    """What a PNG says that it shows, empty where it says nothing; and whether it is wide."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return str(
                image.info.get("Description", "")
            ), image.width > WIDE_ASPECT_RATIO * image.height
    except (OSError, UnidentifiedImageError):
        return "", False


def _block_kind(line: str) -> str:
    if line.startswith("|"):
        return "table"
    if line.startswith("- "):
        return "note"
    return "title" if re.match("#+ ", line) else "text"


def _table_to_html(lines: list[str], title: str) -> str:
    rows = [_split_row(line) for line in lines]
    alignment = rows[1] if len(rows) > 1 and all(re.fullmatch(":?-+:?", c) for c in rows[1]) else []
    headers, rows = rows[0], rows[2 if alignment else 1 :]
    classes = [' class="n"' if _NUMERIC.fullmatch(cell) else "" for cell in alignment]
    classes += [""] * (len(headers) - len(classes))
    constant_columns = _constant_columns(headers, rows)
    stated_columns = {i: text for i, text in constant_columns.items() if text != MISSING}
    constant_text = "".join(
        f"<span>{cell_to_html(headers[i])}: {cell_to_html(text)}</span>"
        for i, text in stated_columns.items()
    )
    varying_columns = [i for i in range(len(headers)) if i not in constant_columns]
    head = "".join(
        f'<th scope="col"{classes[i]} aria-sort="none">'
        f'<button type="button">{cell_to_html(headers[i])}</button></th>'
        for i in varying_columns
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{classes[i]}>{cell_to_html(row[i])}</td>" for i in varying_columns)
        + "</tr>"
        for row in rows
    )
    return (
        (f'<p class="same">{constant_text}</p>' if constant_text else "")
        + f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table class="sortable"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _constant_columns(headers: list[str], rows: list[list[str]]) -> dict[int, str]:
    """The columns that say one thing in all rows, and what: it is said once, above the table."""
    if len(rows) < 3 or any(len(row) != len(headers) for row in rows):
        return {}
    texts = {i: {row[i] for row in rows} for i in range(len(headers))}
    constant_columns = {i: next(iter(values)) for i, values in texts.items() if len(values) == 1}
    return constant_columns if len(constant_columns) < len(headers) else {}


def _split_row(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _inline_to_html(text: str) -> str:
    return escape_html(unescape_markdown(text.strip()))
