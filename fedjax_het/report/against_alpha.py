"""A measure against the heterogeneity of the clients' data."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.errors import require
from fedjax_het.report.grouping import chosen_settings, diverged, figure_lines
from fedjax_het.report.measures import measure_label, require_measure, scale_of, values_of
from fedjax_het.report.style import (
    add_legend,
    band_opacity,
    is_leftmost,
    is_lowest,
    line_styles,
    make_panels,
    plain_axes,
    within_percent,
)
from fedjax_het.store import newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_SPACING = 0.09  # of the axis
_CROSS = 0.05  # height of a cross and its room, of the axis
_MOST_CROSSES = 6  # over each other; more overlap


def plot_against_alpha(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
) -> "Figure":
    """A line per method and hyper-parameters over the Dirichlet alphas, on a logarithmic axis.

    Lines are means over seeds, bands one standard deviation, faint points the single runs. A run
    that diverged is a cross at the lower edge and in no mean. Other settings that vary have a
    panel each. Runs without an alpha are left out.

    Args:
      results: as `load_results` gives it.
      by: names of settings; default: those that vary, apart from the seeds.
      measure: a column of `results` that holds numbers.
    Errors:
      ConfigError for a setting or measure that these runs do not have, and for no alpha at all.
    """
    from matplotlib.lines import Line2D

    results = newest(results)
    by = [name for name in chosen_settings(results, by) if name != "alpha"]
    require_measure(results, measure)
    require("alpha" in results and results["alpha"].notna().any(), "alpha", None, "runs with one")
    results = results[results["alpha"].notna()]
    lines = figure_lines(results, by)
    titles = list(dict.fromkeys(panel for panel, *_ in lines))
    size = (6.0, 3.9) if len(titles) == 1 else (4.0, 3.2)
    sharey = "none" if "dataset" in by else "all"
    figure, panels = make_panels(titles, columns=len(titles), size=size, sharey=sharey)
    styles = line_styles((method, label) for _, method, label, _ in lines)
    opacity = band_opacity(len(styles))
    lost = {title: {} for title in titles}
    for title, _, label, runs in lines:
        _draw(panels[title], runs, measure, label, styles[label], opacity, lost[title])
    most = max((number for counts in lost.values() for number in counts.values()), default=0)
    strip = _CROSS * min(most, _MOST_CROSSES)
    if scale_of(measure) == 100:
        for panel in panels.values():
            within_percent(panel)
    limits = [panel.get_ylim() for panel in panels.values()]
    for panel, (low, high) in zip(panels.values(), limits, strict=True):
        panel.set_ylim(low - strip / (1 - strip) * (high - low), high)
    alphas = sorted(results["alpha"].unique())
    for panel in panels.values():
        plain_axes(panel)
        _alpha_axis(panel, alphas)
        if is_leftmost(panel):
            panel.set_ylabel(measure_label(measure), fontsize=10)
        if is_lowest(panel, panels.values()):
            panel.set_xlabel("Dirichlet alpha (small: heterogeneous)", fontsize=10)
    handles = [
        Line2D([], [], lw=1.8, markersize=5, label=label, **style)
        for label, style in styles.items()
    ]
    if any(lost.values()):
        handles.append(
            Line2D([], [], color="#444444", marker="x", linestyle="none", label="diverged")
        )
    add_legend(figure, handles)
    return figure


def _draw(
    panel: "Axes",
    runs: "pd.DataFrame",
    measure: str,
    label: str,
    style: dict,
    opacity: float,
    lost: dict[float, int],
) -> None:
    """One line. `lost` counts the crosses drawn at each alpha, so that they do not overlap."""
    good = runs[~diverged(runs)]
    values = values_of(good, measure).dropna()
    by_alpha = values.groupby(good["alpha"])
    # A gap where all runs diverged.
    mean = by_alpha.mean().reindex(sorted(runs["alpha"].unique()))
    spread = by_alpha.std().reindex(mean.index).fillna(0)
    colour = style["color"]
    if mean.notna().any():
        panel.plot(mean.index, mean, lw=1.8, markersize=5, label=label, **style)
        panel.fill_between(
            mean.index, mean - spread, mean + spread, color=colour, alpha=opacity, linewidth=0
        )
    if by_alpha.size().max() > 1:
        panel.plot(
            good["alpha"][values.index],
            values,
            linestyle="none",
            marker=style["marker"],
            markersize=3.5,
            markeredgewidth=0,
            color=colour,
            alpha=0.35,
            label="_runs",
        )
    for alpha in runs["alpha"][diverged(runs)].unique():
        number = lost.get(alpha, 0)
        lost[alpha] = number + 1
        panel.plot(
            [alpha],
            [_CROSS * (0.6 + number % _MOST_CROSSES)],
            transform=panel.get_xaxis_transform(),
            marker="x",
            linestyle="none",
            color=colour,
            label="_diverged",
        )


def _alpha_axis(panel: "Axes", alphas: Sequence[float]) -> None:
    """A tick at every alpha, and its value as far as there is room."""
    from matplotlib.ticker import NullLocator

    low, high = math.log10(alphas[0]), math.log10(alphas[-1])
    margin = 0.06 * (high - low) or 0.3
    panel.set_xscale("log")
    panel.set_xlim(10 ** (low - margin), 10 ** (high + margin))
    panel.xaxis.set_minor_locator(NullLocator())
    labels, last = [], -math.inf
    for alpha in alphas:
        place = (math.log10(alpha) - low) / (high - low + 2 * margin)
        labels.append(f"{alpha:g}" if place - last >= _LABEL_SPACING else "")
        last = place if labels[-1] else last
    panel.set_xticks(alphas, labels)
