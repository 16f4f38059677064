"""Data sets from Python objects: equal arrays from every kind of object."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support.published_files import random_splits

from fedjax_het import dataset_from_arrays, dataset_from_object
from fedjax_het.utils.errors import ConfigError

ARRAYS = random_splits((5, 4, 3), 3)
EXPECTED = dataset_from_arrays(**ARRAYS)
NAMES = ["ant", "bee", "cat"]


class TorchStyle:
    """A data set as PyTorch users write it."""

    def __init__(self, images, labels, classes=None):
        self.images, self.labels = images, labels
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, position):
        if position >= len(self):
            raise IndexError
        return self.images[position], self.labels[position]


class Subset(TorchStyle):
    def __init__(self, dataset):
        super().__init__(dataset.images, dataset.labels)
        self.dataset = dataset


class Tensor:
    """The parts of a tensor of PyTorch that the conversion uses."""

    __module__ = "torch"

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or self.values.dtype)

    ndim = property(lambda self: self.values.ndim)

    def item(self):
        return self.values.item()


def encode(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def make_split(kind, split, tmp_path):
    images, labels = ARRAYS[f"{split}_inputs"], ARRAYS[f"{split}_labels"]
    if kind == "pillow":
        return TorchStyle(list(map(Image.fromarray, images)), labels.tolist(), NAMES)
    if kind == "subset":
        return Subset(make_split("pillow", split, tmp_path))
    if kind == "arrays":
        return TorchStyle(images, labels)
    if kind == "tensors":
        return TorchStyle(
            [Tensor(np.moveaxis(i, -1, 0)) for i in images], list(map(Tensor, labels))
        )
    if kind == "dictionaries":
        return [{"img": image, "y": label} for image, label in zip(images, labels, strict=True)]
    if kind == "frame of files":
        return pd.DataFrame(
            {"image": list(map(encode, images)), "label": [NAMES[i] for i in labels]}
        )
    if kind == "frame of arrays":
        return pd.DataFrame({"label": labels, "image": list(images)})
    assert kind == "datasets"
    datasets = pytest.importorskip("datasets")
    features = {"photo": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    content = {"photo": list(map(Image.fromarray, images)), "label": labels.tolist()}
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *(("pillow", NAMES), ("subset", NAMES), ("arrays", []), ("tensors", [])),
        *(("dictionaries", []), ("frame of files", NAMES), ("frame of arrays", [])),
        ("datasets", NAMES),
    ],
)
def test_every_kind_gives_equal_arrays(kind, names, tmp_path):
    train, test = (make_split(kind, split, tmp_path) for split in ("train", "test"))
    dataset = dataset_from_object(train, test, name="mine")
    assert dataset.digest() == EXPECTED.digest()
    assert dataset.class_names == tuple(names) and dataset.name == "mine"
    assert dataset.order == "rows" and dataset.source.endswith(type(train).__name__)
    assert dataset_from_object({"train": train, "validation": test}).digest() == EXPECTED.digest()


def test_float_tensors_have_channels_first():
    images = [
        Tensor(np.moveaxis(i, -1, 0).astype(np.float32) / 255) for i in ARRAYS["train_inputs"]
    ]
    rows = TorchStyle(images, ARRAYS["train_labels"])
    dataset = dataset_from_object(rows, rows)
    expected = (ARRAYS["train_inputs"] / np.float32(255)).astype(np.float32)
    np.testing.assert_array_equal(dataset.train_inputs, expected)


def test_clients_domains_and_fraction():
    rows = [
        (image, int(label), f"w{i % 4}", "xy"[i % 2])
        for i, (image, label) in enumerate(
            zip(ARRAYS["train_inputs"], ARRAYS["train_labels"], strict=True)
        )
    ]
    dataset = dataset_from_object(
        rows, client=2, domain=3, test_fraction=0.5, class_names=["a", "b", "c"]
    )
    assert dataset.num_users == 4 and dataset.domain_names == ("x", "y")
    assert dataset.class_names == ("a", "b", "c")
    users, counts = np.unique(dataset.test_users, return_counts=True)
    assert users.tolist() == ["w0", "w1", "w2", "w3"] and counts.tolist() == [3] * 4
    kept = {image.tobytes() for image in dataset.train_inputs}
    tests = {image.tobytes() for image in dataset.test_inputs}
    assert kept | tests == {row[0].tobytes() for row in rows} and not kept & tests
    again = dataset_from_object(rows, client=2, domain=3, test_fraction=0.5)
    assert again.digest() == dataset.digest()


def test_form_of_the_first_column_decides():
    """Texts, paths and numbers of rows need no name; `image` makes floats gray images."""
    labels = [0, 1] * 4
    rows = {
        name: list(zip(x, labels, strict=True))
        for name, x in {
            "text": ["To be"] * 8,
            "number": [0.5 * i for i in range(8)],
            "path": ["none.png"] * 8,
            "series": list(np.random.default_rng(0).random((8, 3, 4))),
        }.items()
    }
    assert dataset_from_object(rows["text"], test_fraction=0.5).num_tokens == 4
    assert dataset_from_object(rows["number"], test_fraction=0.5).input_shape == (1,)
    assert dataset_from_object(rows["series"], test_fraction=0.5).input_shape == (3, 4)
    images = dataset_from_object(rows["series"], image=0, test_fraction=0.5)
    assert images.input_shape == (3, 4, 1)
    with pytest.raises(ConfigError, match=r"image 0 of column 0 .* cannot be decoded"):
        dataset_from_object(rows["path"], test_fraction=0.5)


def test_gray_split_beside_color():
    gray = [(Image.new("L", (4, 5), 9), 0), (Image.new("L", (4, 5), 8), 1)]
    color = [(Image.new("RGB", (4, 5), (1, 2, 3)), 0), (Image.new("L", (4, 5), 8), 1)]
    dataset = dataset_from_object(color, gray)
    assert dataset.input_shape == (5, 4, 3) and (dataset.test_inputs[0] == 9).all()
    assert dataset_from_object(gray, gray, size=2).input_shape == (2, 2, 1)


IMAGE = np.zeros((2, 2), np.uint8)


class Endless:
    """A data set whose length is not known, such as a stream."""

    def __getitem__(self, position):
        return IMAGE, 0

    def __len__(self):
        raise TypeError("no length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 3, "test": [(IMAGE, 0)]}, "train = 3: expected a data set with __len__"),
        ({"train": [(IMAGE, 0)]}, "test = None: expected .* or test_fraction=0.2"),
        ({"train": Endless(), "test": [(IMAGE, 0)]}, "train = .*expected a data set with __len__"),
        ({"train": [], "test": []}, r"len\(train\) = 0: expected at least one example"),
        ({"train": [(IMAGE, 0)], "test": []}, r"len\(test\) = 0: expected at least one example"),
        ({"train": [IMAGE], "test": [IMAGE]}, r"train\[0\] is a ndarray: expected \(input, label"),
        ({"train": [{"a": 1}], "test": [{"a": 1}]}, r"no column of labels \(columns: a\)"),
        (
            {"train": [(IMAGE, 0)], "test": [(IMAGE,)]},
            r"split 'test' has no column 1 \(columns: 0\)",
        ),
        ({"train": [(IMAGE, 0), (IMAGE,)], "test": [(IMAGE, 0)]}, "train: an item lacks a column"),
        ({"train": [(IMAGE, 0)] * 2, "test": [(IMAGE, 0)], "test_fraction": 0.5}, "test_fraction"),
        (
            {"train": [(IMAGE, 0), (IMAGE, 1)], "test_fraction": 0.1},
            "leaves no test example of 2 examples with 2 labels: expected a larger one, or task=",
        ),
        ({"train": [(IMAGE, 0)] * 2, "test": [(IMAGE, 0)]}, "expected at least two classes"),
        (
            {"train": {"a": 1, "b": 2}},
            r"train = \['a', 'b'\]: expected splits such as train and test",
        ),
        (
            {"train": [(IMAGE, 0), (IMAGE[:1], 1)], "test": [(IMAGE, 0)]},
            r"shapes \(2, 2\) and \(1, 2\)",
        ),
        ({"train": [(IMAGE, 0)], "test": [(IMAGE, 0)], "size": 3}, "size = .3, 3.: expected None"),
        (
            {"train": [(b"x", 0)], "test": [(b"x", 0)]},
            "image 0 of column 0 of split 'train' cannot be decoded",
        ),
    ],
)
def test_unusable_objects(arguments, message):
    with pytest.raises(ConfigError, match=message):
        dataset_from_object(**arguments)
