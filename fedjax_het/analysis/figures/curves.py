"""Curves against the round: learning curves of any runs, and curves of a paper's table.

Few lines share panels, in color or with some in gray; many lines have a small panel each, with the
others behind it in gray.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fedjax_het.analysis.comparison import (
    AVERAGE,
    TableCell,
    format_row,
    get_compared_metric,
    get_reported_value,
    is_personal_evaluation,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.figures.direct_labels import (
    LineLabel,
    compute_label_height,
    label_line_ends,
)
from fedjax_het.analysis.figures.style import (
    BACKGROUND_COLOR,
    GRAYS,
    PALETTE,
    AxisSharing,
    add_note,
    assign_distinct_colors,
    clip_percent_limits,
    label_outer_axes,
    make_line_styles,
    make_panels,
    mark_empty_panel,
    set_integer_ticks,
    style_axes,
    wrap_title,
)
from fedjax_het.analysis.overview import (
    BASELINE,
    RunLine,
    describe_comparison,
    get_method_title,
    get_metric_label,
    group_figure_lines,
    is_diverged,
    list_tasks,
    resolve_group_settings,
)
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.metrics.declarations import NOT_TRAINED
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime.result_display import mark_isolated_points
from fedjax_het.runtime.result_store import is_partial_run, select_newest
from fedjax_het.runtime.results import AXIS_LABELS
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import DIVERGED, escape_mathtext, format_classes_per_client

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_COLORED_LINES = len(PALETTE)
_MAX_LABELED_GRAYS = 5  # with more gray lines, only the best one is labeled
_MAX_LABEL_INCHES = 5.0  # height of the names beside a panel
_SMALL_PANEL_SIZE = (1.75, 1.2)  # inches
_MAX_SMALL_COLUMNS = 6
# FedAvg is named and marked in every figure that compares methods.
_BASELINE_COLOR, _BASELINE_DASHES = "#000000", (0, (4, 1.5))


class Curve(NamedTuple):
    """One line of a figure, and the runs behind it."""

    panel: str
    method: str
    label: str
    runs: "pd.DataFrame"
    """Measured values with a row per round and a column per run, fractions in percent."""
    diverged: bool = False
    """Whether a run is missing in `runs` because it diverged or ended early."""
    reported: float = math.nan
    """A final value to compare with."""
    ended_early: bool = False
    """Whether all runs that are missing in `runs` ended early."""


class CurveMetric(NamedTuple):
    """Metric of a figure's curves and its presentation."""

    name: str = "test_accuracy"
    window: int = 1
    """Number of measured rounds of the running mean that a line shows."""
    reported_kind: str = "final"
    """Kind of the reported values, for the note."""
    is_log: bool = False
    """Whether the axis is logarithmic, and means over seeds are geometric."""
    comparison: str = ""
    """Protocol of the runs and settings in which their methods differ, for the note."""
    x: str = "round"
    """Horizontal axis: "round", "bytes" or "seconds"."""
    tasks: tuple[object, ...] = ()
    """Names of the tasks of the runs, whose score the axis names."""

    @property
    def label(self) -> str:
        """Label of the vertical axis."""
        return get_metric_label(self.name, self.tasks)


# The metrics of a table's curves, by its compared metric.
_CURVE_METRICS = {
    "final_accuracy": CurveMetric("test_accuracy", 5, "final"),
    "best_accuracy": CurveMetric("test_accuracy", 1, "best"),
    "window_accuracy": CurveMetric("test_accuracy", WINDOW, "final"),
    "bmta": CurveMetric("mean_client_accuracy", 1, "best"),
}


class LineStyle(NamedTuple):
    """Style of a line."""

    color: str
    linestyle: Any = "-"
    width: float = 1.0
    is_labeled: bool = True
    """Whether the line's name is at its end."""
    is_highlighted: bool = True
    """Whether the line has a band, and is above the others."""


