"""Who learns from whom: collaboration weights as heat maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.records import Count
from fedjax_het.common.text import figure_text
from fedjax_het.data.checks import array_of
from fedjax_het.measures.personal import group_weights
from fedjax_het.report.style import is_leftmost, is_lowest, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OWN = "#D9D9D9"  # no colour of the scale
_LINES = "#FFFFFF"
_MOST_TICKS, _MOST_GROUPS = 12, 20


@door
def plot_collaboration(
    weights: np.ndarray | Sequence[np.ndarray],
    groups: np.ndarray | None = None,
    titles: Sequence[str] | None = None,
    *,
    scale: str | float = "own",
    columns: Count = 4,
    order: str | np.ndarray = "similar",
) -> "Figure":
    """Collaboration weights as heat maps: row i is what client i takes from each client.

    A client's weight for its own model is far from the others', so the diagonal is grey, with its
    range below the panel, and colours are for all else: from 0 to the largest weight.

    Args:
      weights: one matrix [K, K], or several, a panel each: `result.artifacts["collaboration"]`, or
        rounds of `result.metrics["collaboration"]`.
      groups: [K] the group of each client, see `fedjax_het.data.client_groups`; lines are drawn
        between them, and axes name them.
      titles: of the panels.
      scale: of the colours: "own" for each panel, with a bar beside it; "shared" by all panels; or
        the weight that has the last colour.
      columns: panels beside each other, four at most.
      order: of the clients, in all panels: "similar", those that take from each other side by side
        (`similar_order`; with `groups` these, and clients of one stay together), "given", or [K]
        their numbers.
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
        same = matrix.shape == matrices[0].shape
        require(same, "shape of weights", matrix.shape, f"{matrices[0].shape}, as the first has")
        require(matrix.dtype.kind in "iuf", "dtype of weights", str(matrix.dtype), "numbers")
        shape = () if groups is None else np.shape(groups)
        fits = groups is None or shape == matrix.shape[:1]
        require(fits, "shape of groups", shape, f"({len(matrix)},)")
    if isinstance(scale, str):
        require_name("scale", scale, ("own", "shared"))
    ids = _order(order, matrices, groups)
    count = len(matrices)
    require(titles is None or len(titles) == count, "titles", titles, f"{count} of them")
    names = [f"{number}" for number in range(count)]  # panels have names, titles may repeat

    matrices = [matrix[np.ix_(ids, ids)] for matrix in matrices]
    names_of = None if groups is None else groups[ids]
    others = [_others(matrix) for matrix in matrices]
    largest = [max(float(np.nanmax(values, initial=0)), 1e-12) for values in others]
    if scale != "own":
        largest = [max(largest) if isinstance(scale, str) else float(scale)] * count
    who = "client" if groups is None else "group of the client"
    size = (2.6, 2.9) if scale == "shared" else (3.7, 3.3)
    figure, panels = make_panels(names, columns=columns, size=size, sharey="none")
    figure.set_layout_engine("compressed")  # panels are square
    for n, panel in enumerate(panels.values()):
        panel.set_title("" if titles is None else figure_text(titles[n]), fontsize=10)
        image = _draw(panel, others[n], largest[n])
        _ticks(panel, ids, names_of)
        if is_leftmost(panel):
            panel.set_ylabel(f"{who} that receives", fontsize=10)
        if is_lowest(panel, panels.values()):
            panel.set_xlabel(f"{who} that is heard\n{_own_text(matrices[n])}", fontsize=10)
        else:
            panel.set_xlabel(_own_text(matrices[n]), fontsize=10)
        if scale == "own":
            _bar(figure, image, panel)
    if scale != "own":
        _bar(figure, image, list(panels.values()))
    return figure


def _order(order: Any, matrices: Sequence[np.ndarray], groups: np.ndarray | None) -> np.ndarray:
    """[K] the clients' numbers as they stand. ConfigError unless each is there once."""
    every = np.arange(len(matrices[0]))
    if isinstance(order, str):
        require_name("order", order, ("similar", "given"))
        return similar_order(matrices, groups) if order == "similar" else every
    ids = np.asarray(order)
    ok = ids.shape == every.shape and sorted(ids.tolist()) == every.tolist()
    require(ok, "order", order, f"'similar', 'given' or the numbers 0 to {every[-1]}, each once")
    return ids


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


def similar_order(matrices: Sequence[np.ndarray], groups: np.ndarray | None = None) -> np.ndarray:
    """[K] the clients, so that those that take from each other stand side by side: the leaves of
    average linkage over mean weights, each matrix by its largest and both ways, in the order in
    which neighbours are nearest. With groups [K] it is these that are ordered so."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    scaled = [
        _others(matrix) / max(np.nanmax(_others(matrix), initial=0), 1e-12) for matrix in matrices
    ]
    near = np.nan_to_num(np.mean(scaled, axis=0))
    near = (near + near.T) / 2
    members = [[k] for k in range(len(near))]
    if groups is not None:
        blocks = group_weights(near, groups)
        near = np.nan_to_num(blocks.weights)
        members = [np.flatnonzero(groups == name).tolist() for name in blocks.names]
    if len(members) < 3:
        return np.concatenate(members).astype(int)
    apart = near.max() - near
    np.fill_diagonal(apart, 0)
    leaves = leaves_list(linkage(squareform(apart, checks=False), "average", optimal_ordering=True))
    # Either end may be the first.
    leaves = leaves if leaves[0] < leaves[-1] else leaves[::-1]
    return np.concatenate([members[leaf] for leaf in leaves]).astype(int)


def _draw(panel: "Axes", others: np.ndarray, largest: float):
    from matplotlib import colormaps

    colours = colormaps["viridis"].with_extremes(bad=_OWN)
    image = panel.imshow(others, cmap=colours, vmin=0, vmax=largest, interpolation="nearest")
    panel.set_xlim(-0.5, len(others) - 0.5)
    panel.set_ylim(len(others) - 0.5, -0.5)
    panel.spines[:].set_visible(False)
    return image


def _ticks(panel: "Axes", ids: np.ndarray, groups: np.ndarray | None) -> None:
    """The number of each client, as far as there is room; or the names of groups, and lines between
    them."""
    step = -(-len(ids) // _MOST_TICKS)
    places = np.arange(0, len(ids), step).astype(float)
    texts = [str(ids[int(place)]) for place in places]
    if groups is not None:
        starts = np.concatenate([[0], 1 + np.flatnonzero(groups[1:] != groups[:-1])])
        for start in starts[1:]:
            panel.axhline(start - 0.5, color=_LINES, lw=0.8)
            panel.axvline(start - 0.5, color=_LINES, lw=0.8)
        if len(starts) <= _MOST_GROUPS:
            ends = np.append(starts[1:], len(ids))
            places, texts = (starts + ends - 1) / 2, [str(groups[start]) for start in starts]
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(places, texts)
        axis.set_tick_params(length=0)
