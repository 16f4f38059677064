"""Figures as files."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_het.common.dark import darken
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.files import write_atomically
from fedjax_het.common.picture_text import described

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


KINDS = ("pdf", "svg", "dark")
HELP = "Kinds of pictures besides PNG: pdf, svg; dark: each on a dark page, too, as NAME-dark.png."
DARK = "-dark"  # of a file's name
_besides: tuple[str, ...] = ()


@contextlib.contextmanager
def pictures_besides(kinds: Sequence[str]) -> Iterator[None]:
    """In here every figure that is written is written as these kinds, too, see `KINDS`.

    ConfigError for another kind."""
    global _besides
    for kind in kinds:
        require_name("pictures", kind, KINDS)
    before, _besides = _besides, tuple(dict.fromkeys(kinds))
    try:
        yield
    finally:
        _besides = before


def taken_from(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows `--pictures` among a program's words, up to the next flag; the other words."""
    kinds: list[str] = []
    others: list[str] = []
    taking = False
    for word in words:
        flag, _, value = word.partition("=")
        if flag == "--pictures":
            taking = not value
            kinds += [value] if value else []
        else:
            taking = taking and not word.startswith("-")
            (kinds if taking else others).append(word)
    return kinds, others


def write_figure(path: str | os.PathLike, figure: "Figure", *, dpi: int = 150) -> Path:
    """Write a figure whole or not at all; the path's ending is the format (default: PNG). In
    `pictures_besides` its other kinds are written beside it.

    A character that the font lacks is a box, and no warning: names may be foreign, and fonts
    elsewhere. Raises OSError where it cannot be written. Returns the path.
    """
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(".png")
    kind = path.suffix[1:].lower()
    kinds = figure.canvas.get_supported_filetypes()
    require(kind in kinds, "path", str(path), f"a picture's ending: {', '.join(sorted(kinds))}")
    paths = [path, *(path.with_suffix(f".{kind}") for kind in _besides if kind != "dark")]
    for each in dict.fromkeys(paths):
        _write(each, figure, dpi)
    if "dark" in _besides:
        darken(figure)
        for each in dict.fromkeys(paths):
            _write(each.with_stem(f"{each.stem}{DARK}"), figure, dpi)
    return path


@contextlib.contextmanager
def any_letters() -> Iterator[None]:
    """In here a character that the font lacks is a box, and no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        yield


def _write(path: Path, figure: "Figure", dpi: int) -> None:
    kind = path.suffix[1:].lower()
    # Of what a page puts in the place of a picture that is not seen.
    said = {"Description": described(figure)} if kind in ("png", "svg") else None
    with any_letters():
        write_atomically(
            path, lambda file: figure.savefig(file, format=kind, dpi=dpi, metadata=said)
        )


def plain_axes(panel: "Axes") -> None:
    """A light grid, and no frame where there is no axis."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
