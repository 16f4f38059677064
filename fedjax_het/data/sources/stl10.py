"""The labeled part of STL-10 in its authors' binary files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_het.data.sources.source import (
    FILE_ORDER,
    Content,
    PublishedDataset,
    Source,
    find_folder,
    read_lines,
    read_records,
    require_labels,
    without_cache,
)
from fedjax_het.utils.errors import ConfigError

_SIDE, _FOLDER = 96, "stl10_binary"


def find_stl10(dataset: PublishedDataset, root: Path) -> Callable[[Any], Content] | None:
    """Find the binary files of STL-10.

    Args:
      dataset: the data set.
      root: folder of the files, or the folder that contains it.

    Returns:
      A function `(cache_dir) -> content`, or None.
    """
    if dataset.name != "stl10":
        return None
    folder = find_folder(root, ("", _FOLDER), "train_X.bin")
    return None if folder is None else without_cache(_read, folder)


def _read(folder: Path) -> Content:
    class_names = read_lines(folder / "class_names.txt")
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        pixels = read_records(folder / f"{split}_X.bin", 3 * _SIDE * _SIDE)
        path = folder / f"{split}_y.bin"
        labels = read_records(path, 1)[:, 0].astype(np.int32) - 1  # the files count from 1
        if len(labels) != len(pixels):
            raise ConfigError(
                f"{path} has {len(labels):,} labels: expected {len(pixels):,}, one for each image"
            )
        # Each channel is stored column by column.
        images = pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 3, 2, 1)
        arrays[f"{split}_inputs"] = np.ascontiguousarray(images)
        arrays[f"{split}_labels"] = require_labels(path, labels, class_names)
    facts = {"class_names": class_names, "source": f"binary files in {folder.name}"}
    return arrays, {**facts, "order": FILE_ORDER}


SOURCE = Source(
    "stl10_binary",
    "for stl10: its authors' binary files, the labeled part",
    find=find_stl10,
    files={"stl10": f"{_FOLDER}, unpacked"},
)
