"""A small classification problem, dealt to unequal clients."""

import numpy as np

from fedjax_het.data import dataset_from_arrays, partition_from_clients

CLIENT_SIZES = (7, 0, 12, 3, 9, 20)  # unequal clients, one smaller than a batch, one empty
NUM_CLASSES = 3
IMAGE_SHAPE = (2, 2, 1)
BATCH_SIZE = 4


def make_blobs(sizes=CLIENT_SIZES, seed=0):
    """Float images of three Gaussian classes, and their labels; client after client, skewed."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate(
        [(rng.integers(0, 2, n) + k) % NUM_CLASSES for k, n in enumerate(sizes)]
    ).astype(np.int32)
    centers = np.random.default_rng(99).normal(size=(NUM_CLASSES, *IMAGE_SHAPE))
    images = (centers[labels] + rng.normal(size=(len(labels), *IMAGE_SHAPE))).astype(np.float32)
    return images, labels


SERVER_EXAMPLES = make_blobs((7,), seed=3)  # the examples of the server


def consecutive_partition(sizes=CLIENT_SIZES):
    """A partition that gives every client the next `sizes[k]` examples."""
    ends = np.cumsum(sizes)
    return partition_from_clients([np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)])


def make_user_dataset(sizes=CLIENT_SIZES, **dataset_options):
    images, labels = make_blobs(sizes)
    test_inputs, test_labels = make_blobs((30, 30), seed=1)
    return dataset_from_arrays(
        images, labels, test_inputs, test_labels, num_classes=NUM_CLASSES, **dataset_options
    )


def make_domains_dataset():
    """The same in three domains of unequal size, mixed."""
    return make_user_dataset(
        train_domains=np.arange(sum(CLIENT_SIZES)) * 5 % 3,
        test_domains=np.random.default_rng(2).choice(3, 60, p=(0.5, 0.3, 0.2)),
        domain_names=("clipart", "real", "sketch"),
    )
