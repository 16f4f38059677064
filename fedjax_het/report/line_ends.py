"""Names of lines at their right ends, and marks of reported values, in place of a legend."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.common.pictures import any_letters
from fedjax_het.common.text import figure_text
from fedjax_het.report.style import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = 8  # points, of the letters
MARK = "<"  # of a reported value: points at the axis
_LEADER, _NAME = 1.05, 1.08  # where a leader and a name begin, of the axis
_WIDTH = 18  # letters of a line


class End(NamedTuple):
    """Where a line ends: at `height`, in units of the vertical axis."""

    name: str
    height: float
    colour: str
    bold: bool = False


def name_ends(figure: "Figure", ends: "Mapping[Axes, Sequence[End]]") -> None:
    """`draw_names` for panels of a figure, once all else is drawn: names go by the panels' size."""
    with any_letters():
        figure.draw_without_rendering()
    for panel, own in ends.items():
        draw_names(panel, own)


def draw_names(panel: "Axes", ends: Sequence[End]) -> None:
    """Write the names beside the panel, apart from each other, each with a thin line from where
    its own ends. After the limits of the axes are set."""
    ends = [end for end in ends if math.isfinite(end.height)]
    if not ends:
        return
    heights = [_share(panel, end.height) for end in ends]
    names = [in_lines(end.name) for end in ends]
    inches = panel.get_window_extent().height / panel.figure.dpi
    rows = [name.count("\n") + 1 for name in names]
    places = spread(heights, [1.15 * SIZE / 72 / inches * count for count in rows])
    for end, name, height, place in zip(ends, names, heights, places, strict=True):
        panel.annotate(
            figure_text(name),
            (1.005, height),
            (_NAME, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=readable(end.colour),
            fontsize=SIZE,
            fontweight="bold" if end.bold else "normal",
            linespacing=0.95,
            va="center",
        )
        panel.plot(
            [1.005, _LEADER, _NAME - 0.01],
            [height, place, place],
            transform=panel.transAxes,
            color=end.colour,
            lw=0.6,
            clip_on=False,
            label="_leader",
        )


def in_lines(name: str) -> str:
    """A name in short lines, broken at commas; where it has none, between words."""
    if ", " not in name:
        return textwrap.fill(name, _WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [""]
    for part in name.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(joined) <= _WIDTH or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)


def draw_mark(panel: "Axes", height: float, colour: str, name: str) -> None:
    """A reported value, just outside the right edge, at `height` in units of the axis."""
    panel.plot(
        [1.02],
        [height],
        transform=panel.get_yaxis_transform(),
        marker=MARK,
        markersize=5,
        markeredgewidth=0,
        linestyle="none",
        color=colour,
        clip_on=False,
        zorder=5,
        label=f"reported {name}",
    )


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Places between 0 and 1 for things of these sizes, none over another, in all as near to the
    wanted places as can be (least squares), in their order. What does not fit in all goes beyond
    both ends."""
    order = sorted(range(len(wanted)), key=lambda k: (wanted[k], k))
    groups: list[list] = []  # of neighbours that touch: members, centre, size
    for k in order:
        groups.append([[k], _inside(wanted[k], sizes[k]), sizes[k]])
        while len(groups) > 1:
            (lower, at, low), (upper, above, high) = groups[-2:]
            if above - at >= (low + high) / 2:
                break
            members = [*lower, *upper]
            centre = _inside(_centre(members, wanted, sizes), low + high)
            groups[-2:] = [[members, centre, low + high]]
    places = [0.0] * len(wanted)
    for members, centre, size in groups:
        edge = centre - size / 2
        for k in members:
            places[k] = edge + sizes[k] / 2
            edge += sizes[k]
    return places


def _inside(centre: float, size: float) -> float:
    return min(max(centre, size / 2), 1 - size / 2) if size < 1 else 0.5


def _centre(members: Sequence[int], wanted: Sequence[float], sizes: Sequence[float]) -> float:
    """Of a group that touches: where its members are nearest to what they want."""
    size, below, shifts = sum(sizes[k] for k in members), 0.0, []
    for k in members:
        shifts.append(wanted[k] - (below + sizes[k] / 2 - size / 2))
        below += sizes[k]
    return sum(shifts) / len(shifts)


def _share(panel: "Axes", height: float) -> float:
    """Of the axis's length, from below."""
    scaled = panel.transScale.transform((panel.get_xlim()[1], height))
    return float(panel.transLimits.transform(scaled)[1])
