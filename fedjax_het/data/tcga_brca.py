"""TCGA-BRCA: survival of 1,088 patients with breast cancer in six regions, from FLamby's files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedjax_het.data.author_files import AuthorDataset, read_frame
from fedjax_het.data.sources.source import Content
from fedjax_het.data.sources.splits import join_splits
from fedjax_het.tasks.survival import encode_survival
from fedjax_het.utils.errors import ConfigError

_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")  # of FLamby's centers
_NUM_FEATURES = 39
_NUM_COLUMNS = 1 + _NUM_FEATURES + 2  # patient, features, event, days
# Ends of the intervals in years. Never changed: another value would be another benchmark.
_YEARS = (1, 2, 3, 4, 5, 7, 10)
_DAYS_PER_YEAR = 365.25


def _read(paths: Mapping[str, Path]) -> Content:
    """Read the patients of FLamby's splits, and their deaths in intervals of time."""
    table_path, split_path = paths.values()
    table = read_frame(table_path, _NUM_COLUMNS, header=0)
    folds = read_frame(split_path, 3, header=0).set_axis(["patient", "split", "fold"], axis=1)
    if any(table.iloc[:, column].dtype.kind not in "iufb" for column in range(1, _NUM_COLUMNS)):
        raise ConfigError(f"{table_path} has texts: expected numbers after the patient")
    table = table.set_axis(["patient", *range(1, _NUM_COLUMNS)], axis=1)
    joined = table.merge(folds, on="patient", how="inner", validate="one_to_one")
    if len(joined) != len(folds):
        raise ConfigError(
            f"{split_path} has {len(folds):,} patients: expected patients of {table_path.name}, "
            f"which has {len(joined):,} of them"
        )
    folds = {f"{s}_{i}": name for s in ("train", "test") for i, name in enumerate(_REGIONS)}
    is_valid = joined["fold"].isin(folds.keys())
    if not is_valid.all():
        fold = joined["fold"][~is_valid].iloc[0]
        raise ConfigError(f"{split_path} has the fold {fold!r}: expected train_0 to test_5")
    numbers = joined[[*range(1, _NUM_COLUMNS)]].to_numpy(np.float64)
    inputs = numbers[:, :_NUM_FEATURES].astype(np.float32)
    ends = [years * _DAYS_PER_YEAR for years in _YEARS]
    labels = encode_survival(numbers[:, -1], numbers[:, -2] > 0, ends)
    users = np.array([folds[fold] for fold in joined["fold"]])
    arrays = {}
    for split in ("train", "test"):
        rows = joined["fold"].str.startswith(split).to_numpy()
        arrays[split] = {"inputs": inputs[rows], "labels": labels[rows], "users": users[rows]}
    return join_splits(arrays), {"task": "survival"}


TCGA_BRCA = AuthorDataset(
    "tcga_brca",
    "TCGA-BRCA as in FLamby: 866 + 222 patients, 39 features, 6 regions, survival",
    ("fed_tcga_brca", "flamby/datasets/fed_tcga_brca", ""),
    ("brca.csv", "dataset_creation_scripts/train_test_split.csv"),
    _read,
    {"model": "mlp", "partition": "natural"},
)
"""The tables in FLamby's repository."""
