"""Data sets: readers against images that the test wrote itself, the cache, and bad input."""

import json
import logging
import os
import shutil
import sys

import numpy as np
import pytest
from support.tfds_data import write_tfds_dataset

from fedjax_het.data import DATASETS, NORMALIZATIONS, dataset_registry, load_dataset
from fedjax_het.data.dataset_registry import select_first_45_classes
from fedjax_het.data.prepare import main as prepare_main
from fedjax_het.data.prepare import prepare_dataset
from fedjax_het.data.sources.domainnet import CLASSES, DOMAINS
from fedjax_het.data.sources.tfds import compute_fingerprint
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.io import DamagedFileError, digest_arrays, read_npz


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    """No test reads or writes the user's cache or data."""
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))
    for name in ("TFDS_DATA_DIR", "CINIC10_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# --- prepared data, written as tensorflow-datasets writes it, without TensorFlow


@pytest.fixture(scope="module", autouse=True)
def unregistered_builders():
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():
        yield


def forbid_decoding(monkeypatch, function="sources.tfds.decode_splits"):
    def decode(*arguments):
        raise AssertionError("decoded although the cache is good")

    monkeypatch.setattr(f"fedjax_het.data.{function}", decode)


def as_pairs(images, labels):
    return sorted(
        (image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
    )


READERS = {
    "mnist": ("mnist", "", (28, 28, 1), 10),
    "cifar10": ("cifar10", "", (32, 32, 3), 10),
    "cifar100": ("cifar100", "", (32, 32, 3), 100),
    "emnist_balanced": ("emnist", "balanced", (28, 28, 1), 47),
    "emnist_byclass": ("emnist", "byclass", (28, 28, 1), 62),
    "stl10": ("stl10", "", (96, 96, 3), 10),
}


@pytest.mark.parametrize("name", READERS)
def test_reader_returns_prepared_images(name, tmp_path):
    import tensorflow_datasets as tfds

    builder, config, shape, num_classes = READERS[name]
    extra = {"id": tfds.features.Text(), "coarse_label": tfds.features.ClassLabel(num_classes=20)}
    extra = extra if name == "cifar100" else None
    content = write_tfds_dataset(tmp_path, builder, shape, num_classes, config=config, extra=extra)
    dataset = load_dataset(name, data_dir=tmp_path)
    assert dataset.input_shape == shape
    assert dataset.num_classes == num_classes == len(dataset.class_names)
    assert dataset.train_inputs.dtype == np.uint8
    assert dataset.train_labels.dtype == dataset.test_labels.dtype == np.int32
    for split, images, labels in (
        ("train", dataset.train_inputs, dataset.train_labels),
        ("test", dataset.test_inputs, dataset.test_labels),
    ):
        stored, stored_labels = content[split]
        if name.startswith("emnist"):  # the official files hold rows as columns
            stored = stored.transpose(0, 2, 1, 3)
        assert as_pairs(images, labels) == as_pairs(stored, stored_labels)
    assert dataset.note == "" and dataset.order == "tensorflow-datasets"
    assert dataset.source == "tensorflow-datasets 1.0.0, array_record"
    again = load_dataset(name, data_dir=tmp_path)
    np.testing.assert_array_equal(dataset.train_inputs, again.train_inputs)
    assert dataset.digest() == again.digest()
    assert "tensorflow" not in sys.modules


def test_emnist_class_names(tmp_path):
    write_tfds_dataset(tmp_path, "emnist", (28, 28, 1), 47, config="balanced")
    write_tfds_dataset(tmp_path, "emnist", (28, 28, 1), 62, config="byclass")
    balanced = load_dataset("emnist_balanced", data_dir=tmp_path).class_names
    byclass = load_dataset("emnist_byclass", data_dir=tmp_path).class_names
    assert balanced[10] == byclass[10] == "A" and balanced[36:] == tuple("abdefghnqrt")
    assert byclass[36] == "a" and byclass[61] == "z"


def emnist_content(root, per_class, tests_per_class):
    """EMNIST Balanced with so many of each class, shuffled, each image different."""

    def split(counts):
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(47), counts))
        images = np.random.default_rng(1).integers(0, 256, (len(labels), 28, 28, 1), np.uint8)
        return images, labels

    content = {"train": split(per_class), "test": split(tests_per_class)}
    return write_tfds_dataset(root, "emnist", (28, 28, 1), 47, config="balanced", content=content)


