"""EMNIST as in FSL's experiments: 45 classes of the Balanced split."""

import numpy as np

from fedjax_het.data.quota_sampling import allocate_equal_counts, shuffle_by_class

_NUM_CLASSES, _NUM_TEST_IMAGES = 45, 10_000
_TEST_SEED = 45  # fixed, so that all runs have one test set


def select_first_45_classes(
    arrays: dict[str, np.ndarray], meta: dict
) -> tuple[dict[str, np.ndarray], dict]:
    """Remove the last two classes of EMNIST Balanced, r and t, and draw 10,000 of the test images.

    FSL (arXiv 2210.02614) uses 45 classes of 2,400 training images each, but does not name the two
    of 47 classes that it omits. It uses 10,000 of the 18,000 test images of 45 classes, but does
    not name them. Here a subset with 222 or 223 images of each class is drawn once, with a fixed
    seed; if there are fewer test images, all are used. Images keep their order.

    Args:
      arrays: images and labels of both splits of EMNIST Balanced by name.
      meta: facts of the data set by name, with class names.

    Returns:
      `(arrays, meta)` of the 45 classes.
    """
    rng = np.random.default_rng(_TEST_SEED)
    is_selected = {split: arrays[f"{split}_labels"] < _NUM_CLASSES for split in ("train", "test")}
    labels = np.where(is_selected["test"], arrays["test_labels"], -1)  # -1 belongs to no class
    pools = shuffle_by_class(rng, labels, _NUM_CLASSES)
    sizes = np.array([len(pool) for pool in pools])
    counts = allocate_equal_counts(rng, sizes, min(_NUM_TEST_IMAGES, int(sizes.sum())))
    test_positions = np.concatenate(
        [pool[:count] for pool, count in zip(pools, counts, strict=True)]
    )
    positions = {"train": np.flatnonzero(is_selected["train"]), "test": np.sort(test_positions)}
    return (
        {
            f"{split}_{part}": arrays[f"{split}_{part}"][positions[split]]
            for split in ("train", "test")
            for part in ("images", "labels")
        },
        {**meta, "class_names": meta["class_names"][:_NUM_CLASSES]},
    )