@validate_arguments
def plot_learning_curves(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    metric: str = "test_accuracy",
    window: PositiveInt = 1,
    highlight: Sequence[str] = (),
    x: Literal["round", "bytes", "seconds"] = "round",
) -> "Figure":
    """Plot a metric against the round: a line per method and hyperparameters, panels for the rest.

    A line is the mean over seeds, and its band is one standard deviation over seeds. A `window`
    smooths each run by running means over `window` measured rounds; a note below the panels states
    the number. Runs with fewer than 2 `window` measured rounds are not smoothed.
    Diverged runs are left out and named below the panel. More than eight methods have a small panel
    each, with the other lines in gray.

    Args:
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      by: settings that distinguish lines; default: all that vary, except seeds.
      panels: settings with panels, the last one with a column per value (default: settings of `by`
        that runs of every method have).
      metric: a column of `curves`.
      window: rounds of the running mean; 1: measured values. With 5, an accuracy's line ends at the
        value in overviews.
      highlight: methods in color, the others being gray and FedAvg dashed; default: all in color.
      x: horizontal axis: rounds, bytes that were sent both ways, or simulated seconds. A value
        between two evaluations is the value of the earlier one. Bytes and seconds have no window.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs do not have a setting, the metric, a method or simulated time.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_learning_curves
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": ["fedavg"], "seed": 0,
      ...     "settings": "s", "digest": "d", "finished": "2026", "diverged": False,
      ...     "final_accuracy": 0.5})
      >>> curves = pd.DataFrame({"digest": "d", "round": [1, 2], "test_accuracy": [0.3, 0.5]})
      >>> plot_learning_curves(results, curves).axes[0].get_ylabel()
      'Test accuracy (%)'
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    for name in highlight:
        require_name("highlight", name, results["algorithm"].unique())
    if not len(curves):
        raise ConfigError(
            "curves = none: expected the curves of the runs, as `load_curves` returns them"
        )
    require_name("metric", metric, [n for n in curves.columns if n not in ("digest", "round")])
    has_time = x != "seconds" or "simulated_seconds" in curves
    require(has_time, "x", x, "round or bytes: the runs have no simulated time, see system")
    require(x == "round" or window == 1, "window", window, f"1 with x = {x!r}")
    groups = group_figure_lines(results, by, panels)
    comparison = "; ".join(describe_comparison(results, by))
    return plot_curve_panels(
        [_make_curve(line, curves, metric, x) for line in groups.lines],
        columns=groups.columns,
        metric=CurveMetric(
            *(metric, window),
            comparison=comparison,
            x=x,
            tasks=tuple(list_tasks(results)),
        ),
        sharey="row" if groups.has_dataset_panels else "all",
        highlight=highlight,
    )


@validate_arguments
def plot_gradient_gaps(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] = (),
    panels: Sequence[str] = ("dataset", "classes"),
) -> "Figure":
    """Plot distances of server and client gradients from the full gradient (FSL, Fig. 9).

    The two lines `server_gap` and `client_gap` are squared Euclidean distances on a logarithmic
    axis against the round. Means over seeds and bands are computed from the logarithms.

    Args:
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      by: settings that distinguish lines of a panel.
      panels: settings with panels.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs do not have a setting or the gaps.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_gradient_gaps
      >>> results = pd.DataFrame({"algorithm": ["fsl"], "dataset": "digits", "seed": 0,
      ...     "settings": "s", "digest": "d", "finished": "2026", "diverged": False,
      ...     "final_accuracy": 0.5})
      >>> curves = pd.DataFrame({"digest": "d", "round": [1, 2], "server_gap": [2.0, 1.0],
      ...     "client_gap": [3.0, 2.0]})
      >>> plot_gradient_gaps(results, curves, panels=["dataset"]).axes[0].get_yscale()
      'log'
    """
    results = select_newest(results)
    names = resolve_group_settings(results, [*panels, *by])
    groups = group_figure_lines(results, names, panels)
    lines = []
    for method, metric in (("fsl", "server_gap"), ("fedavg", "client_gap")):
        require_name("metric", metric, list(curves.columns))
        for line in groups.lines:
            label = get_metric_label(metric) + (f", {line.label}" if by else "")
            lines.append(_make_curve(line._replace(method=method, label=label), curves, metric))
    return plot_curve_panels(
        lines,
        columns=groups.columns,
        metric=CurveMetric(
            "gradient_gap", is_log=True, comparison="; ".join(describe_comparison(results, names))
        ),
        sharey="row" if groups.has_dataset_panels else "all",
    )


@validate_arguments
def plot_table_curves(
    cells: Sequence[TableCell],
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    reported: "pd.DataFrame",
    *,
    highlight: Sequence[str] = (),
    separate_panels: bool = False,
    display_names: Mapping[str, str] = MappingProxyType({}),
) -> "Figure":
    """Plot the metric of a paper's table against the round.

    There is a row of panels per data set and network, and a column per alpha, number of labels or
    domain. Lines are means over seeds. If the table has means of the last rounds, lines are running
    means over the same number of rounds. A line therefore ends at the table's value. A triangle at
    the right edge is the reported value. Diverged runs are left out.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      reported: as `load_reported_values` returns it.
      highlight: methods in color, the others being gray; default: all.
      separate_panels: whether each line has a small panel with the others in gray.
      display_names: names of rows in place of their settings.

    Returns:
      The figure.

    Raises:
      ConfigError: if `reported` has metrics other than accuracies.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import TableCell, plot_table_curves
      >>> reported = pd.DataFrame({"metric": ["bmta"], "dataset": "digits", "model": "mlp",
      ...     "level": 0.1, "method": "fedavg", "mean": 81.5, "std": 1.5})
      >>> cells = [TableCell("digits", "mlp", 0.1, "fedavg")]
      >>> figure = plot_table_curves(cells, pd.DataFrame(), pd.DataFrame(), reported)
      >>> figure.axes[0].get_title(), figure.axes[0].texts[0].get_text()
      ('digits, alpha = 0.1', 'not run')
    """
    import pandas as pd

    metric = _CURVE_METRICS[get_compared_metric(reported)]
    models, levels = ({getattr(c, name) for c in cells} for name in ("model", "level"))
    settings = [parse_row(cell.method)[1] for cell in cells]
    first_settings = settings[0] if settings else {}
    shared_settings = {
        name: value
        for name, value in first_settings.items()
        if all(row_settings.get(name) == value for row_settings in settings)
    }
    lines, cell_runs = [], []
    for cell in cells:
        title = [cell.dataset, *[cell.model] * (len(models) > 1), *_format_level(cell)]
        label = display_names.get(cell.method) or format_row(cell.method, omit=shared_settings)
        runs = select_cell_runs(cell, results)
        cell_runs += [runs] if len(runs) else []
        line = RunLine(", ".join(title), parse_row(cell.method)[0], label, runs)
        curve = _make_curve(line, curves, _get_curve_metric(cell, metric.name))
        lines.append(curve._replace(reported=get_reported_value(cell, reported)["reported_mean"]))
    if cell_runs:
        comparison = describe_comparison(pd.concat(cell_runs))
        metric = metric._replace(comparison="; ".join(comparison))
    if separate_panels:
        return plot_small_multiples(lines, metric)
    has_levels = levels != {None}
    return plot_curve_panels(
        lines,
        columns=len(levels) if has_levels else len(cells),
        metric=metric,
        sharey="row" if has_levels else "none",
        highlight=highlight,
    )


def _get_curve_metric(cell: TableCell, metric: str) -> str:
    """Return the metric of a cell's line; `metric` is of a global model on all tests."""
    is_personal = is_personal_evaluation(cell)
    if cell.domain not in (None, AVERAGE):
        return f"{'client_accuracy' if is_personal else metric}_{cell.domain}"
    if is_personal:
        return _CURVE_METRICS["bmta"].name
    return metric if cell.domain is None else f"{metric}_domains"


