"""Names of lines at their right ends, in place of a legend."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.analysis.figures.style import darken_for_text, ignore_missing_glyphs
from fedjax_het.utils.fonts import choose_fonts, replace_missing_characters
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_FONT_SIZE = 8  # points
_LEADER_X, _LABEL_X = 1.05, 1.08  # start of a leader and a name, in axis widths
_MAX_LINE_CHARACTERS, _MAX_WORD_CHARACTERS = 18, 32
_LINE_INCHES, _CHARACTER_INCHES = 1.15 * LABEL_FONT_SIZE / 72, 0.6 * LABEL_FONT_SIZE / 72
_MAX_USUAL_WIDTH = 1.75  # inches of a name for which panels have room


class LineLabel(NamedTuple):
    """Name of a line and the position of its end."""

    text: str
    y: float
    """Position in units of the vertical axis."""
    color: str
    bold: bool = False


def label_line_ends(
    figure: "Figure", labels_by_panel: "Mapping[Axes, Sequence[LineLabel]]"
) -> None:
    """Write the names of lines beside their panels, each with a thin line from the line's end.

    Names do not overlap: the figure grows until they fit beside their panels. Call this after
    everything else is drawn, since positions depend on the sizes of the panels and on the limits of
    their axes.

    Args:
      figure: the figure.
      labels_by_panel: labels by panel; labels whose position is NaN are left out.
    """
    finite_labels = {
        panel: [label for label in labels if math.isfinite(label.y)]
        for panel, labels in labels_by_panel.items()
    }
    with ignore_missing_glyphs():
        figure.draw_without_rendering()
        missing = max(
            (
                compute_label_height(label.text for label in labels) - _get_height(panel)
                for panel, labels in finite_labels.items()
            ),
            default=0.0,
        )
        lines = [
            line
            for labels in finite_labels.values()
            for label in labels
            for line in wrap_label(label.text).split("\n")
        ]
        excess = _CHARACTER_INCHES * max(map(len, lines), default=0) - _MAX_USUAL_WIDTH
        if missing > 0 or excess > 0:
            grids: list[Any] = [panel.get_gridspec() for panel in finite_labels]
            width, height = figure.get_size_inches()
            width += max(grid.ncols for grid in grids) * max(excess, 0)
            height += max(grid.nrows for grid in grids) * max(missing, 0)
            figure.set_size_inches(width, height)
            figure.draw_without_rendering()
    for panel, labels in finite_labels.items():
        if labels:
            _draw_labels(panel, labels)
    choose_fonts(figure)


def compute_label_height(texts: Iterable[str]) -> float:
    """Return the height in inches of names above each other."""
    return sum(_LINE_INCHES * (wrap_label(text).count("\n") + 1) for text in texts)


def _get_height(panel: "Axes") -> float:
    """Return the height of a panel in inches, once it is drawn."""
    return panel.get_window_extent().height / panel.figure.dpi


def _draw_labels(panel: "Axes", labels: Sequence[LineLabel]) -> None:
    line_height = _LINE_INCHES / _get_height(panel)
    texts = [wrap_label(label.text) for label in labels]
    points = panel.transScale.transform([(panel.get_xlim()[1], label.y) for label in labels])
    anchors = panel.transLimits.transform(points)[:, 1]  # fractions of the axis from below
    heights = [line_height * (text.count("\n") + 1) for text in texts]
    positions = spread_positions(anchors, heights)
    for label, text, anchor, position in zip(labels, texts, anchors, positions, strict=True):
        panel.annotate(
            escape_mathtext(text),
            (1.005, anchor),
            (_LABEL_X, position),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=darken_for_text(label.color),
            fontsize=LABEL_FONT_SIZE,
            fontweight="bold" if label.bold else "normal",
            linespacing=0.95,
            va="center",
        )
        panel.plot(
            [1.005, _LEADER_X, _LABEL_X - 0.01],
            [anchor, position, position],
            transform=panel.transAxes,
            color=label.color,
            lw=0.6,
            clip_on=False,
            label="_leader",
        )


def wrap_label(text: str) -> str:
    """Wrap a name into short lines at its commas, or between words if it has no comma.

    Parts between commas and words of more than 32 characters are broken.
    """
    text = replace_missing_characters(text)
    if ", " not in text:
        lines = textwrap.wrap(
            text, _MAX_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False
        )
    else:
        lines = [""]
        for part in text.split(", "):
            joined = f"{lines[-1]}, {part}" if lines[-1] else part
            if len(joined) <= _MAX_LINE_CHARACTERS or not lines[-1]:
                lines[-1] = joined
            else:
                lines[-1] += ","
                lines.append(part)
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _MAX_WORD_CHARACTERS))


def spread_positions(targets: Sequence[float] | np.ndarray, sizes: Sequence[float]) -> list[float]:
    """Place intervals between 0 and 1 without overlap, as close to their targets as possible.

    The sum of squared distances from the targets is minimal among placements in the targets'
    order. Intervals that do not fit extend beyond both ends.

    Args:
      targets: wanted centers.
      sizes: lengths of the intervals.

    Returns:
      Centers of the intervals.
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(targets, kind="stable")
    lengths = np.asarray(sizes)[order]
    # Distances of the centers from the lower end, if all intervals touch.
    offsets = lengths.cumsum() - lengths / 2
    gap = 1 - lengths.sum()
    shifts = isotonic_regression(np.asarray(targets)[order] - offsets).x
    shifts = np.clip(shifts, 0, gap) if gap > 0 else np.full(len(order), gap / 2)
    positions = np.empty(len(order))
    positions[order] = shifts + offsets
    return positions.tolist()
