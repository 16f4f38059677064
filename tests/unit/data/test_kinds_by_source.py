"""Every kind of input and task from every source: equal arrays, and refusals in one line."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het import (
    Result,
    RunSpec,
    dataset_from_arrays,
    dataset_from_object,
    load_dataset,
    load_model,
    simulate,
)
from fedjax_het.data.sources.texts import encode_texts
from fedjax_het.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("private_cache")

RNG = np.random.default_rng(0)
CLASSES = np.arange(24) % 3
TOKENS = RNG.integers(0, 5, (24, 7))
# By case: inputs, labels, and the settings that no source finds by itself.
CASES = {
    "features": (RNG.normal(size=(24, 4)).astype(np.float32), CLASSES, {}),
    "regression": (
        RNG.normal(size=(24, 4)).astype(np.float32),
        RNG.normal(size=(24, 2)).astype(np.float32),
        {"task": "regression"},
    ),
    "series": (
        RNG.normal(size=(24, 5, 2)).astype(np.float32),
        RNG.integers(0, 2, (24, 3)),
        {"task": "multi_label"},
    ),
    "survival": (
        RNG.normal(size=(24, 4)).astype(np.float32),
        np.array([[0, 1, -1], [1, -1, -1], [0, 0, 0]] * 8),
        {"task": "survival"},
    ),
    "tokens": (TOKENS, CLASSES, {"num_tokens": 5}),
    "next_token": (TOKENS[:, :-1], TOKENS[:, 1:], {"task": "next_token", "num_tokens": 5}),
    "numbers of classes": (RNG.normal(size=(24, 4)).astype(np.float32), 10 * CLASSES + 10, {}),
    "images": (RNG.integers(0, 256, (24, 3, 4, 3), np.uint8), CLASSES, {}),
}


def split_rows(values):
    return values[:16], values[16:]


def make_expected(case):
    inputs, labels, settings = CASES[case]
    (x, x_test), (y, y_test) = split_rows(inputs), split_rows(labels)
    return dataset_from_arrays(x, y, x_test, y_test, **settings)


def read_rows(inputs, labels, settings, tmp_path):
    rows = list(zip(inputs, labels, strict=True))
    return dataset_from_object(*split_rows(rows), **settings)


def read_dictionaries(inputs, labels, settings, tmp_path):
    rows = [{"inputs": x, "label": y} for x, y in zip(inputs, labels, strict=True)]
    return dataset_from_object(*split_rows(rows), **settings)


def read_frame(inputs, labels, settings, tmp_path):
    frame = pd.DataFrame({"inputs": list(inputs), "label": list(labels)})
    return dataset_from_object(*split_rows(frame), **settings)


def read_datasets(inputs, labels, settings, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"inputs": inputs.tolist(), "label": labels.tolist()}
    splits = [
        datasets.Dataset.from_dict(dict(zip(rows, part, strict=True)))
        for part in zip(*map(split_rows, rows.values()), strict=True)
    ]
    return dataset_from_object(*splits, **settings)


def read_parquet(inputs, labels, settings, tmp_path):
    frame = pd.DataFrame({"inputs": inputs.tolist(), "label": labels.tolist()})
    for name, part in zip(("train", "test"), split_rows(frame), strict=True):
        part.to_parquet(tmp_path / f"{name}.parquet")
    options = "&".join(f"{name}={value}" for name, value in settings.items())
    name = f"hf:{tmp_path}?{options}"
    dataset = load_dataset(name)
    assert load_dataset(name).digest() == dataset.digest()  # from the cache
    return dataset


def read_npz(inputs, labels, settings, tmp_path):
    (x, x_test), (y, y_test) = split_rows(inputs), split_rows(labels)
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
    np.savez(tmp_path / "data.npz", **arrays)
    options = "&".join(f"{name}={value}" for name, value in settings.items())
    return load_dataset(f"npz:{tmp_path}/data.npz?{options}")


READERS = {
    "npz": read_npz,
    "rows": read_rows,
    "dictionaries": read_dictionaries,
    "frame": read_frame,
    "datasets": read_datasets,
    "hf": read_parquet,
}


@pytest.mark.parametrize("source", READERS)
@pytest.mark.parametrize("case", CASES)
def test_every_source_gives_every_kind(case, source, tmp_path):
    inputs, labels, settings = CASES[case]
    dataset = READERS[source](inputs, labels, settings, tmp_path)
    assert dataset.digest() == make_expected(case).digest()
    assert dataset.task == settings.get("task", "classification")


@pytest.mark.parametrize("source", ["npz", "rows", "dictionaries", "frame"])
def test_gray_images_without_channels(source, tmp_path):
    """Sources that keep the type of pixels; lists of a table have lost it."""
    images = RNG.integers(0, 256, (24, 3, 4), np.uint8)
    dataset = READERS[source](images, CLASSES, {}, tmp_path)
    (x, x_test), (y, y_test) = split_rows(images[..., None]), split_rows(CLASSES)
    assert dataset.digest() == dataset_from_arrays(x, y, x_test, y_test).digest()


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2, 3), (0, 10, 20)])
def test_whole_numbers_as_labels(numbers, tmp_path):
    """Tables and arrays number classes by one rule."""
    (x, x_test), (y, y_test) = split_rows(TABLE[["age"]].to_numpy()), split_rows(CLASSES)
    names = () if numbers == (0, 1, 2) else tuple(map(str, numbers))
    expected = dataset_from_arrays(x, y, x_test, y_test, class_names=names)
    frame = TABLE[["age"]].assign(label=np.take(numbers, CLASSES))
    for source in ("csv", *SOURCES):
        folder = tmp_path / source
        folder.mkdir()
        assert read_table(source, frame, folder).digest() == expected.digest(), source
    (y, y_test) = split_rows(frame["label"].to_numpy())
    dataset = dataset_from_arrays(x, y, x_test, y_test)
    assert (dataset.digest(), dataset.class_names) == (expected.digest(), names)


TABLE = pd.DataFrame(
    {
        "age": RNG.normal(50, 10, 24),
        "smoker": RNG.random(24) < 0.5,
        "sex": RNG.choice(["female", "male"], 24),
        "label": RNG.choice(["healthy", "sick"], 24),
        "client": np.arange(24) % 4,
    }
)


def read_table(source, frame, tmp_path, **options):
    """The same table by csv, parquet, hf and every kind of object."""
    parts = split_rows(frame)
    text = "&".join(f"{name}={value}" for name, value in options.items())
    for name, part in zip(("train", "test"), parts, strict=True):
        if source == "csv":
            part.to_csv(tmp_path / f"{name}.csv", index=False)
        else:
            part.to_parquet(tmp_path / f"{name}.parquet", index=False)
    if source in ("csv", "hf"):
        return load_dataset(f"{source}:{tmp_path}?{text}")
    if source == "parquet":
        return load_dataset(f"csv:{tmp_path}?{text}")
    if source == "frame":
        return dataset_from_object(*parts, **options)
    if source == "datasets":
        datasets = pytest.importorskip("datasets")
        splits = [datasets.Dataset.from_pandas(p, preserve_index=False) for p in parts]
        return dataset_from_object(*splits, **options)
    return dataset_from_object(*(part.to_dict("records") for part in parts), **options)


SOURCES = ("parquet", "hf", "frame", "datasets", "dictionaries")


@pytest.mark.parametrize("source", SOURCES)
def test_tables_of_numbers_and_categories(source, tmp_path):
    (tmp_path / "csv").mkdir()
    expected = read_table("csv", TABLE, tmp_path / "csv")
    dataset = read_table(source, TABLE, tmp_path)
    assert dataset.digest() == expected.digest()
    assert dataset.input_shape == {"numbers": (2,), "category": (1,)}
    assert dataset.class_names == ("healthy", "sick") and dataset.num_users == 4
    spec = RunSpec(model="tabular_mlp", partition="natural", rounds=1, local_epochs=1)
    assert np.isfinite(simulate(spec, dataset=dataset).metrics["test_loss"]).all()


@pytest.mark.parametrize(("text", "is_logged"), [("number {} of many", True), ("id{}", False)])
def test_sentences_as_categories_are_logged(text, is_logged, caplog):
    rows = [{"note": text.format(i), "age": i, "label": i % 2} for i in range(40)]
    dataset_from_object(rows, inputs=("note", "age"), test_fraction=0.25)
    message = "column 'note' has a category for each of 40 texts; the option text=note"
    assert (message in caplog.text) == is_logged


def test_names_of_categories_are_in_results_and_saved_models(tmp_path):
    (tmp_path / "data").mkdir()
    dataset = read_table("csv", TABLE, tmp_path / "data")
    names = {"numbers": ("age", "smoker"), "category": ("sex",)}
    categories = {"category": ("sex=female", "sex=male")}
    assert (dataset.feature_names, dataset.token_names) == (names, categories)
    assert "age, smoker" in dataset._repr_html_()
    settings = {"model": "tabular_mlp", "partition": "iid", "num_clients": 2, "rounds": 1}
    spec = RunSpec(**settings, local_epochs=1)
    result = simulate(spec, dataset=dataset, output_dir=tmp_path)
    stored = Result.load(tmp_path / f"{result.digest()}.json")
    result.save_model(tmp_path / "model.msgpack")
    models = [result.model(), stored.model(), load_model(tmp_path / "model.msgpack")]
    for each in models:
        assert each.input_spec.feature_names == names
        assert each.input_spec.token_names == categories
    numbers = read_table("csv", TABLE[["age", "label"]], tmp_path / "data")
    assert numbers.feature_names == ("age",) and numbers.token_names == ()
    texts = dataset_from_object(
        [(text, i % 3) for i, text in enumerate(TEXTS)], text=0, test_fraction=0.5
    )
    assert texts.token_names[:4] == ("", "?", "!", ",")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"feature_names": ["a"]}, r"len\(feature_names\) = 1: expected 4"),
        ({"feature_names": "abcd"}, "feature_names = 'abcd'"),
        ({"feature_names": [1, 2, 3, 4]}, r"feature_names = \[1, 2, 3, 4\]: expected a list"),
        ({"feature_names": {"x": ["a"]}}, "feature_names = .*: expected a list of names"),
        ({"token_names": ["a"]}, r"len\(token_names\) = 1: expected 0"),
    ],
)
def test_names_of_features_are_checked(names, message):
    inputs, labels, _ = CASES["features"]
    with pytest.raises(ConfigError, match=message):
        dataset_from_arrays(inputs, labels, inputs, labels, **names)


@pytest.mark.parametrize("source", SOURCES)
def test_regression_of_a_table(source, tmp_path):
    frame = TABLE[["age", "smoker"]].assign(label=RNG.normal(size=24))
    (tmp_path / "csv").mkdir()
    expected = read_table("csv", frame, tmp_path / "csv")
    dataset = read_table(source, frame, tmp_path)
    assert dataset.digest() == expected.digest() and dataset.task == "regression"
    chosen = read_table(source, frame, tmp_path, inputs="age")
    np.testing.assert_array_equal(chosen.train_inputs[:, 0], np.float32(frame["age"][:16]))


TEXTS = [f"The cat number {i % 5}, again!" for i in range(24)]


@pytest.mark.parametrize("source", ("csv", *SOURCES))
def test_texts_become_tokens(source, tmp_path):
    frame = pd.DataFrame({"text": TEXTS, "label": CLASSES})
    options = {"length": 6, "num_tokens": 9} | (
        {"text": "text"} if source in ("csv", "parquet") else {}
    )
    dataset = read_table(source, frame, tmp_path, **options)
    (x, x_test), vocabulary = encode_texts([*split_rows(TEXTS)], length=6, max_tokens=9)
    assert dataset.num_tokens == len(vocabulary) == 9
    np.testing.assert_array_equal(dataset.train_inputs, x)
    np.testing.assert_array_equal(dataset.test_inputs, x_test)
    spec = RunSpec(model="fasttext", partition="iid", num_clients=2, rounds=1, local_epochs=1)
    assert np.isfinite(simulate(spec, dataset=dataset).metrics["test_loss"]).all()


@pytest.mark.parametrize("source", ("csv", "hf", "frame"))
def test_next_characters_of_texts_need_no_labels(source, tmp_path):
    frame = pd.DataFrame({"line": TEXTS, "speaker": np.arange(24) % 3})
    options = {"text": "line", "task": "next_token", "unit": "characters", "length": 40}
    dataset = read_table(source, frame, tmp_path, **options, client="speaker")
    (tokens, _), vocabulary = encode_texts([*split_rows(TEXTS)], "characters", 41)
    assert dataset.num_tokens == len(vocabulary) and dataset.num_users == 3
    np.testing.assert_array_equal(dataset.train_inputs, tokens[:, :-1])
    is_known = dataset.train_labels >= 0
    np.testing.assert_array_equal(dataset.train_labels[is_known], tokens[:, 1:][is_known])
    assert is_known.sum() == sum(len(text) - 1 for text in TEXTS[:16])


def test_rows_of_numbers_and_of_arrays_by_name():
    rows = [(20.0 + i, "ab"[i % 2], i % 3) for i in range(12)]
    dataset = dataset_from_object(rows, inputs=[0, 1], label=2, test_fraction=0.5)
    assert dataset.input_shape == {"numbers": (1,), "category": (1,)}
    mixed = [({"x": np.ones(3) * i, "ids": TOKENS[i]}, i % 3) for i in range(12)]
    dataset = dataset_from_object(mixed, test_fraction=0.5, num_tokens={"ids": 5})
    assert dataset.input_shape == {"x": (3,), "ids": (7,)}
    texts = [(text, i % 3) for i, text in enumerate(TEXTS)]
    assert dataset_from_object(texts, text=0, test_fraction=0.5).num_tokens == 13


def test_unused_columns_beside_a_text_are_reported(caplog):
    rows = [{"text": text, "label": i % 3, "idx": i} for i, text in enumerate(TEXTS)]
    dataset_from_object(rows, test_fraction=0.5)
    assert "note: column 'text' is the input; not used: idx" in caplog.text


ROWS = [(np.ones(3), i % 2) for i in range(6)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {"image": 0, "inputs": 1}, "image, inputs: expected one of them"),
        (ROWS, {"inputs": 5}, r"inputs = 5: no such column \(columns: 0, 1\)"),
        (ROWS, {"task": "regresion"}, "did you mean 'regression'"),
        (ROWS, {"length": 5}, "length = 5: expected no value, as there is no text"),
        (ROWS, {"text": 0}, "column 0 has no text in row 0 of split 'train'"),
        ([{"a": 1.0, "label": 0}] * 6, {"num_tokens": 5}, "num_tokens = 5: expected no value"),
        ([{"a": "x", "label": "y"}] * 6, {"task": "regression"}, "column 'label' has texts"),
        ([{"a": 1.0, "label": None}] * 6, {}, "column 'label' of labels has missing values"),
        ([{"label": 1}] * 6, {}, "no column besides labels"),
        ([({"x": [1.0]}, 0), ({"y": [1.0]}, 0)], {}, "other names in row 1"),
        ([([1.0], 0), ([1.0, 2.0], 0)], {}, r"column 0 of split 'train': .*shapes \(1,\) and"),
    ],
)
def test_unsuitable_columns(rows, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataset_from_object(rows, rows, **options)
    assert "\n" not in str(error.value)
