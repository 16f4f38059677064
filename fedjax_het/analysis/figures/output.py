"""Figures as files."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_het.analysis.figures.alt_text import describe_figure
from fedjax_het.analysis.figures.dark_theme import apply_dark_theme
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.io import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FIGURE_FORMATS = ("pdf", "svg", "dark")
DARK_SUFFIX = "-dark"  # of a file's name
_extra_formats: tuple[str, ...] = ()


@contextlib.contextmanager
def write_extra_formats(formats: Sequence[str]) -> Iterator[None]:
    """In here every figure that is written is written as these kinds, too, see `KINDS`.

    ConfigError for another kind."""
    global _extra_formats
    for kind in formats:
        require_name("pictures", kind, FIGURE_FORMATS)
    previous_formats, _extra_formats = _extra_formats, tuple(dict.fromkeys(formats))
    try:
        yield
    finally:
        _extra_formats = previous_formats


def write_figure(path: str | os.PathLike, figure: "Figure", *, dpi: int = 150) -> Path:
    """Write a figure whole or not at all; the path's ending is the format (default: PNG). In
    `write_extra_formats` its other kinds are written beside it.

    A character that the font lacks is a box, and no warning: names may be foreign, and fonts
    elsewhere. Raises OSError where it cannot be written. Returns the path.
    """
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(".png")
    extension = path.suffix[1:].lower()
    supported_formats = figure.canvas.get_supported_filetypes()
    require(
        extension in supported_formats,
        "path",
        str(path),
        f"a picture's ending: {', '.join(sorted(supported_formats))}",
    )
    paths = [path, *(path.with_suffix(f".{kind}") for kind in _extra_formats if kind != "dark")]
    for figure_path in dict.fromkeys(paths):
        _save_figure(figure_path, figure, dpi)
    if "dark" in _extra_formats:
        apply_dark_theme(figure)
        for figure_path in dict.fromkeys(paths):
            _save_figure(figure_path.with_stem(f"{figure_path.stem}{DARK_SUFFIX}"), figure, dpi)
    return path


@contextlib.contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """In here a character that the font lacks is a box, and no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        yield


def _save_figure(path: Path, figure: "Figure", dpi: int) -> None:
    extension = path.suffix[1:].lower()
    # Of what a page puts in the place of a picture that is not seen.
    metadata = {"Description": describe_figure(figure)} if extension in ("png", "svg") else None
    with ignore_missing_glyphs():
        write_atomically(
            path, lambda file: figure.savefig(file, format=extension, dpi=dpi, metadata=metadata)
        )


def style_axes(panel: "Axes") -> None:
    """A light grid, and no frame where there is no axis."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
