"""The idx files of MNIST, Fashion-MNIST and EMNIST."""

import gzip
import shutil
import zipfile

import numpy as np
import pytest
from support.published_files import assert_same_arrays, random_splits, write_idx_splits

from fedjax_het import load_dataset
from fedjax_het.utils.errors import ConfigError


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "."), ("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")],
)
def test_files_in_their_order(name, folder, suffix, tmp_path):
    arrays = random_splits((28, 28, 1), 10)
    write_idx_splits(tmp_path / folder, arrays, suffix=suffix)
    dataset = load_dataset(name, data_dir=tmp_path)
    assert_same_arrays(dataset, arrays)
    assert dataset.order == "files" and "idx" in dataset.source
    assert dataset.class_names[0] == {"mnist": "0", "fashion_mnist": "T-shirt/top"}[name]


@pytest.mark.parametrize("names", [{}, {"prefix": "emnist-letters-", "test": "test"}])
def test_folder_of_another_data_set(names, tmp_path):
    """KMNIST and others have files of these names."""
    arrays = random_splits((9, 7, 1), 4)
    write_idx_splits(tmp_path, arrays, suffix=".gz", **names)
    dataset = load_dataset(f"idx:{tmp_path}")
    assert_same_arrays(dataset, arrays)
    assert (dataset.source, dataset.order, dataset.class_names) == ("idx", "files", ())
    next(tmp_path.glob("*test-labels*" if names else "t10k-labels*")).unlink()
    with pytest.raises(ConfigError, match=r"expected one file \*t10k-labels\?idx1.*found none"):
        load_dataset(f"idx:{tmp_path}")


@pytest.mark.parametrize("form", ["files", "zip"])
def test_emnist_is_transposed(form, tmp_path):
    arrays = random_splits((28, 28, 1), 47, (60, 50))
    folder = tmp_path / "gzip"
    names = {"prefix": "emnist-balanced-", "test": "test"}
    write_idx_splits(folder, arrays, suffix=".gz", transposed=True, **names)
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
            for path in folder.iterdir():
                archive.write(path, f"gzip/{path.name}")
        shutil.rmtree(folder)
    dataset = load_dataset("emnist_balanced", data_dir=tmp_path)
    assert_same_arrays(dataset, arrays)
    assert dataset.class_names[10] == "A"
    small = load_dataset("emnist_45", data_dir=tmp_path)  # selections have the same sources
    assert small.num_classes == 45 and small.order == "files"


def test_files_of_another_set(tmp_path):
    arrays = random_splits((28, 28, 1), 10)
    arrays["train_labels"][:12] = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5]  # MNIST's first labels
    write_idx_splits(tmp_path, arrays)
    load_dataset("mnist", data_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"has the files of mnist: expected fashion_mnist"):
        load_dataset("fashion_mnist", data_dir=tmp_path)


def cut(content):
    return content[:-1]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train-images-idx3-ubyte", cut, "has 18,831 bytes: expected 18,832"),
        ("train-images-idx3-ubyte", lambda c: c + b"x", "has 18,833 bytes"),
        ("train-images-idx3-ubyte", lambda c: b"\0\0\x0d" + c[3:], "magic number 0x00000d03"),
        ("train-images-idx3-ubyte", lambda c: b"<html>", "magic number.*expected 0x00000803"),
        ("t10k-labels-idx1-ubyte", lambda c: gzip.compress(c)[:-9], "cannot be decompressed"),
        ("t10k-labels-idx1-ubyte", lambda c: c[:8] + b"\x0a" + c[9:], "label 10: expected 0 to 9"),
        ("t10k-labels-idx1-ubyte", None, "no file t10k-labels-idx1-ubyte or .gz"),
        (
            "t10k-labels-idx1-ubyte",
            lambda c: c[:4] + np.array([3], ">u4").tobytes() + c[8:11],
            "has 3 labels: expected 9",
        ),
    ],
)
def test_unusable_files(file, change, message, tmp_path):
    write_idx_splits(tmp_path, random_splits((28, 28, 1), 10))
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(ConfigError, match=message) as error:
        load_dataset("mnist", data_dir=tmp_path)
    assert str(error.value).startswith("dataset = 'mnist': ") and file in str(error.value)


def test_unusable_archive(tmp_path):
    (tmp_path / "gzip.zip").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"gzip\.zip cannot be read as a zip archive"):
        load_dataset("emnist_byclass", data_dir=tmp_path)
    content = b"some text that is stored as it is"
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for name in ("images-idx3", "labels-idx1"):
            archive.writestr(f"emnist-byclass-train-{name}-ubyte", content)
    damaged = (tmp_path / "gzip.zip").read_bytes().replace(b"some text", b"more text")
    (tmp_path / "gzip.zip").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"images-idx3-ubyte cannot be read \(Bad CRC-32"):
        load_dataset("emnist_byclass", data_dir=tmp_path)
