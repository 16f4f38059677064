"""STL-10 as examples of another data set's classes: FSL's server data for CIFAR-10."""

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.utils.errors import ConfigError, require

# What STL-10 calls otherwise than CIFAR-10.
_CLASS_SYNONYMS = {"car": "automobile"}


def select_shared_class_images(
    stl10: Dataset, dataset: Dataset, per_class: int
) -> tuple[np.ndarray, np.ndarray]:
    """(images, labels): the first `per_class` training images of every class both sets have.

    Classes are the same where their names are (STL-10's car is an automobile), whatever their
    numbers; labels are those of `dataset`. With CIFAR-10 there are nine: it has no monkey, STL-10
    no frog. Images are shrunk to the size of `dataset` by the mean over blocks of pixels (3x3 from
    96 to 32), rounded; the paper does not say how. Class after class; the first of the stored
    order, which is a random one, and so the images of a smaller `per_class` are among a larger's.

    Raises `ConfigError` where the sets share no class, the sizes do not divide, or a class has
    fewer images.
    """
    names = [_CLASS_SYNONYMS.get(name, name) for name in stl10.class_names]
    shared_names = [name for name in dataset.class_names if name in names]
    require(
        len(shared_names) > 0, "class_names", dataset.class_names, "some of STL-10's, as CIFAR-10's"
    )
    images, labels = [], []
    for name in shared_names:
        members = np.flatnonzero(stl10.train_labels == names.index(name))
        require(
            per_class <= len(members),
            "per_class",
            per_class,
            f"at most {len(members)}, the training images that STL-10 has of {name!r}",
        )
        images.append(stl10.train_images[members[:per_class]])
        labels += [dataset.class_names.index(name)] * per_class
    height, width, _ = dataset.input_shape
    return block_mean(np.concatenate(images), height, width), np.array(labels, np.int32)


def block_mean(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [N, H, W, C] to [N, height, width, C]: the mean of each block, rounded (halves up)."""
    count, full_height, full_width, channels = images.shape
    if full_height % height or full_width % width:
        raise ConfigError(
            f"images of {height}x{width}: expected sides that divide {full_height}x{full_width}"
        )
    block_height, block_width = full_height // height, full_width // width
    blocks = images.reshape(count, height, block_height, width, block_width, channels)
    sums = blocks.sum((2, 4), dtype=np.int64)
    return ((2 * sums + block_height * block_width) // (2 * block_height * block_width)).astype(
        np.uint8
    )
