"""Many lines, each in a small panel of its own, with all the others behind it in grey."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.pictures import plain_axes
from fedjax_het.common.text import figure_text
from fedjax_het.report.curves import (
    Averaged,
    Curve,
    Look,
    averaged,
    axis_label,
    draw_line,
    fitting_window,
    note,
    set_limits,
)
from fedjax_het.report.measures import scale_of
from fedjax_het.report.style import PALETTE, add_note, empty_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (1.75, 1.2)  # inches, of a panel
_COLUMNS = 6
_BEHIND = "#D0D0D0"


def draw_apart(
    curves: Sequence[Curve],
    panels: Sequence[str],
    *,
    measure: str = "test_accuracy",
    window: int = 1,
    reported: str = "final",
    log: bool = False,
) -> "Figure":
    """A row of small panels per label, one for each of `panels`; where these are few, several rows
    beside each other. The number in a panel is where its line ends.

    Arguments are those of `curves.draw_curves`.
    """
    from matplotlib.figure import Figure

    there = [curve for curve in curves if len(curve.runs)]
    window = fitting_window(there, window)
    lines = {(c.panel, c.label): (c, averaged(c, window, log)) for c in there}
    labels = list(dict.fromkeys(c.label for c in curves if len(c.runs) or c.diverged))
    beside = max(1, min(_COLUMNS // len(panels), len(labels)))
    rows = -(-len(labels) // beside)
    columns = beside * len(panels)
    size = (_SIZE[0] * columns + 0.5, _SIZE[1] * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=not log, sharex=False)
    form = ".1f" if scale_of(measure) == 100 else ".3g"
    look = Look(PALETTE[0], "-", 1.6, named=True, main=True)
    for place, label in enumerate(labels):
        row, block = place % rows, place // rows
        for column, title in enumerate(panels):
            panel = grid[row, block * len(panels) + column]
            plain_axes(panel)
            panel.tick_params(labelsize=7)
            if column == 0:
                panel.set_title(figure_text(label), fontsize=8, loc="left", pad=3)
            if row == 0 and len(panels) > 1:
                _head(panel, title)
            _draw(panel, lines, (title, label), look, form)
            if not panel.lines:
                lost = any(c.diverged for c in curves if (c.panel, c.label) == (title, label))
                empty_panel(panel, "diverged" if lost else "not run")
            panel.tick_params(labelbottom=row == rows - 1 or place == len(labels) - 1)
    for panel in grid.flat:
        if panel.lines:
            set_limits(panel, measure, log)
    for unused in range(len(labels), rows * beside):
        for column in range(len(panels)):
            grid[unused % rows, unused // rows * len(panels) + column].set_visible(False)
    figure.supylabel(axis_label(there, measure, window, log).replace("\n", ", "), fontsize=9)
    said = note(curves, dict.fromkeys(labels, look), reported)
    said = "; ".join(filter(None, ("grey: all the other lines", said)))
    add_note(figure, said, above="Round")
    return figure


def _draw(
    panel: "Axes",
    lines: dict[tuple[str, str], tuple[Curve, Averaged]],
    own: tuple[str, str],
    look: Look,
    form: str,
) -> None:
    """The line of `own`, a panel's title and a label, over the others of that title."""
    for (title, label), (_, line) in lines.items():
        if title == own[0] and label != own[1]:
            panel.plot(line.mean.index, line.mean, color=_BEHIND, lw=0.6, label="_behind")
    if own in lines:
        curve, line = lines[own]
        draw_line(panel, curve, line, look)
        panel.annotate(
            f"{line.mean.iloc[-1]:{form}}",
            (0.97, 0.05),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
            color=look.colour,
        )
    elif panel.lines:
        panel.annotate("not run", (0.5, 0.45), xycoords="axes fraction", ha="center", fontsize=8)


def _head(panel: "Axes", title: str) -> None:
    """Above a column of panels."""
    panel.annotate(
        figure_text(title),
        (0.5, 1),
        (0, 15),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#555555",
    )
