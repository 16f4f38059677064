"""A measure against a numeric setting: the heterogeneity of the data, a weight of the method."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.common.doors import door
from fedjax_het.common.errors import SHOWN, require, require_name
from fedjax_het.common.pictures import plain_axes
from fedjax_het.common.text import figure_text
from fedjax_het.report.grouping import (
    Line,
    chosen_settings,
    diverged,
    figure_lines,
    is_numeric,
    is_shared,
    setting_columns,
    setting_name,
)
from fedjax_het.report.learning_curves import columns_of
from fedjax_het.report.line_ends import End, name_ends
from fedjax_het.report.measures import (
    higher_is_better,
    measure_label,
    require_measure,
    scale_of,
    values_of,
)
from fedjax_het.report.style import (
    GREYS,
    MOST_COLUMNS,
    PALETTE,
    Sharing,
    add_note,
    is_leftmost,
    is_lowest,
    line_styles,
    make_panels,
    within_percent,
)
from fedjax_het.running.store import newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_SPACING = 0.09  # of the axis
_CROSS = 0.05  # height of a cross and its room, of the axis
_MOST_CROSSES = 6  # over each other; more overlap
_AXES = {"alpha": "Dirichlet alpha (small: heterogeneous)"}
_DECADE = 10  # values that span more are told apart on a logarithmic axis


@door
def plot_against_alpha(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
) -> "Figure":
    """A measure over the Dirichlet alphas: `plot_against` of that setting."""
    return plot_against(results, x="alpha", by=by, measures=(measure,))


@door
def plot_against(
    results: "pd.DataFrame",
    *,
    x: str,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    measures: Sequence[str] = ("final_accuracy",),
    missing_at: float | None = None,
) -> "Figure":
    """A line per method and hyper-parameters over a numeric setting, a row of panels per measure.

    Lines are means over seeds, bands one standard deviation, faint points the single runs; each has
    its name at its end. Of more than eight methods those are in colour that are best in the mean
    over the axis, the others grey. A run that diverged is a cross at the lower edge and in no mean.
    Other settings that vary have a panel each. The axis is logarithmic for alpha, and for positive
    values that span a factor of ten.

    Args:
      results: as `load_results` gives it.
      x: a setting of numbers, e.g. "hp.gamma".
      by: names of settings; default: those that vary, apart from the seeds.
      panels: those that have panels, the last a column per value; default: those of `by` that runs
        of every method have.
      measures: columns of `results` that hold numbers.
      missing_at: where runs are drawn that do not have the setting (`data_sharing` at a gamma of
        0); default: they are left out.
    Errors:
      ConfigError for a setting or measure that these runs do not have, for a setting of other than
      numbers, and for no run that has it.
    """
    results = newest(results)
    require(len(measures) > 0, "measures", measures, "at least one")
    by = [name for name in chosen_settings(results, by) if name != x]
    panels = chosen_settings(results, panels) if panels else list(filter(is_shared, by))
    for measure in measures:
        require_measure(results, measure)
    results, axis = _placed(results, x, missing_at)
    lines = figure_lines(results, by, panels)
    titles = list(dict.fromkeys(line.panel for line in lines))
    places = [(measure, title) for measure in measures for title in titles]
    size = (6.0, 3.9) if len(places) == 1 else (4.0, 3.2)
    columns = len(titles) if len(titles) <= MOST_COLUMNS else columns_of(results, panels)
    sharey: Sharing = "none" if "dataset" in panels else "row" if len(measures) > 1 else "all"
    figure, grid = make_panels(
        [f"{title}\n{measure}" for measure, title in places],
        columns=columns,
        size=size,
        sharey=sharey,
    )
    axes = dict(zip(places, grid.values(), strict=True))
    styles = _styles(lines, measures[0])
    values = sorted(results[x].unique())
    log = x == "alpha" or (values[0] > 0 and values[-1] >= _DECADE * values[0])
    any_lost = False
    for measure in measures:
        own = {title: axes[measure, title] for title in titles}
        any_lost |= _draw_row(own, lines, (x, measure), styles)
    for (measure, title), panel in axes.items():
        panel.set_title(figure_text(title), fontsize=10, wrap=True)
        plain_axes(panel)
        _value_axis(panel, values, log)
        if is_leftmost(panel):
            panel.set_ylabel(figure_text(measure_label(measure)), fontsize=10)
        if is_lowest(panel, axes.values()):
            panel.set_xlabel(figure_text(axis), fontsize=10)
    named = [line for line in lines if line.label in styles]
    ends = {
        panel: [_end(line, x, measure, styles[line.label]) for line in named if line.panel == title]
        for (measure, title), panel in axes.items()
    }
    name_ends(figure, ends)
    add_note(figure, _note(lines, x, styles, any_lost))
    return figure


def _styles(lines: Sequence[Line], measure: str) -> dict[str, dict[str, Any]]:
    """Of the lines that are in colour: those of eight methods at most, the best."""
    means: dict[str, list[float]] = {}
    for line in lines:
        mean = values_of(line.runs[~diverged(line.runs)], measure).mean()
        means.setdefault(line.method, []).append(-math.inf if math.isnan(mean) else mean)
    sign = 1 if higher_is_better(measure) else -1
    best = sorted(means, key=lambda name: sign * sum(means[name]) / len(means[name]), reverse=True)
    chosen = best[: len(PALETTE)]
    return line_styles((line.method, line.label) for line in lines if line.method in chosen)


def _end(line: Line, x: str, measure: str, style: dict[str, Any]) -> End:
    """Where its mean is at the largest value that it has."""
    good = line.runs[~diverged(line.runs)]
    means = values_of(good, measure).dropna().groupby(good[x]).mean()
    return End(line.label, float(means.iloc[-1]) if len(means) else math.nan, style["color"])


def _note(lines: Sequence[Line], x: str, styles: dict[str, dict], any_lost: bool) -> str:
    parts = []
    if any(line.runs[x].duplicated().any() for line in lines):
        parts.append("lines: means; bands: one standard deviation; small points: single runs")
    grey = list(dict.fromkeys(line.label for line in lines if line.label not in styles))
    if grey:
        parts.append(f"grey: {', '.join(grey)}")
    if any_lost:
        parts.append("×: a run that diverged")
    return "; ".join(parts)


def _placed(
    results: "pd.DataFrame", x: str, missing_at: float | None
) -> tuple["pd.DataFrame", str]:
    """The runs that have a place on the axis, and what the axis is."""
    argument = x.split(".", 1)[-1][:SHOWN]
    require(x in results and results[x].notna().any(), argument, None, "runs with one")
    require_name("x", x, [n for n in setting_columns(results) if is_numeric(results[n])])
    axis = _AXES.get(x, setting_name(x))
    if missing_at is not None:
        without = results["algorithm"][results[x].isna()].unique()
        axis += f" (at {missing_at:g}: {', '.join(without)})" if len(without) else ""
        results = results.fillna({x: missing_at})
    return results[results[x].notna()], axis


def _draw_row(
    panels: dict[str, "Axes"],
    lines: Sequence[Line],
    names: tuple[str, str],
    styles: dict[str, dict],
) -> bool:
    """The panels of one measure, by title, with room for crosses below. Whether there are any."""
    x, measure = names
    lost: dict[str, dict[float, int]] = {title: {} for title in panels}
    for title, _, label, runs in lines:
        _draw(panels[title], runs, (x, measure, label), styles.get(label), lost[title])
    most = max((number for counts in lost.values() for number in counts.values()), default=0)
    strip = _CROSS * min(most, _MOST_CROSSES)
    if scale_of(measure) == 100:
        for panel in panels.values():
            within_percent(panel)
    limits = [panel.get_ylim() for panel in panels.values()]
    for panel, (low, high) in zip(panels.values(), limits, strict=True):
        panel.set_ylim(low - strip / (1 - strip) * (high - low), high)
    return any(lost.values())


def _draw(
    panel: "Axes",
    runs: "pd.DataFrame",
    names: tuple[str, str, str],
    style: dict[str, Any] | None,
    lost: dict[float, int],
) -> None:
    """One line; grey and without single runs if it has no style. `lost` counts the crosses drawn at
    each value, so that they do not overlap."""
    x, measure, label = names
    good = runs[~diverged(runs)]
    values = values_of(good, measure).dropna()
    by_value = values.groupby(good[x])
    # A gap where all runs diverged.
    mean = by_value.mean().reindex(sorted(runs[x].unique()))
    spread = by_value.std().reindex(mean.index).fillna(0)
    look = style or {"color": GREYS[1], "linestyle": "-", "marker": "."}
    colour = look["color"]
    if mean.notna().any():
        panel.plot(
            mean.index,
            mean,
            lw=1.8 if style else 1.0,
            markersize=5,
            label=label,
            zorder=3 if style else 2,
            **look,
        )
    if style and mean.notna().any():
        panel.fill_between(
            mean.index, mean - spread, mean + spread, color=colour, alpha=0.1, linewidth=0
        )
    if style and by_value.size().max() > 1:
        panel.plot(
            good[x][values.index],
            values,
            linestyle="none",
            marker=style["marker"],
            markersize=3.5,
            markeredgewidth=0,
            color=colour,
            alpha=0.35,
            label="_runs",
        )
    for value in runs[x][diverged(runs)].unique():
        number = lost.get(value, 0)
        lost[value] = number + 1
        panel.plot(
            [value],
            [_CROSS * (0.6 + number % _MOST_CROSSES)],
            transform=panel.get_xaxis_transform(),
            marker="x",
            linestyle="none",
            color=colour,
            label="_diverged",
        )


def _value_axis(panel: "Axes", values: Sequence[float], log: bool) -> None:
    """A tick at every value, and its text as far as there is room."""
    from matplotlib.ticker import NullLocator

    if log:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
    forward, back = (math.log10, lambda place: 10**place) if log else (float, float)
    low, high = forward(values[0]), forward(values[-1])
    margin = 0.06 * (high - low) or 0.3
    panel.set_xlim(back(low - margin), back(high + margin / 3))  # names stand at the right
    labels, last = [], -math.inf
    for value in values:
        place = (forward(value) - low) / (high - low + margin * 4 / 3)
        labels.append(f"{value:g}" if place - last >= _LABEL_SPACING else "")
        last = place if labels[-1] else last
    panel.set_xticks(values, labels)
