"""TFRecord files of tensorflow-datasets, read without TensorFlow."""

import json
import struct
import sys

import numpy as np
import pytest
from support.tfds_data import write_tfds_dataset

from fedjax_het import load_dataset
from fedjax_het.data.sources.tfrecord import compute_crc32c, iter_records
from fedjax_het.utils.errors import ConfigError


def crc32c(content):
    """Bit by bit, from the definition."""
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def mask(crc):
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record):
    length = struct.pack("<Q", len(record))
    checksums = [struct.pack("<I", mask(crc32c(part))) for part in (length, record)]
    return length + checksums[0] + record + checksums[1]


def test_checksums():
    rng = np.random.default_rng(0)
    buffers = [rng.bytes(size) for size in (0, 1, 3, 4, 255, 256, 257, 511, 512, 1000, 5)]
    assert compute_crc32c(buffers).tolist() == [crc32c(buffer) for buffer in buffers]
    # Vectors of RFC 3720, section B.4.
    assert compute_crc32c([bytes(32), b"\xff" * 32]).tolist() == [0x8A9136AA, 0x62A8AB43]


def write_tfrecords(folder):
    """Replace the array_record files of a prepared data set by TFRecord files."""
    from array_record.python.array_record_module import ArrayRecordReader

    for path in folder.glob("*array_record*"):
        reader = ArrayRecordReader(str(path))
        records = reader.read(0, reader.num_records())
        target = folder / path.name.replace("array_record", "tfrecord")
        target.write_bytes(b"".join(map(frame, records)))
        path.unlink()
    info = folder / "dataset_info.json"
    text = info.read_text().replace("array_record", "tfrecord").replace("ARRAY_RECORD", "TFRECORD")
    info.write_text(json.dumps({**json.loads(text), "fileFormat": "tfrecord"}))


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
    assert dataset.digest() == original.digest()
    assert dataset.class_names == original.class_names
    assert dataset.source == "tensorflow-datasets 1.0.0, tfrecord"
    assert dataset.order == original.order == "tensorflow-datasets"
    assert "tensorflow" not in sys.modules


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
