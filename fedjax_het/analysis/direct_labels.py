"""Names of lines at their right ends, and marks of reported values, in place of a legend."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.analysis.figure_style import darken_for_text
from fedjax_het.analysis.figures.output import ignore_missing_glyphs
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_FONT_SIZE = 8  # points, of the letters
REPORTED_MARKER = "<"  # of a reported value: points at the axis
_LEADER_X, _LABEL_X = 1.05, 1.08  # where a leader and a name begin, of the axis
_MAX_LINE_CHARACTERS = 18  # letters of a line


class LineLabel(NamedTuple):
    """Where a line ends: at `height`, in units of the vertical axis."""

    text: str
    y: float
    color: str
    bold: bool = False


def label_line_ends(
    figure: "Figure", labels_by_panel: "Mapping[Axes, Sequence[LineLabel]]"
) -> None:
    """`draw_labels` for panels of a figure, once all else is drawn: names go by the panels' size."""
    with ignore_missing_glyphs():
        figure.draw_without_rendering()
    for panel, labels in labels_by_panel.items():
        draw_labels(panel, labels)


def draw_labels(panel: "Axes", labels: Sequence[LineLabel]) -> None:
    """Write the names beside the panel, apart from each other, each with a thin line from where
    its own ends. After the limits of the axes are set."""
    labels = [end for end in labels if math.isfinite(end.y)]
    if not labels:
        return
    anchor_positions = [_to_axes_fraction(panel, end.y) for end in labels]
    wrapped_texts = [wrap_label(end.text) for end in labels]
    panel_height = panel.get_window_extent().height / panel.figure.dpi
    rows = [name.count("\n") + 1 for name in wrapped_texts]
    label_positions = spread_positions(
        anchor_positions, [1.15 * LABEL_FONT_SIZE / 72 / panel_height * count for count in rows]
    )
    for label, wrapped_text, anchor_position, label_position in zip(
        labels, wrapped_texts, anchor_positions, label_positions, strict=True
    ):
        panel.annotate(
            escape_mathtext(wrapped_text),
            (1.005, anchor_position),
            (_LABEL_X, label_position),
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
            [anchor_position, label_position, label_position],
            transform=panel.transAxes,
            color=label.color,
            lw=0.6,
            clip_on=False,
            label="_leader",
        )


def wrap_label(text: str) -> str:
    """A name in short lines, broken at commas; where it has none, between words."""
    if ", " not in text:
        return textwrap.fill(
            text, _MAX_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False
        )
    wrapped_lines = [""]
    for part in text.split(", "):
        joined = f"{wrapped_lines[-1]}, {part}" if wrapped_lines[-1] else part
        if len(joined) <= _MAX_LINE_CHARACTERS or not wrapped_lines[-1]:
            wrapped_lines[-1] = joined
        else:
            wrapped_lines[-1] += ","
            wrapped_lines.append(part)
    return "\n".join(wrapped_lines)


def draw_reported_marker(panel: "Axes", y: float, color: str, name: str) -> None:
    """A reported value, just outside the right edge, at `height` in units of the axis."""
    panel.plot(
        [1.02],
        [y],
        transform=panel.get_yaxis_transform(),
        marker=REPORTED_MARKER,
        markersize=5,
        markeredgewidth=0,
        linestyle="none",
        color=color,
        clip_on=False,
        zorder=5,
        label=f"reported {name}",
    )


def spread_positions(targets: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Places between 0 and 1 for things of these sizes, none over another, in all as near to the
    wanted places as can be (least squares), in their order. What does not fit in all goes beyond
    both ends."""
    order = sorted(range(len(targets)), key=lambda k: (targets[k], k))
    clusters: list[list] = []  # of neighbours that touch: members, centre, size
    for k in order:
        clusters.append([[k], _clip_center(targets[k], sizes[k]), sizes[k]])
        while len(clusters) > 1:
            (lower_members, lower_center, lower_size), (upper_members, upper_center, upper_size) = (
                clusters[-2:]
            )
            if upper_center - lower_center >= (lower_size + upper_size) / 2:
                break
            members = [*lower_members, *upper_members]
            center = _clip_center(_optimal_center(members, targets, sizes), lower_size + upper_size)
            clusters[-2:] = [[members, center, lower_size + upper_size]]
    positions = [0.0] * len(targets)
    for members, center, size in clusters:
        edge = center - size / 2
        for k in members:
            positions[k] = edge + sizes[k] / 2
            edge += sizes[k]
    return positions


def _clip_center(center: float, size: float) -> float:
    return min(max(center, size / 2), 1 - size / 2) if size < 1 else 0.5


def _optimal_center(
    members: Sequence[int], targets: Sequence[float], sizes: Sequence[float]
) -> float:
    """Of a group that touches: where its members are nearest to what they want."""
    size, offset, shifts = sum(sizes[k] for k in members), 0.0, []
    for k in members:
        shifts.append(targets[k] - (offset + sizes[k] / 2 - size / 2))
        offset += sizes[k]
    return sum(shifts) / len(shifts)


def _to_axes_fraction(panel: "Axes", y: float) -> float:
    """Of the axis's length, from below."""
    scaled = panel.transScale.transform((panel.get_xlim()[1], y))
    return float(panel.transLimits.transform(scaled)[1])
