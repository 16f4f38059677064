"""Comparison of methods over clients: distributions, paired tests, and ranks with their significance."""

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
)
from fedjax_het.metrics.personal import wilcoxon
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINT_SPREAD = 0.3  # of a method's points to either side
SIGNIFICANCE_LEVEL = 0.05
_ROW_HEIGHT, _BAR_HEIGHT = 0.26, 0.12  # inches of a name, of a bar
_INK = "#333333"


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
    width = max(3.6, 1.0 + 0.42 * max(len(methods) for methods in panels.values()))
    columns = max(1, int(14 / width))
    figure, axes = make_panels(list(panels), columns=columns, size=(width, 3.6), sharey="none")
    names = list(dict.fromkeys(name for methods in panels.values() for name in methods))
    colored = [name for name in names if name in highlight] or names
    colors = dict.fromkeys(names, GRAYS[1]) | assign_method_colors(colored)
    for title, methods in panels.items():
        _draw_boxes(axes[title], methods, colors)
    label_outer_axes(axes.values(), y="Test accuracy of a client (%)")
    return figure


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
    panel.set_xticks(range(len(methods)), list(methods), rotation=45, ha="right", fontsize=9)
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


def find_cliques(ranks: Sequence[float], critical_difference: float) -> list[tuple[int, int]]:
    """Find the largest groups of methods whose mean ranks do not differ significantly.

    Args:
      ranks: mean ranks in ascending order.
      critical_difference: largest difference within a group.

    Returns:
      Indices of the first and the last method of each group of two or more.
    """
    cliques: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(i for i, other in enumerate(ranks) if other - rank <= critical_difference)
        if last > first and not (cliques and cliques[-1][1] >= last):
            cliques.append((first, last))
    return cliques


def plot_critical_difference(names: Sequence[str], scores: np.ndarray, title: str = "") -> "Figure":
    """Plot methods on an axis of mean ranks; bars join methods that do not differ significantly.

    Source: Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006.

    Args:
      names: names of the methods.
      scores: scores `[blocks, M]`, the higher the better.
      title: title of the figure.

    Returns:
      The figure, the best method on the left.

    Raises:
      ConfigError: if there are fewer than three methods or two blocks.
    """
    from matplotlib.figure import Figure

    friedman, count = compute_mean_ranks(scores), len(names)
    order = np.argsort(friedman.ranks, kind="stable")
    ranks, length = friedman.ranks[order], friedman.critical_difference
    bars = find_cliques(ranks.tolist(), length)
    num_left = -(-count // 2)
    height = 1.1 + _BAR_HEIGHT * (len(bars) + 1) + _ROW_HEIGHT * num_left
    figure = Figure(figsize=(7.2, height), layout="constrained")
    panel = figure.subplots()
    panel.set_xlim(-0.15 * count, 1.15 * count + 1)
    panel.set_ylim(1.1 - height, 0.6)
    panel.axis("off")
    panel.plot([1, count], [0, 0], lw=1, color=_INK)
    for tick in range(1, count + 1, max(1, count // 10)):
        panel.plot([tick, tick], [0, 0.06], lw=1, color=_INK)
        panel.text(tick, 0.1, str(tick), ha="center", va="bottom", fontsize=8)
    panel.plot([1, 1 + length], [0.36, 0.36], lw=2, color=_INK, marker="|")
    panel.text(1 + length / 2, 0.4, f"CD {length:.2f}", ha="center", fontsize=8)
    for index, (first, last) in enumerate(bars):
        y = -_BAR_HEIGHT * (index + 1)
        ends = ranks[first] - 0.03, ranks[last] + 0.03
        panel.plot(ends, [y, y], lw=3.5, color=_INK, solid_capstyle="round")
    colors = assign_method_colors(names)
    for position, name in enumerate(names[index] for index in order):
        is_left = position < num_left
        row = position if is_left else count - 1 - position
        y, x = -_BAR_HEIGHT * (len(bars) + 1.5) - _ROW_HEIGHT * row, 0.7 if is_left else count + 0.3
        rank = ranks[position]
        panel.plot([rank, rank, x], [0, y, y], lw=1, color=colors[name], label=name)
        text = f"{name}  {rank:.1f}" if is_left else f"{rank:.1f}  {name}"
        options: dict[str, Any] = {"ha": "right" if is_left else "left", "va": "center"}
        panel.text(x, y, f" {escape_mathtext(text)} ", fontsize=9, **options)
    p_value = "p < 0.001" if friedman.p_value < 0.001 else f"p = {friedman.p_value:.3f}"
    caption = f"{title} (Friedman {p_value}, {friedman.num_blocks} blocks)"
    figure.suptitle(escape_mathtext(caption), fontsize=10)
    return figure
