"""Covertype (Blackard and Dean, 1999): trees of 581,012 places, a table of 54 features."""

from collections.abc import Mapping
from pathlib import Path

from fedjax_het.data.author_files import AuthorDataset, read_numbers
from fedjax_het.data.sources.source import Content, require_labels
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.utils.errors import ConfigError

_CLASS_NAMES = (
    *("spruce, fir", "lodgepole pine", "ponderosa pine", "cottonwood, willow"),
    *("aspen", "Douglas fir", "krummholz"),
)
_NUM_FEATURES = 54
# The authors' covtype.info: 11,340 rows for training, 3,780 for validation, others for tests.
_NUM_TRAIN = 11_340 + 3_780


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the authors' splits; their validation examples are training examples."""
    (path,) = paths.values()
    rows = read_numbers(path, _NUM_FEATURES + 1, separator=",")
    if len(rows) <= _NUM_TRAIN:
        raise ConfigError(f"{path} has {len(rows):,} lines: expected more than {_NUM_TRAIN:,}")
    features = rows[:, :_NUM_FEATURES]
    labels = require_labels(path, rows[:, _NUM_FEATURES] - 1, _CLASS_NAMES)
    parts = {"train": slice(_NUM_TRAIN), "test": slice(_NUM_TRAIN, None)}
    arrays = {s: {"inputs": features[part], "labels": labels[part]} for s, part in parts.items()}
    return join_splits(arrays), {"class_names": [*_CLASS_NAMES]}


COVERTYPE = AuthorDataset(
    "covertype",
    "Covertype: 15,120 + 565,892 places, 54 features, 7 types of trees",
    ("covertype", ""),
    ("covtype.data",),
    _read,
    {"model": "mlp"},
)
"""The table of the UCI repository."""
