"""Figures of images: synthesis over its iterations, condensed images, and the server's examples."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.figures.style import wrap_title, write_animation
from fedjax_het.condensation.synthetic_data import SyntheticData
from fedjax_het.data.dataset import Dataset
from fedjax_het.data.validation import NumClasses
from fedjax_het.utils.array_validation import to_array, to_integers
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IMAGE_INCHES, _GAP_INCHES = 0.42, 0.12  # of a condensed image, between clients
_MAX_PAIRS, _MAX_IMAGES = 60, 10  # of condensed images
_ROW_INCHES = 0.34  # of the server's examples


def plot_synthesis(
    snapshots: Mapping[int, SyntheticData],
    *,
    num_samples: int = 5,
    class_names: Sequence[str] | None = None,
) -> "Figure":
    """Plot a grid of images: a row for each sample, a column for each iteration (DynaFed, Fig. 4).

    Each image is stretched to its own range, since synthetic pixels have no bounds. A row's title
    is the class of the last snapshot's soft label, with its probability.

    Args:
      snapshots: data by iteration; columns are in order of the iteration.
      num_samples: maximal number of rows, each with the most probable sample of a class.
      class_names: names of the classes; default: their numbers.

    Returns:
      The figure.

    Raises:
      ConfigError: if there is no snapshot.
    """
    from matplotlib.figure import Figure

    require(len(snapshots) > 0, "snapshots", snapshots, "at least one iteration")
    iterations = sorted(snapshots)
    probabilities = _softmax(snapshots[iterations[-1]].label_logits)
    best_samples = select_samples_by_class(probabilities, 1).values()
    samples = [sample for (sample,) in best_samples][:num_samples]

    rows, columns = len(samples), len(iterations)
    figure = Figure(figsize=(1.1 * columns + 1.4, 1.1 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for column, iteration in enumerate(iterations):
        images = np.asarray(snapshots[iteration].inputs)
        axes[0, column].set_title(f"{iteration:,}", fontsize=9)
        for axis, sample in zip(axes[:, column], samples, strict=True):
            image = rescale_to_unit_range(images[sample])
            image = image[..., 0] if image.shape[-1] == 1 else image
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    for axis, sample in zip(axes[:, 0], samples, strict=True):
        label = int(probabilities[sample].argmax())
        name = str(label) if class_names is None else wrap_title(class_names[label], 1.5, size=9)
        title = f"{name}\n{probabilities[sample, label]:.0%}"
        axis.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
    figure.supxlabel("iteration of the synthesis (top), soft label (left)", fontsize=8)
    return choose_fonts(figure)


def animate_synthesis(
    snapshots: Mapping[int, SyntheticData],
    path: str | os.PathLike,
    *,
    class_names: Sequence[str] | None = None,
) -> Path:
    """Write an animation of DynaFed's images over the iterations of their synthesis.

    There is a row for each class of the last soft labels, with up to six images, the most probable
    ones first. Each image keeps one scale through all pictures, from its smallest to its largest
    pixel.

    Args:
      snapshots: data by iteration.
      path: GIF file to write.
      class_names: names of the classes; default: their numbers.

    Returns:
      The path.

    Raises:
      ConfigError: if there is no snapshot.
    """
    require(len(snapshots) > 0, "snapshots", snapshots, "at least one iteration")
    num_images, iterations = 6, sorted(snapshots)
    probabilities = _softmax(snapshots[iterations[-1]].label_logits)
    rows = select_samples_by_class(probabilities, num_images)
    names = [_get_class_name(label, class_names) for label in rows]
    images = np.stack([np.asarray(snapshots[n].inputs, np.float64) for n in iterations])
    images = rescale_to_unit_range(images, axis=(0, 2, 3, 4))
    height, width = images.shape[2:4]

    def draw_iteration(index: int) -> "Figure":
        title = f"DynaFed's synthesis, iteration {iterations[index]:,} of {iterations[-1]:,}"
        mosaic = make_mosaic([images[index, members] for members in rows.values()], num_images)
        return stack_mosaics({"": (names, mosaic)}, title, height, 0.6 / max(height, width))

    return write_animation(path, range(len(iterations)), draw_iteration)


def select_samples_by_class(probabilities: np.ndarray, max_samples: int) -> dict[int, list[int]]:
    """Select the samples with the highest probability of each class.

    Args:
      probabilities: soft labels `[P, C]`.
      max_samples: maximal number of samples per class.

    Returns:
      By class, indices of the samples whose most probable class it is, the most probable first.
    """
    labels = probabilities.argmax(1)
    return {
        int(c): sorted(np.flatnonzero(labels == c).tolist(), key=lambda k: -probabilities[k, c])[
            :max_samples
        ]
        for c in np.unique(labels)
    }


@validate_arguments
def plot_condensed(
    images: np.ndarray,
    clients: Sequence[int] | np.ndarray,
    classes: Sequence[int] | np.ndarray,
    *,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> "Figure":
    """Plot a grid of condensed images: a row for each pair of a client and a class, by client.

    There are the first 60 pairs, and the first ten images of a pair.

    Args:
      images: `[P, ipc, H, W, C]` in the normalized space of the network's input.
      clients: `[P]` client of each pair.
      classes: `[P]` class of each pair.
      class_names: names of the classes; default: their numbers.
      mean: mean of the normalization, per channel. Pixels are shown as they would be stored,
        clipped to black and white. Without it each image is stretched to its own range.
      std: standard deviation of the normalization, per channel; required with `mean`.

    Returns:
      The figure.

    Raises:
      ConfigError: if there is no pair, or arguments do not fit together.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis import plot_condensed
      >>> figure = plot_condensed(np.ones((2, 3, 8, 8, 1)), clients=[0, 1], classes=[4, 4])
      >>> [text.get_text() for text in figure.texts]
      ['client 0', 'client 1', 'condensed images by client and class']
    """
    images = to_array("images", images, "[P, ipc, H, W, C]")
    clients = to_integers("clients", clients, "integers [P]")
    classes = to_integers("classes", classes, "integers [P]")
    is_valid = images.ndim == 5 and images.size > 0
    expected = "[P, ipc, H, W, C] with at least one pair"
    require(is_valid, "shape of images", images.shape, expected)
    require(images.dtype.kind in "iuf", "dtype of images", str(images.dtype), "numbers")
    for name, values in (("clients", clients), ("classes", classes)):
        require(values.shape == images.shape[:1], f"shape of {name}", values.shape, "[P]")
        require(values.min() >= 0, name, values.tolist(), "integers from 0")
    if class_names is not None:
        expected = f"the names of {classes.max() + 1} classes or more"
        require(len(class_names) > classes.max(), "class_names", class_names, expected)
    require((mean is None) == (std is None), "std", std, "a value with `mean`, and None without it")
    for name, numbers in (("mean", mean), ("std", std)):
        is_valid = numbers is None or len(numbers) in (1, images.shape[-1])
        require(is_valid, name, numbers, f"a number per channel ({images.shape[-1]})")

    order = np.lexsort((classes, clients))[:_MAX_PAIRS]
    shown = images[order, :_MAX_IMAGES].astype(np.float64)
    if mean is None or std is None:
        shown = rescale_to_unit_range(shown, axis=(2, 3, 4))
    else:
        shown = (shown * np.asarray(std) + np.asarray(mean)).clip(0, 1)
    names = [_get_class_name(c, class_names) for c in classes[order]]
    panels = {}
    for client in dict.fromkeys(clients[order].tolist()):
        rows = np.flatnonzero(clients[order] == client)
        mosaic = make_mosaic(shown[rows], shown.shape[1])
        panels[f"client {client}"] = ([names[row] for row in rows], mosaic)
    subset = "" if len(order) == len(images) else f", {len(order)} of {len(images)} pairs"
    title = f"condensed images by client and class{subset}"
    height, width = images.shape[2:4]
    return stack_mosaics(panels, title, height, _IMAGE_INCHES / max(height, width))


def stack_mosaics(
    panels: Mapping[str, tuple[list[str], np.ndarray]], title: str, height: int, pixel_inches: float
) -> "Figure":
    """Draw mosaics below each other; a pixel has the same size in all of them.

    Args:
      panels: by label, the names of the rows of images, and the mosaic.
      title: title of the figure.
      height: height of an image in pixels.
      pixel_inches: size of a pixel in inches.

    Returns:
      The figure.
    """
    from matplotlib.figure import Figure

    mosaics = [mosaic for _, mosaic in panels.values()]
    left = 0.9 + 0.08 * max(len(name) for names, _ in panels.values() for name in names)
    width = mosaics[0].shape[1] * pixel_inches
    total_height = sum((len(mosaic) + 1) * pixel_inches + _GAP_INCHES for mosaic in mosaics)
    figure = Figure(figsize=(max(left + width + 0.2, 3.2), total_height + 0.4))
    full_width, full_height = figure.get_size_inches()
    top = full_height - 0.4

    def write_text(text: str, y: float, size: float) -> None:
        figure.text(0.1 / full_width, y / full_height, text, va="center", fontsize=size)

    for label, (names, mosaic) in panels.items():
        mosaic_height = len(mosaic) * pixel_inches
        x, y = left / full_width, (top - mosaic_height) / full_height
        panel = figure.add_axes((x, y, width / full_width, mosaic_height / full_height))
        panel.imshow(mosaic, interpolation="nearest")
        _label_rows(panel, names, height)
        write_text(label, top - mosaic_height / 2, 8)
        top -= mosaic_height + _GAP_INCHES
    write_text(title, full_height - 0.2, 9)
    return choose_fonts(figure)


@validate_arguments
def plot_server_examples(
    dataset: Dataset,
    server_images: np.ndarray,
    server_labels: np.ndarray,
    *,
    num_classes: NumClasses = 10,
    num_images: PositiveInt = 10,
) -> "Figure":
    """Plot training examples of clients (left) beside the server's (right), a row per class.

    Args:
      dataset: data set of the clients.
      server_images: images of the server, as `ServerData.get_examples` returns them.
      server_labels: their labels.
      num_classes: maximal number of rows; classes are taken at equal distances.
      num_images: maximal number of images per row and panel. Training examples are the first of a
        class; the server's are taken at equal distances, so that all sizes and rotations appear.

    Returns:
      The figure.

    Raises:
      ConfigError: if the server has no examples, or labels and numbers do not fit.

    Example:
      >>> from fedjax_het import load_dataset
      >>> from fedjax_het.analysis import plot_server_examples
      >>> digits = load_dataset("digits")
      >>> figure = plot_server_examples(digits, digits.test_inputs[:9], digits.test_labels[:9])
      >>> [panel.get_title() for panel in figure.axes]
      ['training examples of clients', "the server's examples"]
    """
    from matplotlib.figure import Figure

    server_images = to_array("server_images", server_images, "an array [n, H, W, C]")
    server_labels = to_array("server_labels", server_labels, "integers [n]")
    is_valid = server_images.shape[1:] == dataset.input_shape and len(server_images) > 0
    expected = f"[n, *{dataset.input_shape}], n >= 1"
    require(is_valid, "shape of server_images", server_images.shape, expected)
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
    names = [_get_class_name(c, dataset.class_names or None) for c in classes]
    train_rows = [np.flatnonzero(dataset.train_labels == c)[:num_images] for c in classes]
    server_rows = [_subsample(np.flatnonzero(server_labels == c), num_images) for c in classes]
    panels = {
        "training examples of clients": [dataset.train_inputs[rows] for rows in train_rows],
        "the server's examples": [server_images[rows] for rows in server_rows],
    }

    height, width = dataset.input_shape[:2]
    columns = max(len(row) for rows in panels.values() for row in rows)
    panel_width = max(columns * _ROW_INCHES * (width + 1) / (height + 1), 2.2)
    size = (2 * panel_width + 0.5 + 0.08 * max(map(len, names)), len(classes) * _ROW_INCHES + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels_with_axes = zip(figure.subplots(1, 2), panels.items(), strict=True)
    for index, (axes, (title, rows)) in enumerate(panels_with_axes):
        low, high = 0, 255
        if rows[0].dtype != np.uint8:  # stretched to the range of the panel
            pixels = np.concatenate([row.ravel() for row in rows])
            low, high = pixels.min(), pixels.max()
        scaled = [(row.astype(np.float64) - low) / max(high - low, 1e-12) for row in rows]
        axes.imshow(make_mosaic(scaled, columns), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        _label_rows(axes, names if index == 0 else [""] * len(names), height)
    return choose_fonts(figure)


def make_mosaic(rows: Sequence[np.ndarray] | np.ndarray, columns: int) -> np.ndarray:
    """Arrange images in a grid with a white pixel between them.

    Args:
      rows: images of each row, floats `[m, H, W, C]` in `[0, 1]`, m <= `columns`.
      columns: number of images per row.

    Returns:
      Array `[n (H + 1) - 1, columns (W + 1) - 1, 3]`.
    """
    height, width = rows[0].shape[1:3]
    mosaic = np.ones((len(rows) * (height + 1) - 1, columns * (width + 1) - 1, 3))
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            mosaic[i * (height + 1) :, j * (width + 1) :][:height, :width] = image
    return mosaic


def _label_rows(panel: "Axes", names: Sequence[str], height: int) -> None:
    panel.set_yticks(np.arange(len(names)) * (height + 1) + (height - 1) / 2, names, fontsize=8)
    panel.set_xticks([])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _get_class_name(label: int, class_names: Sequence[str] | None) -> str:
    return str(label) if class_names is None else escape_mathtext(class_names[label])


def _subsample(values: np.ndarray, max_count: int) -> np.ndarray:
    """Return at most `max_count` values at equal distances, the first and the last among them."""
    count = min(len(values), max_count)
    return values[np.linspace(0, len(values) - 1, count).round().astype(int)]


def rescale_to_unit_range(image: np.ndarray, axis: tuple[int, ...] | None = None) -> np.ndarray:
    """Stretch pixels to the range from 0 to 1; constant pixels become black.

    Args:
      image: pixels.
      axis: axes with a common range; default: all.

    Returns:
      Array of the same shape.
    """
    low, high = image.min(axis, keepdims=True), image.max(axis, keepdims=True)
    return (image - low) / np.maximum(high - low, np.finfo(np.float32).tiny)


def _softmax(logits: object) -> np.ndarray:
    from scipy.special import softmax

    return softmax(np.asarray(logits, np.float64), axis=-1)
