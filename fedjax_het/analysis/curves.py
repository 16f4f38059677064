"""Lines against the round as figures: in two weights, in colours, or one by one.

Many lines, each in a small panel of its own, with all the others behind it in grey.
"""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.direct_labels import (
    REPORTED_MARKER,
    LineLabel,
    draw_reported_marker,
    label_line_ends,
)
from fedjax_het.analysis.figure_style import (
    GRAYS,
    PALETTE,
    AxisSharing,
    add_note,
    assign_distinct_colors,
    clip_percent_limits,
    is_bottom_panel,
    is_leftmost_panel,
    make_line_styles,
    make_panels,
    mark_empty_panel,
    set_integer_ticks,
)
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.grouping import get_display_scale, get_metric_label
from fedjax_het.utils.text import DIVERGED, escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_COLORED_LINES = len(PALETTE)  # lines: beyond, no colours are left
_MAX_LABELED_GRAYS = 5  # beyond, the best of them alone has its name
_THICK_WIDTH, _MEDIUM_WIDTH, _THIN_WIDTH = 2.0, 1.6, 1.0
_BAND_ALPHA = 0.13


class Curve(NamedTuple):
    """One line of the figure, and the runs behind it."""

    panel: str
    method: str
    label: str
    runs: "pd.DataFrame"
    """A row per measured round and a column per run, as measured, accuracies in percent."""
    diverged: bool = False
    """Whether a run is not in `runs` because it diverged."""
    reported: float = math.nan
    """A final value to compare with."""


class AveragedCurve(NamedTuple):
    """What is drawn of a curve, by the round."""

    mean: "pd.Series"
    low: "pd.Series"
    high: "pd.Series"


class LineStyle(NamedTuple):
    """How a line is drawn."""

    color: str
    linestyle: Any
    width: float
    is_labeled: bool
    """At its end."""
    is_highlighted: bool
    """Whether it has a band, and lies above the others."""


def average_curve(curve: Curve, window: int, is_log: bool) -> AveragedCurve:
    """Running means over `window` measured rounds, where there are as many before; their mean over
    seeds, and one standard deviation to both sides. Where `log`, of the logarithms."""
    import numpy as np
    import pandas as pd

    smoothed_runs = {
        name: values.dropna().rolling(window).mean() for name, values in curve.runs.items()
    }
    runs = pd.DataFrame(smoothed_runs).dropna(how="all").sort_index()
    if is_log:
        runs = np.log10(runs)
    mean, std = runs.mean(axis=1), runs.std(axis=1).fillna(0)
    series = (mean, mean - std, mean + std)
    return AveragedCurve(
        *(10**series_values if is_log else series_values for series_values in series)
    )


def choose_window(curves: Sequence[Curve], window: int) -> int:
    """`window`, or 1 where a run has fewer than twice as many measured rounds: a mean of what is
    not there would bend the line."""
    lengths = [values.count() for curve in curves for _, values in curve.runs.items()]
    return window if lengths and min(lengths) >= 2 * window else 1


def plot_curve_panels(
    curves: Sequence[Curve],
    panels: Sequence[str],
    *,
    columns: int,
    metric: str = "test_accuracy",
    sharey: AxisSharing = "row",
    window: int = 1,
    reported_kind: str = "final",
    is_log: bool = False,
    highlight: Collection[str] = (),
) -> "Figure":
    """The figure of these lines, each with its name at its end. A panel without any run says so.

    Lines of the methods in `focus` are in colour and have bands of one standard deviation over
    seeds, the others are grey; of more than five of these the best alone has its name. Without
    such lines all are in colour, as far as there are colours; more have a small panel each
    (`small_multiples.draw_apart`). A triangle at the right edge is the reported value, of the kind
    that `reported` names. `window`: over how many measured rounds a line is a running mean.
    """

    available_curves = [curve for curve in curves if len(curve.runs)]
    window = choose_window(available_curves, window)
    styles = choose_line_styles(available_curves, highlight)
    if not styles and available_curves:
        return plot_small_multiples(
            curves, panels, metric=metric, window=window, reported_kind=reported_kind, is_log=is_log
        )
    figure, panels_by_title = make_panels(panels, columns=columns, size=(3.5, 2.7), sharey=sharey)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(4.4, width), height + 0.3)
    line_ends: dict[str, list[tuple[Curve, float]]] = {panel: [] for panel in panels}
    for curve in available_curves:
        averaged_curve = average_curve(curve, window, is_log)
        draw_line(panels_by_title[curve.panel], curve, averaged_curve, styles[curve.label])
        line_ends[curve.panel].append((curve, float(averaged_curve.mean.iloc[-1])))
    for title, panel in panels_by_title.items():
        style_axes(panel)
        if panel.lines:
            set_axis_limits(panel, metric, is_log)
        else:
            has_diverged = any(curve.diverged and curve.panel == title for curve in curves)
            mark_empty_panel(panel, "diverged" if has_diverged else "not run")
        if is_leftmost_panel(panel):
            panel.set_ylabel(make_y_label(available_curves, metric, window, is_log), fontsize=9)
        if is_bottom_panel(panel, panels_by_title.values()):
            panel.set_xlabel("Round", fontsize=9)
    label_line_ends(
        figure,
        {
            panel: _make_line_labels(line_ends[title], styles)
            for title, panel in panels_by_title.items()
        },
    )
    add_note(figure, make_note(curves, styles, reported_kind))
    return figure


