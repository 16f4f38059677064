"""TFRecord files of tensorflow-datasets, read without TensorFlow."""

import sys

import numpy as np
import pytest
from support.tfds_data import write_tfds_dataset
from support.tfrecords import crc32c, write_tfrecords

from fedjax_het import load_dataset
from fedjax_het.data.sources.source import PublishedDataset
from fedjax_het.data.sources.tfds import _parse_positions
from fedjax_het.data.sources.tfrecord import compute_crc32c, iter_records
from fedjax_het.utils.errors import ConfigError


def test_checksums():
    rng = np.random.default_rng(0)
    buffers = [rng.bytes(size) for size in (0, 1, 3, 4, 255, 256, 257, 511, 512, 1000, 5)]
    assert compute_crc32c(buffers).tolist() == [crc32c(buffer) for buffer in buffers]
    # Vectors of RFC 3720, section B.4.
    assert compute_crc32c([bytes(32), b"\xff" * 32]).tolist() == [0x8A9136AA, 0x62A8AB43]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))
    with tfds.core.registered.skip_registration():
        write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10)
    return tmp_path


def test_equal_to_array_record(prepared, tmp_path):
    original = load_dataset("mnist", data_dir=prepared)
    write_tfrecords(prepared / "mnist/1.0.0")
    dataset = load_dataset("mnist", data_dir=prepared, cache_dir=tmp_path / "other")
    for name in ("tfds:mnist", "tfds:mnist/1.0.0"):  # any data set, by its folder
        other = load_dataset(name, data_dir=prepared, normalization="unit")
        unit = load_dataset("mnist", data_dir=prepared, normalization="unit")
        assert other.digest() == unit.digest() and other.source == dataset.source
    with pytest.raises(ConfigError, match=r"^dataset = 'tfds:.*cache has no prepared version"):
        load_dataset(f"tfds:{tmp_path}/cache")
    assert dataset.digest() == original.digest()
    assert dataset.class_names == original.class_names
    assert dataset.source == "tensorflow-datasets 1.0.0, tfrecord"
    assert dataset.order == original.order == "tensorflow-datasets"
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_order_of_the_files(form, tmp_path, private_cache):
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():
        ids = {"id": tfds.features.Text()}
        content = write_tfds_dataset(tmp_path, "mine", (5, 4, 3), 10, extra=ids)
        write_tfds_dataset(tmp_path, "other", (5, 4, 3), 10)
    if form == "tfrecord":
        write_tfrecords(tmp_path / "mine/1.0.0")
        write_tfrecords(tmp_path / "other/1.0.0")
    dataset = load_dataset(f"tfds:{tmp_path}/mine?order=files")
    np.testing.assert_array_equal(dataset.train_inputs, content["train"][0])
    np.testing.assert_array_equal(dataset.test_labels, content["test"][1])
    stored = load_dataset(f"tfds:{tmp_path}/mine")
    assert (dataset.order, stored.order) == ("files", "tensorflow-datasets")
    assert dataset.digest() != stored.digest()
    message = (
        "order = 'files': other is stored in the order of hashed keys.*no ids: expected no value"
    )
    with pytest.raises(ConfigError, match=message):
        load_dataset(f"tfds:{tmp_path}/other?order=files")
    positions = _parse_positions(PublishedDataset("", "own"), [b"train_2", b"train_0", b"train_1"])
    assert positions.tolist() == [2, 0, 1]
    for ids in ([b"train_deer_0", b"train_1"], [b"train_0", b"train_0"], [b"train_1", b"train_2"]):
        with pytest.raises(ConfigError, match=r"ids of own, such as 'train_.*are no positions"):
            _parse_positions(PublishedDataset("", "own"), ids)


@pytest.mark.parametrize("damage", ["content", "length", "end", "header", "missing record"])
def test_damaged_files(damage, prepared):
    folder = prepared / "mnist/1.0.0"
    write_tfrecords(folder)
    path = next(folder.glob("*train.tfrecord*"))
    content = bytearray(path.read_bytes())
    size = len(next(iter_records(path)))
    if damage in ("content", "length"):
        content[12 + size // 2 if damage == "content" else 0] ^= 1
    else:
        kept = {"end": -1, "header": 16 + size + 5, "missing record": 16 + size}[damage]
        content = content[:kept]
    path.write_bytes(content)
    message = {"missing record": "train holds 1 examples, not 23", "content": "wrong checksum"}
    expected = message.get(damage, "ends within a record|wrong checksum")
    with pytest.raises(ConfigError, match=rf"'mnist': .*cannot be read .*({expected}).*prepare"):
        load_dataset("mnist", data_dir=prepared)
