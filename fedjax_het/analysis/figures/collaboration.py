"""Collaboration weights between clients as heat maps and as an animation over the rounds."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figures.style import (
    label_outer_axes,
    make_panels,
    wrap_title,
    write_animation,
)
from fedjax_het.metrics.personal import compute_group_weights
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.fonts import choose_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DIAGONAL_COLOR = "#D9D9D9"  # no color of the scale
_MAX_TICKS, _MAX_GROUP_LABELS = 12, 20
_MAX_FRAMES = 40


@validate_arguments
def plot_collaboration(
    weights: np.ndarray | Sequence[np.ndarray],
    groups: np.ndarray | None = None,
    titles: Sequence[str] | None = None,
    *,
    scale: str | float = "own",
    columns: PositiveInt = 4,
    order: str | np.ndarray = "similar",
) -> "Figure":
    """Plot collaboration weights as heat maps: row i has the weights that client i gives to others.

    A client's weight for its own model differs most from the others. Therefore the diagonal is
    gray, with its range below the panel, and colors range from 0 to the largest other weight.

    Args:
      weights: one matrix `[K, K]`, or several with a panel each:
        `result.artifacts["collaboration"]`, or rounds of `result.metrics["collaboration"]`.
      groups: `[K]` group of each client, see `fedjax_het.data.client_groups`. Lines separate the
        groups and the axes name them.
      titles: titles of the panels.
      scale: "own" (each panel has its own color scale and bar), "shared" (all panels have one), or
        the weight of the last color.
      columns: panels per row, at most 4.
      order: order of the clients in all panels: "similar" puts clients with high mutual weights
        together (`order_by_similarity`; with `groups`, within groups), "given" keeps the order, or
        `[K]` client ids.

    Returns:
      The figure.

    Raises:
      ConfigError: if a matrix is not square, or the number of groups or titles does not fit.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis import plot_collaboration
      >>> weights = np.array([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.1, 0.1, 0.8]])
      >>> plot_collaboration(weights, titles=["fedamp"]).axes[0].get_title()
      'fedamp'
    """
    matrices = _to_matrices(weights)
    if groups is not None:
        groups = to_array("groups", groups, "[K] the group of each client")
        expected = f"({len(matrices[0])},)"
        require(groups.shape == matrices[0].shape[:1], "shape of groups", groups.shape, expected)
    if isinstance(scale, str):
        require_name("scale", scale, ("own", "shared"))
    clients = _resolve_client_order(order, matrices, groups)
    count = len(matrices)
    has_titles = titles is None or len(titles) == count
    require(has_titles, "titles", titles, f"one title per matrix ({count})")

    matrices = [matrix[np.ix_(clients, clients)] for matrix in matrices]
    max_weights = [_get_max_weight(matrix) for matrix in matrices]
    if scale != "own":
        max_weights = [max(max_weights) if isinstance(scale, str) else float(scale)] * count
    size = (2.6, 2.9) if scale == "shared" else (3.7, 3.3)
    names = list(map(str, range(count)))  # titles may repeat, names of panels may not
    figure, panels = make_panels(names, columns=columns, size=size, sharey="none")
    figure.set_layout_engine("compressed")  # panels are square

    def add_color_bar(image, panels) -> None:
        bar = figure.colorbar(image, ax=panels, label="Weight", fraction=0.05, pad=0.03)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=9)

    subject = "Client" if groups is None else "Group of the client"
    label_outer_axes(panels.values(), x=f"{subject} that is heard", y=f"{subject} that receives")
    for index, (panel, matrix) in enumerate(zip(panels.values(), matrices, strict=True)):
        panel.set_title("" if titles is None else wrap_title(titles[index], size[0]), fontsize=10)
        image = _draw_matrix(panel, matrix, max_weights[index])
        _set_client_ticks(panel, clients, None if groups is None else groups[clients])
        low, high = (f"{reduce(np.diagonal(matrix)):.3f}" for reduce in (np.min, np.max))
        diagonal = f"gray, own model: {low}" + ("" if low == high else f" to {high}")
        panel.set_xlabel("\n".join(filter(None, [panel.get_xlabel(), diagonal])), fontsize=10)
        if scale == "own":
            add_color_bar(image, panel)
    if scale != "own":
        add_color_bar(image, list(panels.values()))
    return choose_fonts(figure)


def _to_matrices(weights: Any) -> list[np.ndarray]:
    """Return matrices `[K, K]` of one shape; raise ConfigError for anything else."""
    expected = "a matrix [K, K], or a list of them"
    inputs = weights if isinstance(weights, list | tuple) else [weights]
    arrays = [to_array("weights", array, expected) for array in inputs]
    if arrays and arrays[0].ndim == 1:  # rows of one matrix
        arrays = [to_array("weights", weights, expected)]
    matrices = [matrix for array in arrays for matrix in (array if array.ndim == 3 else [array])]
    require(len(matrices) > 0, "weights", "none", "at least one matrix [K, K]")
    first = matrices[0].shape
    for matrix in matrices:
        shape = matrix.shape
        is_square = len(shape) == 2 and shape[0] == shape[1] > 0
        require(is_square, "shape of weights", shape, "[K, K], a row for each client")
        require(shape == first, "shape of weights", shape, f"{first}, as the first has")
        require(matrix.dtype.kind in "iuf", "dtype of weights", str(matrix.dtype), "numbers")
    return matrices


def _resolve_client_order(
    order: Any, matrices: Sequence[np.ndarray], groups: np.ndarray | None
) -> np.ndarray:
    """Return the client ids `[K]` in their order; raise ConfigError unless each is there once."""
    client_ids = np.arange(len(matrices[0]))
    if isinstance(order, str):
        require_name("order", order, ("similar", "given"))
        return order_by_similarity(matrices, groups) if order == "similar" else client_ids
    expected = f"'similar', 'given' or the numbers 0 to {client_ids[-1]}, each once"
    ordered_ids = to_array("order", order, expected)
    is_integer = ordered_ids.ndim == 1 and ordered_ids.dtype.kind in "iu"
    is_permutation = is_integer and np.array_equal(np.sort(ordered_ids), client_ids)
    require(is_permutation, "order", order, expected)
    return ordered_ids


def _mask_diagonal(matrix: np.ndarray) -> np.ndarray:
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _get_max_weight(matrix: np.ndarray) -> float:
    """Return the largest weight for another client, at least 1e-12."""
    return max(float(np.nanmax(_mask_diagonal(matrix), initial=0)), 1e-12)


def order_by_similarity(
    matrices: Sequence[np.ndarray], groups: np.ndarray | None = None
) -> np.ndarray:
    """Order clients so that clients with high mutual weights are next to each other.

    The order is the order of the leaves of average linkage with optimal leaf ordering. The
    similarity of two clients is their mean weight in both directions, each matrix divided by its
    largest.

    Args:
      matrices: collaboration weights `[K, K]`.
      groups: `[K]` group of each client; if given, groups are ordered in place of clients.

    Returns:
      Client ids, int `[K]`.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    scaled = [_mask_diagonal(matrix) / _get_max_weight(matrix) for matrix in matrices]
    similarity = np.nan_to_num(np.mean(scaled, axis=0))
    similarity = (similarity + similarity.T) / 2
    members = [[k] for k in range(len(similarity))]
    if groups is not None:
        blocks = compute_group_weights(similarity, groups)
        similarity = np.nan_to_num(blocks.weights)
        members = [np.flatnonzero(groups == name).tolist() for name in blocks.names]
    if len(members) < 3:
        return np.concatenate(members).astype(int)
    distance = similarity.max() - similarity
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    leaves = leaves_list(tree)
    leaves = leaves if leaves[0] < leaves[-1] else leaves[::-1]  # either end may be the first
    return np.concatenate([members[leaf] for leaf in leaves]).astype(int)