def test_emnist_45_selection(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_het.data.dataset_registry._EMNIST_45_TEST_IMAGES", 100)
    emnist_content(tmp_path, 2, [1] + [4] * 46)
    balanced = load_dataset("emnist_balanced", data_dir=tmp_path)
    forbid_decoding(monkeypatch)
    dataset = load_dataset("emnist_45", data_dir=tmp_path)
    assert dataset.num_classes == 45 and dataset.class_names == balanced.class_names[:45]
    assert balanced.class_names[45:] == ("r", "t")
    kept = balanced.train_labels < 45
    np.testing.assert_array_equal(dataset.train_inputs, balanced.train_inputs[kept])
    np.testing.assert_array_equal(dataset.train_labels, balanced.train_labels[kept])
    # 100 tests: the one of class 0, and of the others two or three.
    assert sorted(np.bincount(dataset.test_labels)) == [1] + [2] * 33 + [3] * 11
    pairs = as_pairs(dataset.test_inputs, dataset.test_labels)
    assert set(pairs) <= set(as_pairs(balanced.test_inputs, balanced.test_labels))
    assert len(set(pairs)) == 100
    at = {image.tobytes(): position for position, image in enumerate(balanced.test_inputs)}
    assert (np.diff([at[image.tobytes()] for image in dataset.test_inputs]) > 0).all()
    assert load_dataset("emnist_45", data_dir=tmp_path).digest() == dataset.digest()
    monkeypatch.setattr("fedjax_het.data.dataset_registry._EMNIST_45_SEED", 46)
    assert load_dataset("emnist_45", data_dir=tmp_path).digest() != dataset.digest()
    unit = load_dataset("emnist_45", data_dir=tmp_path, normalization="fsl")
    assert (unit.mean, unit.std) == ((0.0,), (1.0,))
    pixels = dataset.train_inputs / np.float64(255)
    np.testing.assert_allclose((*dataset.mean, *dataset.std), (pixels.mean(), pixels.std()))


def test_pooled_fashion_mnist(tmp_path, monkeypatch):
    labels = np.repeat(np.arange(10), [40] * 9 + [42])
    images = np.random.default_rng(0).integers(0, 256, (402, 28, 28, 1), np.uint8)
    rows = {"train": slice(0, 300), "test": slice(300, 402)}
    content = {split: (images[part], labels[part]) for split, part in rows.items()}
    write_tfds_dataset(tmp_path, "fashion_mnist", (28, 28, 1), 10, content=content)
    original = load_dataset("fashion_mnist", data_dir=tmp_path)
    forbid_decoding(monkeypatch)
    dataset = load_dataset("fashion_mnist_pooled", data_dir=tmp_path)
    assert np.bincount(dataset.test_labels).tolist() == [10] * 10
    assert np.bincount(dataset.train_labels).tolist() == [30] * 9 + [32]

    def collect(data):
        train = as_pairs(data.train_inputs, data.train_labels)
        return sorted([*train, *as_pairs(data.test_inputs, data.test_labels)])

    assert collect(dataset) == collect(original)
    assert dataset.class_names == original.class_names
    small = load_dataset("fashion_mnist_twentieth", data_dir=tmp_path)
    assert np.bincount(small.train_labels).tolist() == [2] * 10
    assert np.bincount(small.test_labels).tolist() == [1] * 10
    assert {*as_pairs(small.train_inputs, small.train_labels)} < {
        *as_pairs(dataset.train_inputs, dataset.train_labels)
    }
    scaled = load_dataset("fashion_mnist_pooled", data_dir=tmp_path, normalization="pfllib")
    assert (scaled.mean, scaled.std) == ((0.5,), (0.5,))
    monkeypatch.setattr("fedjax_het.data.dataset_registry._POOLED_SEED", 76)
    assert load_dataset("fashion_mnist_pooled", data_dir=tmp_path).digest() != dataset.digest()


@pytest.mark.parametrize("name", ["mnist_tenth", "fashion_mnist_tenth", "cifar10_tenth"])
def test_tenth_of_the_training_images(name, tmp_path):
    original, labels = name.removesuffix("_tenth"), np.repeat(np.arange(10), [40] * 9 + [41])
    shape = (32, 32, 3) if original == "cifar10" else (28, 28, 1)
    images = np.random.default_rng(0).integers(0, 256, (401, *shape), np.uint8)
    content = {"train": (images, labels), "test": (images[:20], labels[:20])}
    write_tfds_dataset(tmp_path, original, shape, 10, content=content)
    small = load_dataset(name, data_dir=tmp_path, normalization="unit")
    assert np.bincount(small.train_labels).tolist() == [4] * 9 + [5]
    pairs = as_pairs(small.train_inputs, small.train_labels)
    assert len({*pairs}) == 41 and {*pairs} < {*as_pairs(images, labels)}
    full = load_dataset(original, data_dir=tmp_path, normalization="unit")
    np.testing.assert_array_equal(small.test_inputs, full.test_inputs)
    np.testing.assert_array_equal(small.test_labels, full.test_labels)


def test_emnist_45_counts():
    """108,000 and 10,000 of EMNIST Balanced's 2,400 and 400 for each class."""
    arrays = {
        f"{split}_{part}": np.repeat(np.arange(47, dtype=np.int32), count)
        for split, count in (("train", 2400), ("test", 400))
        for part in ("inputs", "labels")
    }
    arrays, _ = select_first_45_classes(arrays, {"class_names": ["x"] * 47})
    np.testing.assert_array_equal(np.bincount(arrays["train_labels"]), [2400] * 45)
    counts = np.bincount(arrays["test_labels"])
    assert len(counts) == 45 and counts.sum() == 10_000 and set(counts) == {222, 223}
    np.testing.assert_array_equal(arrays["test_inputs"], arrays["test_labels"])


def test_note_on_lossy_images(tmp_path):
    write_tfds_dataset(tmp_path, "cifar10", (32, 32, 3), 10, jpeg=True)
    assert "JPEG" in load_dataset("cifar10", data_dir=tmp_path).note
    assert "JPEG" in load_dataset("cifar10", data_dir=tmp_path).note  # from the cache as well


def test_newest_version(tmp_path):
    write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10, version="3.0.1", seed=1)
    newest = write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10, version="10.0.0", seed=2)
    dataset = load_dataset("mnist", data_dir=tmp_path)
    assert as_pairs(dataset.test_inputs, dataset.test_labels) == as_pairs(*newest["test"])


