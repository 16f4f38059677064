"""Whether methods' ranks over many blocks differ by more than chance: a critical-difference
diagram (Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.common.text import figure_text
from fedjax_het.report.style import method_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVEL = 0.05
_ROW, _STEP = 0.26, 0.12  # inches: of a name, of a bar


class MeanRanks(NamedTuple):
    """ranks: [M] means over blocks, 1 the best; equal scores share their mean rank. statistic,
    p_value: of Friedman's test that all methods rank alike. difference: of two mean ranks that is
    beyond chance at a level of 5 % for all pairs together (Nemenyi). blocks: how many there are."""

    ranks: np.ndarray
    statistic: float
    p_value: float
    difference: float
    blocks: int


def mean_ranks(scores: np.ndarray) -> MeanRanks:
    """Of scores [blocks, M], the higher the better; blocks with a NaN are left out.

    Blocks are taken to be independent; where they are not, p-values are too small. ConfigError for
    fewer than three methods or two blocks.
    """
    from scipy import stats

    scores = np.asarray(scores, np.float64)
    require(scores.ndim == 2 and scores.shape[1] > 2, "scores", scores.shape, "[blocks, 3 or more]")
    scores = scores[~np.isnan(scores).any(1)]
    blocks, methods = scores.shape
    require(blocks > 1, "scores", f"{blocks} whole blocks", "two or more")
    statistic, p_value = stats.friedmanchisquare(*scores.T)
    quantile = stats.studentized_range.ppf(1 - LEVEL, methods, math.inf) / math.sqrt(2)
    difference = quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))
    ranks = stats.rankdata(-scores, axis=1).mean(0)
    return MeanRanks(ranks, float(statistic), float(p_value), float(difference), blocks)


def cliques(ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The largest runs (first, last) of sorted ranks whose ends are no further apart."""
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(i for i, other in enumerate(ranks) if other - rank <= difference)
        if last > first and not (found and found[-1][1] >= last):
            found.append((first, last))
    return found


def plot_critical_difference(names: Sequence[str], scores: np.ndarray, title: str = "") -> "Figure":
    """Methods on an axis of mean ranks, the best on the left; bars join those whose ranks are not
    told apart. Cost: a figure."""
    from matplotlib.figure import Figure

    found = mean_ranks(scores)
    order = np.argsort(found.ranks, kind="stable")
    ranks = found.ranks[order]
    bars = cliques(ranks.tolist(), found.difference)
    half = -(-len(names) // 2)
    height = 1.1 + _STEP * (len(bars) + 1) + _ROW * half
    figure = Figure(figsize=(7.2, height), layout="constrained")
    panel = figure.subplots()
    _axis(panel, len(names), height - 0.5, found.difference)
    top = -_STEP * (len(bars) + 1.5)
    for i, (first, last) in enumerate(bars):
        below = -_STEP * (i + 1)
        ends = ranks[first] - 0.03, ranks[last] + 0.03
        panel.plot(ends, [below, below], lw=3.5, color="#333333", solid_capstyle="round")
    colours = method_colours(names)
    for place, index in enumerate(order):
        left = place < half
        row = place if left else len(names) - 1 - place
        below, side = top - _ROW * row, 0.7 if left else len(names) + 0.3
        rank, name = ranks[place], names[index]
        colour = colours[name]
        panel.plot([rank, rank, side], [0, below, below], lw=1, color=colour, label=name)
        text = f"{name}  {rank:.1f}" if left else f"{rank:.1f}  {name}"
        align: dict[str, Any] = {"ha": "right" if left else "left", "va": "center", "fontsize": 9}
        panel.text(side, below, f" {figure_text(text)} ", **align)
    p_value = "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"
    figure.suptitle(
        figure_text(f"{title} (Friedman {p_value}, {found.blocks} blocks)"), fontsize=10
    )
    return figure


def _axis(panel: "Axes", methods: int, height: float, difference: float) -> None:
    """The ranks along the top, and the length of the difference over it."""
    panel.set_xlim(-0.15 * methods, 1.15 * methods + 1)
    panel.set_ylim(0.6 - height, 0.6)
    panel.axis("off")
    panel.plot([1, methods], [0, 0], lw=1, color="#333333")
    for rank in range(1, methods + 1, max(1, methods // 10)):
        panel.plot([rank, rank], [0, 0.06], lw=1, color="#333333")
        panel.text(rank, 0.1, str(rank), ha="center", va="bottom", fontsize=8)
    panel.plot([1, 1 + difference], [0.36, 0.36], lw=2, color="#333333", marker="|")
    panel.text(1 + difference / 2, 0.4, f"CD {difference:.2f}", ha="center", fontsize=8)
