"""Division of one split into training and test: by user, by class, or of all examples."""

import numpy as np
import pytest

from fedjax_het import ConfigError
from fedjax_het.data.sources.splits import divide_examples


def divide(labels, fraction=0.25, task=None, **arrays):
    inputs = np.arange(len(labels))
    divided = divide_examples({"inputs": inputs, "labels": labels, **arrays}, fraction, task)
    together = np.concatenate([divided["train_inputs"], divided["test_inputs"]])
    assert sorted(together.tolist()) == inputs.tolist()
    np.testing.assert_array_equal(divided["test_labels"], labels[divided["test_inputs"]])
    return divided


def test_classes_are_divided_alike():
    labels = np.repeat([0, 1, 2], [40, 20, 4])
    divided = divide(labels)
    assert np.bincount(divided["test_labels"]).tolist() == [10, 5, 1]


def test_users_are_divided_alike():
    users = np.repeat([5, 9], [40, 8])
    divided = divide(np.arange(48) % 7, users=users)
    assert np.unique(divided["test_users"], return_counts=True)[1].tolist() == [10, 2]


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (np.arange(60), "regression"),
        (np.arange(60) // 3, "regression"),
        (np.arange(180).reshape(60, 3), "next_token"),
        (np.arange(120).reshape(60, 2) % 2, "multi_label"),
        (np.linspace(0, 1, 60), None),
        (np.arange(120).reshape(60, 2), None),
    ],
)
def test_labels_without_classes_are_divided_as_a_whole(labels, task):
    divided = divide(labels, 0.2, task)
    assert len(divided["test_inputs"]) == 12
    assert np.ptp(divided["test_inputs"]) > 12  # a draw, not a block


def test_a_split_without_examples_is_refused():
    with pytest.raises(ConfigError, match=r"test_fraction = 0\.01 leaves no test example"):
        divide(np.zeros(10, int), 0.01)
