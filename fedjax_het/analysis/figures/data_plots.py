"""Plots of data: a partition as bubbles, and the server's examples beside the clients'.

In the plot of a partition, clients are columns, classes are rows, and the area of a bubble is the
number of examples.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.data.dataset import Dataset
from fedjax_het.data.partition import Partition
from fedjax_het.data.validation import NumClasses, to_array
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_BUBBLE_STYLE: dict[str, Any] = {"facecolor": "#5b8ac6", "edgecolor": "white", "zorder": 3}


@validate_arguments
def plot_partition(
    partition: Partition,
    labels: np.ndarray,
    num_classes: NumClasses,
    path: str | os.PathLike,
    *,
    class_names: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Draw a partition as in FedAF's Figures 6 to 8, and write the figure to a file.

    The area of a bubble is proportional to the number of examples of class c at client k; a key
    gives the scale. Areas compare within one figure only, since bubbles are as large as their
    cells allow. The figure grows with the numbers of clients and classes.

    Args:
      partition: the partition.
      labels: labels of all training examples, int `[N]`.
      num_classes: number of classes, C.
      path: file to write (.png, .pdf or .svg).
      class_names: names of the classes on the axis; default: their numbers.
      title: title of the figure.

    Returns:
      The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    counts = partition.label_counts(labels, num_classes)
    require(
        len(class_names) in (0, num_classes), "class_names", class_names, f"{num_classes} names"
    )
    num_clients = partition.num_clients
    # Cells in inches; wide federations and many classes get small cells, not huge figures.
    cell_width = float(np.clip(11.0 / num_clients, 0.14, 0.5))
    cell_height = float(np.clip(5.0 / num_classes, 0.09, 0.36))
    # In points. Where cells are narrow the largest bubbles overlap their neighbours a little.
    max_count = max(int(counts.max()), 1)
    diameter = 72 * max(min(cell_width, cell_height) * 0.95, min(0.24, cell_height * 1.5))
    margin_x = max(0.6, 0.6 * diameter / 72 / cell_width)  # in cells, as the axes count them
    margin_y = max(0.6, 0.6 * diameter / 72 / cell_height)
    width = (num_clients - 1 + 2 * margin_x) * cell_width
    height = (num_classes - 1 + 2 * margin_y) * cell_height

    has_class_labels = bool(class_names) and num_classes <= 30
    left, right, bottom, top = (
        1.1 if has_class_labels else 0.65,
        1.05,
        0.55,
        0.45 if title else 0.15,
    )
    figure = Figure(figsize=(left + max(width, 2.5) + right, bottom + max(height, 1.2) + top))
    FigureCanvasAgg(figure)
    total_width, total_height = figure.get_size_inches()
    axes = figure.add_axes(
        (
            left / total_width,
            bottom / total_height,
            1 - (left + right) / total_width,
            1 - (bottom + top) / total_height,
        )
    )

    def draw_bubbles(x, y, bubble_counts):
        area = bubble_counts / max_count * diameter**2
        # A thin white rim parts bubbles that overlap; it would hide the smallest ones.
        return axes.scatter(x, y, s=area, linewidth=np.where(area > 16, 0.4, 0.0), **_BUBBLE_STYLE)

    clients, classes = np.nonzero(counts)
    bubble_counts = counts[clients, classes]
    order = np.argsort(-bubble_counts, kind="stable")  # small ones on top
    draw_bubbles(clients[order], classes[order], bubble_counts[order])

    axes.set_xlim(-margin_x, num_clients - 1 + margin_x)
    axes.set_ylim(-margin_y, num_classes - 1 + margin_y)
    _label_axes(axes, class_names if has_class_labels else ())
    if title:
        axes.set_title(escape_mathtext(title), fontsize=10, loc="left", pad=10)

    _add_size_legend(axes, draw_bubbles, max_count, diameter)
    return write_figure(path, figure, dpi=200)


def _label_axes(axes, class_names: Sequence[str]) -> None:
    """Clients across, classes up: by name, or (none) by number."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("client", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    if class_names:
        axes.set_yticks(range(len(class_names)), map(escape_mathtext, class_names))
    else:
        axes.set_ylabel("class", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.grid(color="#e4e7ec", linewidth=0.6, zorder=0)
    axes.tick_params(length=0, labelsize=8, colors="#333f50")
    for side in axes.spines.values():
        side.set_visible(False)


def _add_size_legend(axes, draw_bubbles, max_count: int, diameter: float) -> None:
    """Bubbles of round numbers beside the axes; `draw` makes them, the largest of `diameter`."""
    legend_counts = _choose_legend_counts(max_count)
    # matplotlib takes these distances in units of the font size.
    handle_size = diameter * np.sqrt(legend_counts[-1] / max_count) / 8
    axes.legend(
        [draw_bubbles([], [], np.array([n])) for n in legend_counts],
        [f"{n:,}" for n in legend_counts],
        title="examples",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=max(0.6, 0.75 * handle_size - 0.6),
        handlelength=max(1.5, handle_size),
    )


def _choose_legend_counts(max_count: int) -> list[int]:
    """Up to three round numbers within the counts, for the key."""
    power = 10 ** int(np.floor(np.log10(max_count)))
    largest_round_count = max(step * power for step in (1, 2, 5) if step * power <= max_count)
    return sorted(
        {max(largest_round_count // 10, 1), max(largest_round_count // 2, 1), largest_round_count}
    )


_ROW_INCHES = 0.34  # inches


@validate_arguments
def plot_server_examples(
    dataset: Dataset,
    server_images: np.ndarray,
    server_labels: np.ndarray,
    *,
    num_classes: NumClasses = 10,
    num_images: PositiveInt = 10,
) -> "Figure":
    """Plot training examples of clients (left) beside the server's examples (right), a row per class.

    Args:
      dataset: data set of the clients.
      server_images: images of the server, as `ServerData.get_examples` returns them.
      server_labels: their labels.
      num_classes: maximal number of rows; classes are taken at equal distances.
      num_images: maximal number of images per row and panel. Training examples are the first of a
        class; the server's are taken at equal distances, so that all sizes and rotations appear.

    Raises:
      ConfigError: if the server has no examples, or labels and numbers do not fit.
    """
    from matplotlib.figure import Figure

    server_images = to_array("server_images", server_images, "an array [n, H, W, C]")
    server_labels = to_array("server_labels", server_labels, "integers [n]")
    has_matching_shape = server_images.shape[1:] == dataset.input_shape and len(server_images) > 0
    require(
        has_matching_shape,
        "shape of server_images",
        server_images.shape,
        f"[n, *{dataset.input_shape}], n >= 1",
    )
    require(
        server_labels.shape == server_images.shape[:1]
        and server_labels.dtype.kind in "iu"
        and server_labels.min() >= 0
        and server_labels.max() < dataset.num_classes,
        "server_labels",
        server_labels.tolist() if server_labels.size < 10 else f"{server_labels.size} labels",
        f"a label in [0, {dataset.num_classes}) for each image",
    )

    classes = _subsample(np.unique(server_labels), num_classes)
    names = [
        escape_mathtext(dataset.class_names[c]) if dataset.class_names else str(c) for c in classes
    ]
    train_rows = [np.flatnonzero(dataset.train_labels == c)[:num_images] for c in classes]
    server_rows = [_subsample(np.flatnonzero(server_labels == c), num_images) for c in classes]
    panels = {
        "training examples of clients": [dataset.train_images[rows] for rows in train_rows],
        "the server's examples": [server_images[rows] for rows in server_rows],
    }

    height, width = dataset.input_shape[0] + 1, dataset.input_shape[1] + 1
    columns = max(len(row) for rows in panels.values() for row in rows)
    panel_width = max(columns * _ROW_INCHES * width / height, 2.2)
    size = (2 * panel_width + 0.5 + 0.08 * max(map(len, names)), len(classes) * _ROW_INCHES + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels_with_axes = zip(figure.subplots(1, 2), panels.items(), strict=True)
    for panel_index, (axes, (title, rows)) in enumerate(panels_with_axes):
        axes.imshow(_make_mosaic(rows, dataset.input_shape, columns), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        ticks = np.arange(len(classes)) * height + (height - 2) / 2
        axes.set_yticks(ticks, names if panel_index == 0 else [""] * len(names), fontsize=8)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def _subsample(values: np.ndarray, max_count: int) -> np.ndarray:
    """`values`, or `most` of them at equal distances, the first and the last among them."""
    count = min(len(values), max_count)
    return values[np.linspace(0, len(values) - 1, count).round().astype(int)]


def _make_mosaic(rows: list[np.ndarray], shape: tuple[int, int, int], columns: int) -> np.ndarray:
    """[H', W', 3] in [0, 1], white between images; floats are stretched to the panel's range."""
    height, width, _ = shape
    low, high = 0, 255
    if rows[0].dtype != np.uint8:
        low = min(row.min() for row in rows if len(row))
        high = max(row.max() for row in rows if len(row))
    mosaic = np.ones((len(rows) * (height + 1) - 1, columns * (width + 1) - 1, 3))
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = i * (height + 1), j * (width + 1)
            pixels = (image.astype(np.float64) - low) / max(high - low, 1e-12)
            mosaic[top : top + height, left : left + width] = pixels
    return mosaic
