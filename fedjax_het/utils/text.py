"""Foreign text in other media: names, labels and notes of a stranger's result or data set are shown
as they are, and mean nothing there.

On a terminal and in a log: `one_line`, and no markup of rich's. In Markdown, LaTeX, HTML and
figures: the function of that name.
"""

import html
import re
import unicodedata

MINUS = "−"
DIVERGED = "†"
MISSING = "—"
UNPRINTABLE = "\ufffd"

# Control characters, and what turns the direction of text or is half a character.
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# What begins an element anywhere in a line, and at its beginning. Not every bracket or underscore:
# a text stays readable as it is written.
_MARKDOWN_MARKUP = re.compile(
    r"([\\`*|~$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=[(\[:])"
    r"|(?<![^\W_])_|_(?![^\W_])|(?<=\w):(?=//)|(?<=www)\.)"
)
_MARKDOWN_LINE_START = re.compile(
    r"^(?:(\d+)(?=[.)](?:\s|$))|(?=(?:#{1,6}|[+-])(?:\s|$)|[-=]{2,}\s*$|>))"
)
# Everything that LaTeX would read as a command, and the signs that it has commands for.
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
        MISSING: "---",
        UNPRINTABLE: "?",
    }
)


def to_one_line(text: str) -> str:
    """`text` in one line of printable characters: no escape reaches a terminal."""
    if text.isprintable():
        return text
    text = re.sub(r"[ \t]*[\t\n\r\v\f\x85\u2028\u2029]\s*", " ", text)
    is_hidden = [unicodedata.category(character) in _HIDDEN_CATEGORIES for character in text]
    return "".join(UNPRINTABLE if h else c for h, c in zip(is_hidden, text, strict=True))


def escape_markdown(text: str) -> str:
    """Any text, so that Markdown shows it as it is: no markup, link, formula or column of its own.
    An underscore within a word is none, and stays."""
    text = _MARKDOWN_MARKUP.sub(r"\\\1", to_one_line(text).strip())
    return _MARKDOWN_LINE_START.sub(r"\1\\", text)


def escape_latex(text: str) -> str:
    """Any text, so that LaTeX prints it as it is: `fashion_mnist` becomes `fashion\\_mnist`."""
    return to_one_line(text).translate(_LATEX_ESCAPES)


def escape_mathtext(text: str) -> str:
    """Any text, so that matplotlib draws it as it is: dollars begin no formula; lines stay."""
    return "\n".join(to_one_line(line).replace("$", r"\$") for line in text.split("\n"))


def escape_html(text: str) -> str:
    """Any text, so that a browser shows it as it is."""
    return html.escape(to_one_line(text))


def format_classes_per_client(num_classes: float) -> str:
    """How many classes a client has, in words: `2 classes a client`."""
    return f"{num_classes:g} class{'' if num_classes == 1 else 'es'} a client"
