"""PAMAP2: activities of nine subjects, measured by sensors (Reiss and Stricker, ISWC 2012)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset, read_numbers
from fedjax_het.data.sources.source import Content
from fedjax_het.data.sources.splits import divide_examples
from fedjax_het.utils.errors import ConfigError

# Numbers of the activities in the files, in the order of the classes of PFLlib's
# `dataset/generate_PAMAP2.py`.
_ACTIVITIES = {
    **{24: "rope jumping", 1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running"},
    **{6: "cycling", 7: "Nordic walking", 12: "ascending stairs", 13: "descending stairs"},
    **{16: "vacuum cleaning", 17: "ironing"},
}
_NUM_COLUMNS, _ACTIVITY = 54, 1
# Acceleration (16 g), angular velocity and magnetic field of the sensors at hand, chest and ankle.
_CHANNELS = tuple(
    column
    for first in (4, 21, 38)
    for column in (*range(first, first + 3), *range(first + 6, first + 12))
)
_LENGTH, _STEP = 256, 128  # rows of 10 ms
_TEST_FRACTION = 0.25  # of PFLlib; never changed: another value would be another benchmark
_SUBJECTS = tuple(f"subject{number}" for number in range(101, 110))


def _read(paths: Mapping[str, Path]) -> Content:
    """Cut the recordings into windows of 2.56 s that overlap by half, by PFLlib's rules.

    A window has the smallest number of its activities, and 0 stands for a transition. Windows of
    transitions and of activities outside the protocol are left out. Missing measurements become 0.
    A quarter of the windows of each subject are tests.
    """
    pooled: dict[str, list[np.ndarray]] = {"inputs": [], "labels": [], "users": []}
    numbers = np.array([*_ACTIVITIES])
    for subject, path in zip(_SUBJECTS, paths.values(), strict=True):
        rows = read_numbers(path, _NUM_COLUMNS, separator=" ", has_missing_values=True)
        rows = np.nan_to_num(rows)
        series, activities = rows[:, _CHANNELS], rows[:, _ACTIVITY].astype(int)
        # As in PFLlib, a window that ends with the last row is left out.
        starts = np.arange(0, max(len(rows) - _LENGTH, 0), _STEP)
        positions = starts[:, None] + np.arange(_LENGTH)
        window_activities = activities[positions].min(axis=1)
        is_used = np.isin(window_activities, numbers)
        if not is_used.any():
            raise ConfigError(f"{path} has no window of 256 rows with one of the 12 activities")
        matches = window_activities[is_used][:, None] == numbers
        pooled["inputs"].append(series[positions[is_used]])
        pooled["labels"].append(matches.argmax(axis=1).astype(np.int32))
        pooled["users"].append(np.repeat(subject, is_used.sum()))
    arrays = {name: np.concatenate(parts) for name, parts in pooled.items()}
    return divide_examples(arrays, _TEST_FRACTION), {"class_names": [*_ACTIVITIES.values()]}


PAMAP2 = AuthorDataset(
    "pamap2",
    "PAMAP2: windows of 256 x 27 measurements, 9 subjects, 12 activities",
    ("PAMAP2_Dataset", ""),
    tuple(f"Protocol/{subject}.dat" for subject in _SUBJECTS),
    _read,
    {"model": "cnn1d", "partition": "natural"},
)
"""The recordings of the protocol."""
