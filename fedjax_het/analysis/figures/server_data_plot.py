"""The server's examples beside the clients' (FSL's Figures 3 and 4)."""

from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.data.validation import NumClasses, to_array
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import escape_mathtext
from fedjax_het.utils.validation import validate_arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Training examples that clients learn from (left), the server's (right); a row for a class.

    Args:
      server_images, server_labels: D_0, as `ServerData.get_examples` gives it.
      num_classes: rows at most; classes are taken at equal distances from those that D_0 has.
      num_images: columns of each panel at most. The training examples are the first of a class;
        the server's are taken at equal distances, so that all sizes and rotations show.
    Errors: ConfigError: an empty D_0, labels that do not fit, or a number below 1.
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
