"""A metric against one numeric setting as lines, or against two settings as a heat map."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figures.direct_labels import LineLabel, label_line_ends
from fedjax_het.analysis.figures.style import (
    GRAYS,
    MAX_COLUMNS,
    PALETTE,
    AxisSharing,
    add_note,
    clip_percent_limits,
    label_outer_axes,
    make_line_styles,
    make_panels,
    style_axes,
    wrap_title,
)
from fedjax_het.analysis.overview import (
    RunLine,
    describe_comparison,
    describe_settings,
    find_varying_settings,
    format_setting_name,
    format_setting_value,
    get_method_title,
    get_metric_label,
    get_metric_values,
    get_setting_column,
    group_figure_lines,
    group_runs,
    is_diverged,
    is_numeric,
    list_setting_columns,
    list_tasks,
    require_result_metric,
    resolve_group_settings,
    summarize_runs,
)
from fedjax_het.analysis.render import choose_number_format, format_number
from fedjax_het.config.kind_settings import get_neutral_strength
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import MAX_VALUE_LENGTH, ConfigError, require, require_name
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import DIVERGED, escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIN_LABEL_SPACING = 0.09  # of tick labels, as a fraction of the axis
_CROSS_HEIGHT = 0.05  # height of a cross and its margin, as a fraction of the axis
_MAX_STACKED_CROSSES = 6
_AXIS_LABELS = {"alpha": "Dirichlet alpha (small: heterogeneous)"}
_MIN_LOG_RANGE = 10  # ratio of the values from which an axis is logarithmic
_MISSING_COLOR = "#EEEEEE"


@validate_arguments
def plot_metric_vs_alpha(
    results: "pd.DataFrame", *, by: Sequence[str] | None = None, metric: str = "final_accuracy"
) -> "Figure":
    """Plot a metric against the Dirichlet alpha, see `plot_metric_vs_setting`.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish lines and panels; default: all that vary, except seeds.
      metric: a numeric column of `results`.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs have no alpha, or not a setting or the metric.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_metric_vs_alpha
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": "fedavg", "alpha": [0.1, 1.0],
      ...     "seed": 0, "settings": ["a", "b"], "finished": "2026", "diverged": False,
      ...     "final_accuracy": [0.5, 0.6]})
      >>> plot_metric_vs_alpha(results).axes[0].get_xscale()
      'log'
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
    than eight methods, the methods with the best mean over the axis are in color and the others
    gray. A diverged run is a cross at the lower edge and in no mean. The axis is logarithmic for
    alpha, and for positive values over more than a factor of ten.

    Args:
      results: as `load_results` returns it.
      x: a numeric setting, for example "hp.gamma" or "learning_rate".
      by: settings that distinguish lines and panels; default: all that vary, except seeds.
      panels: settings with panels, the last one with a column per value (default: settings of `by`
        that runs of every method have).
      metrics: numeric columns of `results`.
      missing_value: position on the axis of runs without the setting, for example 0 for
        `data_sharing` against gamma; default: they are left out.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs do not have a setting or metric, or `x` is not numeric.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_metric_vs_setting
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": "fsl", "hp.gamma": [0.5, 1.0],
      ...     "seed": 0, "settings": ["a", "b"], "finished": "2026", "diverged": False,
      ...     "final_accuracy": [0.5, 0.6]})
      >>> plot_metric_vs_setting(results, x="hp.gamma").axes[0].get_xlabel()
      'gamma'
    """
    results, x = select_newest(results), get_setting_column(x)
    require(len(metrics) > 0, "metrics", metrics, "at least one")
    by = [name for name in resolve_group_settings(results, by) if name != x]
    for metric in metrics:
        require_result_metric(results, metric)
    results, x_label = _select_plottable_runs(results, x, missing_value)
    groups = group_figure_lines(results, by, panels)
    lines, titles = groups.lines, groups.titles
    keys = [(metric, title) for metric in metrics for title in titles]
    sharey: AxisSharing = "row" if len(metrics) > 1 else "all"
    size = (6.0, 3.9) if len(keys) == 1 else (4.0, 3.2)
    figure, grid = make_panels(
        [f"{title}\n{metric}" for metric, title in keys],
        columns=len(titles) if len(titles) <= MAX_COLUMNS else groups.columns,
        size=size,
        sharey="none" if groups.has_dataset_panels else sharey,
    )
    panels_by_key = dict(zip(keys, grid.values(), strict=True))
    styles = _choose_line_styles(lines, metrics[0])
    values = sorted(results[x].unique())
    labels: dict[Axes, list[LineLabel]] = {}
    for metric in metrics:
        row = {title: panels_by_key[metric, title] for title in titles}
        labels |= _draw_metric_row(row, lines, (x, metric), styles)
        label_outer_axes(row.values(), y=get_metric_label(metric, list_tasks(results)))
    for (_, title), panel in panels_by_key.items():
        panel.set_title(wrap_title(title, size[0] - 1.5), fontsize=10)
        style_axes(panel)
        _set_x_axis(panel, values, x)
    label_outer_axes(panels_by_key.values(), x=x_label)
    label_line_ends(figure, labels)
    notes = [_make_note(lines, x, styles), *describe_comparison(results, [x, *by])]
    add_note(figure, "; ".join(filter(None, notes)))
    return figure


def _select_plottable_runs(
    results: "pd.DataFrame", x: str, missing_value: float | None
) -> tuple["pd.DataFrame", str]:
    """Return the runs that have a place on the axis, and the label of the axis."""
    argument = x.split(".", 1)[-1][:MAX_VALUE_LENGTH]
    require(x in results and results[x].notna().any(), argument, None, "runs with one")
    require_name("x", x, [n for n in list_setting_columns(results) if is_numeric(results[n])])
    label = _AXIS_LABELS.get(x, format_setting_name(x))
    if missing_value is not None:
        methods = ", ".join(
            get_method_title(name) for name in results["algorithm"][results[x].isna()].unique()
        )
        label += f" (at {missing_value:g}: {methods})" if methods else ""
        results = results.fillna({x: missing_value})
    return results[results[x].notna()], label


def _choose_line_styles(lines: Sequence[RunLine], metric: str) -> dict[str, dict[str, Any]]:
    """Return the styles of the colored lines, which belong to the best eight methods.

    A metric without a direction has no best methods: the first eight are in color.
    """
    direction = get_metric_info(metric).higher_is_better
    sign = {True: 1, False: -1, None: 0}[direction]
    scores: dict[str, list[float]] = {}
    for line in lines:
        mean = get_metric_values(line.runs[~is_diverged(line.runs)], metric).mean()
        scores.setdefault(line.method, []).append(-math.inf if math.isnan(mean) else sign * mean)
    best = sorted(scores, key=lambda name: -sum(scores[name]) / len(scores[name]))
    colored = best[: len(PALETTE)]
    return make_line_styles((line.method, line.label) for line in lines if line.method in colored)


def _make_note(lines: Sequence[RunLine], x: str, styles: dict[str, dict]) -> str:
    gray = ", ".join(dict.fromkeys(line.label for line in lines if line.label not in styles))
    parts = {
        "lines: means; bands: one standard deviation; small points: single runs": any(
            line.runs[x].duplicated().any() for line in lines
        ),
        f"gray: {gray}": gray,
        "×: a run that diverged or ended early": any(
            is_diverged(line.runs).any() for line in lines
        ),
    }
    return "; ".join(text for text, is_needed in parts.items() if is_needed)


def _draw_metric_row(
    panels: dict[str, "Axes"],
    lines: Sequence[RunLine],
    names: tuple[str, str],
    styles: dict[str, dict],
) -> "dict[Axes, list[LineLabel]]":
    """Draw the panels of a metric, with room for crosses below; return the labels of the lines."""
    labels: dict[Axes, list[LineLabel]] = {panel: [] for panel in panels.values()}
    num_crosses: Counter[tuple[str, float]] = Counter()  # by panel and value, above each other
    for line in lines:
        panel, style = panels[line.panel], styles.get(line.label)
        end = _draw_line(panel, line, names, style)
        if style:
            labels[panel].append(LineLabel(line.label, end, style["color"]))
        for value in line.runs[names[0]][is_diverged(line.runs)].unique():
            index = num_crosses[line.panel, value]
            num_crosses[line.panel, value] += 1
            panel.plot(
                [value],
                [_CROSS_HEIGHT * (0.6 + index % _MAX_STACKED_CROSSES)],
                transform=panel.get_xaxis_transform(),
                marker="x",
                linestyle="none",
                color=style["color"] if style else GRAYS[1],
                label="_diverged",
            )
    strip = _CROSS_HEIGHT * min(max(num_crosses.values(), default=0), _MAX_STACKED_CROSSES)
    if get_metric_info(names[1]).is_fraction:
        for panel in panels.values():
            clip_percent_limits(panel)
    limits = [panel.get_ylim() for panel in panels.values()]
    for panel, (low, high) in zip(panels.values(), limits, strict=True):
        panel.set_ylim(low - strip / (1 - strip) * (high - low), high)
    return labels


def _draw_line(
    panel: "Axes", line: RunLine, names: tuple[str, str], style: dict[str, Any] | None
) -> float:
    """Draw a line, in gray and without single runs if it has no style; return its last mean."""
    x, metric = names
    runs = line.runs[~is_diverged(line.runs)]
    values = get_metric_values(runs, metric).dropna()
    by_value = values.groupby(runs[x])
    # The line has a gap at a value where all runs diverged.
    mean = by_value.mean().reindex(sorted(line.runs[x].unique()))
    if mean.isna().all():
        return math.nan
    last_mean = float(mean.dropna().iloc[-1])
    if style is None:
        style = {"color": GRAYS[1], "linestyle": "-", "marker": ".", "lw": 1.0, "zorder": 2}
        panel.plot(mean.index, mean, markersize=5, label=line.label, **style)
        return last_mean
    panel.plot(mean.index, mean, lw=1.8, markersize=5, zorder=3, label=line.label, **style)
    std = by_value.std().reindex(mean.index).fillna(0)
    band: Any = {"color": style["color"], "alpha": 0.1, "linewidth": 0}
    panel.fill_between(mean.index, mean - std, mean + std, **band)
    if by_value.size().max() > 1:
        points: Any = {**style, "linestyle": "none", "markersize": 3.5, "markeredgewidth": 0}
        panel.plot(runs[x][values.index], values, alpha=0.35, label="_runs", **points)
    return last_mean


def _set_x_axis(panel: "Axes", values: Sequence[float], x: str) -> None:
    """Place a tick at every value, with its text if there is room."""
    from matplotlib.ticker import NullLocator

    is_log = x == "alpha" or (values[0] > 0 and values[-1] >= _MIN_LOG_RANGE * values[0])
    if is_log:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    positions = np.log10(values) if is_log else np.asarray(values, np.float64)
    low, high = positions[0], positions[-1]
    margin = 0.06 * (high - low) or 0.3
    limits = np.array([low - margin, high + margin / 3])  # names are at the right
    panel.set_xlim(*(10**limits if is_log else limits))
    labels, last_fraction = [], -math.inf
    for value, fraction in zip(
        values, (positions - low) / (high - low + margin * 4 / 3), strict=True
    ):
        is_far = fraction - last_fraction >= _MIN_LABEL_SPACING
        labels.append(f"{value:g}" if is_far else "")
        last_fraction = fraction if is_far else last_fraction
    panel.set_xticks(values, labels)


@validate_arguments
def plot_heat_map(
    results: "pd.DataFrame",
    *,
    x: str,
    y: str,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
) -> "Figure":
    """Plot means over seeds against two settings, a panel per method and other varying setting.

    Each cell shows its value, `†` if runs diverged or ended early and are left out, or a dash if
    there is no run. All panels share one color scale. A method without both settings has no panel.

    Args:
      results: as `load_results` returns it.
      x: setting on the horizontal axis, for example "alpha".
      y: setting on the vertical axis, for example "hp.local_lr".
      by: settings with panels; default: all that vary, except seeds.
      metric: a numeric column of `results`.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs do not have a setting or the metric.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_heat_map
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": "fedavg", "alpha": [0.1, 1.0],
      ...     "seed": 0, "hp.local_lr": 0.1, "settings": ["a", "b"], "finished": "2026",
      ...     "diverged": False, "final_accuracy": [0.5, 0.6]})
      >>> panel = plot_heat_map(results, x="alpha", y="hp.local_lr").axes[0]
      >>> [text.get_text() for text in panel.texts]
      ['50.0', '60.0']
    """
    results, x, y = select_newest(results), get_setting_column(x), get_setting_column(y)
    for argument, name in (("x", x), ("y", y)):
        require_name(argument, name, list_setting_columns(results))
    require(x != y, "y", y, "another setting than x")
    panel_settings = [name for name in resolve_group_settings(results, by) if name not in (x, y)]
    require_result_metric(results, metric)
    results = results[results[x].notna() & results[y].notna()]
    if not len(results):
        raise ConfigError(f"x = {x!r}, y = {y!r}: expected runs that have both settings")
    summary = summarize_runs(results, by=[*panel_settings, x, y], metric=metric)
    summary["diverged"] += summary["partial"]
    xs, ys = ([keys[name] for keys, _ in group_runs(summary, [name])] for name in (x, y))
    if not is_numeric(summary[y]):
        ys.reverse()  # texts from top to bottom, numbers from bottom to top
    groups = {describe_settings(keys): rows for keys, rows in group_runs(summary, panel_settings)}
    values = summary["mean"].dropna()
    format_spec = ".1f" if get_metric_info(metric).is_fraction else choose_number_format(values)
    limits = (values.min(), values.max()) if len(values) else (0.0, 1.0)

    longest = max([5, *(len(format_number(value, format_spec)) + 2 for value in values)])
    size = (1.0 + max(0.085 * longest * len(xs), 1.6), 0.8 + max(0.34 * len(ys), 1.1))
    max_columns = max(1, int(14 / size[0]))
    columns = len(group_runs(summary, panel_settings[-1:]))
    if not 1 < columns <= max_columns or len(groups) % columns:
        columns = -(-len(groups) // -(-len(groups) // max_columns))  # rows of equal length
    figure, panels = make_panels(list(groups), columns=columns, size=size, sharey="none")
    width, height = figure.get_size_inches()
    label = get_metric_label(metric, list_tasks(results))
    figure.set_size_inches(width + 1.0, max(height, 0.6 + 0.085 * len(label)))
    for title, panel in panels.items():
        cells = groups[title].pivot(index=y, columns=x, values=["mean", "diverged"])
        means, num_diverged = (
            cells[name].reindex(index=ys, columns=xs).to_numpy(float)
            for name in ("mean", "diverged")
        )
        image = _draw_cells(panel, means, num_diverged > 0, limits, format_spec)
        for axis, name, ticks in ((panel.xaxis, x, xs), (panel.yaxis, y, ys)):
            labels = [escape_mathtext(format_setting_value(value, name)) for value in ticks]
            axis.set_ticks(range(len(ticks)), labels)
    label_outer_axes(panels.values(), x=format_setting_name(x), y=format_setting_name(y))
    color_bar = figure.colorbar(image, ax=list(panels.values()), label=label)
    color_bar.outline.set_visible(False)
    add_note(figure, "; ".join(describe_comparison(results, [*panel_settings, x, y])))
    return choose_fonts(figure)


def find_numeric_pair(results: "pd.DataFrame", by: Sequence[str] | None = None) -> list[str]:
    """Find the first two numeric settings that vary together within a method, alpha first.

    Args:
      results: as `load_results` returns it.
      by: names of settings (default: settings that vary).

    Returns:
      Two names, or none if a heat map would show nothing.
    """
    varying = find_varying_settings(results)
    names = [
        name
        for name in resolve_group_settings(results, by)
        if name in varying and is_numeric(results[name])
    ]
    names.sort(key=lambda name: name != "alpha")
    for pair in map(list, itertools.combinations(names, 2)):
        for _, runs in group_runs(results, ["algorithm"]):
            cells = runs[pair].dropna()
            if (cells.nunique() > 1).all() and not _are_alternatives(cells):
                return pair
    return []


def _are_alternatives(cells: "pd.DataFrame") -> bool:
    """Return whether at most one of two settings changes each run: skews that do not combine."""
    neutral_strengths = [get_neutral_strength(name) for name in cells]
    return None not in neutral_strengths and not (cells != neutral_strengths).all(axis=1).any()


def _draw_cells(
    panel: "Axes",
    means: np.ndarray,
    has_diverged: np.ndarray,
    limits: tuple[float, float],
    format_spec: str,
):
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    color_map = colormaps["cividis"].with_extremes(bad=_MISSING_COLOR)
    normalize = Normalize(*limits)
    image = panel.imshow(means, cmap=color_map, norm=normalize, aspect="auto", origin="lower")
    for (row, column), mean in np.ndenumerate(means):
        text = f" {DIVERGED}" if has_diverged[row, column] else ""
        if not (text and math.isnan(mean)):
            text = format_number(mean, format_spec) + text
        color = "white" if normalize(mean) < 0.5 else "black"  # black for NaN
        style: Any = {"ha": "center", "va": "center", "fontsize": 9, "color": color}
        panel.text(column, row, text.strip(), **style)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image
