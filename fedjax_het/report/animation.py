"""Figures one after the other, as a GIF."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.common.errors import require
from fedjax_het.common.files import write_atomically
from fedjax_het.common.pictures import any_letters
from fedjax_het.condensation.synthetic import SyntheticData
from fedjax_het.report.collaboration import plot_collaboration, similar_order
from fedjax_het.report.synthetic_images import mosaic, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECONDS = 8.0  # of a whole turn, at most
_FRAMES = 40
_SLOWEST, _LAST = 0.6, 2.0  # seconds: of a picture, of the last one


def write_animation(
    path: str | os.PathLike,
    frames: Sequence[Any],
    draw: "Callable[[Any], Figure]",
    *,
    dpi: int = 90,
) -> Path:
    """Write `draw(frame)` of each frame as pictures of a GIF that repeats, whole or not at all.

    All figures have to be of one size. The last picture stays for two seconds. Cost: a figure a
    frame. Returns the path. ConfigError without a frame.
    """
    from PIL import Image

    require(len(frames) > 0, "frames", frames, "at least one")
    path = Path(path)
    pictures = []
    for frame in frames:
        buffer = io.BytesIO()
        with any_letters():
            draw(frame).savefig(buffer, format="png", dpi=dpi)
        picture = Image.open(buffer).convert("RGB")
        pictures.append(picture.quantize(128, dither=Image.Dither.NONE))
    each = int(1000 * min(_SLOWEST, SECONDS / len(frames)))
    times = [each] * (len(frames) - 1) + [int(1000 * _LAST)]
    first, *rest = pictures
    write_atomically(
        path,
        lambda file: first.save(
            file, format="GIF", save_all=True, append_images=rest, duration=times, loop=0
        ),
    )
    return path


def animate_synthesis(
    snapshots: Mapping[int, SyntheticData],
    path: str | os.PathLike,
    *,
    num_images: int = 6,
    class_names: Sequence[str] | None = None,
) -> Path:
    """DynaFed's images over its synthesis: a row for each class that soft labels favour at the end,
    with up to `num_images` of its images, those that are surest of it first.

    snapshots: iteration -> data at that iteration. Each image keeps one scale of grey or colours
    through all pictures, from its least to its largest pixel. Returns the path.
    """
    require(len(snapshots) > 0, "snapshots", snapshots, "at least one iteration")
    require(num_images >= 1, "num_images", num_images, "a number >= 1")
    iterations = sorted(snapshots)
    logits = np.asarray(snapshots[iterations[-1]].label_logits, np.float64)
    rows = favoured_rows(logits, num_images)
    images = np.stack([np.asarray(snapshots[n].images, np.float64) for n in iterations])
    low, high = (edge(images, axis=(0, 2, 3, 4), keepdims=True) for edge in (np.min, np.max))
    shown = (images - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
    names = [str(c) if class_names is None else class_names[c] for c in rows]
    height, width = images.shape[2:4]

    def draw(place: int) -> "Figure":
        grid = np.ones((len(rows), num_images, height, width, images.shape[-1]))
        for row, members in enumerate(rows.values()):
            grid[row, : len(members)] = shown[place, members]
        mosaics = {"": (names, mosaic(grid, lambda image: image))}
        title = f"DynaFed's synthesis, iteration {iterations[place]:,} of {iterations[-1]:,}"
        return stacked(mosaics, title, height, 0.6 / max(height, width))

    return write_animation(path, range(len(iterations)), draw)


def favoured_rows(logits: np.ndarray, most: int) -> dict[int, list[int]]:
    """By class, the samples [P, C] whose soft label favours it: up to `most`, the surest first."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    favoured = shares.argmax(1)
    return {
        int(c): sorted(np.flatnonzero(favoured == c).tolist(), key=lambda k: -shares[k, c])[:most]
        for c in np.unique(favoured)
    }


def animate_collaboration(
    weights: np.ndarray,
    path: str | os.PathLike,
    groups: np.ndarray | None = None,
    *,
    title: str = "",
) -> Path:
    """Who learns from whom over the rounds: `plot_collaboration` of up to 40 of them, in the order
    of the last one, on one scale.

    weights: [rounds, K, K], as `result.metrics["collaboration"]` has them. Returns the path.
    """
    weights = np.asarray(weights, np.float64)
    fits = weights.ndim == 3 and len(weights) > 0
    require(fits, "shape of weights", weights.shape, "[rounds, K, K] of at least one round")
    ids = similar_order([weights[-1]], groups)
    largest = float(np.nanmax(np.where(np.eye(len(ids), dtype=bool), 0, weights)))

    def draw(place: int) -> "Figure":
        said = ", ".join(filter(None, [title, f"round {place + 1}"]))
        return plot_collaboration(weights[place], groups, [said], scale=largest, order=ids)

    return write_animation(path, some_of(len(weights), _FRAMES), draw)


def some_of(count: int, most: int) -> list[int]:
    """Up to `most` of the first `count` numbers, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})
