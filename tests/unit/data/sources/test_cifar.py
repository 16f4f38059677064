"""The files of CIFAR-10 and CIFAR-100 that their authors publish."""

import pickle

import numpy as np
import pytest
from support.published_files import (
    assert_same_arrays,
    random_splits,
    write_cifar_binary,
    write_cifar_python,
)

from fedjax_het import load_dataset
from fedjax_het.utils.errors import ConfigError

NAMES = {"cifar10": [f"c{i}" for i in range(10)], "cifar100": [f"fine{i}" for i in range(100)]}
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}
WRITERS = {"binary": write_cifar_binary, "python": write_cifar_python}


def write(root, name, version, **options):
    arrays = random_splits((32, 32, 3), len(NAMES[name]), (120, 101))
    num_batches = 5 if name == "cifar10" else 1
    folder = root / FOLDERS[name, version]
    options |= {"num_batches": num_batches, "class_names": NAMES[name]}
    WRITERS[version](folder, arrays, **options)
    return folder, arrays


@pytest.mark.parametrize(("name", "version"), FOLDERS)
def test_files_in_their_order(name, version, tmp_path):
    folder, arrays = write(tmp_path, name, version)
    dataset = load_dataset(name, data_dir=tmp_path)
    assert_same_arrays(dataset, arrays)
    assert dataset.class_names == tuple(NAMES[name]) and dataset.num_classes == len(NAMES[name])
    assert dataset.order == "files" and folder.name in dataset.source
    assert load_dataset(name, data_dir=folder).digest() == dataset.digest()


def test_versions_have_one_digest(tmp_path):
    digests = set()
    for version, options in (("binary", {}), ("python", {}), ("python", {"keys_are_bytes": True})):
        root = tmp_path / f"{version}{len(options)}"
        write(root, "cifar10", version, **options)
        digests.add(load_dataset("cifar10", data_dir=root).digest())
    assert len(digests) == 1


class Attack:
    def __reduce__(self):
        return print, ("attacked",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"data": Attack()}, protocol=2), "print is no part of CIFAR's files"),
        (pickle.dumps(np.float64(1)), "is no part of CIFAR's files"),
        (pickle.dumps([1, 2]), "expected a dictionary"),
        (pickle.dumps({"data": 1}), "no list 'labels'"),
        (pickle.dumps({"labels": [1, 2], "data": np.zeros((2, 3))}), r"uint8 \[2, 3072\]"),
        (pickle.dumps({"labels": [1, "x"]}), "a list of int"),
        (pickle.dumps({"labels": [11], "data": np.zeros((1, 3072), np.uint8)}), "label 11"),
        (b"\x80\x02", "cannot be read"),
    ],
)
def test_unusable_python_files(content, message, tmp_path, capsys):
    folder, _ = write(tmp_path, "cifar10", "python")
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^dataset = 'cifar10'.*data_batch_3.*{message}"):
        load_dataset("cifar10", data_dir=tmp_path)
    assert "attacked" not in capsys.readouterr().out


def test_unusable_binary_files(tmp_path):
    folder, _ = write(tmp_path, "cifar100", "binary")
    path = folder / "test.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"test\.bin has 310,473 bytes.*multiple of 3,074"):
        load_dataset("cifar100", data_dir=tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"dataset = 'cifar100': no file .*test\.bin"):
        load_dataset("cifar100", data_dir=tmp_path)
    path.write_bytes(bytes([0, 100]) + content[2:])
    with pytest.raises(ConfigError, match=r"test\.bin has the label 100: expected 0 to 99"):
        load_dataset("cifar100", data_dir=tmp_path)


def test_missing_files_message(tmp_path):
    expected = r"cifar-10-batches-bin or cifar-10-batches-py.*cifar10/<version>.*prepare cifar10`"
    with pytest.raises(ConfigError, match=rf"no data in {tmp_path}.*{expected}"):
        load_dataset("cifar10", data_dir=tmp_path)
