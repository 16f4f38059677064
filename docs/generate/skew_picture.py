"""Draw the images of five clients under each skew of images, the picture of the page on skews.

python docs/generate/skew_picture.py   # needs Fashion-MNIST
"""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from fedjax_het import load_dataset
from fedjax_het.core.example_transform import make_skew_inputs
from fedjax_het.data import partition_from_clients
from fedjax_het.skews import SKEW_SETTING, SKEWS, FeatureSkew
from fedjax_het.skews.assignment import assign_skews

PATH = Path(__file__).parents[1] / "images" / "skews.png"
NUM_CLIENTS = 5
TEXTS = {"rotation": "rotation:degrees=180,levels=ramp", "inversion": "inversion:levels=ramp"}


def transform_images(text: str, dataset, position: int) -> list[np.ndarray]:
    """Return an image as each client sees it.

    Args:
      text: the skew.
      dataset: the data set.
      position: position of the image in the training set.

    Returns:
      Images with values in [0, 1], `[H, W]` each.
    """
    partition = partition_from_clients(np.arange(NUM_CLIENTS)[:, None])
    skews = SKEW_SETTING.parse(SKEW_SETTING.to_settings(text))
    _, own = assign_skews(skews, partition, dataset, seed=0)
    inputs = make_skew_inputs(own, jax.random.key(0), dataset.train_labels, owners=None)
    index = np.array([position])
    return [
        np.asarray(inputs.transform.apply(dataset.train_inputs[index], index, np.int32(k)))[
            0, ..., 0
        ]
        for k in range(NUM_CLIENTS)
    ]


def draw_picture() -> None:
    """Draw one row for each skew of images in gray, and one column for each client."""
    dataset = load_dataset("fashion_mnist")
    position = int(np.flatnonzero(dataset.train_labels == 9)[0])
    kinds = [kind for kind in SKEWS.values() if issubclass(kind.make, FeatureSkew)]
    names = [kind.name for kind in kinds if kind.name != "color"]  # for three channels
    figure, axes = plt.subplots(len(names), NUM_CLIENTS, figsize=(5.0, 5.7))
    for i, (row, name) in enumerate(zip(axes, names, strict=True)):
        images = transform_images(TEXTS.get(name, name), dataset, position)
        for k, (axis, image) in enumerate(zip(row, images, strict=True)):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if i == 0:
                axis.set_title(f"client {k}", fontsize=9)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.tight_layout(pad=0.3)
    figure.savefig(PATH, dpi=110)


if __name__ == "__main__":
    draw_picture()
