"""Whether methods' ranks over many blocks differ by more than chance: a critical-difference
diagram (Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.analysis.figure_style import assign_method_colors
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNIFICANCE_LEVEL = 0.05
_ROW_HEIGHT, _BAR_HEIGHT = 0.26, 0.12  # inches: of a name, of a bar


class FriedmanResult(NamedTuple):
    """ranks: [M] means over blocks, 1 the best; equal scores share their mean rank. statistic,
    p_value: of Friedman's test that all methods rank alike. difference: of two mean ranks that is
    beyond chance at a level of 5 % for all pairs together (Nemenyi). blocks: how many there are."""

    ranks: np.ndarray
    statistic: float
    p_value: float
    critical_difference: float
    num_blocks: int


def compute_mean_ranks(scores: np.ndarray) -> FriedmanResult:
    """Of scores [blocks, M], the higher the better; blocks with a NaN are left out.

    Blocks are taken to be independent; where they are not, p-values are too small. ConfigError for
    fewer than three methods or two blocks.
    """
    from scipy import stats

    scores = np.asarray(scores, np.float64)
    require(scores.ndim == 2 and scores.shape[1] > 2, "scores", scores.shape, "[blocks, 3 or more]")
    scores = scores[~np.isnan(scores).any(1)]
    num_blocks, num_methods = scores.shape
    require(num_blocks > 1, "scores", f"{num_blocks} whole blocks", "two or more")
    statistic, p_value = stats.friedmanchisquare(*scores.T)
    quantile = stats.studentized_range.ppf(
        1 - SIGNIFICANCE_LEVEL, num_methods, math.inf
    ) / math.sqrt(2)
    critical_difference = quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_blocks))
    ranks = stats.rankdata(-scores, axis=1).mean(0)
    return FriedmanResult(
        ranks, float(statistic), float(p_value), float(critical_difference), num_blocks
    )


def find_cliques(ranks: Sequence[float], critical_difference: float) -> list[tuple[int, int]]:
    """The largest runs (first, last) of sorted ranks whose ends are no further apart."""
    clique_ranges: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(
            i for i, other_rank in enumerate(ranks) if other_rank - rank <= critical_difference
        )
        if last > first and not (clique_ranges and clique_ranges[-1][1] >= last):
            clique_ranges.append((first, last))
    return clique_ranges


def plot_critical_difference(names: Sequence[str], scores: np.ndarray, title: str = "") -> "Figure":
    """Methods on an axis of mean ranks, the best on the left; bars join those whose ranks are not
    told apart. Cost: a figure."""
    from matplotlib.figure import Figure

    friedman = compute_mean_ranks(scores)
    order = np.argsort(friedman.ranks, kind="stable")
    ranks = friedman.ranks[order]
    bars = find_cliques(ranks.tolist(), friedman.critical_difference)
    num_left = -(-len(names) // 2)
    height = 1.1 + _BAR_HEIGHT * (len(bars) + 1) + _ROW_HEIGHT * num_left
    figure = Figure(figsize=(7.2, height), layout="constrained")
    panel = figure.subplots()
    _draw_rank_axis(panel, len(names), height - 0.5, friedman.critical_difference)
    first_row_y = -_BAR_HEIGHT * (len(bars) + 1.5)
    for i, (first, last) in enumerate(bars):
        below = -_BAR_HEIGHT * (i + 1)
        ends = ranks[first] - 0.03, ranks[last] + 0.03
        panel.plot(ends, [below, below], lw=3.5, color="#333333", solid_capstyle="round")
    colors = assign_method_colors(names)
    for position, index in enumerate(order):
        is_left = position < num_left
        row = position if is_left else len(names) - 1 - position
        below, text_x = first_row_y - _ROW_HEIGHT * row, 0.7 if is_left else len(names) + 0.3
        rank, name = ranks[position], names[index]
        color = colors[name]
        panel.plot([rank, rank, text_x], [0, below, below], lw=1, color=color, label=name)
        text = f"{name}  {rank:.1f}" if is_left else f"{rank:.1f}  {name}"
        text_options: dict[str, Any] = {
            "ha": "right" if is_left else "left",
            "va": "center",
            "fontsize": 9,
        }
        panel.text(text_x, below, f" {escape_mathtext(text)} ", **text_options)
    p_value = "p < 0.001" if friedman.p_value < 0.001 else f"p = {friedman.p_value:.3f}"
    figure.suptitle(
        escape_mathtext(f"{title} (Friedman {p_value}, {friedman.num_blocks} blocks)"), fontsize=10
    )
    return figure


def _draw_rank_axis(
    panel: "Axes", num_methods: int, height: float, critical_difference: float
) -> None:
    """The ranks along the top, and the length of the difference over it."""
    panel.set_xlim(-0.15 * num_methods, 1.15 * num_methods + 1)
    panel.set_ylim(0.6 - height, 0.6)
    panel.axis("off")
    panel.plot([1, num_methods], [0, 0], lw=1, color="#333333")
    for rank in range(1, num_methods + 1, max(1, num_methods // 10)):
        panel.plot([rank, rank], [0, 0.06], lw=1, color="#333333")
        panel.text(rank, 0.1, str(rank), ha="center", va="bottom", fontsize=8)
    panel.plot([1, 1 + critical_difference], [0.36, 0.36], lw=2, color="#333333", marker="|")
    panel.text(
        1 + critical_difference / 2, 0.4, f"CD {critical_difference:.2f}", ha="center", fontsize=8
    )
