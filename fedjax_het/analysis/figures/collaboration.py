"""Who learns from whom: collaboration weights as heat maps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figure_style import is_bottom_panel, is_leftmost_panel, make_panels
from fedjax_het.data.validation import to_array
from fedjax_het.metrics.personal import compute_group_weights
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DIAGONAL_COLOR = "#D9D9D9"  # no colour of the scale
_GROUP_LINE_COLOR = "#FFFFFF"
_MAX_TICKS, _MAX_GROUP_LABELS = 12, 20


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

    Raises:
      ConfigError: if a matrix is not square, or the number of groups or titles does not fit.
    """
    expected_shape = "a matrix [K, K], or a list of them"
    matrices = []
    for matrix in weights if isinstance(weights, list | tuple) else [weights]:
        array = to_array("weights", matrix, expected_shape)
        matrices += list(array) if array.ndim == 3 else [array]
    if matrices and matrices[0].ndim == 1:  # the rows of one
        matrices = [to_array("weights", weights, expected_shape)]
    if groups is not None:
        groups = to_array("groups", groups, "[K] the group of each client")
    require(len(matrices) > 0, "weights", "none", "at least one matrix [K, K]")
    for matrix in matrices:
        is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        require(is_square, "shape of weights", matrix.shape, "[K, K], a row for each client")
        has_same_shape = matrix.shape == matrices[0].shape
        require(
            has_same_shape,
            "shape of weights",
            matrix.shape,
            f"{matrices[0].shape}, as the first has",
        )
        require(matrix.dtype.kind in "iuf", "dtype of weights", str(matrix.dtype), "numbers")
        shape = () if groups is None else np.shape(groups)
        is_matching_shape = groups is None or shape == matrix.shape[:1]
        require(is_matching_shape, "shape of groups", shape, f"({len(matrix)},)")
    if isinstance(scale, str):
        require_name("scale", scale, ("own", "shared"))
    client_ids = _resolve_client_order(order, matrices, groups)
    num_matrices = len(matrices)
    require(
        titles is None or len(titles) == num_matrices, "titles", titles, f"{num_matrices} of them"
    )
    panel_names = [
        f"{number}" for number in range(num_matrices)
    ]  # panels have names, titles may repeat

    matrices = [matrix[np.ix_(client_ids, client_ids)] for matrix in matrices]
    ordered_groups = None if groups is None else groups[client_ids]
    off_diagonal_weights = [_mask_diagonal(matrix) for matrix in matrices]
    max_weights = [
        max(float(np.nanmax(values, initial=0)), 1e-12) for values in off_diagonal_weights
    ]
    if scale != "own":
        max_weights = [max(max_weights) if isinstance(scale, str) else float(scale)] * num_matrices
    axis_subject = "client" if groups is None else "group of the client"
    size = (2.6, 2.9) if scale == "shared" else (3.7, 3.3)
    figure, panels = make_panels(panel_names, columns=columns, size=size, sharey="none")
    figure.set_layout_engine("compressed")  # panels are square
    for index, panel in enumerate(panels.values()):
        panel.set_title("" if titles is None else escape_mathtext(titles[index]), fontsize=10)
        image = _draw_matrix(panel, off_diagonal_weights[index], max_weights[index])
        _set_client_ticks(panel, client_ids, ordered_groups)
        if is_leftmost_panel(panel):
            panel.set_ylabel(f"{axis_subject} that receives", fontsize=10)
        if is_bottom_panel(panel, panels.values()):
            panel.set_xlabel(
                f"{axis_subject} that is heard\n{_describe_diagonal(matrices[index])}", fontsize=10
            )
        else:
            panel.set_xlabel(_describe_diagonal(matrices[index]), fontsize=10)
        if scale == "own":
            _add_color_bar(figure, image, panel)
    if scale != "own":
        _add_color_bar(figure, image, list(panels.values()))
    return figure


