"""Pictures of synthetic images: over the course of their synthesis (DynaFed's Fig. 4), and of what
clients condensed (FedDM, FedAF)."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.condensation.synthetic_data import SyntheticData
from fedjax_het.utils.errors import require
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IMAGE_INCHES, _GAP_INCHES = 0.42, 0.12  # inches, of a condensed image and between clients


def plot_synthesis(
    snapshots: Mapping[int, SyntheticData],
    path: str | os.PathLike,
    *,
    samples: Sequence[int] | None = None,
    num_samples: int = 5,
    class_names: Sequence[str] | None = None,
) -> None:
    """Write a grid of images: a row for each sample, a column for each iteration.

    Each image is stretched to its own range, since synthetic pixels know no bounds. A row's title
    is the class that the last snapshot's soft label favours, with its probability.

    Args:
      snapshots: iteration -> data at that iteration; columns are in order of the iteration.
      path: file to write; its ending is the format.
      samples: indices of the samples to show. Default: of each class, as far as `num_samples`
        goes, the sample whose last soft label is surest of it.
      class_names: default is the number of the class.

    Raises:
      ConfigError: if there is no snapshot, or a sample does not exist.
    """
    from matplotlib.figure import Figure

    require(len(snapshots) > 0, "snapshots", snapshots, "at least one iteration")
    iterations = sorted(snapshots)
    soft_labels = _softmax(np.asarray(snapshots[iterations[-1]].label_logits, np.float64))
    if samples is None:
        samples = _select_most_confident_samples(soft_labels)[:num_samples]
    is_in_range = len(samples) > 0 and all(0 <= sample < len(soft_labels) for sample in samples)
    require(is_in_range, "samples", samples, f"indices from 0 to {len(soft_labels) - 1}")

    rows, columns = len(samples), len(iterations)
    figure = Figure(figsize=(1.1 * columns + 1.4, 1.1 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for column, iteration in enumerate(iterations):
        images = np.asarray(snapshots[iteration].images)
        axes[0, column].set_title(f"{iteration:,}", fontsize=9)
        for row, sample in enumerate(samples):
            axis = axes[row, column]
            axis.imshow(_rescale_to_unit_range(images[sample]), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    for row, sample in enumerate(samples):
        favored_class = int(soft_labels[sample].argmax())
        name = (
            str(favored_class)
            if class_names is None
            else escape_mathtext(class_names[favored_class])
        )
        title = f"{name}\n{soft_labels[sample, favored_class]:.0%}"
        axes[row, 0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
    figure.supxlabel("iteration of the synthesis (top), soft label (left)", fontsize=8)
    write_figure(path, figure)


def plot_condensed(
    images: np.ndarray,
    clients: Sequence[int] | np.ndarray,
    classes: Sequence[int] | np.ndarray,
    path: str | os.PathLike,
    *,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    num_images: int = 10,
    num_pairs: int = 60,
) -> None:
    """Write a grid of condensed images: a row for each pair of a client and a class, by client.

    Args:
      images: `[P, ipc, H, W, C]` in the normalised space of the network's input; the first
        `num_images` of each pair are shown, and the first `num_pairs` pairs.
      clients, classes: `[P]`, of each pair.
      path: file to write; its ending is the format.
      class_names: default is the number of the class.
      mean, std: per channel, of the normalisation; pixels are shown as they would be stored, those
        beyond black and white as these. Without them each image is stretched to its own range.

    Raises:
      ConfigError: if there is no pair, or arguments do not fit together.
    """
    images, clients, classes = np.asarray(images), np.asarray(clients), np.asarray(classes)
    is_valid_shape = images.ndim == 5 and images.size > 0
    require(
        is_valid_shape, "shape of images", images.shape, "[P, ipc, H, W, C] with at least one pair"
    )
    for name, values in (("clients", clients), ("classes", classes)):
        require(values.shape == images.shape[:1], f"shape of {name}", values.shape, "[P]")
    require((mean is None) == (std is None), "std", std, "given where mean is, and only there")
    require(num_images >= 1, "num_images", num_images, "a number >= 1")
    require(num_pairs >= 1, "num_pairs", num_pairs, "a number >= 1")

    order = np.lexsort((classes, clients))[:num_pairs]
    shown_images = images[order, :num_images].astype(np.float64)
    if mean is None or std is None:
        to_pixels = _rescale_to_unit_range
    else:
        shown_images = (shown_images * np.asarray(std) + np.asarray(mean)).clip(0, 1)
        to_pixels = _identity
    names = [
        str(c) if class_names is None else escape_mathtext(class_names[c]) for c in classes[order]
    ]
    rows_by_client = {client: np.flatnonzero(clients[order] == client) for client in clients[order]}
    panels = {
        f"client {client}": (
            [names[row] for row in rows],
            make_mosaic(shown_images[rows], to_pixels),
        )
        for client, rows in rows_by_client.items()
    }
    subset_text = "" if len(order) == len(images) else f", {len(order)} of {len(images)} pairs"
    height, width = images.shape[2:4]
    figure = stack_mosaics(
        panels,
        f"condensed images by client and class{subset_text}",
        height,
        _IMAGE_INCHES / max(height, width),
    )
    write_figure(path, figure)


def make_mosaic(images: np.ndarray, to_pixels: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`[n, m, H, W, C]` -> `[n (H + 1) - 1, m (W + 1) - 1, 3]`, a white pixel between images;
    `pixels` of an image is what is shown of it."""
    rows, columns, height, width = images.shape[:4]
    mosaic = np.ones((rows * (height + 1) - 1, columns * (width + 1) - 1, 3))
    for i, j in np.ndindex(rows, columns):
        region = np.s_[i * (height + 1) :, j * (width + 1) :]
        mosaic[region][:height, :width] = np.atleast_3d(to_pixels(images[i, j]))
    return mosaic


