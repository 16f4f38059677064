"""Comparison of methods over clients: distributions, paired tests, and ranks with significance."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.analysis.figures.style import (
    GRAYS,
    assign_method_colors,
    label_outer_axes,
    make_panels,
    mark_empty_panel,
    style_axes,
    wrap_title,
)
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.metrics.personal import wilcoxon
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINT_SPREAD = 0.3  # of a method's points to either side
SIGNIFICANCE_LEVEL = 0.05


@validate_arguments
def plot_client_accuracies(
    panels: Mapping[str, Mapping[str, np.ndarray]], *, highlight: Sequence[str] = ()
) -> "Figure":
    """Plot the distribution of the clients' accuracies: a panel per mapping, a box per method.

    A box is the middle half of the clients with the median as a line. Whiskers end at the most
    distant client within 1.5 times the box, the diamond is the mean, and each client is a point.
    Points are spread sideways evenly in the order of the clients.

    Args:
      panels: by title, the accuracies by method: fractions `[K]`, NaN for a client without a value.
        Methods keep their order.
      highlight: methods in color, the others being gray; default: all.

    Returns:
      The figure.

    Raises:
      ConfigError: if there is no panel.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis import plot_client_accuracies
      >>> figure = plot_client_accuracies({"digits": {"fedavg": np.array([0.5, 0.7, 0.9])}})
      >>> figure.axes[0].get_ylabel()
      'Test accuracy of a client (%)'
    """
    require(len(panels) > 0, "panels", "none", "at least one")
    names = list(dict.fromkeys(name for methods in panels.values() for name in methods))
    # Names stand at 45 degrees below the axes.
    excess = max(0.0, 0.05 * (max(map(len, names), default=0) - 14))
    width = max(3.6, 1.0 + 0.42 * max(len(methods) for methods in panels.values())) + excess
    columns = max(1, int(14 / width))
    size = (width, 3.6 + excess)
    figure, axes = make_panels(list(panels), columns=columns, size=size, sharey="none")
    colored = [name for name in names if name in highlight] or names
    colors = dict.fromkeys(names, GRAYS[1]) | assign_method_colors(colored)
    for title, methods in panels.items():
        _draw_boxes(axes[title], methods, colors)
    label_outer_axes(axes.values(), y="Test accuracy of a client (%)")
    return choose_fonts(figure)


def _draw_boxes(panel: "Axes", methods: Mapping[str, np.ndarray], colors: dict[str, str]) -> None:
    style_axes(panel)
    if not methods:
        return mark_empty_panel(panel, "not run")
    panel.grid(visible=False, axis="x")
    mean_style = {"marker": "D", "markersize": 4, "markerfacecolor": "white", "zorder": 4}
    for position, (method, accuracies) in enumerate(methods.items()):
        values = 100 * np.asarray(accuracies, np.float64)
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        color: dict[str, Any] = {"color": colors[method]}
        panel.boxplot(
            values,
            positions=[position],
            widths=0.7,
            showfliers=False,
            showmeans=True,
            manage_ticks=False,
            medianprops={**color, "lw": 1.6},
            boxprops=color,
            whiskerprops=color,
            capprops=color,
            meanprops={**mean_style, "markeredgecolor": colors[method]},
        )
        x = position + np.linspace(-_POINT_SPREAD, _POINT_SPREAD, len(values))
        panel.scatter(x, values, s=9, **color, alpha=0.45, linewidth=0)
    labels = [escape_mathtext(get_method_title(name)) for name in methods]
    panel.set_xticks(range(len(methods)), labels, rotation=45, ha="right", fontsize=9)
    panel.set_xlim(-0.6, len(methods) - 0.4)


@validate_arguments
def run_paired_tests(
    accuracies: Mapping[str, np.ndarray], methods: Sequence[str]
) -> "pd.DataFrame":
    """Run Wilcoxon's signed-rank test of each of `methods` against every other method.

    Args:
      accuracies: by method, fractions `[K]` of the same clients in the same order.
      methods: methods that are compared with the others.

    Returns:
      One row per pair: `method`, `against`, `clients`, `ties`, `mean_difference` and
      `median_difference` over clients in percentage points, and `p_value` (two-sided).

    Raises:
      ConfigError: if a method has no accuracies.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis import run_paired_tests
      >>> accuracies = {"fedamp": np.array([0.9, 0.8, 0.7]), "fedavg": np.array([0.8, 0.6, 0.6])}
      >>> pairs = run_paired_tests(accuracies, ["fedamp"])
      >>> pairs[["against", "clients", "p_value"]].to_numpy().tolist()
      [['fedavg', 3, 0.25]]
    """
    import pandas as pd

    rows = []
    for method in methods:
        require_name("methods", method, accuracies)
        for other, values in accuracies.items():
            if other != method:
                test = wilcoxon(accuracies[method], values)
                differences = np.asarray(accuracies[method]) - np.asarray(values)
                rows.append(
                    {
                        "method": method,
                        "against": other,
                        "clients": test.num_pairs,
                        "ties": test.num_ties,
                        "mean_difference": 100 * float(np.nanmean(differences)),
                        "median_difference": 100 * test.median_difference,
                        "p_value": test.p_value,
                    }
                )
    return pd.DataFrame(rows)


class FriedmanResult(NamedTuple):
    """Mean ranks of methods over blocks, and Friedman's test that all methods rank alike."""

    ranks: np.ndarray
    """Mean rank of each method, `[M]`; 1 is the best. Equal scores share their mean rank."""
    statistic: float
    p_value: float
    critical_difference: float
    """Difference of two mean ranks beyond chance at 5 % for all pairs together (Nemenyi)."""
    num_blocks: int


