"""Escape functions for foreign text, such as names, labels and notes in results and data sets.

Each output medium (terminal, Markdown, LaTeX, HTML, matplotlib) has one function. The medium then
shows the text unchanged and interprets nothing in it.
"""

import html
import re
from collections.abc import Iterable, Sequence

from fedjax_het.utils.fonts import replace_missing_characters

MINUS = "−"
DIVERGED = "†"
EQUAL = "≈"
MISSING = "—"
UNPRINTABLE = "\ufffd"

# Characters that start an element of Markdown anywhere in a line, and at its beginning. Brackets
# and underscores without such a meaning stay, so that the source of a text is readable.
_MARKDOWN_MARKUP = re.compile(
    r"([\\`*|~$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=[(\[:])"
    r"|(?<![^\W_])_|_(?![^\W_])|(?<=\w):(?=//)|(?<=www)\.)"
)
_MARKDOWN_LINE_START = re.compile(
    r"^(?:(\d+)(?=[.)](?:\s|$))|(?=(?:#{1,6}|[+-])(?:\s|$)|[-=]{2,}\s*$|>))"
)
# Characters that LaTeX reads as commands, and signs for which LaTeX needs commands.
_LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "[": "{[}",  # after a line's end it would open an option, as a star would
        "*": "{*}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "±": r"$\pm$",
        "×": r"$\times$",
        MINUS: "$-$",
        DIVERGED: r"$^\dagger$",
        EQUAL: r"$\approx$",
        MISSING: "---",
        UNPRINTABLE: "?",
    }
)


def to_one_line(text: str) -> str:
    """Return a text as one line of printable characters, without terminal escapes.

    Example:
      >>> from fedjax_het.utils.text import to_one_line
      >>> to_one_line("two" + chr(10) + "lines")
      'two lines'
    """
    if text.isprintable():
        return text
    text = re.sub(r"[ \t]*[\t\n\r\v\f\x85\u2028\u2029]\s*", " ", text)
    # Python prints no control characters, changes of direction, wide spaces and halves of
    # characters.
    return "".join(c if c.isprintable() else " " if c.isspace() else UNPRINTABLE for c in text)


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows unchanged, without markup, links, formulas and columns.

    An underscore within a word is no markup and stays.
    """
    text = _MARKDOWN_MARKUP.sub(r"\\\1", to_one_line(text).strip())
    return _MARKDOWN_LINE_START.sub(r"\1\\", text)


def escape_latex(text: str) -> str:
    r"""Return a text that LaTeX prints unchanged, e.g. `fashion\_mnist` for "fashion_mnist"."""
    return to_one_line(text).translate(_LATEX_ESCAPES)


def escape_mathtext(text: str) -> str:
    """Return a text that matplotlib draws unchanged; dollars start no formula, line breaks stay.

    A character that no installed font has becomes its code point, such as `[U+72D7]`.
    """
    text = "\n".join(to_one_line(line).replace("$", r"\$") for line in text.split("\n"))
    return replace_missing_characters(text)


def escape_html(text: str) -> str:
    """Return a text that a browser shows unchanged."""
    return html.escape(to_one_line(text))


def make_html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return an HTML table, left-aligned and without colors, for light and dark notebooks.

    Args:
      rows: values of the cells. They are escaped, except `markupsafe.Markup`.
      header: headings of the columns. Without them the first cell of a row is its heading.

    Returns:
      The table.

    Example:
      >>> from fedjax_het.utils.text import make_html_table
      >>> make_html_table([("alpha", 0.1)]).count("text-align:left")
      2
    """

    def escape_cell(cell: object) -> str:
        return str(cell) if hasattr(cell, "__html__") else escape_html(str(cell))

    def make_row(cells: Sequence[object], num_headings: int) -> str:
        tags = ["th"] * num_headings + ["td"] * (len(cells) - num_headings)
        return "".join(
            f'<{tag} style="text-align:left">{escape_cell(cell)}</{tag}>'
            for tag, cell in zip(tags, cells, strict=True)
        )

    lines = [make_row(header, len(header))] if header else []
    lines += [make_row(row, 0 if header else 1) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def format_classes_per_client(num_classes: float) -> str:
    """Return a number of classes per client in words.

    Example:
      >>> from fedjax_het.utils.text import format_classes_per_client
      >>> format_classes_per_client(2)
      '2 classes a client'
    """
    return f"{num_classes:g} class{'' if num_classes == 1 else 'es'} a client"