# --- DomainNet

LABELS = ["zebra", "yoga", "whale", "axe", *CLASSES[1:6], "bird", "windmill", "ant", "wine_glass"]


def prepare_domain(root, domain, seed, class_names=LABELS):
    """Images of all sizes of more classes than ours, every one of ours among them."""
    rng = np.random.default_rng(seed)

    def split(count):
        sizes = rng.integers(20, 150, (count, 2))
        images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
        return images, np.arange(count) % len(class_names)

    content = {"train": split(20 + seed), "test": split(14)}
    options = {"config": domain, "content": content, "class_names": class_names}
    return write_tfds_dataset(root, "domainnet", (None, None, 3), 0, **options)


@pytest.fixture(scope="module")
def prepared_domains(tmp_path_factory):
    """(folder, what was written for each domain); prepared in another order than the loader's."""
    root = tmp_path_factory.mktemp("domains")
    domains = ["real", "quickdraw", "clipart", "sketch", "infograph", "painting"]
    return root, {domain: prepare_domain(root, domain, seed) for seed, domain in enumerate(domains)}


def bilinear_weights(pixels, to):
    """[to, pixels]: a triangle around each new pixel's centre, as wide as the shrinking asks."""
    scale = pixels / to
    centres = (np.arange(to)[:, None] + 0.5) * scale
    distance = np.abs(np.arange(pixels) + 0.5 - centres) / max(scale, 1)
    weights = np.maximum(1 - distance, 0)
    return weights / weights.sum(1, keepdims=True)


def resized_in_float64(image):
    rows, columns = (bilinear_weights(pixels, 64) for pixels in image.shape[:2])
    return np.einsum("ih,hwc,jw->ijc", rows, image.astype(np.float64), columns, optimize=True)