def stack_mosaics(
    panels: Mapping[str, tuple[list[str], np.ndarray]], title: str, height: int, pixel_inches: float
) -> "Figure":
    """A figure of mosaics, one below the other, with a name for every row of images.

    In inches, so that a pixel, `pixel` wide and high, is of one size in all panels. `height` is an
    image's, in pixels.
    """
    from matplotlib.figure import Figure

    longest = max(len(name) for names, _ in panels.values() for name in names)
    left = 0.9 + 0.08 * longest
    mosaic_width = next(picture.shape[1] for _, picture in panels.values()) * pixel_inches
    mosaic_heights = sum(
        (len(picture) + 1) * pixel_inches + _GAP_INCHES for _, picture in panels.values()
    )
    figure = Figure(figsize=(max(left + mosaic_width + 0.2, 3.2), mosaic_heights + 0.4))
    full_width, full_height = figure.get_size_inches()
    top = full_height - 0.4
    for label, (names, picture) in panels.items():
        mosaic_height = len(picture) * pixel_inches
        x, y = left / full_width, (top - mosaic_height) / full_height
        panel = figure.add_axes((x, y, mosaic_width / full_width, mosaic_height / full_height))
        panel.imshow(picture, interpolation="nearest")
        panel.set_yticks(np.arange(len(names)) * (height + 1) + (height - 1) / 2, names, fontsize=8)
        panel.set_xticks([])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        figure.text(
            0.1 / full_width,
            (top - mosaic_height / 2) / full_height,
            label,
            va="center",
            fontsize=8,
        )
        top -= mosaic_height + _GAP_INCHES
    figure.text(0.1 / full_width, 1 - 0.2 / full_height, title, va="center", fontsize=9)
    return figure


def _select_most_confident_samples(soft_labels: np.ndarray) -> list[int]:
    """For each class that some sample favours, the sample with the highest probability of it."""
    favored_classes = soft_labels.argmax(1)
    classes = np.unique(favored_classes)
    return [int(np.where(favored_classes == c, soft_labels[:, c], -1).argmax()) for c in classes]


def _identity(image: np.ndarray) -> np.ndarray:
    return image


def _rescale_to_unit_range(image: np.ndarray) -> np.ndarray:
    """`[H, W, C]` to `[0, 1]`; one channel is dropped to `[H, W]`. A flat image becomes black."""
    low, high = image.min(), image.max()
    image = (image - low) / max(high - low, np.finfo(np.float32).tiny)
    return image[..., 0] if image.shape[-1] == 1 else image


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
