"""Two tables of scikit-learn: features with classes, and features with a number as label."""

import numpy as np

from fedjax_het.data.sources.splits import divide_examples

# Never changed: another value would be another benchmark.
_TEST_FRACTION = 0.2


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
    arrays = {"inputs": table.data.astype(np.float32), "labels": table.target.astype(np.int32)}
    return divide_examples(arrays, _TEST_FRACTION), {
        "class_names": [str(name) for name in table.target_names],
        "feature_names": [str(name) for name in table.feature_names],
    }


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
    arrays = {"inputs": table.data.astype(np.float32), "labels": labels}
    feature_names = [str(name) for name in table.feature_names]
    facts = {"task": "regression", "feature_names": feature_names}
    return divide_examples(arrays, _TEST_FRACTION, "regression"), facts