def _format_level(cell: TableCell) -> list[str]:
    if cell.domain or cell.level is None:
        return [cell.domain] if cell.domain else []
    if cell.classes is not None:
        return [format_classes_per_client(cell.classes)]
    return [f"alpha = {cell.alpha:g}"]


def _make_curve(line: RunLine, curves: "pd.DataFrame", metric: str, x: str = "round") -> Curve:
    """Return the curves of a line's runs that did not diverge, with NaN where a line has a gap."""
    import pandas as pd

    runs, table = line.runs, pd.DataFrame()
    has_diverged = is_diverged(runs)
    if len(curves) and len(runs) and metric in curves:
        digests, info = runs["digest"][~has_diverged], get_metric_info(metric)
        run_curves = curves[curves["digest"].isin(digests)]
        table = run_curves.pivot(index="round", columns="digest", values=metric)
        table = info.scale * table.dropna(axis="columns", how="all")
        if info.missing != NOT_TRAINED or not table.size:
            table = table.dropna(how="all")
        if x != "round" and table.size:
            table = _align_to_cost(table, run_curves, x)
    ended_early = bool((~has_diverged | is_partial_run(runs)).all())
    names, diverged = (line.panel, line.method, line.label), bool(has_diverged.any())
    return Curve(*names, table, diverged, ended_early=ended_early)


