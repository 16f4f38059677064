"""Examples by user: JSON files of LEAF, HDF5 and SQLite files of TensorFlow Federated."""

import contextlib
import json
import sqlite3
import sys

import numpy as np
import pytest
from support.published_files import assert_same_arrays, random_splits, write_tff_sqlite

from fedjax_het import dataset_from_arrays, load_dataset
from fedjax_het.utils.errors import ConfigError

ARRAYS = random_splits((6, 6, 1), 4)
USERS = {
    "train": np.repeat(["f0", "f1", "f2"], [10, 5, 9]),
    "test": np.repeat(["f0", "f2"], [4, 5]),
}
USERS = {f"{split}_users": users for split, users in USERS.items()}

pytestmark = pytest.mark.usefixtures("private_cache")


def list_users(split):
    """Return name, images and labels of each user."""
    users = USERS[f"{split}_users"]
    for name in dict.fromkeys(users.tolist()):
        rows = users == name
        yield name, ARRAYS[f"{split}_inputs"][rows], ARRAYS[f"{split}_labels"][rows]


def write_leaf(folder, splits=("train", "test"), flatten=True):
    """Write a file for each user, as LEAF does for each hundred users."""
    for split in splits:
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number, (name, images, labels) in enumerate(list_users(split)):
            x = images.reshape(len(images), -1) if flatten else images[..., 0]
            data = {"x": (x / 255).tolist(), "y": labels.tolist()}
            content = {"users": [name], "num_samples": [len(labels)], "user_data": {name: data}}
            (folder / split / f"all_data_{number}.json").write_text(json.dumps(content))
    return folder


def write_tff(folder, image="pixels"):
    h5py = pytest.importorskip("h5py")
    for split in ("train", "test"):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for name, images, labels in list_users(split):
                group = file.create_group(f"examples/{name}")
                group[image] = (images[..., 0] / 255).astype(np.float32)
                group["label"] = labels
    return folder


def write_sqlite(path):
    splits = {
        split: {
            name: {"pixels": (images[..., 0] / 255).astype(np.float32), "label": labels}
            for name, images, labels in list_users(split)
        }
        for split in ("train", "test")
    }
    write_tff_sqlite(path, splits)


def test_all_formats_equal_arrays(tmp_path):
    expected = dataset_from_arrays(**ARRAYS, **USERS)
    (tmp_path / "leaf/data").mkdir(parents=True)
    write_leaf(tmp_path / "leaf/data")
    write_tff(tmp_path)
    write_sqlite(tmp_path / "fed_emnist.sqlite")
    digests = {}
    for name in (
        *("leaf:leaf/data", "leaf:leaf", "leaf:leaf?shape=[6,6,1]"),
        *("tff:.", "tff:fed_emnist_train.h5", "tff:fed_emnist.sqlite"),
    ):
        dataset = load_dataset(name, data_dir=tmp_path)
        assert_same_arrays(dataset, ARRAYS | USERS)
        assert (dataset.source, dataset.order) == (name.partition(":")[0], "user")
        digests[name] = dataset.digest()
    assert set(digests.values()) == {expected.digest()}
    write_leaf(tmp_path / "rows", flatten=False)
    path = tmp_path / "rows/test/all_data_1.json"  # with labels as in FedProx's files
    content = json.loads(path.read_text())
    content["user_data"]["f2"]["y"] = list(map(float, content["user_data"]["f2"]["y"]))
    path.write_text(json.dumps(content))
    assert load_dataset("leaf:rows", data_dir=tmp_path).digest() == expected.digest()


def test_division_by_user(tmp_path):
    write_leaf(tmp_path, ["train"])
    with pytest.raises(
        ConfigError, match=r"^dataset = 'leaf:.*no split 'test'.*: expected test_fraction=0\.2 to"
    ):
        load_dataset(f"leaf:{tmp_path}")
    dataset = load_dataset(f"leaf:{tmp_path}?test_fraction=0.4")
    users, counts = np.unique(dataset.test_users, return_counts=True)
    assert users.tolist() == ["f0", "f1", "f2"] and counts.tolist() == [4, 2, 4]


def test_test_split_that_is_not_used_is_logged(tmp_path, caplog):
    write_leaf(tmp_path)
    load_dataset(f"leaf:{tmp_path}?test_fraction=0.4")
    assert "test_fraction divides the split 'train'; not used: 'test'" in caplog.text


def test_other_pixels_stay_floats(tmp_path):
    write_leaf(tmp_path)
    path = tmp_path / "train/all_data_1.json"
    content = json.loads(path.read_text())
    content["user_data"]["f1"]["x"][0][0] = 0.123
    path.write_text(json.dumps(content))
    dataset = load_dataset(f"leaf:{tmp_path}?shape=[6,6,1]")
    assert dataset.train_inputs.dtype == dataset.test_inputs.dtype == np.float32
    np.testing.assert_allclose(dataset.train_inputs[10, 0, 0, 0], 0.123, rtol=1e-6)
    np.testing.assert_allclose(dataset.test_inputs * 255, ARRAYS["test_inputs"], rtol=1e-5)


