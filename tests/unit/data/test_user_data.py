"""The user's own data: image folders and arrays, and what is refused of them."""

import dataclasses
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from support.paths import ROOT

from fedjax_het import RunSpec, simulate
from fedjax_het.core.task import Task
from fedjax_het.data import dataset_from_arrays, load_dataset, load_image_folder
from fedjax_het.data.dataset import validate_dataset
from fedjax_het.nn import make_model
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import digest_arrays

pytestmark = pytest.mark.usefixtures("private_cache")


# --- image folders


def write_folder(root, names=("bird", "cat"), splits=("train", "valid", "test"), side=6, count=3):
    """PNG files of random pixels; returns {split: {class: [images in the order of names]}}."""
    rng = np.random.default_rng(0)
    content = {}
    for split in splits:
        for name in names:
            (root / split / name).mkdir(parents=True, exist_ok=True)
            images = rng.integers(0, 256, (count, side, side, 3), np.uint8)
            # Written last first, so that the order of the listing is the reader's own doing.
            for at in reversed(range(count)):
                Image.fromarray(images[at]).save(root / split / name / f"{split}-{at}.png")
            content.setdefault(split, {})[name] = images
    return content


def stacked(content, split):
    return np.concatenate(list(content[split].values()))


def test_image_folder_order(tmp_path):
    content = write_folder(tmp_path / "set")
    (tmp_path / "set/train/cat/notes.txt").write_text("not an image")
    dataset = load_image_folder(tmp_path / "set")
    np.testing.assert_array_equal(dataset.train_inputs, stacked(content, "train"))
    np.testing.assert_array_equal(dataset.test_inputs, stacked(content, "test"))
    np.testing.assert_array_equal(dataset.train_labels, [0, 0, 0, 1, 1, 1])
    assert dataset.class_names == ("bird", "cat") and dataset.name == "set"
    train = stacked(content, "train").astype(np.float64).reshape(-1, 3) / 255
    np.testing.assert_allclose(dataset.mean, train.mean(0), rtol=1e-12)
    np.testing.assert_allclose(dataset.std, train.std(0), rtol=1e-12)

    with_valid = load_image_folder(tmp_path / "set", use_valid=True)
    expected = np.concatenate([stacked(content, "train"), stacked(content, "valid")])
    np.testing.assert_array_equal(with_valid.train_inputs, expected)
    np.testing.assert_array_equal(with_valid.test_inputs, dataset.test_inputs)


def test_image_folder_ignores_hidden_files(tmp_path, caplog):
    content = write_folder(tmp_path / "set")
    for name in ("._train-0.png", ".DS_Store", "Thumbs.db", "desktop.ini", ".hidden.png"):
        (tmp_path / "set/train/cat" / name).write_bytes(b"no image")
        (tmp_path / "set/test" / name).write_bytes(b"no image")
    (tmp_path / "set/train/.ipynb_checkpoints").mkdir()
    dataset = load_image_folder(tmp_path / "set")
    np.testing.assert_array_equal(dataset.train_inputs, stacked(content, "train"))
    assert not caplog.records


