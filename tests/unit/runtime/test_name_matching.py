"""Evaluation of a model on a data set whose classes, features or tokens have another order."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het import RunSpec, dataset_from_arrays, dataset_from_object, evaluate, simulate
from fedjax_het.utils.errors import ConfigError

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": RNG.normal(50, 10, 40),
        "size": RNG.normal(0, 1, 40),
        "sex": ["f", "m"] * 20,
        "label": ["high", "low", "low", "mid"] * 10,
    }
)


def make_dataset(frame):
    return dataset_from_object(frame, frame)


@pytest.fixture(scope="module")
def model():
    settings = {"partition": "iid", "num_clients": 2, "rounds": 1, "local_epochs": 1}
    spec = RunSpec(model="tabular_mlp", **settings)
    return simulate(spec, dataset=make_dataset(FRAME)).model()


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[["label", "sex", "size", "age"]],
        lambda frame: frame[frame["label"] != "high"],
        lambda frame: frame[frame["sex"] == "m"],
    ],
    ids=["order", "classes", "categories"],
)
def test_names_in_another_order_are_matched(model, change):
    frame = change(FRAME)
    inputs, labels = make_dataset(FRAME).test_inputs, make_dataset(FRAME).test_labels
    rows = frame.index.to_numpy()
    expected = model.evaluate({name: array[rows] for name, array in inputs.items()}, labels[rows])
    actual = evaluate(model, make_dataset(frame))
    assert actual.accuracy == expected.accuracy
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)
    np.testing.assert_array_equal(actual.confusion, expected.confusion)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (FRAME.replace("high", "huge"), "class_names of dataset: huge: expected the model's names"),
        (FRAME.replace("f", "z"), r"token_names\['category'\] of dataset: sex=z: expected"),
        (
            FRAME.rename(columns={"age": "year"}),
            r"feature_names\['numbers'\] of dataset = .*'year'",
        ),
    ],
    ids=["class", "category", "feature"],
)
def test_unknown_names(model, frame, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(model, make_dataset(frame))


def test_words_of_another_vocabulary():
    texts = [("to be or", 0), ("not to be", 1)] * 6
    spec = RunSpec(
        model="fasttext", partition="iid", num_clients=2, rounds=1, batch_size=4, local_epochs=1
    )
    dataset = dataset_from_object(texts, texts, length=4)
    model = simulate(spec, dataset=dataset).model()
    others = [("be not new", 0), ("or", 1)] * 6
    evaluation = evaluate(model, dataset_from_object(others, others, length=4))
    numbers = {word: number for number, word in enumerate(dataset.token_names)}
    rows = [["be", "not", "?", ""], ["or", "", "", ""]] * 6
    tokens = np.array([[numbers[word] for word in row] for row in rows])
    expected = model.evaluate(tokens, np.array([0, 1] * 6))
    assert evaluation.loss == expected.loss


def test_classes_without_names_are_compared_by_number():
    images = RNG.integers(0, 256, (12, 4, 4, 1), np.uint8)
    two, three = (
        dataset_from_arrays(images, np.arange(12) % n, images, np.arange(12) % n) for n in (2, 3)
    )
    spec = RunSpec(model="mlp", partition="iid", num_clients=2, rounds=1, local_epochs=1)
    model = simulate(spec, dataset=two).model()
    with pytest.raises(ConfigError, match="num_classes of dataset = 3: expected 2"):
        evaluate(model, three)
