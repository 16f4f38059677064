"""EMNIST as FSL's experiments have it: 45 classes of its Balanced split."""

import numpy as np

from fedjax_het.data.quota_sampling import allocate_equal_counts, shuffle_by_class

_NUM_CLASSES, _NUM_TEST_IMAGES = 45, 10_000
_TEST_SEED = 45  # one test set for all runs


def select_first_45_classes(
    arrays: dict[str, np.ndarray], meta: dict
) -> tuple[dict[str, np.ndarray], dict]:
    """Those of EMNIST Balanced without its last two classes, r and t; 10,000 of its tests.

    FSL (arXiv 2210.02614) says 45 classes of 2,400 training images each, but not which two of the
    47 it leaves out, and 10,000 test images of the 18,000 that 45 classes have, but not which: a
    subset with 222 or 223 of each class is drawn once, with a fixed seed (with fewer tests than
    that, all are kept). Images keep their order.
    """
    rng = np.random.default_rng(_TEST_SEED)
    is_selected = {split: arrays[f"{split}_labels"] < _NUM_CLASSES for split in ("train", "test")}
    labels = np.where(is_selected["test"], arrays["test_labels"], -1)  # no class's
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