def test_image_folder_logs_what_it_leaves_out(tmp_path, caplog):
    content = write_folder(tmp_path / "set")
    for split in ("train", "test"):
        (tmp_path / "set" / split / "cat/session").mkdir()
        (tmp_path / "set" / split / "empty").mkdir()
        for at in range(2):
            (tmp_path / "set" / split / f"cat/session/{at}.png").write_bytes(b"")
    Image.fromarray(content["train"]["cat"][0]).save(tmp_path / "set/train/cat/1.ppm")
    (tmp_path / "set/train/bird/1").write_bytes(b"")
    (tmp_path / "set/train/1.png").write_bytes(b"")
    for _ in range(2):  # also if the images are in the cache
        caplog.clear()
        dataset = load_image_folder(tmp_path / "set")
        np.testing.assert_array_equal(dataset.train_inputs, stacked(content, "train"))
        assert "not read: 3 files that are no images in a class folder" in caplog.text
        assert "2 sub-folders of classes with 4 files; e.g. train/1.png" in caplog.text
        for split in ("train", "test"):
            assert f"{split}: 1 of 3 classes have no images: empty" in caplog.text
        assert "1 of 3 classes have no training example: empty" in caplog.text


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("color", [True, False])
def test_image_folder_applies_exif_orientation(suffix, color, tmp_path):
    """Four gray quadrants; each orientation is undone by hand."""
    upright = np.kron(
        np.array([[40, 90, 150], [200, 250, 10]], np.uint8), np.ones((8, 8), np.uint8)
    )
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: np.rot90(upright, 2).T,
        8: np.rot90(upright, -1),
    }
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        for folder in ("train/a", "train/b", "test/a", "test/b"):
            (tmp_path / "set" / folder).mkdir(parents=True, exist_ok=True)
            path = tmp_path / "set" / folder / f"{orientation}.{suffix}"
            options = {"compression": "tiff_lzw"} if suffix == "tif" else {"quality": 100}
            Image.fromarray(np.ascontiguousarray(pixels)).save(path, exif=exif, **options)
    images = load_image_folder(tmp_path / "set", color=color).train_inputs
    assert images.shape == (16, 16, 24, 3 if color else 1)
    assert np.abs(images.astype(int) - upright[None, ..., None]).max() <= 4
    if suffix == "tif":
        Image.fromarray(np.ascontiguousarray(upright.T)).save(path, exif=exif)
        with pytest.raises(ConfigError, match="uncompressed TIFF with an EXIF rotation"):
            load_image_folder(tmp_path / "set")


def test_image_folder_cache_detects_changes(tmp_path, caplog):
    write_folder(tmp_path / "set")
    load_image_folder(tmp_path / "set")
    new = np.full((6, 6, 3), 77, np.uint8)
    Image.fromarray(new).save(tmp_path / "set/train/cat/train-1.png")
    dataset = load_image_folder(tmp_path / "set")
    np.testing.assert_array_equal(dataset.train_inputs[4], new)