def _align_to_cost(table: "pd.DataFrame", curves: "pd.DataFrame", x: str) -> "pd.DataFrame":
    """Return the curves at common costs of the runs instead of rounds.

    Args:
      table: a row per round and a column per run.
      curves: as `load_curves` returns it, of these runs.
      x: "bytes" or "seconds".

    Returns:
      A row per cost that all runs have spent, and the last value that each run had until then.
    """
    import pandas as pd

    names = ["bytes_up", "bytes_down"] if x == "bytes" else ["simulated_seconds"]
    spent = curves.assign(cost=curves[names].sum(axis=1)).pivot(
        index="round", columns="digest", values="cost"
    )
    costs = spent.cumsum().loc[table.index, table.columns]
    grid = np.unique(np.concatenate([costs[name].dropna() for name in costs]))
    grid = grid[(grid >= costs.min().max()) & (grid <= costs.max().min())]
    columns = {}
    for name in table:
        values = table[name].dropna()
        own_costs = costs[name][values.index].to_numpy()
        positions = np.searchsorted(own_costs, grid, side="right") - 1
        columns[name] = np.where(positions < 0, np.nan, values.to_numpy()[positions])
    return pd.DataFrame(columns, index=grid).dropna(how="all")


def plot_curve_panels(
    curves: Sequence[Curve],
    *,
    columns: int,
    metric: CurveMetric = CurveMetric(),
    sharey: AxisSharing = "row",
    highlight: Collection[str] = (),
) -> "Figure":
    """Plot lines with their names at their ends. A panel without any run says so.

    Lines of the methods in `highlight` are in color and have bands of one standard deviation over
    seeds. FedAvg is dashed and named. The other lines are gray; if there are more than five gray
    lines, only the best is labeled. Without such lines all are in color. More methods than colors,
    and names that take more than 5 inches beside a panel, have a small panel each
    (`plot_small_multiples`). A triangle at the right edge is the reported value.

    Args:
      curves: the lines.
      columns: panels per row.
      metric: metric of the lines.
      sharey: panels that share the limits of the vertical axis.
      highlight: methods in color; default: all.

    Returns:
      The figure.
    """
    available = [curve for curve in curves if len(curve.runs)]
    metric = _limit_window(metric, available)
    styles = choose_line_styles(available, highlight)
    names: dict[str, list[str]] = {}
    for curve in available:
        if styles and styles[curve.label].is_labeled:
            names.setdefault(curve.panel, []).append(curve.label)
    label_height = max(map(compute_label_height, names.values()), default=0.0)
    if available and (not styles or label_height > _MAX_LABEL_INCHES):
        return plot_small_multiples(curves, metric)
    titles = list(dict.fromkeys(curve.panel for curve in curves))
    figure, panels = make_panels(titles, columns=columns, size=(3.5, 2.7), sharey=sharey)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(4.4, width), height + 0.3)
    ends: dict[str, list[tuple[Curve, float]]] = {title: [] for title in titles}
    for curve in available:
        average = _average_runs(curve, metric)
        _draw_line(panels[curve.panel], curve, average, styles[curve.label])
        ends[curve.panel].append((curve, _get_last_mean(average)))
    for title, panel in panels.items():
        _finish_panel(panel, metric, [curve for curve in curves if curve.panel == title])
    label_outer_axes(panels.values(), x=AXIS_LABELS[metric.x], y=metric.label, size=9)
    direction = get_metric_info(metric.name).higher_is_better
    labels = {
        panels[title]: _make_line_labels(own, styles, lowest=direction is False)
        for title, own in ends.items()
    }
    label_line_ends(figure, labels)
    add_note(figure, _make_note(curves, styles, metric))
    return figure