@pytest.mark.slow
def test_domainnet_classes_and_resizing(prepared_domains):
    folder, content = prepared_domains
    dataset = load_dataset("domainnet", data_dir=folder)
    assert dataset.class_names == (
        *("bird", "feather", "headphones", "ice_cream", "teapot"),
        *("tiger", "whale", "windmill", "wine_glass", "zebra"),
    )
    names = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    assert dataset.domain_names == names
    assert dataset.input_shape == (64, 64, 3) and dataset.train_inputs.dtype == np.uint8
    for split in ("train", "test"):
        images, labels, domains = (
            getattr(dataset, f"{split}_{part}") for part in ("inputs", "labels", "domains")
        )
        assert (np.diff(domains) >= 0).all()
        for domain, name in enumerate(names):
            mine = np.flatnonzero(domains == domain)
            stored, stored_labels = content[name][split]
            ours = [at for at, label in enumerate(stored_labels) if LABELS[label] in CLASSES]
            assert len(mine) == len(ours) > 0
            actual = images[mine].astype(np.float64)
            at_last = []
            for at in ours:  # the library shuffles: find each image again
                distances = np.abs(actual - resized_in_float64(stored[at])).max((1, 2, 3))
                at_last.append(mine[distances.argmin()])
                assert distances.min() < 1.6  # rounded twice
                assert dataset.class_names[labels[at_last[-1]]] == LABELS[stored_labels[at]]
            assert sorted(at_last) == mine.tolist()


def test_domainnet_cache(prepared_domains, monkeypatch, tmp_path):
    folder, _ = prepared_domains
    first = load_dataset("domainnet", data_dir=folder)
    assert len(list((tmp_path / "cache/datasets").iterdir())) == 6
    forbid_decoding(monkeypatch, "sources.domainnet._read_domain")
    again = load_dataset("domainnet", data_dir=folder, normalization="fedaf")
    assert again.digest() == first.digest()
    pixels = first.train_inputs.reshape(-1, 3) / np.float64(255)
    np.testing.assert_allclose((again.mean, again.std), (pixels.mean(0), pixels.std(0)), rtol=1e-9)
    assert "64x64" in first.note and "tensorflow" not in sys.modules


def test_domainnet_rejects_missing_domain(prepared_domains, tmp_path):
    folder, _ = prepared_domains
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    shutil.rmtree(mine / "domainnet/quickdraw")
    with pytest.raises(ConfigError, match=r"domainnet/quickdraw.*prepare domainnet"):
        load_dataset("domainnet", data_dir=mine)
    prepare_domain(mine, "quickdraw", 0, class_names=[name for name in LABELS if name != "tiger"])
    with pytest.raises(ConfigError, match=r"domainnet/quickdraw.*labels lack tiger"):
        load_dataset("domainnet", data_dir=mine)


def test_domainnet_names():
    from tensorflow_datasets.image_classification.domainnet import domainnet

    assert set(DOMAINS) == {config.name for config in domainnet.Domainnet.BUILDER_CONFIGS}
    assert set(CLASSES) < set(domainnet._CLASS_NAMES)
    assert list(DOMAINS) == sorted(DOMAINS) and list(CLASSES) == sorted(CLASSES)


# --- data that are missing or unusable


@pytest.mark.parametrize(
    ("name", "variable", "message"),
    [
        ("cifar", "TFDS_DATA_DIR", "did you mean 'cifar10'"),
        ("cifar100", "TFDS_DATA_DIR", "nowhere.*TFDS_DATA_DIR.*fedjax_het.data.prepare cifar100"),
        ("emnist_45", "TFDS_DATA_DIR", "prepare emnist_balanced"),
        ("cinic10", "HOME", "CINIC10_DIR"),
        ("cinic10", "CINIC10_DIR", "nowhere.*CINIC10_DIR"),
    ],
)
def test_missing_data_message(name, variable, message, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=message) as error:
        load_dataset(name)
    assert "\n" not in str(error.value)


