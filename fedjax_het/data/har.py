"""UCI HAR: activities of 30 subjects, measured by a smartphone (Anguita et al., ESANN 2013)."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset, read_numbers, require_equal_lengths
from fedjax_het.data.sources.source import Content, require_labels
from fedjax_het.data.sources.splits import divide_examples

_CLASS_NAMES = (
    *("walking", "walking upstairs", "walking downstairs"),
    *("sitting", "standing", "laying"),
)
# In the order of PFLlib's `dataset/generate_HAR.py`.
_SIGNALS = tuple(
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
_LENGTH, _NUM_FEATURES = 128, 561
_SPLITS = ("train", "test")
_TEST_FRACTION = 0.25  # of PFLlib; never changed: another value would be another benchmark
_LABEL_FILES = tuple(
    f"{split}/{kind}_{split}.txt" for split in _SPLITS for kind in ("y", "subject")
)


def _read_series(paths: Mapping[str, Path]) -> Content:
    """Read the acceleration and the angular velocity, `[N, 128, 9]`."""

    def read_inputs(split: str) -> dict[Path, np.ndarray]:
        files = (paths[f"{split}/Inertial Signals/{signal}_{split}.txt"] for signal in _SIGNALS)
        return {path: read_numbers(path, _LENGTH) for path in files}

    return _join(paths, read_inputs)


def _read_features(paths: Mapping[str, Path]) -> Content:
    """Read the features of the authors, `[N, 561]`."""

    def read_inputs(split: str) -> dict[Path, np.ndarray]:
        path = paths[f"{split}/X_{split}.txt"]
        return {path: read_numbers(path, _NUM_FEATURES)}

    return _join(paths, read_inputs)


def _join(
    paths: Mapping[str, Path], read_inputs: Callable[[str], dict[Path, np.ndarray]]
) -> Content:
    """Pool both splits, and draw a quarter of the examples of each subject as tests.

    The authors' test split has other subjects than the training split. PFLlib pools both splits and
    draws a quarter of each subject's examples, so that each client has tests.
    """
    parts = []
    for split in _SPLITS:
        contents = read_inputs(split)
        inputs = [*contents.values()]
        label_path, user_path = (paths[f"{split}/{kind}_{split}.txt"] for kind in ("y", "subject"))
        contents |= {path: read_numbers(path, 1)[:, 0] for path in (label_path, user_path)}
        require_equal_lengths(contents)
        labels = require_labels(label_path, contents[label_path] - 1, _CLASS_NAMES)
        users = np.array([f"subject{int(user):02d}" for user in contents[user_path]])
        stacked = inputs[0] if len(inputs) == 1 else np.stack(inputs, axis=-1)
        parts.append((stacked, labels, users))
    names = ("inputs", "labels", "users")
    pooled = {n: np.concatenate(p) for n, p in zip(names, zip(*parts, strict=True), strict=True)}
    return divide_examples(pooled, _TEST_FRACTION), {"class_names": [*_CLASS_NAMES]}


HAR = AuthorDataset(
    "har",
    "UCI HAR: 10,299 series of 128 x 9 measurements, 30 subjects, 6 activities",
    ("UCI HAR Dataset", ""),
    (
        *(f"{split}/Inertial Signals/{s}_{split}.txt" for split in _SPLITS for s in _SIGNALS),
        *_LABEL_FILES,
    ),
    _read_series,
    {"model": "cnn1d", "partition": "natural"},
)
"""The series of measurements."""
HAR_FEATURES = AuthorDataset(
    "har_features",
    "UCI HAR: 10,299 examples of 561 features, 30 subjects, 6 activities",
    ("UCI HAR Dataset", ""),
    (*(f"{split}/X_{split}.txt" for split in _SPLITS), *_LABEL_FILES),
    _read_features,
    {"model": "mlp", "partition": "natural"},
)
"""The features that the authors computed from the series."""
