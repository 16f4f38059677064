"""Heart Disease of four hospitals (Detrano et al., 1989), as FLamby prepares it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset, read_frame
from fedjax_het.data.sources.source import Content
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.utils.errors import ConfigError

_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_CLASS_NAMES = ("no disease", "disease")
_NUM_COLUMNS = 14
# Columns slope, ca and thal are missing in most rows of three hospitals.
_NUMBERS = [0, 1, 3, 4, 5, 7, 8, 9]
_CATEGORIES = ((2, (2, 3, 4)), (6, (1, 2)))  # chest pain, electrocardiogram; the first is left out
_USED_COLUMNS, _LABEL = [*range(10)], 13
# As in FLamby's `datasets/fed_heart_disease/dataset.py`. Never changed.
_TRAIN_FRACTION, _SEED = 0.66, 43
_TINY = 1e-9


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the complete rows of each hospital, and divide and normalize them as FLamby does.

    Each feature is normalized by mean and deviation of the hospital's training examples.
    """
    splits: dict[str, list[tuple[np.ndarray, ...]]] = {"train": [], "test": []}
    for hospital, path in zip(_HOSPITALS, paths.values(), strict=True):
        features, labels = _read_hospital(path)
        rows = _divide(path, labels)
        train = features[rows["train"]]
        mean, deviation = train.mean(0), train.std(0, ddof=1)
        deviation = np.where(deviation > 0, deviation + _TINY, 1)
        normalized = ((features - mean) / deviation).astype(np.float32)
        users = np.repeat(hospital, len(labels))
        for split, part in rows.items():
            splits[split].append((normalized[part], labels[part], users[part]))
    arrays = {}
    for split, contents in splits.items():
        parts = map(np.concatenate, zip(*contents, strict=True))
        arrays[split] = dict(zip(("inputs", "labels", "users"), parts, strict=True))
    num_features = arrays["train"]["inputs"].shape[1]
    constants = {"mean": [0.0] * num_features, "std": [1.0] * num_features}
    return join_splits(arrays), {"class_names": [*_CLASS_NAMES], **constants}


def _read_hospital(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return features, float64 `[N, 13]`, and classes, int32 `[N]`, of the complete rows."""
    frame = read_frame(path, _NUM_COLUMNS, na_values=["?"], has_missing_values=True)
    frame = frame[[*_USED_COLUMNS, _LABEL]].dropna()
    if any(frame[column].dtype.kind not in "iuf" for column in frame.columns):
        raise ConfigError(f"{path} has texts: expected numbers, or ? for missing ones")
    indicators = [frame[column] == value for column, values in _CATEGORIES for value in values]
    features = np.stack([*(frame[column] for column in _NUMBERS), *indicators], axis=1)
    return features.astype(np.float64), (frame[_LABEL] > 0).to_numpy().astype(np.int32)


def _divide(path: Path, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the positions of both splits, by class if each class has more than two examples."""
    from sklearn.model_selection import train_test_split

    counts = np.unique(labels, return_counts=True)[1]
    is_stratified = len(counts) > 1 and counts.min() > 2
    try:
        train, test = train_test_split(
            np.arange(len(labels)),
            test_size=1 - _TRAIN_FRACTION,
            train_size=_TRAIN_FRACTION,
            random_state=_SEED,
            stratify=labels if is_stratified else None,
        )
    except ValueError as error:
        raise ConfigError(f"{path} has {len(labels)} complete rows: expected more") from error
    return {"train": np.sort(train), "test": np.sort(test)}


HEART_DISEASE = AuthorDataset(
    "heart_disease",
    "Heart Disease as in FLamby: 486 + 254 patients, 13 features, 4 hospitals, 2 classes",
    ("heart_disease", "heart+disease", ""),
    tuple(f"processed.{hospital}.data" for hospital in _HOSPITALS),
    _read,
    {"model": "mlp", "partition": "natural"},
)
"""The processed tables of the UCI repository."""
