"""Learning curves: one measure against the round, with bands over seeds."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require_name
from fedjax_het.common.pictures import plain_axes
from fedjax_het.common.records import Count
from fedjax_het.common.text import DIVERGED, figure_text
from fedjax_het.report.grouping import (
    chosen_settings,
    diverged,
    figure_lines,
    group_runs,
    is_shared,
)
from fedjax_het.report.measures import measure_label, scale_of
from fedjax_het.report.style import (
    Sharing,
    add_legend,
    band_opacity,
    empty_panel,
    is_leftmost,
    is_lowest,
    line_styles,
    make_panels,
    whole_ticks,
    within_percent,
)
from fedjax_het.running.store import newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_ROUNDS = 5
_TICK = (0, (3, 1))  # dashes, in points


class Curve(NamedTuple):
    """One line of the figure, and the runs behind it."""

    panel: str
    method: str
    label: str
    runs: "pd.DataFrame"
    """A row per measured round and a column per run, as drawn: smoothed, in percent."""
    diverged: bool = False
    """Whether a run is not in `runs` because it diverged."""
    reported: float = math.nan
    """A final value to compare with."""


@door
def plot_learning_curves(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    measure: str = "test_accuracy",
    window: Count = SMOOTHED_ROUNDS,
) -> "Figure":
    """A line per method and hyper-parameters, a panel for each of the other settings.

    Lines are means over seeds of a running mean over `window` measured rounds (five: an accuracy's
    line ends at the value of the overview), with a band of one standard deviation over seeds. Runs
    that diverged are left out, and their lines marked in the legend.

    Args:
      results, curves: as `load_results` and `load_curves` give them.
      by: names of settings; default: those that vary, apart from the seeds.
      panels: those that have panels, the last a column per value; default: those of `by` that runs
        of every method have.
      measure: a column of `curves`.
    Errors:
      ConfigError for a setting or measure that these runs do not have.
    """
    results = newest(results)
    by = chosen_settings(results, by)
    panels = chosen_settings(results, panels) if panels else list(filter(is_shared, by))
    if not len(curves):
        raise ConfigError("curves = none: expected those of `load_curves`")
    require_name("measure", measure, [n for n in curves.columns if n not in ("digest", "round")])
    lines = [
        Curve(
            line.panel,
            line.method,
            line.label,
            runs=values_by_round(line.runs, curves, measure, window=window),
            diverged=bool(diverged(line.runs).any()),
        )
        for line in figure_lines(results, by, panels)
    ]
    titles = list(dict.fromkeys(line.panel for line in lines))
    sharey: Sharing = "row" if "dataset" in panels else "all"
    return draw_curves(
        lines,
        titles,
        columns=columns_of(results, panels),
        measure=measure,
        sharey=sharey,
        window=window,
    )


def columns_of(results: "pd.DataFrame", panels: Sequence[str]) -> int:
    """As many panels beside each other as the last of these settings has values; where their
    number differs between data sets, the most of one."""
    groups = group_runs(results, [name for name in panels if name == "dataset"])
    return max(len(group_runs(runs, panels[-1:])) for _, runs in groups)


@door
def plot_gradient_gaps(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] = (),
    panels: Sequence[str] = ("dataset", "classes"),
) -> "Figure":
    """How far the server's gradient, and the clients', are from that of all clients' data (FSL's
    Figure 9): `server_gap` and `client_gap` against the round, on one logarithmic axis.

    Both are squared Euclidean distances of the rounds that were measured; means over seeds, and
    their bands, are those of the logarithms.
    Arguments and errors are those of `plot_learning_curves`; `by`: what tells lines of a panel
    apart.
    """
    results = newest(results)
    names = [*chosen_settings(results, panels), *(chosen_settings(results, by) if by else ())]
    lines = []
    for method, measure in (("fsl", "server_gap"), ("fedavg", "client_gap")):
        require_name("measure", measure, list(curves.columns))
        for line in figure_lines(results, names, panels):
            values = values_by_round(line.runs, curves, measure, window=1)
            label = measure_label(measure) + (f", {line.label}" if by else "")
            lines.append(Curve(line.panel, method, label, values, bool(diverged(line.runs).any())))
    return draw_curves(
        lines,
        list(dict.fromkeys(line.panel for line in lines)),
        columns=columns_of(results, panels),
        measure="gradient_gap",
        sharey="row" if "dataset" in panels else "all",
        window=1,
        log=True,
    )


def values_by_round(
    runs: "pd.DataFrame",
    curves: "pd.DataFrame",
    measure: str = "test_accuracy",
    *,
    window: int = SMOOTHED_ROUNDS,
) -> "pd.DataFrame":
    """Running means over `window` measured rounds: a row per round, a column per run.

    Runs that diverged are left out. Accuracies are in percent.
    """
    import pandas as pd

    if not len(curves) or not len(runs) or measure not in curves:
        return pd.DataFrame()
    wanted = runs["digest"][~diverged(runs)]
    own = curves[curves["digest"].isin(wanted)].dropna(subset=measure)
    by_round = scale_of(measure) * own.pivot(index="round", columns="digest", values=measure)
    smoothed = by_round.rolling(window, min_periods=1).mean()
    return smoothed.where(by_round.notna())  # a shorter run does not go on


def draw_curves(
    lines: Sequence[Curve],
    panels: Sequence[str],
    *,
    columns: int,
    measure: str = "test_accuracy",
    sharey: Sharing = "row",
    window: int = SMOOTHED_ROUNDS,
    reported: str = "final",
    log: bool = False,
) -> "Figure":
    """The figure of these lines. A panel without any run says so. On a logarithmic axis, means and
    deviations over seeds are those of the logarithms.

    A dashed tick right of the last round is the reported value, of the kind that `reported` names;
    `window` is how many rounds the lines are means of.
    """
    figure, axes = make_panels(panels, columns=columns, size=(3.5, 2.7), sharey=sharey)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(6.4, width), height + 0.3)
    styles = line_styles((line.method, line.label) for line in lines)
    opacity = band_opacity(len({line.label for line in lines if len(line.runs)}))
    for line in lines:
        if len(line.runs):
            look = {name: styles[line.label][name] for name in ("color", "linestyle")}
            _draw(line, axes[line.panel], look, opacity, log)
    for panel in axes.values():
        plain_axes(panel)
        if panel.lines:
            whole_ticks(panel)
            first, last = panel.get_xlim()
            if last - first < 2:
                panel.set_xlim(first - 1, last + 1)
            if scale_of(measure) == 100:
                within_percent(panel)
            if log:
                panel.set_yscale("log")
        else:
            empty_panel(panel, "not run" if not _only_diverged(panel, axes, lines) else "diverged")
        if is_leftmost(panel):
            panel.set_ylabel(figure_text(measure_label(measure)), fontsize=10)
        if is_lowest(panel, axes.values()):
            mean = f" (running mean of {window})" if window > 1 else ""
            panel.set_xlabel(f"Round{mean}", fontsize=10)
    add_legend(figure, _handles(lines, styles, reported))
    return figure


def _draw(line: Curve, panel: "Axes", look: dict, opacity: float, log: bool) -> None:
    import numpy as np

    values = np.log10(line.runs) if log else line.runs
    mean, spread = values.mean(axis=1), values.std(axis=1).fillna(0)
    low, high = mean - spread, mean + spread
    if log:
        mean, low, high = 10**mean, 10**low, 10**high
    # A single round is a point: a line would not be seen.
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
    panel.plot(mean.index, mean, lw=1.6, label=line.label, **look, **marker)
    if line.runs.shape[1] > 1:
        panel.fill_between(
            mean.index,
            low,
            high,
            color=look["color"],
            alpha=opacity,
            linewidth=0,
        )
    if not math.isnan(line.reported):
        last = mean.index[-1]
        panel.plot(
            [1.03 * last, 1.13 * last],
            [line.reported] * 2,
            color=look["color"],
            linestyle=_TICK,
            lw=1.4,
        )


def _only_diverged(panel: "Axes", axes: dict, lines: Sequence[Curve]) -> bool:
    return any(line.diverged and axes[line.panel] is panel for line in lines)


def _handles(lines: Sequence[Curve], styles: dict[str, dict], reported: str) -> list:
    from matplotlib.lines import Line2D

    drawn = {line.label for line in lines if len(line.runs)}
    lost = {line.label for line in lines if line.diverged}
    handles = [
        Line2D(
            [],
            [],
            color=style["color"],
            linestyle=style["linestyle"],
            lw=2,
            label=f"{label} {DIVERGED}" if label in lost else label,
        )
        for label, style in styles.items()
        if label in drawn | lost
    ]
    if any(len(line.runs) and not math.isnan(line.reported) for line in lines):
        label = f"reported {reported} value"
        handles.append(Line2D([], [], color="#444444", linestyle=_TICK, label=label))
    if lost:
        handles.append(
            Line2D([], [], linestyle="none", label=f"{DIVERGED} runs that diverged are left out")
        )
    return handles
