"""The binary files of STL-10."""

import numpy as np
import pytest
from support.published_files import assert_same_arrays, random_splits

from fedjax_het import load_dataset
from fedjax_het.utils.errors import ConfigError

CLASS_NAMES = [f"class{i}" for i in range(10)]


def write_stl10(folder, arrays):
    """Write each channel column by column, and labels from 1 on, as the authors do."""
    folder.mkdir()
    for split in ("train", "test"):
        images = [
            np.stack([image[..., c].T for c in range(3)]) for image in arrays[f"{split}_inputs"]
        ]
        (folder / f"{split}_X.bin").write_bytes(np.stack(images).tobytes())
        labels = (arrays[f"{split}_labels"] + 1).astype(np.uint8)
        (folder / f"{split}_y.bin").write_bytes(labels.tobytes())
    (folder / "class_names.txt").write_text("\n".join(CLASS_NAMES) + "\n")


def test_files(tmp_path):
    arrays = random_splits((96, 96, 3), 10, (12, 10))
    folder = tmp_path / "stl10_binary"
    write_stl10(folder, arrays)
    dataset = load_dataset("stl10", data_dir=tmp_path)
    assert_same_arrays(dataset, arrays)
    assert dataset.class_names == tuple(CLASS_NAMES) and dataset.order == "files"
    path = folder / "test_y.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"'stl10': .*test_y\.bin has 9 labels: expected 10"):
        load_dataset("stl10", data_dir=folder)
    path.write_bytes(bytes(10))
    with pytest.raises(ConfigError, match=r"test_y\.bin has the label -1"):
        load_dataset("stl10", data_dir=folder)