def test_other_format_message(tmp_path):
    write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10)
    info = tmp_path / "mnist/1.0.0/dataset_info.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "fileFormat": "riegeli"}))
    with pytest.raises(ConfigError, match=r"riegeli.*array_record or tfrecord.*prepare mnist"):
        load_dataset("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone", "features", "image", "info"])
def test_unreadable_data_message(damage, tmp_path):
    write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10)
    folder = tmp_path / "mnist/1.0.0"
    records = next(folder.glob("*train.array_record*"))
    if damage == "cut":
        records.write_bytes(records.read_bytes()[: records.stat().st_size // 2])
    elif damage == "gone":
        records.unlink()
    elif damage == "image":
        path = folder / "features.json"
        text = path.read_text()
        assert '"image": {' in text
        path.write_text(text.replace('"image": {', '"picture": {', 1))  # not its type
    else:
        (folder / ("features.json" if damage == "features" else "dataset_info.json")).write_text(
            "{"
        )
    reason = {"info": "is damaged", "image": "do not fit"}.get(damage, "cannot be read")
    with pytest.raises(
        ConfigError, match=rf"mnist.*{reason}.*: prepare it again with .*: run `pyth"
    ):
        load_dataset("mnist", data_dir=tmp_path)
    assert not list((tmp_path / "cache").rglob("*.npz"))


def test_prepare_requires_tensorflow(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedjax_het\[prepare\]"):
        prepare_dataset("mnist", tmp_path)
    assert prepare_main(["mnist"]) == 2
    assert "fedjax_het[prepare]" in capsys.readouterr().err
    assert prepare_main(["mnits"]) == 2
    assert "'mnist'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "builders"),
    [
        ("emnist_byclass", ["emnist/byclass"]),
        ("mnist", ["mnist"]),
        ("domainnet", [f"domainnet/{domain}" for domain in DOMAINS]),
    ],
)
def test_prepare_writes_array_record(dataset, builders, monkeypatch, tmp_path):
    import tensorflow_datasets as tfds

    prepared = []

    class Builder:
        def __init__(self, name, data_dir, file_format):
            assert (data_dir, file_format) == (tmp_path, "array_record")
            self.name = name

        def download_and_prepare(self):
            prepared.append(self.name)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(tfds, "builder", Builder)
    assert prepare_dataset(dataset, tmp_path) == tmp_path
    assert prepared == builders


# --- the cache


@pytest.fixture
def prepared_mnist(tmp_path):
    write_tfds_dataset(tmp_path, "mnist", (28, 28, 1), 10)
    return tmp_path


def cache_file(tmp_path):
    return tmp_path / "cache/datasets/mnist.npz"


def test_cache_is_private_and_used(prepared_mnist, monkeypatch):
    first = load_dataset("mnist", data_dir=prepared_mnist)
    path = cache_file(prepared_mnist)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["mnist.npz"]
    forbid_decoding(monkeypatch)
    assert load_dataset("mnist", data_dir=prepared_mnist).digest() == first.digest()


def cache_records(caplog):
    """Log records except of classes that the few images of a test do not have."""
    return [record for record in caplog.records if "training example" not in record.getMessage()]


@pytest.mark.parametrize("damage", ["cut", "other archive"])
def test_damaged_cache_is_rebuilt(damage, prepared_mnist, caplog):
    first = load_dataset("mnist", data_dir=prepared_mnist)
    path = cache_file(prepared_mnist)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    else:
        np.savez(path, something=np.arange(3))
    with caplog.at_level(logging.WARNING):
        again = load_dataset("mnist", data_dir=prepared_mnist)
    assert again.digest() == first.digest()
    (record,) = cache_records(caplog)
    assert "rebuilding" in record.getMessage() and "\n" not in record.getMessage()
    assert path.read_bytes()[:2] == b"PK" and read_npz(path)


def test_npz_of_version_0_6(tmp_path):
    arrays, meta = {"x": np.arange(5)}, {"kind": "test"}
    header = np.array(json.dumps({"meta": meta, "sha256": digest_arrays(arrays, meta)}))
    np.savez(tmp_path / "a.npz", **arrays, __header__=header)
    actual, found_meta = read_npz(tmp_path / "a.npz")
    assert actual["x"].tolist() == [0, 1, 2, 3, 4] and found_meta == meta
    np.savez(tmp_path / "b.npz", x=np.arange(1, 6), __header__=header)
    with pytest.raises(DamagedFileError, match="checksum"):
        read_npz(tmp_path / "b.npz")


def test_stale_cache_is_rebuilt(prepared_mnist, caplog):
    load_dataset("mnist", data_dir=prepared_mnist)
    shutil.rmtree(prepared_mnist / "mnist")
    content = write_tfds_dataset(prepared_mnist, "mnist", (28, 28, 1), 10, seed=7)
    with caplog.at_level(logging.WARNING):
        dataset = load_dataset("mnist", data_dir=prepared_mnist)
    assert as_pairs(dataset.train_inputs, dataset.train_labels) == as_pairs(*content["train"])
    assert len(cache_records(caplog)) == 1


def without_the_library(monkeypatch):
    """Simulate a machine without tensorflow-datasets, where nothing can be decoded."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    forbid_decoding(monkeypatch)


def test_copied_data_and_cache(prepared_mnist, monkeypatch, tmp_path, caplog):
    first = load_dataset("mnist", data_dir=prepared_mnist)
    shutil.copytree(prepared_mnist / "mnist", tmp_path / "copy/mnist", copy_function=shutil.copy)
    shutil.copytree(prepared_mnist / "cache", tmp_path / "other", copy_function=shutil.copy)
    for file in (tmp_path / "copy").rglob("*.*"):
        os.utime(file, (1, 1))
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "other"))
    without_the_library(monkeypatch)
    again = load_dataset("mnist", data_dir=tmp_path / "copy")
    assert again.digest() == first.digest() and not cache_records(caplog)


def test_cache_without_data(prepared_mnist, monkeypatch):
    first = load_dataset("mnist", data_dir=prepared_mnist)
    without_the_library(monkeypatch)
    assert load_dataset("mnist").digest() == first.digest()
    # Where a folder is named that has no such set, that is an error, whatever is in the cache.
    with pytest.raises(ConfigError, match="no data in"):
        load_dataset("mnist", data_dir=prepared_mnist / "nowhere")
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared_mnist / "nowhere"))
    with pytest.raises(ConfigError, match="no data in"):
        load_dataset("mnist")


def test_fingerprint_covers_contents(prepared_mnist):
    (folder,) = (prepared_mnist / "mnist").iterdir()
    before = compute_fingerprint(folder)
    for file in folder.iterdir():
        dates, whole = file.stat(), bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 1
        kept = file.read_bytes()
        file.write_bytes(whole)
        os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
        assert compute_fingerprint(folder) != before
        file.write_bytes(kept)
    assert compute_fingerprint(folder) == before


def test_load_without_writable_cache(prepared_mnist, caplog):
    (prepared_mnist / "file").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        cache_dir = prepared_mnist / "file/cache"
        dataset = load_dataset("mnist", data_dir=prepared_mnist, cache_dir=cache_dir)
    assert dataset.train_inputs.shape == (23, 28, 28, 1)
    assert any("without it" in record.getMessage() for record in caplog.records)


# --- digits


@pytest.mark.parametrize("has_file", [True, False])
def test_digits_match_scikit_learn(has_file, monkeypatch):
    """Read from scikit-learn's file, or by its function where the file has another place."""
    if not has_file:
        monkeypatch.setattr(dataset_registry.importlib.util, "find_spec", lambda name: None)
    from sklearn.datasets import load_digits

    dataset, original = load_dataset("digits"), load_digits()
    assert dataset.input_shape == (8, 8, 1) and dataset.num_classes == 10
    images = np.concatenate([dataset.train_inputs, dataset.test_inputs])[..., 0]
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    restored = images.astype(float) * 16 / 255
    assert np.abs(restored - np.rint(restored)).max() <= 0.5 * 16 / 255 + 1e-9
    expected = as_pairs(original.images.astype(np.int8), original.target)
    assert as_pairs(np.rint(restored).astype(np.int8), labels) == expected
    assert images.max() == 255
    shares = np.bincount(dataset.test_labels) / np.bincount(original.target)
    assert np.abs(shares - 0.2).max() < 0.5 / 170  # each class is split to the nearest example
    assert load_dataset("digits").digest() == dataset.digest()


# --- normalization


def test_normalization_presets(tmp_path):
    write_tfds_dataset(tmp_path, "fashion_mnist", (28, 28, 1), 10)
    write_tfds_dataset(tmp_path, "cifar100", (32, 32, 3), 100)

    def constants(name, preset=None):
        dataset = load_dataset(name, data_dir=tmp_path, normalization=preset)
        return dataset.mean, dataset.std

    # DynaFed's code uses MNIST's numbers for Fashion-MNIST and CIFAR-10's for CIFAR-100.
    assert constants("fashion_mnist") == ((0.1307,), (0.3081,))
    assert constants("fashion_mnist", "fedaf") == ((0.2861,), (0.3530,))
    assert constants("cifar100") == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert constants("cifar100", "fedaf")[0] == (0.5071, 0.4866, 0.4409)
    assert constants("cifar100", "unit") == constants("cifar100", "fsl") == ((0,) * 3, (1,) * 3)
    images = load_dataset("cifar100", data_dir=tmp_path).train_inputs / np.float64(255)
    for preset in ("dataset", "fedamp"):
        mean, std = constants("cifar100", preset)
        np.testing.assert_allclose(mean, images.mean((0, 1, 2)), rtol=1e-12)
        np.testing.assert_allclose(std, images.std((0, 1, 2)), rtol=1e-12)
    with pytest.raises(ConfigError, match="has no constants for 'digits'"):
        load_dataset("digits", normalization="fedaf")
    with pytest.raises(ConfigError, match="'dynafed'"):
        load_dataset("digits", normalization="dynafd")
    assert all(NORMALIZATIONS.values()) and all(s.description for s in DATASETS.values())


# --- the real data


@pytest.mark.slow
def test_real_fashion_mnist(prepared_data):
    dataset = load_dataset("fashion_mnist", data_dir=prepared_data)
    assert dataset.train_inputs.shape == (60_000, 28, 28, 1)
    assert dataset.test_inputs.shape == (10_000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(dataset.train_labels), 6_000)
    np.testing.assert_array_equal(np.bincount(dataset.test_labels), 1_000)
    assert dataset.class_names[0] == "T-shirt/top" and dataset.note == ""
    # The constants that the field quotes, .2861 and .3530, are the statistics of these images.
    own = load_dataset("fashion_mnist", data_dir=prepared_data, normalization="dataset")
    np.testing.assert_allclose((own.mean, own.std), ((0.2860,), (0.3530,)), atol=2e-4)
    pooled = load_dataset("fashion_mnist_pooled", data_dir=prepared_data)
    np.testing.assert_array_equal(np.bincount(pooled.train_labels), 5_250)
    np.testing.assert_array_equal(np.bincount(pooled.test_labels), 1_750)
    # A classifier of nearest class means gets 67 to 69 % where labels and images belong together.
    flat = dataset.train_inputs.reshape(60_000, -1).astype(np.float32)
    means = np.stack([flat[dataset.train_labels == c].mean(0) for c in range(10)])
    test = dataset.test_inputs[:2000].reshape(2000, -1).astype(np.float32)
    nearest = ((test[:, None] - means) ** 2).sum(-1).argmin(1)
    assert 0.6 < (nearest == dataset.test_labels[:2000]).mean() < 0.75


@pytest.mark.slow
def test_real_cifar10_and_mnist(prepared_data):
    mnist = load_dataset("mnist", data_dir=prepared_data, normalization="dataset")
    np.testing.assert_allclose((mnist.mean, mnist.std), ((0.1307,), (0.3081,)), atol=2e-4)
    cifar10 = load_dataset("cifar10", data_dir=prepared_data, normalization="dataset")
    np.testing.assert_array_equal(np.bincount(cifar10.train_labels), 5_000)
    np.testing.assert_allclose(cifar10.mean, (0.4914, 0.4822, 0.4465), atol=2e-3)
    np.testing.assert_allclose(cifar10.std, (0.2470, 0.2435, 0.2616), atol=5e-3)
    features = json.loads((prepared_data / "cifar10/3.0.2/features.json").read_text())
    lossy = "jpeg" in json.dumps(features)
    assert ("JPEG" in cifar10.note) == lossy