def _resolve_client_order(
    order: Any, matrices: Sequence[np.ndarray], groups: np.ndarray | None
) -> np.ndarray:
    """[K] the clients' numbers as they stand. ConfigError unless each is there once."""
    all_client_ids = np.arange(len(matrices[0]))
    if isinstance(order, str):
        require_name("order", order, ("similar", "given"))
        return order_by_similarity(matrices, groups) if order == "similar" else all_client_ids
    client_ids = np.asarray(order)
    is_permutation = (
        client_ids.shape == all_client_ids.shape
        and sorted(client_ids.tolist()) == all_client_ids.tolist()
    )
    require(
        is_permutation,
        "order",
        order,
        f"'similar', 'given' or the numbers 0 to {all_client_ids[-1]}, each once",
    )
    return client_ids


def _add_color_bar(figure: "Figure", image, panels) -> None:
    color_bar = figure.colorbar(image, ax=panels, label="weight", fraction=0.05, pad=0.03)
    color_bar.outline.set_visible(False)
    color_bar.ax.tick_params(labelsize=9)


def _mask_diagonal(matrix: np.ndarray) -> np.ndarray:
    """The weights for other clients; NaN on the diagonal."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _describe_diagonal(matrix: np.ndarray) -> str:
    low, high = f"{np.diagonal(matrix).min():.3f}", f"{np.diagonal(matrix).max():.3f}"
    return f"grey, own model: {low}" + ("" if low == high else f" to {high}")


def order_by_similarity(
    matrices: Sequence[np.ndarray], groups: np.ndarray | None = None
) -> np.ndarray:
    """[K] the clients, so that those that take from each other stand side by side: the leaves of
    average linkage over mean weights, each matrix by its largest and both ways, in the order in
    which neighbours are nearest. With groups [K] it is these that are ordered so."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    scaled_matrices = [
        _mask_diagonal(matrix) / max(np.nanmax(_mask_diagonal(matrix), initial=0), 1e-12)
        for matrix in matrices
    ]
    similarity = np.nan_to_num(np.mean(scaled_matrices, axis=0))
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
    leaves = leaves_list(
        linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    )
    # Either end may be the first.
    leaves = leaves if leaves[0] < leaves[-1] else leaves[::-1]
    return np.concatenate([members[leaf] for leaf in leaves]).astype(int)


def _draw_matrix(panel: "Axes", off_diagonal: np.ndarray, max_weight: float):
    from matplotlib import colormaps

    color_map = colormaps["viridis"].with_extremes(bad=_DIAGONAL_COLOR)
    image = panel.imshow(
        off_diagonal, cmap=color_map, vmin=0, vmax=max_weight, interpolation="nearest"
    )
    panel.set_xlim(-0.5, len(off_diagonal) - 0.5)
    panel.set_ylim(len(off_diagonal) - 0.5, -0.5)
    panel.spines[:].set_visible(False)
    return image


def _set_client_ticks(panel: "Axes", client_ids: np.ndarray, groups: np.ndarray | None) -> None:
    """The number of each client, as far as there is room; or the names of groups, and lines between
    them."""
    step = -(-len(client_ids) // _MAX_TICKS)
    tick_positions = np.arange(0, len(client_ids), step).astype(float)
    texts = [str(client_ids[int(place)]) for place in tick_positions]
    if groups is not None:
        starts = np.concatenate([[0], 1 + np.flatnonzero(groups[1:] != groups[:-1])])
        for start in starts[1:]:
            panel.axhline(start - 0.5, color=_GROUP_LINE_COLOR, lw=0.8)
            panel.axvline(start - 0.5, color=_GROUP_LINE_COLOR, lw=0.8)
        if len(starts) <= _MAX_GROUP_LABELS:
            ends = np.append(starts[1:], len(client_ids))
            tick_positions, texts = (
                (starts + ends - 1) / 2,
                [str(groups[start]) for start in starts],
            )
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(tick_positions, texts)
        axis.set_tick_params(length=0)