ASCII_PROGRAM = """
import sys
from pathlib import Path
from fedjax_het import analysis, load_image_folder, make_partition
dataset = load_image_folder(sys.argv[1])
labels, num_classes = dataset.train_labels, dataset.num_classes
partition = make_partition("iid", labels, num_classes, num_clients=2, seed=0)
path = Path(sys.argv[1], "plot.png")
figure = analysis.plot_partition(partition, labels, num_classes, class_names=dataset.class_names)
figure.savefig(path)
print(sys.getfilesystemencoding(), ascii((dataset.name, *dataset.class_names)), dataset.digest())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no ASCII file names")
def test_image_folder_under_ascii_file_names(tmp_path, caplog):
    folder = tmp_path / "Bärtier"
    write_folder(folder, ["bird", "Kätzchen", os.fsdecode(b"L\xf6we")])
    dataset = load_image_folder(folder)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASCII_PROGRAM, str(folder)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    names = ("Bärtier", "Kätzchen", "L\\xf6we", "bird")
    assert (dataset.name, *dataset.class_names) == names
    assert process.stdout == f"ascii {names!a} {dataset.digest()}\n", process.stderr
    assert not process.stderr and not caplog.records  # the cache is valid in both encodings


def test_image_folder_size_and_gray(tmp_path):
    root = tmp_path / "set"
    for split in ("train", "test"):
        for name, level in (("dark", 40), ("light", 200)):
            (root / split / name).mkdir(parents=True)
            Image.new("L", (12, 8), level).save(root / split / name / "0.png")
            Image.new("RGB", (6, 6), (level,) * 3).save(root / split / name / "1.png")
    dataset = load_image_folder(root, size=(4, 5), color=False)
    assert dataset.input_shape == (4, 5, 1)
    np.testing.assert_array_equal(dataset.train_inputs[:2], np.full((2, 4, 5, 1), 40))
    with pytest.raises(ConfigError, match=r"size of .*1\.png.*\(6, 6\).*\(8, 12\)"):
        load_image_folder(root)
    with pytest.raises(ConfigError, match="size"):
        load_image_folder(root, size=0)


def test_image_folder_rejects_invalid_folders(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_image_folder(tmp_path / "nowhere")
    write_folder(tmp_path / "set")
    (tmp_path / "set/test/dog").mkdir()
    with pytest.raises(ConfigError, match=r"test has the class folders dog"):
        load_image_folder(tmp_path / "set")
    (tmp_path / "set/test/dog").rmdir()
    broken = tmp_path / "set/train/cat/train-1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"train-1\.png cannot be decoded"):
        load_image_folder(tmp_path / "set")
    for file in (tmp_path / "set/test").rglob("*.png"):
        file.unlink()
    with pytest.raises(ConfigError, match="holds no images"):
        load_image_folder(tmp_path / "set")


def test_cinic10(tmp_path, monkeypatch):
    names = [f"class{label}" for label in range(10)]
    content = write_folder(tmp_path / "cinic", names=names, side=32, count=2)
    monkeypatch.setenv("CINIC10_DIR", str(tmp_path / "cinic"))
    dataset = load_dataset("cinic10")
    np.testing.assert_array_equal(dataset.train_inputs, stacked(content, "train"))
    assert dataset.class_names == tuple(names)
    assert dataset.mean[0] == 0.47889522 and dataset.std[2] == 0.25874835


# --- the user's own arrays


def arrays(**changes):
    rng = np.random.default_rng(0)
    arguments = {
        "train_inputs": rng.integers(0, 256, (8, 5, 4, 3), np.uint8),
        "train_labels": np.arange(8) % 3,
        "test_inputs": rng.integers(0, 256, (4, 5, 4, 3), np.uint8),
        "test_labels": np.arange(4) % 3,
    }
    return arguments | changes


def test_arrays_are_stored():
    arguments = arrays()
    dataset = dataset_from_arrays(**arguments, num_classes=5)
    np.testing.assert_array_equal(dataset.train_inputs, arguments["train_inputs"])
    assert dataset.num_classes == 5 and dataset_from_arrays(**arguments).num_classes == 3
    assert dataset.train_labels.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        dataset.train_inputs[0] = 0
    arguments["train_inputs"][0] += 1  # the user's own array stays writable
    wide = dataset_from_arrays(**arrays(train_inputs=arrays()["train_inputs"].astype(np.int64)))
    np.testing.assert_array_equal(wide.train_inputs, arrays()["train_inputs"])
    assert wide.train_inputs.dtype == np.uint8


def test_float_images_stay_floats():
    floats = {name: arrays()[name] / 255 for name in ("train_inputs", "test_inputs")}
    dataset = dataset_from_arrays(**arrays(**floats))
    assert dataset.train_inputs.dtype == np.float32
    np.testing.assert_allclose(dataset.train_inputs, floats["train_inputs"], rtol=1e-6)
    np.testing.assert_allclose(dataset.mean, floats["train_inputs"].mean((0, 1, 2)), rtol=1e-6)


def test_std_of_constant_channel():
    dataset = dataset_from_arrays(**arrays(train_inputs=np.zeros((8, 5, 4, 3), np.uint8)))
    assert dataset.std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("mean", "scale"), [(0, 1e-9), (3e-7, 1e-9), (-5, 1e-5), (0, 1e-20), (1e15, 1e14)]
)
def test_features_of_any_magnitude_are_normalized(mean, scale):
    rng = np.random.default_rng(0)
    values = (mean + scale * rng.normal(size=(90, 2))).astype(np.float32)
    dataset = dataset_from_arrays(values, np.arange(90) % 2, values, np.arange(90) % 2)
    np.testing.assert_allclose(dataset.std, values.std(0, dtype=np.float64))
    network = make_model("mlp", dataset.input_shape, 2)
    normalized = Task(network, dataset.mean, dataset.std).normalize(jnp.asarray(values))
    np.testing.assert_allclose(normalized.std(0), 1, rtol=0.02)


def test_integers_beside_features_are_numbers():
    """Where other inputs show that integers are features; and truth values always."""
    floats, integers, labels = (
        np.arange(12.0).reshape(6, 2),
        np.arange(12).reshape(6, 2),
        [0, 1] * 3,
    )
    expected = dataset_from_arrays(floats, labels, floats, labels)
    dataset = dataset_from_arrays(floats, labels, integers, labels)
    assert dataset.digest() == expected.digest()
    flags = dataset_from_arrays(integers % 2 == 0, labels, integers % 3 == 0, labels)
    assert flags.train_inputs.dtype == np.float32 and flags.input_kind == "features"
    spec = RunSpec(model="mlp", partition="iid", num_clients=2, rounds=1, local_epochs=1)
    model = simulate(spec, dataset=dataset).model()
    np.testing.assert_array_equal(model.logits(integers), model.logits(floats))


@pytest.mark.parametrize("value", [0, 0.1, -1e6, 1e-40])
def test_features_that_differ_by_rounding_are_constant(value):
    column = np.full((8, 1), value, np.float32)
    column[3:5] = np.nextafter(column[0], np.float32(9e9))
    dataset = dataset_from_arrays(column, np.arange(8) % 2, column, np.arange(8) % 2)
    assert dataset.std == (1.0,)
    labels = dataset_from_arrays(column, column, column, column, task="regression")
    assert labels.task_kind.variances == (1.0,)


def test_learns_features_of_tiny_values():
    rng = np.random.default_rng(0)
    values = 1e-9 * rng.normal(size=(300, 2)).astype(np.float32)
    labels = (values[:, 0] > 0).astype(int)
    dataset = dataset_from_arrays(values[:200], labels[:200], values[200:], labels[200:])
    spec = RunSpec(model="mlp", partition="iid", num_clients=2, rounds=3, learning_rate=0.1)
    assert simulate(spec, dataset=dataset).final_accuracy > 0.9


def test_digest_covers_contents_only():
    base = dataset_from_arrays(**arrays())
    assert base.digest() == dataset_from_arrays(**arrays(), name="other", note="n").digest()
    fortran = arrays(train_inputs=np.asfortranarray(arrays()["train_inputs"]))
    assert base.digest() == dataset_from_arrays(**fortran).digest()
    changed = arrays()
    changed["test_inputs"][3, 4, 3, 2] ^= 1
    others = [
        dataset_from_arrays(**changed),
        dataset_from_arrays(**arrays(), num_classes=4),
        dataset_from_arrays(**arrays(), mean=(0, 0, 0)),
        dataset_from_arrays(**arrays(train_labels=np.arange(8)[::-1] % 3)),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 5


DOMAINS = {"train_domains": np.arange(8) % 2, "test_domains": np.arange(4)[::-1] % 2}


def test_domains_enter_digest():
    plain, dataset = (dataset_from_arrays(**arrays(**arguments)) for arguments in ({}, DOMAINS))
    assert plain.train_domains is None and plain.domain_names == ()
    assert dataset.domain_names == ("0", "1") and "2 domains" in repr(dataset)
    assert dataset.train_domains.dtype == dataset.test_domains.dtype == np.int32
    np.testing.assert_array_equal(dataset.test_domains, [1, 0, 1, 0])
    with pytest.raises(ValueError, match="read-only"):
        dataset.test_domains[0] = 0
    named = dataset_from_arrays(**arrays(**DOMAINS), domain_names=["clipart", "real"])
    assert named.domain_names == ("clipart", "real") and named.digest() == dataset.digest()
    swapped = dataset_from_arrays(**arrays(**(DOMAINS | {"test_domains": np.arange(4) % 2})))
    assert len({plain.digest(), dataset.digest(), swapped.digest()}) == 3


def test_digest_without_domains():
    dataset = dataset_from_arrays(**arrays())
    constants = {"num_classes": 3, "mean": dataset.mean, "std": dataset.std}
    stored = {
        name: np.asarray(a, a.dtype if a.ndim > 1 else np.int32) for name, a in arrays().items()
    }
    # The names of version 0.6.
    stored |= {f"{s}_images": stored.pop(f"{s}_inputs") for s in ("train", "test")}
    assert dataset.digest() == digest_arrays(stored, constants)


def with_bad_pixel(value):
    images = arrays()["train_inputs"] / 255
    images[2, 1, 0, 1] = value
    return {"train_inputs": images, "test_inputs": arrays()["test_inputs"] / 255}


BAD_ARRAYS = {
    "nan": (with_bad_pixel(np.nan), r"train_inputs\[2, 1, 0, 1\] = nan"),
    "inf": (with_bad_pixel(np.inf), r"train_inputs\[2, 1, 0, 1\] = inf"),
    "float range": (with_bad_pixel(255.0), r"range of train_inputs .*pass images in 0\.\.255"),
    "integer range": ({"train_inputs": np.full((8, 5, 4, 3), 256)}, r"0\.\.255"),
    "strings": ({"train_inputs": np.full((8, 5, 4, 3), "a")}, "dtype of train_inputs"),
    "rank": ({"train_inputs": np.zeros((8, 5, 4, 3, 1), np.uint8)}, r"\[N, H, W, C\]"),
    "integers of three axes": (
        {"train_inputs": np.zeros((8, 5, 4), np.int32)},
        r"train_inputs = 'int32 \(8, 5, 4\)': expected uint8 or \[N, H, W, 1\] for gray images .*, or floats",
    ),
    "integer features": (
        {"train_inputs": np.zeros((8, 5), int)},
        r"^train_inputs = 'int64 \(8, 5\)': expected num_tokens for tokens \[N, T\], or floats for features$",
    ),
    "texts as features": ({"train_inputs": np.full((8, 5), "a")}, "dtype of train_inputs = '<U1'"),
    "empty": ({"test_inputs": np.zeros((0, 5, 4, 3), np.uint8)}, "shape of test_inputs"),
    "shape": ({"test_inputs": np.zeros((4, 5, 5, 3), np.uint8)}, "format of test_inputs"),
    "type": ({"test_inputs": np.zeros((4, 5, 4, 3), np.float32)}, "format of test_inputs"),
    "length": ({"train_labels": np.zeros(7, int)}, r"len\(train_labels\) = 7"),
    "label rank": ({"test_labels": np.zeros((4, 3), int)}, "test_labels = .*integers"),
    "fractions as labels": (
        {"train_labels": np.full(8, 0.37)},
        r"float64 .*: expected integers or texts \[N\], a label for each example, or .*task=.regression.$",
    ),
    "one class": (
        {"train_labels": np.zeros(8, int), "test_labels": np.zeros(4, int), "num_classes": None},
        "train_labels, test_labels: all labels are equal: expected at least two classes",
    ),
    "equal class names": ({"class_names": [*"abcdefghi", "a"]}, "expected different names"),
    "label below": ({"train_labels": np.arange(8) - 1}, r"train_labels\[0\] = -1"),
    "label above": ({"test_labels": np.arange(4) + 7}, r"test_labels\[3\] = 10.*\[0, 10\)"),
    "classes": ({"num_classes": 1}, "num_classes = 1"),
    "class names": ({"class_names": ["a", "b"]}, "class_names"),
    "mean": ({"mean": (0.5,)}, "mean = .*3 finite numbers"),
    "std": ({"std": (1, 0, 1)}, r"std\[1\] = 0: expected a number in \[1e-30, 1e\+30\]"),
    "std type": ({"std": 0.5}, "std = 0.5"),
    "std text": ({"std": "123"}, "std = '123'"),
    "std of truth values": ({"std": (True, True, True)}, r"std\[0\] = True"),
    "std nan": ({"std": (1, np.nan, 1)}, r"std\[1\] = nan"),
    "std below mean": ({"mean": (0, 1e9, 0), "std": (1, 1e-10, 1)}, r"at least 1e-18 \* \|mean\|"),
    "tiny std": ({"std": (1, 1e-300, 1)}, r"std\[1\] = 1e-300"),
    "huge mean": ({"mean": (1, 1e39, 1)}, r"mean\[1\] = .*number in \[-1e\+30, 1e\+30\]"),
    "ragged": (
        {"train_inputs": [np.zeros((5, 4, 3)), np.zeros((6, 4, 3))]},
        r"train_inputs: items of shapes \(5, 4, 3\) and \(6, 4, 3\)",
    ),
    "ragged pixels": ({"test_inputs": [[[[1]], [[1], [2]]]]}, "test_inputs: .*expected one array"),
    "objects": ({"train_inputs": np.full((8, 5, 4, 3), None)}, "train_inputs: a ndarray of obj"),
    "an iterator": ({"train_inputs": iter([1])}, "train_inputs: a list_iterator of objects"),
    "truth values": ({"train_inputs": np.zeros((8, 5, 4, 3), bool)}, "dtype of train_inputs"),
    "complex": ({"train_inputs": np.zeros((8, 5, 4, 3), complex)}, "dtype of train_inputs"),
    "wide int32": (
        {"train_inputs": np.full((8, 5, 4, 3), 65535, np.int32)},
        r"range of train_inputs = \(65535, 65535\): .*of 16 bits: uint16",
    ),
    "one hot": (
        {"train_labels": np.eye(8, dtype=int)},
        r"int64 .*such as train_labels.argmax\(-1\)",
    ),
    "labels of truth values": (
        {"train_labels": np.zeros(8, bool)},
        "type of test_labels = 'integers': expected texts as train_labels",
    ),
    "ragged labels": ({"train_labels": [[0], [1, 2]]}, "train_labels: items of shapes"),
    "label words": (
        {"train_labels": list("abcdefgh")},
        "type of test_labels = 'integers': expected texts as train_labels",
    ),
    "label objects": ({"train_labels": [None] * 8}, "train_labels: a list of objects"),
    "huge float": ({"train_labels": np.full(8, 2.0**60)}, "train_labels = 'float64"),
    "missing label": (
        {"train_labels": np.arange(8) - 1, "num_classes": None},
        r"\[0\] = -1: .*mark",
    ),
    "huge classes and label": (
        {"train_labels": np.array([0] * 7 + [10**9]), "num_classes": 10**9 + 1},
        r"num_classes = 1000000001: .*in \[2, 65536\]",
    ),
    "huge classes": ({"num_classes": 10**9}, r"num_classes = 1000000000: .*in \[2, 65536\]"),
    "classes of truth values": ({"num_classes": True}, "num_classes = True"),
    "names are no list": ({"class_names": 10}, "class_names = 10: expected a word or a list"),
    "domain names are letters": (DOMAINS | {"domain_names": "ab"}, "domain_names = 'ab'"),
    "one split's domains": ({"test_domains": np.zeros(4, int)}, "train_domains = None"),
    "names alone": ({"domain_names": ["a"]}, "domain_names = .*none without train_domains"),
    "domain rank": (DOMAINS | {"test_domains": np.zeros((4, 2), int)}, "test_domains = 'int64"),
    "domain length": (DOMAINS | {"train_domains": np.zeros(7, int)}, r"len\(train_domains\) = 7"),
    "domain type": (DOMAINS | {"train_domains": np.full(8, 0.5)}, "train_domains = 'float64"),
    "missing domain": (
        DOMAINS | {"train_domains": -np.ones(8, int)},
        r"\[0\] = -1: expected a domain",
    ),
    "domain names": (
        DOMAINS | {"domain_names": ["a"]},
        "expected 2 names, one for each different dom",
    ),
    "same domain names": (DOMAINS | {"domain_names": ["a", "a"]}, "a different name"),
    "reserved name": (DOMAINS | {"domain_names": ["a", "domains"]}, "not 'domains'"),
    "no test image": (DOMAINS | {"domain_names": ["a", "b", "c"]}, "no test example of domain 'c'"),
}


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels_first_images(channels):
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 5, channels), np.uint8)
    first, labels = images.transpose(0, 3, 1, 2), np.arange(6) % 2
    server = {"server_inputs": first, "server_labels": labels}
    message = rf"shape of train_inputs = \(6, {channels}, 8, 5\): .*\[N, H, W, C\]; pass channels="
    with pytest.raises(ConfigError, match=message) as error:
        dataset_from_arrays(first, labels, first, labels)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="shape of test_inputs"):
        dataset_from_arrays(images, labels, first, labels)
    with pytest.raises(ConfigError, match="shape of server_inputs"):
        dataset_from_arrays(images, labels, images, labels, **server)
    dataset = dataset_from_arrays(first, labels, first.tolist(), labels, **server, channels="first")
    for array in (dataset.train_inputs, dataset.test_inputs, dataset.server_inputs):
        np.testing.assert_array_equal(array, images)
    assert (
        dataset.digest()
        == dataset_from_arrays(
            images, labels, images, labels, server_inputs=images, server_labels=labels
        ).digest()
    )
    message = (
        rf"train_inputs = \(6, 8, 5, {channels}\): expected \[N, C, H, W\] with channels='first'"
    )
    with pytest.raises(ConfigError, match=message):
        dataset_from_arrays(images, labels, images, labels, channels="first")
    rows = dataset_from_arrays(first, labels, first, labels, channels="last")
    np.testing.assert_array_equal(rows.train_inputs, first)
    with pytest.raises(ConfigError, match="channels = 'NCHW'"):
        dataset_from_arrays(first, labels, first, labels, channels="NCHW")
    by_hand = dataclasses.replace(dataset, train_inputs=first, test_inputs=first)
    with pytest.raises(ConfigError, match="shape of train_inputs"):
        validate_dataset(by_hand)


@pytest.mark.parametrize(
    ("num_classes", "names", "empty"),
    [(4, (), "1 of 4 classes .*: 0"), (5, [*"abcde"], "2 of 5 classes .*: a, e")],
)
def test_empty_classes_are_logged(num_classes, names, empty, caplog):
    images, labels = np.zeros((4, 5, 4, 3), np.uint8), np.array([1, 2, 3, 1])
    arguments = {"num_classes": num_classes, "class_names": names}
    dataset_from_arrays(images, labels, images, labels, **arguments)
    assert re.search(f"{empty}$", caplog.text.strip())
    caplog.clear()
    dataset_from_arrays(images, np.arange(4), images, np.array([0, 1, 1, 1]))
    assert not caplog.records


def test_different_labels_are_the_classes(caplog):
    """Labels that are no positions name classes, also those of the server and of the test alone."""
    images = np.zeros((4, 5, 4, 3), np.uint8)
    own: dict = {"server_inputs": images[:2], "server_labels": [20, 7]}
    dataset = dataset_from_arrays(images, [20, 7, 2000, 7], images, [7, 9, 20, 9], **own)
    assert dataset.class_names == ("7", "9", "20", "2000")
    assert dataset.train_labels.tolist() == [2, 0, 3, 0]
    assert dataset.test_labels.tolist() == [0, 1, 2, 1]
    assert dataset.server_labels.tolist() == [2, 0]
    assert "the 4 different labels are the classes: 7, 9, 20, 2000" in caplog.text
    assert "1 of 4 classes have no training example: 9" in caplog.text


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["b", "a", "b", "c"], (), ("a", "b", "c")),
        (["b", "a", "b", "c"], ("c", "b", "a", "d"), ("c", "b", "a", "d")),
        ([1.0, 3.0, 1.0, 2.0], (), ("1", "2", "3")),
        ([[1], [3], [1], [2]], ("x", "y", "z"), ("x", "y", "z")),
        ([-5, 10, 9, -5], (), ("-5", "9", "10")),
        ([True, False, True, True], (), ("False", "True")),
        ([10**6, 5, 10**12, 5], (), ("5", "1000000", "1000000000000")),
        ([2, 0, 1, 1], ("x", "y", "z"), ("x", "y", "z")),
    ],
)
def test_labels_of_every_form_name_classes(labels, names, expected):
    images = np.zeros((4, 5, 4, 3), np.uint8)
    dataset = dataset_from_arrays(images, labels, images, labels, class_names=names)
    assert dataset.class_names == expected and dataset.num_classes == len(expected)
    flat = np.array(labels).ravel()
    by_position = dict(enumerate(expected))
    shown = [by_position[label] for label in dataset.train_labels.tolist()]
    if len(names) == 3:  # names of the numbers in ascending order
        order = {value: name for value, name in zip(np.unique(flat), names, strict=True)}
        assert shown == [order[value] for value in flat]
    else:
        assert shown == [str(int(v)) if flat.dtype.kind == "f" else str(v) for v in flat]


def test_numbers_of_a_regression_are_no_classes():
    features, prices = np.zeros((3000, 2), np.float32), np.arange(3000) * 7
    with pytest.raises(
        ConfigError, match=r'3,000 different labels of 6,000 examples: .*task="regr'
    ):
        dataset_from_arrays(features, prices, features, prices)


def test_integers_of_three_axes_are_gray_images_by_their_type():
    labels = np.arange(8) % 2
    for dtype in (np.uint8, np.uint16):
        images = np.arange(8 * 20).reshape(8, 5, 4).astype(dtype)
        dataset = dataset_from_arrays(images, labels, images, labels)
        expected = dataset_from_arrays(images[..., None], labels, images[..., None], labels)
        assert dataset.digest() == expected.digest()
    series = images.astype(float)
    assert dataset_from_arrays(series, labels, series, labels).input_shape == (5, 4)


def test_16_bit_arrays_are_scaled():
    wide = np.arange(8 * 60, dtype=np.uint16).reshape(8, 5, 4, 3) * 136
    dark = np.full((4, 5, 4, 3), 51, np.uint16)
    dataset = dataset_from_arrays(**arrays(train_inputs=wide, test_inputs=dark))
    np.testing.assert_allclose(dataset.train_inputs, wide / 65535, rtol=1e-6)
    np.testing.assert_allclose(dataset.test_inputs, 51 / 65535, rtol=1e-6)
    swapped = dataset_from_arrays(**arrays(train_inputs=wide.astype(">u2"), test_inputs=dark))
    assert swapped.digest() == dataset.digest()
    narrow = dataset_from_arrays(**arrays(train_inputs=wide % 256))
    assert narrow.train_inputs.dtype == np.uint8, "8 bits in a wider type"


@pytest.mark.parametrize("color", [False, True])
def test_16_bit_folders_are_scaled(color, tmp_path):
    levels = np.array([[0, 257, 32768, 65535]], np.uint16)
    for split in ("train", "test"):
        for name in ("a", "b"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.fromarray(levels).save(folder / "1.png")
    images = load_image_folder(tmp_path, color=color, cache_dir=tmp_path / "cache").train_inputs
    assert images.shape == (2, 1, 4, 3 if color else 1)
    np.testing.assert_array_equal(images[0, 0, :, 0], [0, 1, 128, 255])


@pytest.mark.parametrize(
    "arguments",
    [
        *({"size": size} for size in (True, 0, -1, 2.5, "32", (8,), (8, True), 10**9, [1, 2, 3])),
        *({name: value} for name in ("color", "use_valid") for value in ("yes", 1, None)),
        *({"path": path} for path in (None, "", 3)),
    ],
    ids=str,
)
def test_image_folder_rejects_invalid_arguments(arguments, tmp_path):
    (name, value) = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=f"{name} = ") as error:
        load_image_folder(**{"path": tmp_path, **arguments})
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_dataset_rejects_invalid_arrays(case):
    changes, message = BAD_ARRAYS[case]
    with pytest.raises(ConfigError, match=message) as error:
        dataset_from_arrays(**({"num_classes": 10} | arrays(**changes)))
    assert "\n" not in str(error.value)
