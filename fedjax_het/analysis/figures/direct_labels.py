"""Names of lines at their right ends, in place of a legend."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.analysis.figures.style import darken_for_text, ignore_missing_glyphs
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_FONT_SIZE = 8  # points
_LEADER_X, _LABEL_X = 1.05, 1.08  # start of a leader and a name, in axis widths
_MAX_LINE_CHARACTERS = 18


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

    Names do not overlap. Call this after everything else is drawn, since positions depend on the
    sizes of the panels and on the limits of their axes.

    Args:
      figure: the figure.
      labels_by_panel: labels by panel; labels whose position is NaN are left out.
    """
    with ignore_missing_glyphs():
        figure.draw_without_rendering()
    for panel, labels in labels_by_panel.items():
        _draw_labels(panel, [label for label in labels if math.isfinite(label.y)])


def _draw_labels(panel: "Axes", labels: Sequence[LineLabel]) -> None:
    panel_height = panel.get_window_extent().height / panel.figure.dpi
    line_height = 1.15 * LABEL_FONT_SIZE / 72 / panel_height
    if not labels:
        return
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
    """Wrap a name into short lines at its commas, or between words if it has no comma."""
    if ", " not in text:
        return textwrap.fill(
            text, _MAX_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False
        )
    lines = [""]
    for part in text.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) <= _MAX_LINE_CHARACTERS or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


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