def plot_small_multiples(curves: Sequence[Curve], metric: CurveMetric) -> "Figure":
    """Plot a row of small panels per label; the number in a panel is the end of its line.

    Args:
      curves: the lines. If they have few panels, several rows are beside each other.
      metric: metric of the lines.

    Returns:
      The figure.
    """
    from matplotlib.figure import Figure

    available = [curve for curve in curves if len(curve.runs)]
    metric = _limit_window(metric, available)
    averages = {(c.panel, c.label): (c, _average_runs(c, metric)) for c in available}
    titles = list(dict.fromkeys(curve.panel for curve in curves))
    labels = list(dict.fromkeys(c.label for c in curves if len(c.runs) or c.diverged))
    blocks = max(1, min(_MAX_SMALL_COLUMNS // len(titles), len(labels)))
    rows, columns = -(-len(labels) // blocks), blocks * len(titles)
    panel_width, panel_height = _SMALL_PANEL_SIZE
    label_texts = [wrap_title(label, panel_width * len(titles) - 0.3, size=8) for label in labels]
    panel_height += 0.14 * max((text.count("\n") for text in label_texts), default=0)
    size = (panel_width * columns + 0.5, panel_height * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=not metric.is_log)
    # Panels of a label in a row; the labels fill the blocks of the grid column by column.
    grid = grid.reshape(rows, blocks, len(titles)).swapaxes(0, 1).reshape(-1, len(titles))
    style = LineStyle(PALETTE[0], width=1.6)
    for index, label in enumerate(labels):
        grid[index, 0].set_title(label_texts[index], fontsize=8, loc="left", pad=3)
        is_lowest = index % rows == rows - 1 or index == len(labels) - 1
        for title, panel in zip(titles, grid[index], strict=True):
            panel.tick_params(labelsize=7, labelbottom=is_lowest)
            if index % rows == 0 and len(titles) > 1:
                options: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
                options |= {"ha": "center", "fontsize": 8, "color": "#555555"}
                lines = wrap_title(title, panel_width - 0.2, size=8)
                offset = 15 + 10 * label_texts[index].count("\n")
                panel.annotate(lines, (0.5, 1), (0, offset), **options)
            _draw_small_panel(panel, averages, (title, label), metric, style)
    for index, label in enumerate(labels):  # once all is drawn, since panels share their limits
        for title, panel in zip(titles, grid[index], strict=True):
            own = [c for c in curves if (c.panel, c.label) == (title, label)]
            _finish_panel(panel, metric, own)
    for unused_panel in grid[len(labels) :].flat:
        unused_panel.set_visible(False)
    figure.supylabel(escape_mathtext(metric.label), fontsize=9)
    choose_fonts(figure)
    has_baseline = any(curve.method == BASELINE for curve in available)
    notes = [
        f"dashed: {get_method_title(BASELINE)}" if has_baseline else "",
        "gray: all the other lines",
        _make_note(curves, dict.fromkeys(labels, style), metric),
    ]
    add_note(figure, "; ".join(filter(None, notes)), x_label=AXIS_LABELS[metric.x])
    return figure


def _draw_small_panel(
    panel: "Axes",
    averages: "dict[tuple[str, str], tuple[Curve, pd.DataFrame]]",
    key: tuple[str, str],
    metric: CurveMetric,
    style: LineStyle,
) -> None:
    """Draw the line of a title and a label over the other lines of the title."""
    for (title, label), (other, average) in averages.items():
        if title == key[0] and label != key[1]:
            options: Any = {"color": BACKGROUND_COLOR, "lw": 0.6, "label": "_behind"}
            if other.method == BASELINE:
                options |= {
                    "color": _BASELINE_COLOR,
                    "linestyle": _BASELINE_DASHES,
                    "lw": 1.0,
                    "zorder": 2.5,
                }
            panel.plot(average.index, average["mean"], **options)
    if key in averages:
        curve, average = averages[key]
        _draw_line(panel, curve, average, style)
        end = _get_last_mean(average)
        text = f"{end:.1f}" if get_metric_info(metric.name).is_fraction else f"{end:.3g}"
        options = {"xycoords": "axes fraction", "ha": "right", "fontsize": 8}
        panel.annotate(text, (0.97, 0.05), color=style.color, **options)
    elif panel.lines:
        panel.annotate("not run", (0.5, 0.45), xycoords="axes fraction", ha="center", fontsize=8)


def _limit_window(metric: CurveMetric, curves: Sequence[Curve]) -> CurveMetric:
    """Show measured values if a run has fewer than two windows: means of few rounds bend a line."""
    lengths = [values.count() for curve in curves for _, values in curve.runs.items()]
    has_windows = bool(lengths) and min(lengths) >= 2 * metric.window
    return metric if has_windows else metric._replace(window=1)


def _average_runs(curve: Curve, metric: CurveMetric) -> "pd.DataFrame":
    """Return the columns `mean`, `low` and `high` over seeds of running means, by round."""
    import pandas as pd

    smoothed = {
        name: values.dropna().rolling(metric.window).mean() for name, values in curve.runs.items()
    }
    runs = pd.DataFrame(smoothed).dropna(how="all").sort_index()
    runs = np.log10(runs) if metric.is_log else runs
    mean, std = runs.mean(axis=1), runs.std(axis=1).fillna(0)
    table = pd.DataFrame({"mean": mean, "low": mean - std, "high": mean + std})
    if get_metric_info(metric.name).missing == NOT_TRAINED:
        rounds = curve.runs.index
        table = table.reindex(rounds[rounds >= table.index[0]])  # NaN where the line has a gap
    return 10**table if metric.is_log else table


def _get_last_mean(average: "pd.DataFrame") -> float:
    return float(average["mean"].dropna().iloc[-1])


def choose_line_styles(curves: Sequence[Curve], highlight: Collection[str]) -> dict[str, LineStyle]:
    """Choose the styles of lines.

    Args:
      curves: the lines.
      highlight: methods in color.

    Returns:
      Styles by label; none if there are more methods than colors and none of them is highlighted.
    """
    lines = list(dict.fromkeys((curve.method, curve.label) for curve in curves))
    highlighted = [line for line in lines if line[0] in highlight]
    styles = {}
    if highlighted and len(highlighted) <= MAX_COLORED_LINES:
        # Few methods in many variants: shades of one hue would be hard to distinguish.
        for label, color in assign_distinct_colors(highlighted).items():
            styles[label] = LineStyle(color, width=2.0)
    elif len({method for method, _ in highlighted or lines}) <= MAX_COLORED_LINES:
        for label, style in make_line_styles(highlighted or lines).items():
            styles[label] = LineStyle(style["color"], style["linestyle"], width=1.6)
    else:
        return {}
    for method, label in lines:
        if method == BASELINE and label not in styles:
            dashed = LineStyle(_BASELINE_COLOR, _BASELINE_DASHES, 1.3, is_highlighted=False)
            styles[label] = dashed
    gray_labels = [label for _, label in lines if label not in styles]
    has_few = len(gray_labels) <= _MAX_LABELED_GRAYS
    for index, label in enumerate(gray_labels):
        gray = GRAYS[index % len(GRAYS) if has_few else 1]
        styles[label] = LineStyle(gray, is_labeled=has_few, is_highlighted=False)
    return styles


def _draw_line(panel: "Axes", curve: Curve, average: "pd.DataFrame", style: LineStyle) -> None:
    """Draw a line with its band, and the reported value of a labeled line."""
    options: dict[str, Any] = {"marker": "o", "markersize": 4} if len(average) == 1 else {}
    (line,) = panel.plot(
        average.index,
        average["mean"],
        color=style.color,
        linestyle=style.linestyle,
        lw=style.width,
        label=curve.label,
        zorder=3 if style.is_highlighted else 2,
        **options,
    )
    mark_isolated_points(line)
    if curve.runs.shape[1] > 1 and style.is_highlighted:
        band: Any = {"color": style.color, "alpha": 0.13, "linewidth": 0}
        panel.fill_between(average.index, average["low"], average["high"], **band)
    if style.is_labeled and not math.isnan(curve.reported):
        # A triangle just outside the right edge.
        options = {"transform": panel.get_yaxis_transform(), "clip_on": False, "zorder": 5}
        options |= {"marker": "<", "markersize": 5, "markeredgewidth": 0, "linestyle": "none"}
        options |= {"color": style.color, "label": f"reported {curve.label}"}
        panel.plot([1.02], [curve.reported], **options)
        panel.update_datalim([(average.index[-1], curve.reported)])
        panel.autoscale_view()


def _finish_panel(panel: "Axes", metric: CurveMetric, curves: Sequence[Curve]) -> None:
    """Style the axes: the last round is the right edge, accuracies stay within 0 and 100."""
    style_axes(panel)
    if not panel.lines:
        has_diverged = any(curve.diverged for curve in curves)
        ended_early = all(curve.ended_early for curve in curves if curve.diverged)
        reason = "ended early" if ended_early else "diverged"
        mark_empty_panel(panel, reason if has_diverged else "not run")
        return
    if metric.x == "round":
        set_integer_ticks(panel)
    first, last = panel.dataLim.intervalx
    panel.set_xlim(0 if first < last else first - 1, last)
    if metric.is_log:
        panel.set_yscale("log")
    elif get_metric_info(metric.name).is_fraction:
        clip_percent_limits(panel)


def _describe_means(curves: Sequence[Curve], metric: CurveMetric) -> str:
    """Return the numbers of rounds and seeds that lines are means of; empty if of none."""
    seeds = sorted({curve.runs.shape[1] for curve in curves})
    counts = []
    if metric.window > 1:
        steps = {step for curve in curves for step in curve.runs.index.to_series().diff()[1:]}
        rounds = "rounds" if steps == {1.0} else "tested rounds"
        counts.append(f"{metric.window} {rounds} (running)")
    if seeds and seeds[-1] > 1:
        counts.append(f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds")
    mean = "geometric mean" if metric.is_log else "mean"
    return f"line: {mean} of {' and '.join(counts)}" if counts else ""


def _make_note(curves: Sequence[Curve], styles: dict[str, LineStyle], metric: CurveMetric) -> str:
    """Describe bands, marks, gray lines and diverged runs."""
    available = [(curve, styles[curve.label]) for curve in curves if len(curve.runs)]
    means = _describe_means([curve for curve, _ in available], metric)
    parts = [means] if means else []
    if any(curve.runs.shape[1] > 1 and style.is_highlighted for curve, style in available):
        parts.append("band: one standard deviation over seeds")
    if any(style.is_labeled and not math.isnan(curve.reported) for curve, style in available):
        parts.append(f"◂: reported {metric.reported_kind} value")
    unlabeled = [label for label, style in styles.items() if not style.is_labeled]
    if unlabeled:
        direction = get_metric_info(metric.name).higher_is_better
        named = "highest" if direction is None else "best"
        parts.append(f"gray: {', '.join(unlabeled)}, the {named} of them named")
    diverged = list(dict.fromkeys(curve.label for curve in curves if curve.diverged))
    if diverged:
        parts.append(
            f"{DIVERGED} runs that diverged or ended early are left out: {', '.join(diverged)}"
        )
    return "; ".join(filter(None, [*parts, metric.comparison]))


def _make_line_labels(
    ends: Sequence[tuple[Curve, float]], styles: dict[str, LineStyle], *, lowest: bool = False
) -> list[LineLabel]:
    """Return the labels of a panel: one for each labeled line, and one for the best other line."""
    unlabeled = [(y, curve.label) for curve, y in ends if not styles[curve.label].is_labeled]
    choose = min if lowest else max
    best = choose(unlabeled)[1] if unlabeled else ""
    has_gray = any(not style.is_highlighted for style in styles.values())
    labels = []
    for curve, y in ends:
        style = styles[curve.label]
        if style.is_labeled or curve.label == best:
            text = f"{curve.label} {DIVERGED}" if curve.diverged else curve.label
            labels.append(LineLabel(text, y, style.color, has_gray and style.is_highlighted))
    return labels
