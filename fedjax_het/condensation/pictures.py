"""Pictures of synthetic images over the course of their synthesis (DynaFed's Fig. 4)."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_het.condensation.synthetic import SyntheticData
from fedjax_het.errors import require


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
    Errors: ConfigError: no snapshot, or a sample that is not there.
    """
    from matplotlib.figure import Figure

    require(len(snapshots) > 0, "snapshots", snapshots, "at least one iteration")
    iterations = sorted(snapshots)
    labels = _softmax(np.asarray(snapshots[iterations[-1]].label_logits, np.float64))
    if samples is None:
        samples = _surest_of_each_class(labels)[:num_samples]
    in_range = len(samples) > 0 and all(0 <= sample < len(labels) for sample in samples)
    require(in_range, "samples", samples, f"indices from 0 to {len(labels) - 1}")

    rows, columns = len(samples), len(iterations)
    figure = Figure(figsize=(1.1 * columns + 1.4, 1.1 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for column, iteration in enumerate(iterations):
        images = np.asarray(snapshots[iteration].images)
        axes[0, column].set_title(f"{iteration:,}", fontsize=9)
        for row, sample in enumerate(samples):
            axis = axes[row, column]
            axis.imshow(_stretched(images[sample]), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    for row, sample in enumerate(samples):
        favoured = int(labels[sample].argmax())
        name = str(favoured) if class_names is None else class_names[favoured]
        title = f"{name}\n{labels[sample, favoured]:.0%}"
        axes[row, 0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
    figure.supxlabel("iteration of the synthesis (top), soft label (left)", fontsize=8)
    figure.savefig(path, dpi=150)


def _surest_of_each_class(labels: np.ndarray) -> list[int]:
    """For each class that some sample favours, the sample with the highest probability of it."""
    favoured = labels.argmax(1)
    classes = np.unique(favoured)
    return [int(np.where(favoured == c, labels[:, c], -1).argmax()) for c in classes]


def _stretched(image: np.ndarray) -> np.ndarray:
    """`[H, W, C]` to `[0, 1]`; one channel is dropped to `[H, W]`. A flat image becomes black."""
    low, high = image.min(), image.max()
    image = (image - low) / max(high - low, np.finfo(np.float32).tiny)
    return image[..., 0] if image.shape[-1] == 1 else image


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
