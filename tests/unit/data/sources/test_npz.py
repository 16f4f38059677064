"""Archives of arrays, named as `npz:FILE`."""

import numpy as np
import pytest
from support.published_files import random_splits

from fedjax_het import RunSpec, dataset_from_arrays, load_dataset, simulate
from fedjax_het.utils.errors import ConfigError

KERAS = {"train_inputs": "x_train", "train_labels": "y_train"}
KERAS |= {"test_inputs": "x_test", "test_labels": "y_test"}


def save(path, arrays, **more):
    np.savez(path, **{KERAS[name]: array for name, array in arrays.items()}, **more)
    return f"npz:{path}"


def test_equal_to_arrays(tmp_path):
    arrays = random_splits((6, 6, 3), 4)
    name = save(tmp_path / "a.npz", arrays)
    dataset, expected = load_dataset(name), dataset_from_arrays(**arrays)
    assert dataset.digest() == expected.digest()
    assert (dataset.name, dataset.source, dataset.order) == (name, "npz", "files")
    assert load_dataset("npz:a.npz", data_dir=tmp_path).digest() == expected.digest()
    unit = load_dataset(name, normalization="unit")
    assert (unit.mean, unit.std) == ((0, 0, 0), (1, 1, 1))
    np.savez(tmp_path / "b.npz", **arrays)
    assert load_dataset(f"npz:{tmp_path}/b.npz").digest() == expected.digest()
    medmnist = {name.replace("inputs", "images"): array for name, array in arrays.items()}
    np.savez(tmp_path / "c.npz", **medmnist)
    assert load_dataset(f"npz:{tmp_path}/c.npz").digest() == expected.digest()


def test_layouts(tmp_path):
    arrays = random_splits((6, 6, 1), 4)
    names = np.array(["ant", "bee", "cat", "dog"])
    expected = dataset_from_arrays(**arrays)
    variants = {
        "gray": {
            "train_inputs": arrays["train_inputs"][..., 0],
            "test_inputs": arrays["test_inputs"][..., 0],
        },
        "columns": {
            "train_labels": arrays["train_labels"][:, None],
            "test_labels": arrays["test_labels"][:, None],
        },
        "texts": {
            "train_labels": names[arrays["train_labels"]],
            "test_labels": names[arrays["test_labels"]],
        },
        "int64": {
            "train_inputs": arrays["train_inputs"].astype(int),
            "test_inputs": arrays["test_inputs"].astype(int),
        },
    }
    for key, variant in variants.items():
        dataset = load_dataset(save(tmp_path / f"{key}.npz", arrays | variant))
        assert dataset.digest() == expected.digest(), key
        assert dataset.class_names == (tuple(names) if key == "texts" else ())
    first = {key: np.moveaxis(arrays[key], -1, 1) for key in ("train_inputs", "test_inputs")}
    name = save(tmp_path / "first.npz", arrays | first, class_names=names[::-1])
    dataset = load_dataset(f"{name}?channels=first")
    assert dataset.digest() == expected.digest() and dataset.class_names == tuple(names[::-1])
    with pytest.raises(
        ConfigError, match=rf"^dataset = '{name}': shape of x_train .*channels=.?first"
    ):
        load_dataset(name)


def test_clients_and_domains(tmp_path):
    arrays = random_splits((6, 6, 1), 4)
    clients = {"client_train": np.arange(24) % 3, "client_test": np.arange(9) % 3}
    domains = {
        "domain_train": np.array(["b", "a"] * 12),
        "domain_test": np.array(["a", "b", "a"] * 3),
    }
    name = save(tmp_path / "a.npz", arrays, **clients, **domains)
    dataset = load_dataset(name)
    assert dataset.num_users == 3 and dataset.domain_names == ("a", "b")
    assert dataset.train_domains[:3].tolist() == [1, 0, 1]
    np.testing.assert_array_equal(dataset.test_users, clients["client_test"])


def test_names_near_a_known_name_are_logged(tmp_path, caplog):
    arrays = random_splits((6, 6, 1), 4)
    users, extra = np.zeros(4, int), np.zeros(2)
    load_dataset(save(tmp_path / "a.npz", arrays, clients_train=users, thumbnails=extra))
    first, second = [r.getMessage() for r in caplog.records if "is not read" in r.getMessage()]
    assert "'clients_train'" in first and "did you mean 'client_train'?" in first
    assert second.endswith("array 'thumbnails' is not read")


def test_run_equals_run_of_arrays(tmp_path):
    """Settings that name a file train as an object does, bit by bit, and record the source."""
    arrays = random_splits((6, 6, 1), 4)
    name = save(tmp_path / "a.npz", arrays)
    settings = {"model": "mlp", "rounds": 1, "num_clients": 2, "partition": "iid"}
    result = simulate(RunSpec("fedavg", name, **settings))
    expected = simulate(
        RunSpec("fedavg", "user", **settings), dataset=dataset_from_arrays(**arrays)
    )
    for metric, values in expected.metrics.items():
        np.testing.assert_array_equal(result.metrics[metric], values)
    summary = result.summary
    assert summary["dataset_digest"] == expected.summary["dataset_digest"]
    assert (summary["dataset_source"], summary["dataset_order"]) == ("npz", "files")


