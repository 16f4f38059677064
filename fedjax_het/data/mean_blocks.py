"""Averages of clients' examples, which mean-augmented federated learning shares (Yoon et al., ICLR
2021)."""

from typing import NamedTuple

import numpy as np

from fedjax_het.data.partition import Partition
from fedjax_het.data.validation import NumClasses, Seed, to_array
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import require
from fedjax_het.utils.validation import validate_arguments

# A stream of its own, so that who is averaged does not depend on other draws.
_AVERAGES_STREAM = 0xA7E5


class MeanBlocks(NamedTuple):
    """Which of a client's examples are averaged together.

    size: the paper's M_k, examples in an average; None: all that a client has."""

    size: PositiveInt | None = None

    def num_averages(self, sizes: np.ndarray) -> np.ndarray:
        """How many averages clients make that hold so many examples. What is left over after whole
        blocks makes a smaller one."""
        return -(-sizes // np.maximum(sizes if self.size is None else self.size, 1))


@validate_arguments
def average_examples(
    images: np.ndarray,
    labels: np.ndarray,
    num_classes: NumClasses,
    partition: Partition,
    blocks: MeanBlocks,
    seed: Seed,
) -> tuple[np.ndarray, np.ndarray]:
    """The averages of all clients, client after client.

    Every client shuffles its examples and cuts them into blocks. Returns the mean images
    `[M, H, W, C]` float32, divided by 255 where `images` are uint8 (normalisation, being affine,
    may come after the mean), and the shares of the classes `[M, num_classes]` float32.
    Cost: one pass over the clients' examples.
    Raises `ConfigError` for what does not fit together.
    """
    images = to_array("images", images, "an array [N, H, W, C]")
    partition.label_counts(labels, num_classes)  # it is of these labels
    labels = np.asarray(labels)
    ok = images.ndim == 4 and len(images) == len(labels) and images.dtype.kind in "iuf"
    require(ok, "shape of images", images.shape, f"[{len(labels)}, H, W, C], as of the labels")
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    means, class_proportions = [], []
    for client in map(int, np.flatnonzero(partition.sizes)):
        client_indices = partition.client_indices(client)
        size = blocks.size or len(client_indices)
        order = np.random.default_rng([_AVERAGES_STREAM, seed, client]).permutation(client_indices)
        for block in np.split(order, range(size, len(client_indices), size)):
            means.append(images[block].mean(0, dtype=np.float64) / scale)
            class_proportions.append(np.bincount(labels[block], minlength=num_classes) / len(block))
    return np.asarray(means, np.float32), np.asarray(class_proportions, np.float32)
