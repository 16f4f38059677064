"""Names of lines at their right ends, and marks of reported values, in place of a legend."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
    texts = [wrap_label(label.text) for label in labels]
    anchors = [_to_axes_fraction(panel, label.y) for label in labels]
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


def draw_reported_marker(panel: "Axes", y: float, color: str, name: str) -> None:
    """Draw a triangle just outside the right edge of a panel.

    Args:
      panel: the panel.
      y: reported value, in units of the vertical axis.
      color: color of the marker.
      name: name of the line that it belongs to.
    """
    panel.plot(
        [1.02],
        [y],
        transform=panel.get_yaxis_transform(),
        marker="<",
        markersize=5,
        markeredgewidth=0,
        linestyle="none",
        color=color,
        clip_on=False,
        zorder=5,
        label=f"reported {name}",
    )


def spread_positions(targets: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Place intervals between 0 and 1 without overlap, as close to their targets as possible.

    The sum of squared distances from the targets is minimal among placements in the targets'
    order. Intervals that do not fit extend beyond both ends.

    Args:
      targets: wanted centers.
      sizes: lengths of the intervals.

    Returns:
      Centers of the intervals.
    """
    order = sorted(range(len(targets)), key=lambda k: (targets[k], k))
    clusters: list[tuple[list[int], float, float]] = []  # touching members, center, size
    for k in order:
        clusters.append(([k], _clip_center(targets[k], sizes[k]), sizes[k]))
        while len(clusters) > 1:
            (lower, lower_center, lower_size), (upper, upper_center, upper_size) = clusters[-2:]
            size = lower_size + upper_size
            if upper_center - lower_center >= size / 2:
                break
            members = [*lower, *upper]
            center = _clip_center(_compute_optimal_center(members, targets, sizes), size)
            clusters[-2:] = [(members, center, size)]
    positions = [0.0] * len(targets)
    for members, center, size in clusters:
        edge = center - size / 2
        for k in members:
            positions[k] = edge + sizes[k] / 2
            edge += sizes[k]
    return positions


def _clip_center(center: float, size: float) -> float:
    return min(max(center, size / 2), 1 - size / 2) if size < 1 else 0.5


def _compute_optimal_center(
    members: Sequence[int], targets: Sequence[float], sizes: Sequence[float]
) -> float:
    """Return the center of touching intervals that minimizes their squared distances."""
    size, offset, shifts = sum(sizes[k] for k in members), 0.0, []
    for k in members:
        shifts.append(targets[k] - (offset + sizes[k] / 2 - size / 2))
        offset += sizes[k]
    return sum(shifts) / len(shifts)


def _to_axes_fraction(panel: "Axes", y: float) -> float:
    """Convert a value of the vertical axis to a fraction of the axis from below."""
    scaled = panel.transScale.transform((panel.get_xlim()[1], y))
    return float(panel.transLimits.transform(scaled)[1])
