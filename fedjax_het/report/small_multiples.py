"""Many lines, each in a small panel of its own, with all the others behind it in grey."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.pictures import style_axes
from fedjax_het.common.text import escape_mathtext
from fedjax_het.report.curves import (
    AveragedCurve,
    Curve,
    LineStyle,
    average_curve,
    choose_window,
    draw_line,
    make_note,
    make_y_label,
    set_axis_limits,
)
from fedjax_het.report.measures import get_display_scale
from fedjax_het.report.style import PALETTE, add_note, mark_empty_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_SIZE = (1.75, 1.2)  # inches, of a panel
_MAX_PANEL_COLUMNS = 6
_BACKGROUND_COLOR = "#D0D0D0"


def plot_small_multiples(
    curves: Sequence[Curve],
    panels: Sequence[str],
    *,
    metric: str = "test_accuracy",
    window: int = 1,
    reported_kind: str = "final",
    is_log: bool = False,
) -> "Figure":
    """A row of small panels per label, one for each of `panels`; where these are few, several rows
    beside each other. The number in a panel is where its line ends.

    Arguments are those of `curves.draw_curves`.
    """
    from matplotlib.figure import Figure

    available_curves = [curve for curve in curves if len(curve.runs)]
    window = choose_window(available_curves, window)
    curves_by_key = {
        (c.panel, c.label): (c, average_curve(c, window, is_log)) for c in available_curves
    }
    labels = list(dict.fromkeys(c.label for c in curves if len(c.runs) or c.diverged))
    num_blocks = max(1, min(_MAX_PANEL_COLUMNS // len(panels), len(labels)))
    rows = -(-len(labels) // num_blocks)
    columns = num_blocks * len(panels)
    size = (_PANEL_SIZE[0] * columns + 0.5, _PANEL_SIZE[1] * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=not is_log, sharex=False)
    format_spec = ".1f" if get_display_scale(metric) == 100 else ".3g"
    style = LineStyle(PALETTE[0], "-", 1.6, is_labeled=True, is_highlighted=True)
    for label_index, label in enumerate(labels):
        row, block = label_index % rows, label_index // rows
        for column, title in enumerate(panels):
            panel = grid[row, block * len(panels) + column]
            style_axes(panel)
            panel.tick_params(labelsize=7)
            if column == 0:
                panel.set_title(escape_mathtext(label), fontsize=8, loc="left", pad=3)
            if row == 0 and len(panels) > 1:
                _add_column_title(panel, title)
            _draw_highlighted_line(panel, curves_by_key, (title, label), style, format_spec)
            if not panel.lines:
                has_diverged = any(
                    c.diverged for c in curves if (c.panel, c.label) == (title, label)
                )
                mark_empty_panel(panel, "diverged" if has_diverged else "not run")
            panel.tick_params(labelbottom=row == rows - 1 or label_index == len(labels) - 1)
    for panel in grid.flat:
        if panel.lines:
            set_axis_limits(panel, metric, is_log)
    for unused_index in range(len(labels), rows * num_blocks):
        for column in range(len(panels)):
            grid[unused_index % rows, unused_index // rows * len(panels) + column].set_visible(
                False
            )
    figure.supylabel(
        make_y_label(available_curves, metric, window, is_log).replace("\n", ", "), fontsize=9
    )
    note_text = make_note(curves, dict.fromkeys(labels, style), reported_kind)
    note_text = "; ".join(filter(None, ("grey: all the other lines", note_text)))
    add_note(figure, note_text, x_label="Round")
    return figure


def _draw_highlighted_line(
    panel: "Axes",
    curves_by_key: dict[tuple[str, str], tuple[Curve, AveragedCurve]],
    highlighted_key: tuple[str, str],
    style: LineStyle,
    format_spec: str,
) -> None:
    """The line of `own`, a panel's title and a label, over the others of that title."""
    for (title, label), (_, averaged_curve) in curves_by_key.items():
        if title == highlighted_key[0] and label != highlighted_key[1]:
            panel.plot(
                averaged_curve.mean.index,
                averaged_curve.mean,
                color=_BACKGROUND_COLOR,
                lw=0.6,
                label="_behind",
            )
    if highlighted_key in curves_by_key:
        curve, averaged_curve = curves_by_key[highlighted_key]
        draw_line(panel, curve, averaged_curve, style)
        panel.annotate(
            f"{averaged_curve.mean.iloc[-1]:{format_spec}}",
            (0.97, 0.05),
            xycoords="axes fraction",
            ha="right",
            fontsize=8,
            color=style.color,
        )
    elif panel.lines:
        panel.annotate("not run", (0.5, 0.45), xycoords="axes fraction", ha="center", fontsize=8)


def _add_column_title(panel: "Axes", title: str) -> None:
    """Above a column of panels."""
    panel.annotate(
        escape_mathtext(title),
        (0.5, 1),
        (0, 15),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#555555",
    )