def test_unusable_names(tmp_path):
    name = save(tmp_path / "a.npz", random_splits((6, 6, 1), 4))
    for bad, message in (
        ("npy:a", "format = 'npy' is unknown: did you mean 'npz'"),
        ("npz:", "location = '': expected npz:LOCATION"),
        (f"{name}?chanels=first", "did you mean 'channels'"),
        (f"{name}?channels=middle", "channels = 'middle' is unknown: expected first, last"),
        (f"{name}?channels", "expected different NAME=VALUE|channels = ''"),
        ("cifar:x", "format = 'cifar' is unknown"),
        (name.removeprefix("npz:"), "is a path: expected FORMAT:.*/a.npz with .* npz, images"),
    ):
        for use in (load_dataset, lambda text: RunSpec("fedavg", text).resolved()):
            with pytest.raises(ConfigError, match=rf"^dataset = .*({message})"):
                use(bad)
    assert RunSpec("fedavg", name).resolved().dataset == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x_train": 0}, "has no y_train, x_test, y_test: expected .*it has x_train"),
        ({**dict.fromkeys(KERAS.values(), 0), "x_test": np.array([None])}, "cannot be read"),
        (b"text", "cannot be read"),
        (b"", "cannot be read"),
        (b"PK\x03\x04", "cannot be read"),
        (None, "no file"),
        (np.zeros(3), "has one array"),
        ({key: np.zeros((2, 4, 4)) for key in KERAS.values()}, "y_train|train_labels"),
    ],
)
def test_unusable_files(content, message, tmp_path):
    path = tmp_path / "a.npz"
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, np.ndarray):
        with open(path, "wb") as file:
            np.save(file, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^dataset = 'npz:.*a\.npz': .*({message})"):
        load_dataset(f"npz:{path}")


def test_series_tokens_and_tasks(tmp_path):
    random = np.random.default_rng(0)
    series, tokens = random.normal(size=(12, 5, 2)), random.integers(0, 9, (12, 5))
    numbers = random.normal(size=12)

    def check(inputs, labels, options, stored, **arguments):
        split = inputs[:8], labels[:8], inputs[8:], labels[8:]
        arrays = dict(zip(KERAS, split, strict=True))
        name = save(tmp_path / "a.npz", arrays, **stored)
        dataset = load_dataset(f"{name}{options}")
        assert dataset.digest() == dataset_from_arrays(*split, **arguments).digest()
        assert dataset.task == arguments.get("task", "classification")

    check(series, np.arange(12) % 3, "", {})
    check(series, numbers, "?task=regression", {}, task="regression")
    integers = random.integers(0, 256, (12, 5, 2), np.uint8)
    arrays = dict(zip(KERAS, (integers, numbers, integers, numbers), strict=True))
    name = save(tmp_path / "integers.npz", arrays)
    for option, shape in (("true", (5, 2)), ("false", (5, 2, 1))):
        dataset = load_dataset(f"{name}?task=regression&series={option}")
        assert dataset.input_shape == shape
    check(series[:, 0], numbers, "", {"task": "regression"}, task="regression")
    check(tokens, np.arange(12) % 3, "?num_tokens=9", {}, num_tokens=9)
    stored = {"task": "next_token", "num_tokens": 9}
    check(tokens, tokens, "", stored, task="next_token", num_tokens=9)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"task": np.array(["a", "b"])}, "task is <U1 (2,): expected one text"),
        ({"num_tokens": np.array("x")}, "num_tokens is <U1 (): expected one value"),
        ({"task": "sorting"}, "task = 'sorting'"),
    ],
)
def test_damaged_facts(tmp_path, stored, message):
    name = save(tmp_path / "a.npz", random_splits((6, 6, 3), 4), **stored)
    with pytest.raises(ConfigError) as error:
        load_dataset(name)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("y_train", np.array([0, -1, 1, 0]), r"y_train\[1\] = -1: expected a label, not"),
        ("y_train", np.array([0, np.nan, 1, 0]), r"y_train\[1\] = 'nan': .* no missing value"),
        ("client_train", np.zeros(3, int), r"len\(client_train\) = 3: expected 4"),
        ("client_test", np.zeros(4, int), "client_train = None: expected users"),
        ("domain_train", np.zeros(4, int), "domain_test = None: expected an array"),
        ("x_test", np.full((4, 3), np.nan, np.float32), r"x_test\[0, 0\] = nan"),
        ("x_train", np.full((4, 3), "a"), "dtype of x_train = '<U1'"),
        ("class_names", np.array(["a"]), r"class_names = \('a',\): expected 2 names"),
    ],
)
def test_messages_name_the_arrays_of_the_file(tmp_path, name, values, message):
    labels, inputs = np.array([0, 1, 1, 0]), np.zeros((4, 3), np.float32)
    arrays = {"x_train": inputs, "y_train": labels, "x_test": inputs, "y_test": labels}
    np.savez(tmp_path / "file.npz", **{**arrays, name: values})
    with pytest.raises(ConfigError, match=message) as error:
        load_dataset(f"npz:{tmp_path / 'file.npz'}")
    assert "train_labels" not in str(error.value) and "train_users" not in str(error.value)