def compute_mean_ranks(scores: np.ndarray) -> FriedmanResult:
    """Rank methods within each block, and test whether their mean ranks differ.

    Blocks are assumed to be independent; if they are not, p-values are too small.

    Args:
      scores: scores `[blocks, M]`, the higher the better. Blocks with a NaN are left out.

    Raises:
      ConfigError: if there are fewer than three methods or two blocks.
    """
    from scipy import stats

    scores = np.asarray(scores, np.float64)
    require(scores.ndim == 2 and scores.shape[1] > 2, "scores", scores.shape, "[blocks, 3 or more]")
    scores = scores[~np.isnan(scores).any(1)]
    num_blocks, num_methods = scores.shape
    require(num_blocks > 1, "scores", f"{num_blocks} whole blocks", "two or more")
    statistic, p_value = stats.friedmanchisquare(*scores.T)
    quantile = stats.studentized_range.ppf(1 - SIGNIFICANCE_LEVEL, num_methods, math.inf)
    variance = num_methods * (num_methods + 1) / (6 * num_blocks)
    return FriedmanResult(
        stats.rankdata(-scores, axis=1).mean(0),
        float(statistic),
        float(p_value),
        float(quantile / math.sqrt(2) * math.sqrt(variance)),
        num_blocks,
    )


def plot_critical_difference(names: Sequence[str], scores: np.ndarray, title: str = "") -> "Figure":
    """Plot mean ranks with intervals that overlap if two methods do not differ significantly.

    An interval is as long as the critical difference. Source: Demsar, "Statistical Comparisons of
    Classifiers over Multiple Data Sets", JMLR 2006.

    Args:
      names: names of the methods.
      scores: scores `[blocks, M]`, the higher the better.
      title: title of the figure.

    Returns:
      A figure with a row per method, the best at the top.

    Raises:
      ConfigError: if there are fewer than three methods or two blocks.
    """
    from matplotlib.figure import Figure

    friedman, colors = compute_mean_ranks(scores), assign_method_colors(names)
    width = 6.4 + max(0.0, 0.07 * (max(map(len, names)) - 30))
    figure = Figure(figsize=(width, 0.9 + 0.2 * len(names)), layout="constrained")
    panel = figure.subplots()
    order = np.argsort(friedman.ranks, kind="stable")
    margin = friedman.critical_difference / 2
    for row, index in enumerate(order):
        rank, color = friedman.ranks[index], colors[names[index]]
        panel.errorbar(rank, row, xerr=margin, fmt="o", ms=4, lw=2, color=color)
        panel.text(rank, row - 0.2, f"{rank:.1f}", ha="center", va="bottom", fontsize=7)
    labels = [escape_mathtext(names[index]) for index in order]
    panel.set_yticks(range(len(order)), labels, fontsize=8)
    panel.set_ylim(len(order) - 0.5, -0.8)
    panel.set_xlabel(f"Mean rank; bars: critical difference {friedman.critical_difference:.2f}")
    style_axes(panel)
    p_value = "p < 0.001" if friedman.p_value < 0.001 else f"p = {friedman.p_value:.3f}"
    caption = f"{title} (Friedman {p_value}, {friedman.num_blocks} blocks)"
    figure.suptitle(wrap_title(caption, width), fontsize=10)
    return choose_fonts(figure)
