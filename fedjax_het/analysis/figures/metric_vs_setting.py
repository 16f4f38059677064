"""A measure against a numeric setting: the heterogeneity of the data, a weight of the method."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figure_style import (
    GRAYS,
    MAX_COLUMNS,
    PALETTE,
    AxisSharing,
    add_note,
    clip_percent_limits,
    is_bottom_panel,
    is_leftmost_panel,
    make_line_styles,
    make_panels,
)
from fedjax_het.analysis.figures.learning_curves import count_panel_columns
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.grouping import (
    RunLine,
    format_setting_name,
    get_display_scale,
    get_metric_label,
    get_metric_values,
    group_figure_lines,
    is_diverged,
    is_higher_better,
    is_numeric,
    is_shared_setting,
    list_setting_columns,
    require_result_metric,
    resolve_group_settings,
)
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import MAX_VALUE_LENGTH, require, require_name
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIN_LABEL_SPACING = 0.09  # of the axis
_CROSS_HEIGHT = 0.05  # height of a cross and its room, of the axis
_MAX_STACKED_CROSSES = 6  # over each other; more overlap
_AXIS_LABELS = {"alpha": "Dirichlet alpha (small: heterogeneous)"}
_MIN_LOG_RANGE = 10  # values that span more are told apart on a logarithmic axis


@validate_arguments
def plot_metric_vs_alpha(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
) -> "Figure":
    """Plot a metric against the Dirichlet alpha, see `plot_metric_vs_setting`.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish lines and panels; default: all that vary, except seeds.
      metric: a numeric column of `results`.
    """
    return plot_metric_vs_setting(results, x="alpha", by=by, metrics=(metric,))


@validate_arguments
def plot_metric_vs_setting(
    results: "pd.DataFrame",
    *,
    x: str,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    metrics: Sequence[str] = ("final_accuracy",),
    missing_value: float | None = None,
) -> "Figure":
    """Plot metrics against a numeric setting: a line per method, a row of panels per metric.

    Lines are means over seeds, bands one standard deviation, and faint points the runs. With more
    than eight methods, those with the best mean over the axis are in color and the others gray. A
    diverged run is a cross at the lower edge and in no mean. The axis is logarithmic for alpha,
    and for positive values over more than a factor of ten.

    Args:
      results: as `load_results` returns it.
      x: a numeric setting, for example "hp.gamma".
      by: settings that distinguish lines and panels; default: all that vary, except seeds.
      panels: settings with panels, the last one with a column per value; default: those of `by`
        that runs of every method have.
      metrics: numeric columns of `results`.
      missing_value: position on the axis of runs without the setting, for example 0 for
        `data_sharing` against gamma; default: they are left out.

    Raises:
      ConfigError: if the runs do not have a setting or metric, or `x` is not numeric.
    """
    results = select_newest(results)
    require(len(metrics) > 0, "measures", metrics, "at least one")
    by = [name for name in resolve_group_settings(results, by) if name != x]
    panels = (
        resolve_group_settings(results, panels) if panels else list(filter(is_shared_setting, by))
    )
    for metric in metrics:
        require_result_metric(results, metric)
    results, x_label = _select_plottable_runs(results, x, missing_value)
    lines = group_figure_lines(results, by, panels)
    titles = list(dict.fromkeys(line.panel for line in lines))
    panel_keys = [(metric, title) for metric in metrics for title in titles]
    size = (6.0, 3.9) if len(panel_keys) == 1 else (4.0, 3.2)
    columns = len(titles) if len(titles) <= MAX_COLUMNS else count_panel_columns(results, panels)
    sharey: AxisSharing = "none" if "dataset" in panels else "row" if len(metrics) > 1 else "all"
    figure, grid = make_panels(
        [f"{title}\n{metric}" for metric, title in panel_keys],
        columns=columns,
        size=size,
        sharey=sharey,
    )
    panels_by_key = dict(zip(panel_keys, grid.values(), strict=True))
    styles = _choose_line_styles(lines, metrics[0])
    x_values = sorted(results[x].unique())
    is_log = x == "alpha" or (x_values[0] > 0 and x_values[-1] >= _MIN_LOG_RANGE * x_values[0])
    has_diverged_runs = False
    for metric in metrics:
        row_panels = {title: panels_by_key[metric, title] for title in titles}
        has_diverged_runs |= _draw_metric_row(row_panels, lines, (x, metric), styles)
    for (metric, title), panel in panels_by_key.items():
        panel.set_title(escape_mathtext(title), fontsize=10, wrap=True)
        style_axes(panel)
        _set_x_axis(panel, x_values, is_log)
        if is_leftmost_panel(panel):
            panel.set_ylabel(escape_mathtext(get_metric_label(metric)), fontsize=10)
        if is_bottom_panel(panel, panels_by_key.values()):
            panel.set_xlabel(escape_mathtext(x_label), fontsize=10)
    colored_lines = [line for line in lines if line.label in styles]
    line_ends = {
        panel: [
            _make_line_label(line, x, metric, styles[line.label])
            for line in colored_lines
            if line.panel == title
        ]
        for (metric, title), panel in panels_by_key.items()
    }
    label_line_ends(figure, line_ends)
    add_note(figure, _make_note(lines, x, styles, has_diverged_runs))
    return figure


def _choose_line_styles(lines: Sequence[RunLine], metric: str) -> dict[str, dict[str, Any]]:
    """Of the lines that are in colour: those of eight methods at most, the best."""
    means: dict[str, list[float]] = {}
    for line in lines:
        mean = get_metric_values(line.runs[~is_diverged(line.runs)], metric).mean()
        means.setdefault(line.method, []).append(-math.inf if math.isnan(mean) else mean)
    sign = 1 if is_higher_better(metric) else -1
    best = sorted(means, key=lambda name: sign * sum(means[name]) / len(means[name]), reverse=True)
    colored_methods = best[: len(PALETTE)]
    return make_line_styles(
        (line.method, line.label) for line in lines if line.method in colored_methods
    )


def _make_line_label(line: RunLine, x: str, metric: str, style: dict[str, Any]) -> LineLabel:
    """Where its mean is at the largest value that it has."""
    converged_runs = line.runs[~is_diverged(line.runs)]
    means = get_metric_values(converged_runs, metric).dropna().groupby(converged_runs[x]).mean()
    return LineLabel(line.label, float(means.iloc[-1]) if len(means) else math.nan, style["color"])


def _make_note(
    lines: Sequence[RunLine], x: str, styles: dict[str, dict], has_diverged_runs: bool
) -> str:
    parts = []
    if any(line.runs[x].duplicated().any() for line in lines):
        parts.append("lines: means; bands: one standard deviation; small points: single runs")
    gray_labels = list(dict.fromkeys(line.label for line in lines if line.label not in styles))
    if gray_labels:
        parts.append(f"grey: {', '.join(gray_labels)}")
    if has_diverged_runs:
        parts.append("×: a run that diverged")
    return "; ".join(parts)


def _select_plottable_runs(
    results: "pd.DataFrame", x: str, missing_value: float | None
) -> tuple["pd.DataFrame", str]:
    """The runs that have a place on the axis, and what the axis is."""
    argument = x.split(".", 1)[-1][:MAX_VALUE_LENGTH]
    require(x in results and results[x].notna().any(), argument, None, "runs with one")
    require_name("x", x, [n for n in list_setting_columns(results) if is_numeric(results[n])])
    x_label = _AXIS_LABELS.get(x, format_setting_name(x))
    if missing_value is not None:
        methods_without_setting = results["algorithm"][results[x].isna()].unique()
        x_label += (
            f" (at {missing_value:g}: {', '.join(methods_without_setting)})"
            if len(methods_without_setting)
            else ""
        )
        results = results.fillna({x: missing_value})
    return results[results[x].notna()], x_label


def _draw_metric_row(
    panels: dict[str, "Axes"],
    lines: Sequence[RunLine],
    axis_names: tuple[str, str],
    styles: dict[str, dict],
) -> bool:
    """The panels of one measure, by title, with room for crosses below. Whether there are any."""
    x, metric = axis_names
    num_crosses_by_panel: dict[str, dict[float, int]] = {title: {} for title in panels}
    for title, _, label, runs in lines:
        _draw_line(
            panels[title], runs, (x, metric, label), styles.get(label), num_crosses_by_panel[title]
        )
    max_crosses = max(
        (
            num_crosses
            for counts in num_crosses_by_panel.values()
            for num_crosses in counts.values()
        ),
        default=0,
    )
    strip_height = _CROSS_HEIGHT * min(max_crosses, _MAX_STACKED_CROSSES)
    if get_display_scale(metric) == 100:
        for panel in panels.values():
            clip_percent_limits(panel)
    limits = [panel.get_ylim() for panel in panels.values()]
    for panel, (low, high) in zip(panels.values(), limits, strict=True):
        panel.set_ylim(low - strip_height / (1 - strip_height) * (high - low), high)
    return any(num_crosses_by_panel.values())


def _draw_line(
    panel: "Axes",
    runs: "pd.DataFrame",
    line_names: tuple[str, str, str],
    style: dict[str, Any] | None,
    num_crosses: dict[float, int],
) -> None:
    """One line; grey and without single runs if it has no style. `lost` counts the crosses drawn at
    each value, so that they do not overlap."""
    x, metric, label = line_names
    converged_runs = runs[~is_diverged(runs)]
    values = get_metric_values(converged_runs, metric).dropna()
    by_value = values.groupby(converged_runs[x])
    # A gap where all runs diverged.
    mean = by_value.mean().reindex(sorted(runs[x].unique()))
    std = by_value.std().reindex(mean.index).fillna(0)
    line_style = style or {"color": GRAYS[1], "linestyle": "-", "marker": "."}
    color = line_style["color"]
    if mean.notna().any():
        panel.plot(
            mean.index,
            mean,
            lw=1.8 if style else 1.0,
            markersize=5,
            label=label,
            zorder=3 if style else 2,
            **line_style,
        )
    if style and mean.notna().any():
        panel.fill_between(mean.index, mean - std, mean + std, color=color, alpha=0.1, linewidth=0)
    if style and by_value.size().max() > 1:
        panel.plot(
            converged_runs[x][values.index],
            values,
            linestyle="none",
            marker=style["marker"],
            markersize=3.5,
            markeredgewidth=0,
            color=color,
            alpha=0.35,
            label="_runs",
        )
    for value in runs[x][is_diverged(runs)].unique():
        cross_index = num_crosses.get(value, 0)
        num_crosses[value] = cross_index + 1
        panel.plot(
            [value],
            [_CROSS_HEIGHT * (0.6 + cross_index % _MAX_STACKED_CROSSES)],
            transform=panel.get_xaxis_transform(),
            marker="x",
            linestyle="none",
            color=color,
            label="_diverged",
        )


def _set_x_axis(panel: "Axes", values: Sequence[float], is_log: bool) -> None:
    """A tick at every value, and its text as far as there is room."""
    from matplotlib.ticker import NullLocator

    if is_log:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    to_axis_scale, from_axis_scale = (
        (math.log10, lambda position: 10**position) if is_log else (float, float)
    )
    low, high = to_axis_scale(values[0]), to_axis_scale(values[-1])
    margin = 0.06 * (high - low) or 0.3
    panel.set_xlim(
        from_axis_scale(low - margin), from_axis_scale(high + margin / 3)
    )  # names stand at the right
    labels, last_label_position = [], -math.inf
    for value in values:
        position = (to_axis_scale(value) - low) / (high - low + margin * 4 / 3)
        labels.append(f"{value:g}" if position - last_label_position >= _MIN_LABEL_SPACING else "")
        last_label_position = position if labels[-1] else last_label_position
    panel.set_xticks(values, labels)
