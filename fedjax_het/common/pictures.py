"""Figures as files."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_het.common.errors import require
from fedjax_het.common.files import write_atomically
from fedjax_het.common.picture_text import described

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_figure(path: str | os.PathLike, figure: "Figure", *, dpi: int = 150) -> Path:
    """Write a figure whole or not at all; the path's ending is the format (default: PNG).

    A character that the font lacks is a box, and no warning: names may be foreign, and fonts
    elsewhere. Raises OSError where it cannot be written. Returns the path.
    """
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(".png")
    kind = path.suffix[1:].lower()
    kinds = figure.canvas.get_supported_filetypes()
    require(kind in kinds, "path", str(path), f"a picture's ending: {', '.join(sorted(kinds))}")
    # Of what a page puts in the place of a picture that is not seen.
    said = {"Description": described(figure)} if kind in ("png", "svg") else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        write_atomically(
            path, lambda file: figure.savefig(file, format=kind, dpi=dpi, metadata=said)
        )
    return path


def plain_axes(panel: "Axes") -> None:
    """A light grid, and no frame where there is no axis."""
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
