"""Figures one after the other, as a GIF."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_het.analysis.figures.collaboration import order_by_similarity, plot_collaboration
from fedjax_het.analysis.figures.output import ignore_missing_glyphs
from fedjax_het.analysis.figures.synthetic_images import make_mosaic, stack_mosaics
from fedjax_het.condensation.synthetic_data import SyntheticData
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DURATION_SECONDS = 8.0  # of a whole turn, at most
_MAX_FRAMES = 40
_MAX_FRAME_SECONDS, _LAST_FRAME_SECONDS = 0.6, 2.0  # seconds: of a picture, of the last one


def write_animation(
    path: str | os.PathLike,
    frames: Sequence[Any],
    draw_frame: "Callable[[Any], Figure]",
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
    frame_images = []
    for frame in frames:
        buffer = io.BytesIO()
        with ignore_missing_glyphs():
            draw_frame(frame).savefig(buffer, format="png", dpi=dpi)
        frame_image = Image.open(buffer).convert("RGB")
        frame_images.append(frame_image.quantize(128, dither=Image.Dither.NONE))
    frame_milliseconds = int(1000 * min(_MAX_FRAME_SECONDS, MAX_DURATION_SECONDS / len(frames)))
    durations = [frame_milliseconds] * (len(frames) - 1) + [int(1000 * _LAST_FRAME_SECONDS)]
    first_image, *other_images = frame_images
    write_atomically(
        path,
        lambda file: first_image.save(
            file,
            format="GIF",
            save_all=True,
            append_images=other_images,
            duration=durations,
            loop=0,
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
    rows = select_samples_by_class(logits, num_images)
    images = np.stack([np.asarray(snapshots[n].images, np.float64) for n in iterations])
    low, high = (reduce(images, axis=(0, 2, 3, 4), keepdims=True) for reduce in (np.min, np.max))
    scaled_images = (images - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
    names = [str(c) if class_names is None else class_names[c] for c in rows]
    height, width = images.shape[2:4]

    def draw_frame(index: int) -> "Figure":
        grid = np.ones((len(rows), num_images, height, width, images.shape[-1]))
        for row, members in enumerate(rows.values()):
            grid[row, : len(members)] = scaled_images[index, members]
        mosaics = {"": (names, make_mosaic(grid, lambda image: image))}
        title = f"DynaFed's synthesis, iteration {iterations[index]:,} of {iterations[-1]:,}"
        return stack_mosaics(mosaics, title, height, 0.6 / max(height, width))

    return write_animation(path, range(len(iterations)), draw_frame)


def select_samples_by_class(logits: np.ndarray, max_samples: int) -> dict[int, list[int]]:
    """By class, the samples [P, C] whose soft label favours it: up to `most`, the surest first."""
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    favored_classes = probabilities.argmax(1)
    return {
        int(c): sorted(
            np.flatnonzero(favored_classes == c).tolist(), key=lambda k: -probabilities[k, c]
        )[:max_samples]
        for c in np.unique(favored_classes)
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
    is_valid_shape = weights.ndim == 3 and len(weights) > 0
    require(
        is_valid_shape, "shape of weights", weights.shape, "[rounds, K, K] of at least one round"
    )
    client_ids = order_by_similarity([weights[-1]], groups)
    max_weight = float(np.nanmax(np.where(np.eye(len(client_ids), dtype=bool), 0, weights)))

    def draw_frame(index: int) -> "Figure":
        title_text = ", ".join(filter(None, [title, f"round {index + 1}"]))
        return plot_collaboration(
            weights[index], groups, [title_text], scale=max_weight, order=client_ids
        )

    return write_animation(path, select_evenly_spaced(len(weights), _MAX_FRAMES), draw_frame)


def select_evenly_spaced(count: int, max_count: int) -> list[int]:
    """Up to `most` of the first `count` numbers, evenly, the first and the last among them."""
    if count <= max_count:
        return list(range(count))
    return sorted({round(k * (count - 1) / (max_count - 1)) for k in range(max_count)})