def write_lists(folder, inputs):
    content = {
        "users": ["a", "b"],
        "user_data": {u: {"x": inputs.tolist(), "y": [0, 1] * 4} for u in "ab"},
    }
    folder.mkdir()
    (folder / "data.json").write_text(json.dumps(content))
    return f"leaf:{folder}?test_fraction=0.5"


def test_lists_of_numbers_are_features(tmp_path, caplog):
    """FedProx's synthetic data have 60 normal numbers; `shape` makes series and images."""
    features = np.random.default_rng(0).normal(size=(8, 60))
    dataset = load_dataset(write_lists(tmp_path / "normal", features))
    assert dataset.input_shape == (60,) and dataset.num_tokens is None and not caplog.records
    users = dataset.train_users == "a"
    assert {*map(tuple, dataset.train_inputs[users])} <= {*map(tuple, np.float32(features))}
    fractions = np.random.default_rng(0).random((8, 64))
    name = write_lists(tmp_path / "fractions", fractions)
    assert load_dataset(name).input_shape == (64,)
    assert "x has features (64,); shape=[8,8,1] makes images of them" in caplog.text
    for option, shape in (
        ("[64]", (64,)),
        ("64", (64,)),
        ("[16,4]", (16, 4)),
        ("[8,8,1]", (8, 8, 1)),
    ):
        assert load_dataset(f"{name}&shape={option}").input_shape == shape
    nested = load_dataset(write_lists(tmp_path / "nested", fractions.reshape(8, 16, 4)))
    assert nested.input_shape == (16, 4)
    levels = load_dataset(write_lists(tmp_path / "levels", np.arange(8 * 9).reshape(8, 9)))
    assert levels.input_shape == (3, 3, 1)
    assert "x has images (3, 3, 1); shape=[9] makes features of them" in caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": ["a text"], "y": ["b"]}, r"user 'f1' has inputs \(6,\): expected \(6, 6, 1\)"),
        ({"x": [[0.5] * 36], "y": [0, 1]}, "user 'f1' has 1 inputs and 2 labels"),
        ({"x": [[0.5] * 49], "y": [0]}, r"user 'f1' has inputs \(49,\): expected \(36,\)"),
        ({"x": [[0.5] * 7], "y": [0]}, r"user 'f1' has inputs \(7,\): expected \(36,\)"),
        ({"x": [[0.5], [0.5, 1]], "y": [0, 1]}, "x or y of user 'f1' are no arrays"),
        ({"y": [0]}, "cannot be read .KeyError: 'x'.: expected users and user_data"),
        (None, "cannot be read"),
    ],
)
def test_unusable_json(data, message, tmp_path):
    write_leaf(tmp_path)
    text = "{" if data is None else json.dumps({"users": ["f1"], "user_data": {"f1": data}})
    (tmp_path / "train/all_data_1.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^dataset = 'leaf:.*{message}"):
        load_dataset(f"leaf:{tmp_path}")


def test_unusable_hdf5(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^dataset = 'tff:.*has the files \*_train\.h5: none"):
        load_dataset(f"tff:{tmp_path}")
    with pytest.raises(ConfigError, match=r"no file .*none\.h5"):
        load_dataset(f"tff:{tmp_path}/none.h5")
    write_tff(tmp_path, image="photo")
    with pytest.raises(ConfigError, match=r"no column pixels or image \(columns: label, photo\)"):
        load_dataset(f"tff:{tmp_path}")
    assert load_dataset(f"tff:{tmp_path}?image=photo").num_users == 3
    (tmp_path / "fed_emnist_test.h5").write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match=r"fed_emnist_test\.h5 cannot be read"):
        load_dataset(f"tff:{tmp_path}?image=photo")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"fedjax_het\[tff\]"):
        load_dataset(f"tff:{tmp_path}?image=photo")


def test_unusable_sqlite(tmp_path):
    path = tmp_path / "fed_emnist.sqlite"
    pixels = {"pixels": [np.zeros(7)], "label": [0]}
    for splits, message in (
        ({"train": {"f0": {"label": [1]}}}, "no column pixels or image .columns: label."),
        ({"train": {"f0": pixels}}, "images of 7 pixels"),
        ({}, "no user has an example"),
    ):
        path.unlink(missing_ok=True)
        write_tff_sqlite(path, splits)
        with pytest.raises(ConfigError, match=rf"^dataset = 'tff:.*{message}"):
            load_dataset(f"tff:{path}")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO examples VALUES ('train', 'f0', X'FFFF');")
        connection.commit()
    for message in ("cannot be read .*Error parsing", "file is not a database"):
        with pytest.raises(ConfigError, match=rf"fed_emnist\.sqlite .*{message}"):
            load_dataset(f"tff:{path}")
        path.write_bytes(b"no SQLite file" * 1000)
