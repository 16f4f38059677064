"""Who learns from whom: collaboration weights as heat maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.records import Count
from fedjax_het.common.text import figure_text
from fedjax_het.data.checks import array_of
from fedjax_het.report.style import is_leftmost, is_lowest, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OWN = "#D9D9D9"  # no colour of the scale
_LINES = "#FFFFFF"
_MOST_TICKS = 8  # beyond that many groups, ticks are not at the first client of each


@door
def plot_collaboration(
    weights: np.ndarray | Sequence[np.ndarray],
    groups: np.ndarray | None = None,
    titles: Sequence[str] | None = None,
    *,
    scale: str = "own",
    columns: Count = 4,
) -> "Figure":
    """Collaboration weights as heat maps: row i is what client i takes from each client.

    A client's weight for its own model is far from the others', so the diagonal is grey, with its
    range below the panel, and colours are for all else: from 0 to the largest weight.

    Args:
      weights: one matrix [K, K], or several, a panel each: `result.artifacts["collaboration"]`, or
        rounds of `result.metrics["collaboration"]`.
      groups: [K] the group of each client, see `fedjax_het.data.client_groups`; lines are drawn
        where it changes from one client to the next.
      titles: of the panels.
      scale: of the colours: "own" for each panel, with a bar beside it; "shared" by all panels.
      columns: panels beside each other, four at most.
    Errors:
      ConfigError for a matrix that is not square, and for numbers of groups or titles that do not
      fit.
    """
    square = "a matrix [K, K], or a list of them"
    matrices = []
    for matrix in weights if isinstance(weights, list | tuple) else [weights]:
        array = array_of("weights", matrix, square)
        matrices += list(array) if array.ndim == 3 else [array]
    if matrices and matrices[0].ndim == 1:  # the rows of one
        matrices = [array_of("weights", weights, square)]
    if groups is not None:
        groups = array_of("groups", groups, "[K] the group of each client")
    require(len(matrices) > 0, "weights", "none", "at least one matrix [K, K]")
    for matrix in matrices:
        ok = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        require(ok, "shape of weights", matrix.shape, "[K, K], a row for each client")
        require(matrix.dtype.kind in "iuf", "dtype of weights", str(matrix.dtype), "numbers")
        shape = () if groups is None else np.shape(groups)
        fits = groups is None or shape == matrix.shape[:1]
        require(fits, "shape of groups", shape, f"({len(matrix)},)")
    require_name("scale", scale, ("own", "shared"))
    count = len(matrices)
    require(titles is None or len(titles) == count, "titles", titles, f"{count} of them")
    names = [f"{number}" for number in range(count)]  # panels have names, titles may repeat

    others = [_others(matrix) for matrix in matrices]
    largest = [max(float(np.nanmax(values, initial=0)), 1e-12) for values in others]
    if scale == "shared":
        largest = [max(largest)] * count
    size = (3.7, 3.3) if scale == "own" else (2.6, 2.9)
    figure, panels = make_panels(names, columns=columns, size=size, sharey="none")
    figure.set_layout_engine("compressed")  # panels are square
    for n, panel in enumerate(panels.values()):
        panel.set_title("" if titles is None else figure_text(titles[n]), fontsize=10)
        image = _draw(panel, matrices[n], others[n], largest[n], groups)
        if is_leftmost(panel):
            panel.set_ylabel("client that receives", fontsize=10)
        if is_lowest(panel, panels.values()):
            panel.set_xlabel(f"client that is heard\n{_own_text(matrices[n])}", fontsize=10)
        else:
            panel.set_xlabel(_own_text(matrices[n]), fontsize=10)
        if scale == "own":
            _bar(figure, image, panel)
    if scale == "shared":
        _bar(figure, image, list(panels.values()))
    return figure


def _bar(figure: "Figure", image, panels) -> None:
    bar = figure.colorbar(image, ax=panels, label="weight", fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9)


def _others(matrix: np.ndarray) -> np.ndarray:
    """The weights for other clients; NaN on the diagonal."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _own_text(matrix: np.ndarray) -> str:
    low, high = f"{np.diagonal(matrix).min():.3f}", f"{np.diagonal(matrix).max():.3f}"
    return f"grey, own model: {low}" + ("" if low == high else f" to {high}")


def _draw(
    panel: "Axes",
    matrix: np.ndarray,
    others: np.ndarray,
    largest: float,
    groups: np.ndarray | None,
):
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colours = colormaps["viridis"].with_extremes(bad=_OWN)
    image = panel.imshow(others, cmap=colours, vmin=0, vmax=largest, interpolation="nearest")
    starts = np.array([], int)
    if groups is not None:
        starts = 1 + np.flatnonzero(np.asarray(groups)[1:] != np.asarray(groups)[:-1])
    for start in starts:
        panel.axhline(start - 0.5, color=_LINES, lw=0.8)
        panel.axvline(start - 0.5, color=_LINES, lw=0.8)
    for axis in (panel.xaxis, panel.yaxis):
        if 0 < len(starts) < _MOST_TICKS:
            axis.set_ticks(sorted({0, *starts, len(matrix) - 1}))
        else:
            axis.set_major_locator(MaxNLocator(nbins=_MOST_TICKS, integer=True))
    panel.set_xlim(-0.5, len(matrix) - 0.5)
    panel.set_ylim(len(matrix) - 0.5, -0.5)
    panel.spines[:].set_visible(False)
    return image
