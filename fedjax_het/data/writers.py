"""The embedded digits in the styles of artificial writers: a small data set with natural users."""

import numpy as np

# Never changed: another value would be another benchmark.
_SEED, _NUM_WRITERS, _SIZE_ALPHA = 0, 30, 4.0


def add_writers(arrays: dict[str, np.ndarray], meta: dict) -> tuple[dict[str, np.ndarray], dict]:
    """Assign each digit to one of 30 writers, and draw it in the writer's style.

    A writer has a slant, a width, a height and a stroke, which are drawn once. The numbers of
    examples are drawn from a Dirichlet distribution, in equal proportions for both splits and all
    classes, up to rounding.

    Args:
      arrays: images and labels of both splits of the digits by name.
      meta: facts of the data set by name.

    Returns:
      `(arrays, meta)` with the changed images, and the writer of each example as user.
    """
    rng = np.random.default_rng(_SEED)
    slants = rng.uniform(-0.4, 0.4, _NUM_WRITERS)
    scales = rng.uniform(0.75, 1.25, (_NUM_WRITERS, 2))
    strokes = np.exp(rng.uniform(-0.7, 0.7, _NUM_WRITERS))
    ends = np.cumsum(rng.dirichlet(np.full(_NUM_WRITERS, _SIZE_ALPHA)))
    changed = dict(arrays)
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_inputs"], arrays[f"{split}_labels"]
        # Sorted by class, then dealt by the writers' shares: each class has these shares.
        order = np.argsort(labels + rng.random(len(labels)))
        ranks = np.empty(len(labels))
        ranks[order] = np.arange(len(labels)) * (np.sqrt(5) - 1) / 2 % 1
        writers = np.minimum(np.searchsorted(ends, ranks, side="right"), _NUM_WRITERS - 1)
        changed[f"{split}_inputs"] = np.stack(
            [
                _draw_in_style(image, slants[writer], scales[writer], strokes[writer])
                for image, writer in zip(images, writers, strict=True)
            ]
        )
        changed[f"{split}_users"] = np.array([f"writer{writer:02d}" for writer in writers])
    note = f"the embedded digits in the styles of {_NUM_WRITERS} artificial writers"
    return changed, {**meta, "note": note}


def _draw_in_style(image: np.ndarray, slant: float, scale: np.ndarray, stroke: float) -> np.ndarray:
    """Shear and scale an image `[H, W, 1]` around its center, and change its stroke."""
    from scipy import ndimage

    matrix = np.array([[1 / scale[0], 0], [slant, 1 / scale[1]]])  # of source positions
    center = (np.array(image.shape[:2]) - 1) / 2
    sheared = ndimage.affine_transform(
        image[..., 0] / 255, matrix, center - matrix @ center, order=1
    )
    return np.rint(255 * sheared**stroke).astype(np.uint8)[..., None]