def choose_line_styles(curves: Sequence[Curve], highlight: Collection[str]) -> dict[str, LineStyle]:
    """By label; none where there are more lines than colours and none of them is in `focus`."""
    lines = list(dict.fromkeys((curve.method, curve.label) for curve in curves))
    highlighted_lines = [line for line in lines if line[0] in highlight]
    if highlighted_lines and len(highlighted_lines) <= MAX_COLORED_LINES:
        # Of few methods in many variants: shades would not be told apart.
        colors = assign_distinct_colors(highlighted_lines)
        styles = {
            label: LineStyle(colors[label], "-", _THICK_WIDTH, True, True)
            for _, label in highlighted_lines
        }
    elif len({method for method, _ in highlighted_lines or lines}) <= MAX_COLORED_LINES:
        styles = {
            label: LineStyle(style["color"], style["linestyle"], _MEDIUM_WIDTH, True, True)
            for label, style in make_line_styles(highlighted_lines or lines).items()
        }
    else:
        return {}
    remaining_labels = [label for _, label in lines if label not in styles]
    has_few_remaining = len(remaining_labels) <= _MAX_LABELED_GRAYS
    for index, label in enumerate(remaining_labels):
        gray = GRAYS[index % len(GRAYS)] if has_few_remaining else GRAYS[1]
        styles[label] = LineStyle(
            gray, "-", _THIN_WIDTH, is_labeled=has_few_remaining, is_highlighted=False
        )
    return styles


def draw_line(panel: "Axes", curve: Curve, averaged_curve: AveragedCurve, style: LineStyle) -> None:
    """A line, its band, and the mark of its reported value, if the line is to be named; the
    vertical axis has room for it."""
    point_options: dict[str, Any] = (
        {"marker": "o", "markersize": 4} if len(averaged_curve.mean) == 1 else {}
    )  # a point
    panel.plot(
        averaged_curve.mean.index,
        averaged_curve.mean,
        color=style.color,
        linestyle=style.linestyle,
        lw=style.width,
        label=curve.label,
        zorder=3 if style.is_highlighted else 2,
        **point_options,
    )
    if curve.runs.shape[1] > 1 and style.is_highlighted:
        panel.fill_between(
            averaged_curve.mean.index,
            averaged_curve.low,
            averaged_curve.high,
            color=style.color,
            alpha=_BAND_ALPHA,
            linewidth=0,
        )
    if style.is_labeled and not math.isnan(curve.reported):
        draw_reported_marker(panel, curve.reported, style.color, curve.label)
        panel.update_datalim([(averaged_curve.mean.index[-1], curve.reported)])
        panel.autoscale_view()


def set_axis_limits(panel: "Axes", metric: str, is_log: bool) -> None:
    """The last round is the right edge; accuracies stay within 0 and 100."""
    set_integer_ticks(panel)
    first, last = panel.dataLim.intervalx
    panel.set_xlim(0 if first < last else first - 1, last)
    if is_log:
        panel.set_yscale("log")
    elif get_display_scale(metric) == 100:
        clip_percent_limits(panel)


def make_y_label(curves: Sequence[Curve], metric: str, window: int, is_log: bool) -> str:
    """The measure, and of what the lines are means."""
    seed_counts = sorted({curve.runs.shape[1] for curve in curves})
    averaging_texts = []
    if window > 1:
        round_steps = {
            step for curve in curves for step in set(curve.runs.index.to_series().diff()[1:])
        }
        averaging_texts.append(
            f"{window} rounds" if round_steps == {1.0} else f"{window} tested rounds"
        )
    if seed_counts and seed_counts[-1] > 1:
        averaging_texts.append(
            f"{seed_counts[0]} seeds"
            if len(seed_counts) == 1
            else f"{seed_counts[0]} to {seed_counts[-1]} seeds"
        )
    mean_name = "geometric mean" if is_log else "mean"
    label = escape_mathtext(get_metric_label(metric))
    return f"{label}\n{mean_name} of {' and '.join(averaging_texts)}" if averaging_texts else label


def make_note(curves: Sequence[Curve], styles: dict[str, LineStyle], reported_kind: str) -> str:
    """What a legend would say, in a line."""
    available_curves = [curve for curve in curves if len(curve.runs)]
    parts = []
    if any(
        curve.runs.shape[1] > 1 and styles[curve.label].is_highlighted for curve in available_curves
    ):
        parts.append("band: one standard deviation over seeds")
    if any(
        styles[curve.label].is_labeled and not math.isnan(curve.reported)
        for curve in available_curves
    ):
        parts.append(
            f"{'◂' if REPORTED_MARKER == '<' else REPORTED_MARKER}: reported {reported_kind} value"
        )
    unlabeled_curves = [label for label, style in styles.items() if not style.is_labeled]
    if unlabeled_curves:
        parts.append(f"grey: {', '.join(unlabeled_curves)}, the best of them named")
    diverged_labels = list(dict.fromkeys(curve.label for curve in curves if curve.diverged))
    if diverged_labels:
        parts.append(f"{DIVERGED} runs that diverged are left out: {', '.join(diverged_labels)}")
    return "; ".join(parts)


def _make_line_labels(
    curve_ends: Sequence[tuple[Curve, float]], styles: dict[str, LineStyle]
) -> list[LineLabel]:
    """Of a panel's lines: those that are named, and the best of the others."""
    unlabeled_ends = [
        (height, curve.label) for curve, height in curve_ends if not styles[curve.label].is_labeled
    ]
    best = max(unlabeled_ends)[1] if unlabeled_ends else ""
    has_highlight = any(not style.is_highlighted for style in styles.values())
    return [
        LineLabel(
            f"{curve.label} {DIVERGED}" if curve.diverged else curve.label,
            height,
            style.color,
            bold=has_highlight and style.is_highlighted,
        )
        for curve, height in curve_ends
        for style in [styles[curve.label]]
        if style.is_labeled or curve.label == best
    ]


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