def _draw_matrix(panel: "Axes", matrix: np.ndarray, max_weight: float):
    from matplotlib import colormaps

    colors = colormaps["viridis"].with_extremes(bad=_DIAGONAL_COLOR)
    options: Any = {"cmap": colors, "vmin": 0, "vmax": max_weight, "interpolation": "nearest"}
    image = panel.imshow(_mask_diagonal(matrix), **options)
    panel.set_xlim(-0.5, len(matrix) - 0.5)
    panel.set_ylim(len(matrix) - 0.5, -0.5)
    panel.spines[:].set_visible(False)
    return image


def _set_client_ticks(panel: "Axes", clients: np.ndarray, groups: np.ndarray | None) -> None:
    """Label clients as far as there is room, or groups with lines between them."""
    ticks = np.arange(0, len(clients), -(-len(clients) // _MAX_TICKS)).astype(float)
    texts = [str(clients[int(tick)]) for tick in ticks]
    if groups is not None:
        starts = np.concatenate([[0], 1 + np.flatnonzero(groups[1:] != groups[:-1])])
        for start in starts[1:]:
            panel.axhline(start - 0.5, color="#FFFFFF", lw=0.8)
            panel.axvline(start - 0.5, color="#FFFFFF", lw=0.8)
        if len(starts) <= _MAX_GROUP_LABELS:
            ticks = (starts + np.append(starts[1:], len(clients)) - 1) / 2
            texts = [str(groups[start]) for start in starts]
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(ticks, texts)
        axis.set_tick_params(length=0)


def animate_collaboration(
    weights: np.ndarray,
    path: str | os.PathLike,
    groups: np.ndarray | None = None,
    *,
    title: str = "",
) -> Path:
    """Write an animation of `plot_collaboration` over up to 40 rounds, evenly spaced.

    All pictures have one color scale, and the order of the clients in the last round.

    Args:
      weights: `[rounds, K, K]`, for example `result.metrics["collaboration"]`.
      path: GIF file to write.
      groups: `[K]` group of each client.
      title: title, before the number of the round.

    Returns:
      The path.

    Raises:
      ConfigError: if the weights have another shape.
    """
    weights = np.asarray(weights, np.float64)
    is_valid = weights.ndim == 3 and len(weights) > 0
    require(is_valid, "shape of weights", weights.shape, "[rounds, K, K] of at least one round")
    clients = order_by_similarity([weights[-1]], groups)
    scale = max(map(_get_max_weight, weights))

    def draw_round(index: int) -> "Figure":
        titles = [", ".join(filter(None, [title, f"round {index + 1}"]))]
        return plot_collaboration(weights[index], groups, titles, scale=scale, order=clients)

    count = min(len(weights), _MAX_FRAMES)
    rounds = np.linspace(0, len(weights) - 1, count).round().astype(int)
    return write_animation(path, rounds.tolist(), draw_round)
