"""STL-10 images of another data set's classes: FSL's server data for CIFAR-10."""

import numpy as np

from fedjax_het.data.dataset import Dataset
from fedjax_het.utils.errors import ConfigError, require

# Names in STL-10 that differ from those in CIFAR-10.
_CLASS_SYNONYMS = {"car": "automobile"}


def select_shared_class_images(
    stl10: Dataset, dataset: Dataset, per_class: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select the first `per_class` training images of every class that both data sets have.

    Classes are matched by name (STL-10's car is an automobile), and labels are those of `dataset`.
    With CIFAR-10 there are nine shared classes: CIFAR-10 has no monkey, STL-10 no frog. Images are
    shrunk to the size of `dataset` by the mean over blocks of pixels (3x3 from 96 to 32), rounded;
    the paper does not describe the resizing. The stored order of STL-10 is random, so the first
    images are a random choice, and the images of a smaller `per_class` are among those of a larger
    one.

    Args:
      stl10: STL-10.
      dataset: the data set whose classes and image size are used.
      per_class: number of images of each class.

    Returns:
      `(images, labels)`: uint8 `[n, H, W, 3]` and int32 `[n]`, ordered by class.

    Raises:
      ConfigError: if the data sets share no class, if the sizes do not divide, or if a class has
        fewer images.
    """
    names = [_CLASS_SYNONYMS.get(name, name) for name in stl10.class_names]
    shared_names = [name for name in dataset.class_names if name in names]
    require(
        len(shared_names) > 0,
        "class_names",
        dataset.class_names,
        "names of STL-10 classes, like those of CIFAR-10",
    )
    images, labels = [], []
    for name in shared_names:
        members = np.flatnonzero(stl10.train_labels == names.index(name))
        require(
            per_class <= len(members),
            "per_class",
            per_class,
            f"at most {len(members)}, the number of training images of {name!r} in STL-10",
        )
        images.append(stl10.train_images[members[:per_class]])
        labels += [dataset.class_names.index(name)] * per_class
    height, width, _ = dataset.input_shape
    return block_mean(np.concatenate(images), height, width), np.array(labels, np.int32)


def block_mean(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Shrink images by the mean of each block of pixels, rounded (halves up).

    Args:
      images: uint8 `[N, H, W, C]`.
      height: height of the result, which divides H.
      width: width of the result, which divides W.

    Returns:
      Images, uint8 `[N, height, width, C]`.

    Raises:
      ConfigError: if the sizes do not divide.
    """
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
