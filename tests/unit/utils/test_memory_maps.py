"""Arrays in files: blocks, pages, and equality with arrays in memory."""

import numpy as np
import pytest

from fedjax_het import ConfigError, dataset_from_arrays
from fedjax_het.utils import memory_maps
from fedjax_het.utils.memory_maps import gather_rows, is_memory_mapped, iter_blocks, release_pages


def in_file(array, folder, mode="r"):
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, array)
    return np.load(path, mmap_mode=mode)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(memory_maps, "BLOCK_BYTES", 100)


def test_views_of_files_are_memory_mapped(tmp_path):
    array = in_file(np.arange(12).reshape(4, 3), tmp_path)
    assert is_memory_mapped(array) and is_memory_mapped(np.asarray(array)[1:].T)
    assert is_memory_mapped({"a": np.zeros(3), "b": array})
    assert not is_memory_mapped(array + 1) and not is_memory_mapped(np.array(array))


def test_released_pages_are_read_again(tmp_path):
    array = np.arange(4000.0).reshape(1000, 4)
    for mode in ("r", "r+", "c"):
        mapped = in_file(array, tmp_path, mode)
        expected = array.copy()
        if mode != "r":
            mapped[3] = expected[3] = -1  # of the mode "c": in memory alone
        for _ in range(2):
            release_pages(mapped)
            np.testing.assert_array_equal(mapped, expected)
        positions = np.array([1, 3, 999])
        np.testing.assert_array_equal(gather_rows(mapped[1:], positions - 1), expected[positions])


@pytest.mark.parametrize("shape", [(7,), (50, 3), (5, 40), (0, 3), (3, 0)])
def test_blocks_are_all_rows_in_order(shape, tmp_path):
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    blocks = list(iter_blocks(array))
    assert all(len(block) == 1 or block.nbytes <= 100 for block in blocks)
    np.testing.assert_array_equal(np.concatenate([array[:0], *blocks]), array)


@pytest.mark.parametrize("kind", ["uint8", "float32", "float64", "tokens", "uint16"])
def test_data_set_of_a_file_equals_data_set_of_an_array(kind, tmp_path, monkeypatch):
    rng, options = np.random.default_rng(0), {}
    inputs = rng.integers(0, 256, (300, 2, 3, 2))
    if kind == "tokens":
        inputs, options = inputs.reshape(300, -1), {"num_tokens": 256}
    elif kind.startswith("float"):
        inputs = (inputs / 255).astype(kind)
    else:
        inputs = inputs.astype(kind)
    labels = rng.integers(0, 3, 300)
    digests = set()
    for limit in (2**30, 0) if kind.startswith("float") else (2**30,):
        monkeypatch.setattr("fedjax_het.data.dataset._MAX_STATISTICS_BYTES", limit)
        datasets = [
            dataset_from_arrays(array, labels, inputs[:30], labels[:30], **options)
            for array in (inputs, in_file(inputs, tmp_path))
        ]
        assert datasets[0].mean == datasets[1].mean and datasets[0].std == datasets[1].std
        assert datasets[0].digest() == datasets[1].digest()
        np.testing.assert_array_equal(datasets[0].train_inputs, datasets[1].train_inputs)
        assert is_memory_mapped(datasets[1].train_inputs) == (kind in ("uint8", "float32"))
        digests.add((datasets[0].mean, datasets[0].std))
    for (mean, std), (other_mean, other_std) in zip(digests, digests, strict=True):
        np.testing.assert_allclose(mean, other_mean, rtol=1e-6)
        np.testing.assert_allclose(std, other_std, rtol=1e-6)


def test_invalid_values_of_a_file_are_reported(tmp_path):
    inputs = np.zeros((100, 2, 2, 1), np.float32)
    inputs[70, 1, 0, 0] = np.nan
    labels = np.arange(100) % 2
    with pytest.raises(ConfigError, match=r"^train_inputs\[70, 1, 0, 0\] = nan: expected"):
        dataset_from_arrays(in_file(inputs, tmp_path), labels, inputs[:2], labels[:2])
