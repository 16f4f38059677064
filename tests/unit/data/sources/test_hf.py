"""Hugging Face data sets: on the Hub, saved to disk, and in parquet files."""

import io
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.published_files import assert_same_arrays, random_splits

from fedjax_het import dataset_from_arrays, load_dataset
from fedjax_het.utils.errors import ConfigError

NAMES = ("ant", "bee", "cat", "dog")

pytestmark = pytest.mark.usefixtures("private_cache")


def encode(image):
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return file.getvalue()


def make_table(arrays, split, *, image="img", label="label", **columns):
    """A table as Hugging Face datasets store it, with its metadata."""
    images = [{"bytes": encode(i), "path": None} for i in arrays[f"{split}_inputs"]]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    features = {image: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": list(NAMES)}}
    table = pa.table(
        {
            image: pa.array(images, kind),
            label: arrays[f"{split}_labels"].astype(np.int64),
            **columns,
        }
    )
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return table.replace_schema_metadata(metadata)


@pytest.fixture(scope="module")
def arrays():
    return random_splits((5, 4, 3), 4)


def write_parquet(folder, arrays, **options):
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        table = make_table(arrays, split, **options)
        half = len(table) // 2
        for part, rows in enumerate((table[:half], table[half:])):
            pq.write_table(rows, folder / f"{split}-0000{part}-of-00002.parquet")
    return folder


def test_parquet_folder(arrays, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # not needed
    write_parquet(tmp_path / "cifar/data", arrays)
    dataset = load_dataset("hf:cifar", data_dir=tmp_path)
    assert_same_arrays(dataset, arrays)
    assert dataset.digest() == dataset_from_arrays(**arrays).digest()
    assert dataset.class_names == NAMES and (dataset.source, dataset.order) == ("hf", "files")
    with monkeypatch.context() as context:  # the second time from the cache
        context.setattr("fedjax_het.data.sources.hf.read_tables", None)
        assert load_dataset(f"hf:{tmp_path}/cifar").class_names == NAMES
    for split in ("train", "test"):  # the names of files after the Hub's conversion
        folder = tmp_path / "converted/default" / split
        folder.mkdir(parents=True)
        pq.write_table(make_table(arrays, split), folder / "0000.parquet")
    assert load_dataset(f"hf:{tmp_path}/converted").digest() == dataset.digest()


def test_folder_saved_to_disk(arrays, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(
        {s: datasets.Dataset(make_table(arrays, s)) for s in ("train", "test")}
    )
    datasets.disable_progress_bars()
    splits.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    calls = []

    def load(name, config, revision):
        calls.append((name, config, revision))
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load)
    hub = load_dataset("hf:owner/set?config=plain&revision=v1")
    assert calls == [("owner/set", "plain", "v1")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    saved = load_dataset(f"hf:{tmp_path}/saved")
    assert saved.digest() == hub.digest() == dataset_from_arrays(**arrays).digest()
    assert saved.class_names == hub.class_names == NAMES
    divided = load_dataset(f"hf:{tmp_path}/saved/train?test_fraction=0.25")
    np.testing.assert_array_equal(np.bincount(divided.test_labels), [2, 2, 2, 2])
    assert len(divided.train_labels) == 16


def test_class_without_examples(arrays, tmp_path):
    few = {
        **arrays,
        "train_labels": arrays["train_labels"] % 2,
        "test_labels": arrays["test_labels"] % 2,
    }
    dataset = load_dataset(f"hf:{write_parquet(tmp_path, few)}")
    assert dataset.class_names == NAMES and dataset.num_classes == 4


def test_columns(arrays, tmp_path):
    clients = {
        s: [f"w{i % 3}" for i in range(len(arrays[f"{s}_labels"]))] for s in ("train", "test")
    }
    for split in ("train", "test"):
        table = make_table(arrays, split, image="photo", label="kind", writer_id=clients[split])
        table = table.append_column("colour", [["red", "blue", "red"] * (len(table) // 3)])
        pq.write_table(table, tmp_path / f"{split}.parquet")
    dataset = load_dataset(f"hf:{tmp_path}?domain=colour")  # the others by their types
    assert_same_arrays(dataset, arrays)
    assert dataset.train_users.tolist() == clients["train"]
    assert (
        dataset.domain_names == ("blue", "red") and dataset.test_domains.tolist() == [1, 0, 1] * 3
    )
    texts = load_dataset(f"hf:{tmp_path}?label=writer_id&client=kind")
    assert texts.class_names == ("w0", "w1", "w2") and texts.test_labels.tolist() == [0, 1, 2] * 3
    np.testing.assert_array_equal(texts.train_users, arrays["train_labels"])
    for options, message in (
        (
            "label=none",
            r"label = 'none': no such column \(columns: photo, kind, writer_id, colour\)",
        ),
        ("test=none", r"no split 'none' for tests \(splits: test, train\)"),
        ("image=colour", "image 0 of column 'colour' of split 'train' cannot be"),
        ("size=0", "size = 0"),
    ):
        with pytest.raises(ConfigError, match=rf"^dataset = 'hf:.*{message}"):
            load_dataset(f"hf:{tmp_path}?{options}")
    assert load_dataset(f"hf:{tmp_path}?size=[3,2]").input_shape == (3, 2, 3)


@pytest.mark.parametrize("form", ["bytes", "lists", "fixed lists"])
def test_forms_of_images(form, arrays, tmp_path):
    for split in ("train", "test"):
        images = arrays[f"{split}_inputs"]
        column = [encode(image) for image in images] if form == "bytes" else images.tolist()
        kind = pa.binary()
        if form == "lists":
            kind = pa.list_(pa.list_(pa.list_(pa.uint8())))
        elif form == "fixed lists":
            kind = pa.list_(pa.list_(pa.list_(pa.uint8(), 3), 4), 5)
        table = pa.table({"image": pa.array(column, kind), "label": arrays[f"{split}_labels"]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    assert_same_arrays(load_dataset(f"hf:{tmp_path}"), arrays)


def test_missing_splits_and_files(arrays, tmp_path, monkeypatch):
    pq.write_table(make_table(arrays, "train"), tmp_path / "all.parquet")
    with pytest.raises(ConfigError, match=r"no split 'test' for tests .*test_fraction=0\.2"):
        load_dataset(f"hf:{tmp_path}/all.parquet")
    assert load_dataset(f"hf:{tmp_path}/all.parquet?test_fraction=0.5").num_classes == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty has no known format"):
        load_dataset(f"hf:{tmp_path}/empty")
    (tmp_path / "all.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(ConfigError, match=r"all\.parquet cannot be read"):
        load_dataset(f"hf:{tmp_path}?test_fraction=0.5")
    write_parquet(tmp_path / "two/a", arrays)
    write_parquet(tmp_path / "two/b", arrays)
    with pytest.raises(ConfigError, match="split test in a and b: expected the folder of one"):
        load_dataset(f"hf:{tmp_path}/two")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"no folder owner/name.*fedjax_het\[hf\]"):
        load_dataset("hf:owner/name")
