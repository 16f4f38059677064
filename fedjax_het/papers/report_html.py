"""How the report of all tables and figures looks, and how its tables are sorted.

What programs leave as parts of an HTML page: tables in Markdown, pictures, what was printed.
"""

import base64
import html
import io
import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from pathlib import Path

from fedjax_het.analysis.figures.output import DARK_SUFFIX
from fedjax_het.utils.text import MISSING, escape_html, to_one_line, unescape_markdown

CSS = """
:root{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--soft:#5c6470;--line:#d8dde3;
--shade:#f4f6f8;--link:#0b57b0;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#15181c;--soft:#9ea7b3;--line:#353b43;
--shade:#1f242a;--link:#7db7ff;--bad:#ff8a80}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:1.5rem 1rem 4rem;
color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
a{color:var(--link);text-underline-offset:.15em}
h1{font-size:1.6rem;line-height:1.25;margin:.3em 0}
h2{font-size:1.3rem;margin:2.2em 0 .6em;padding-top:.7em;border-top:2px solid var(--line)}
h3{font-size:1.1rem;margin:2em 0 .3em}
h4{font-size:1rem;margin:1.6em 0 .3em}
.made,.same,.top,figcaption,.state{color:var(--soft);font-size:.85rem}
.failed{color:var(--bad);font-weight:600}
.same{margin:.3em 0}.same span{display:inline-block;margin-right:1.1em}
code,pre{font:.85em ui-monospace,monospace}
pre{background:var(--shade);padding:.8em;overflow-x:auto;overflow-wrap:normal;border-radius:6px}
.scroll{overflow-x:auto;margin:.8em 0;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;font-size:.82rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.3em .7em;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{background:var(--shade)}
.n{text-align:right}
th button{all:unset;cursor:pointer;font-weight:600}
th button:focus-visible{outline:2px solid var(--link)}
th button::after{content:"";display:inline-block;width:.9em;text-align:right}
th[aria-sort=ascending] button::after{content:"\\2191"}
th[aria-sort=descending] button::after{content:"\\2193"}
ul.notes{font-size:.85rem;color:var(--soft);padding-left:1.2em}
ul.notes li{margin:.25em 0}
.contents ul{list-style:none;padding:0;margin:.2em 0 1em}
.contents li{margin:.3em 0}
.kept{border-left:3px solid var(--line);padding-left:1rem;margin-top:1.5em}
figure{margin:1.2em 0}figcaption{margin-top:.4em}
img{max-width:100%;height:auto;display:block;background:#fff;border-radius:6px}
figure .view{overflow-x:auto}
@media(max-width:600px){img.wide{max-width:none;width:46rem}
body{padding:1rem .75rem 3rem;font-size:15px}.kept{padding-left:.6rem}}
@media print{.scroll{overflow:visible}th button::after{content:none}}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], first = [...body.rows];
  const number = (text) => {
    const found = text.replaceAll(",", "").replaceAll("\\u2212", "-").match(/^[<+]?(-?[\\d.]+)/);
    return found ? parseFloat(found[1]) : NaN;
  };
  table.querySelectorAll("th").forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => {
      const next = {none: "ascending", ascending: "descending", descending: "none"};
      const way = next[head.getAttribute("aria-sort") || "none"];
      table.querySelectorAll("th").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", way);
      const sign = way === "descending" ? -1 : 1;
      const rows = first.map((row) => [row, row.cells[place].textContent.trim()]);
      if (way !== "none") rows.sort(([, a], [, b]) => {
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) && isNaN(y)) return sign * a.localeCompare(b);
        if (isNaN(x) || isNaN(y)) return isNaN(x) ? 1 : -1;
        return sign * (x - y);
      });
      body.append(...rows.map(([row]) => row));
    });
  });
}
"""


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
