"""Averages of clients' examples, shared in mean-augmented federated learning.

Source: Yoon et al., "FedMix", ICLR 2021.
"""

from typing import NamedTuple

import numpy as np

from fedjax_het.data.partition import Partition
from fedjax_het.data.validation import NumClasses, Seed
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_arguments

# Averages use a separate random stream, so the blocks do not depend on other draws.
_AVERAGES_STREAM = 0xA7E5


class MeanBlocks(NamedTuple):
    """Rule that divides the examples of a client into blocks, each of which is averaged.

    Attributes:
      size: number of examples in an average, the paper's M_k. None: all examples of the client.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import MeanBlocks
      >>> MeanBlocks(4).num_averages(np.array([0, 4, 9]))
      array([0, 1, 3])
    """

    size: PositiveInt | None = None

    def num_averages(self, sizes: np.ndarray) -> np.ndarray:
        """Count the averages of each client.

        The examples left over after whole blocks make a smaller block.

        Args:
          sizes: number of examples of each client, integers `[K]`.

        Returns:
          Number of averages of each client, integers `[K]`.
        """
        return -(-sizes // np.maximum(sizes if self.size is None else self.size, 1))


@accept_former_arguments("average_examples", FORMER_INPUT_NAMES)
@validate_arguments
def average_examples(
    inputs: np.ndarray,
    labels: np.ndarray,
    num_classes: NumClasses,
    partition: Partition,
    blocks: MeanBlocks,
    seed: Seed,
) -> tuple[np.ndarray, np.ndarray]:
    """Average the examples of all clients in blocks.

    Every client shuffles its examples, cuts them into blocks and averages each block. Normalization
    is affine, so it may follow the mean. Cost: one pass over the clients' examples.

    Args:
      inputs: training inputs `[N, ...]`, uint8 images or floats.
      labels: training labels, integers `[N]` in [0, num_classes).
      num_classes: number of classes.
      partition: the training examples of each client.
      blocks: size of the blocks.
      seed: seed of the shuffles, >= 0.

    Returns:
      `(means, class_proportions)` of the M blocks, ordered by client: mean inputs, float32
      `[M, ...]`, divided by 255 if `inputs` are uint8; and class proportions, float32
      `[M, num_classes]`.

    Raises:
      ConfigError: if inputs, labels and partition do not belong together.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data import MeanBlocks, average_examples, partition_from_clients
      >>> inputs = np.full((6, 2, 2, 1), 255, np.uint8)
      >>> partition = partition_from_clients([[0, 1, 2, 3], [4, 5]])
      >>> means, proportions = average_examples(
      ...     inputs, np.array([0, 0, 0, 0, 1, 0]), 2, partition, MeanBlocks(2), seed=0
      ... )
      >>> means.shape, float(means.max())
      ((3, 2, 2, 1), 1.0)
      >>> proportions
      array([[1. , 0. ],
             [1. , 0. ],
             [0.5, 0.5]], dtype=float32)
    """
    inputs = to_array("inputs", inputs, "an array [N, ...]")
    partition.label_counts(labels, num_classes)  # checks that they belong together
    labels = np.asarray(labels)
    is_valid = inputs.ndim > 1 and len(inputs) == len(labels) and inputs.dtype.kind in "iuf"
    expected = f"[{len(labels)}, ...], an input for each label"
    require(is_valid, "shape of inputs", inputs.shape, expected)
    scale = 255.0 if inputs.dtype == np.uint8 else 1.0
    means, class_proportions = [], []
    for client in map(int, np.flatnonzero(partition.sizes)):
        client_indices = partition.client_indices(client)
        size = blocks.size or len(client_indices)
        order = np.random.default_rng([_AVERAGES_STREAM, seed, client]).permutation(client_indices)
        for block in np.split(order, range(size, len(client_indices), size)):
            means.append(inputs[block].mean(0, dtype=np.float64) / scale)
            class_proportions.append(np.bincount(labels[block], minlength=num_classes) / len(block))
    return np.asarray(means, np.float32), np.asarray(class_proportions, np.float32)
