"""Handwritten digits of scikit-learn: real images that need no download."""

import numpy as np

# Never changed: another value would be another benchmark.
_SPLIT_SEED = 0
_TEST_FRACTION = 0.2


def read_digits(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read the 1,797 gray 8x8 images in a fixed, stratified split.

    The split has 1,438 training and 359 test images. Values 0..16 become uint8 0..255 (times
    255/16, rounded). A fifth of each class, rounded, is drawn for the test split. Both splits keep
    scikit-learn's order.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: images and labels of both splits by name, and class names.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)

    rng = np.random.default_rng(_SPLIT_SEED)
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        is_test[rng.permutation(members)[: round(_TEST_FRACTION * len(members))]] = True
    arrays = {
        "train_images": images[~is_test],
        "train_labels": labels[~is_test],
        "test_images": images[is_test],
        "test_labels": labels[is_test],
    }
    return arrays, {"class_names": [str(digit) for digit in range(10)]}
