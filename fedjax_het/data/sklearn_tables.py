"""Two tables of scikit-learn: features with classes, and features with a number as label."""

import numpy as np

# Never changed: another value would be another benchmark.
_SEED, _TEST_FRACTION = 0, 0.2


def read_breast_cancer(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read 569 examples of 30 features of cell nuclei in two classes, benign and malignant.

    A fifth of each class, rounded, is drawn for the test split, with a fixed seed.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: features and classes of both splits by name, and class names.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    arrays = _split(table.data, table.target.astype(np.int32), table.target)
    return arrays, {"class_names": [str(name) for name in table.target_names]}


def read_diabetes(data_dir=None, cache_dir=None) -> tuple[dict[str, np.ndarray], dict]:
    """Read 442 examples of 10 features with the progression of diabetes after a year.

    The label is divided by 100. A fifth of the examples is drawn for the test split, with a fixed
    seed.

    Args:
      data_dir: not used.
      cache_dir: not used.

    Returns:
      `(arrays, meta)`: features and numbers of both splits by name, and the task.
    """
    from sklearn.datasets import load_diabetes

    table = load_diabetes(scaled=False)
    labels = (table.target / 100).astype(np.float32)
    return _split(table.data, labels, np.zeros(len(labels))), {"task": "regression"}


def _split(features: np.ndarray, labels: np.ndarray, strata: np.ndarray) -> dict[str, np.ndarray]:
    rng, is_test = np.random.default_rng(_SEED), np.zeros(len(labels), bool)
    for stratum in np.unique(strata):
        members = rng.permutation(np.flatnonzero(strata == stratum))
        is_test[members[: round(_TEST_FRACTION * len(members))]] = True
    arrays = {}
    for split, rows in (("train", ~is_test), ("test", is_test)):
        arrays[f"{split}_images"] = features[rows].astype(np.float32)
        arrays[f"{split}_labels"] = labels[rows]
    return arrays
