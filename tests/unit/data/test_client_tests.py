"""Local tests: the mixture of a client's training data, drawn from the test split."""

import logging

import numpy as np
import pytest
from support.partitions import group_arguments, required_parameters, shuffled_labels

from fedjax_het.data import (
    DATASETS,
    PARTITIONS,
    Partition,
    compute_client_mixtures,
    dataset_from_arrays,
    draw_local_tests,
    load_dataset,
    make_client_tests,
    make_full_tests,
    make_partition,
    make_proportional_tests,
    partition_from_clients,
)
from fedjax_het.utils.errors import ConfigError

TRAIN, TEST = shuffled_labels([500] * 10), shuffled_labels([400] * 10, seed=1)


def split(scheme, num_clients=20, labels=TRAIN, num_classes=10, **settings):
    settings = required_parameters(scheme, alpha=0.5, classes_per_client=3) | settings
    settings = group_arguments(scheme, len(labels), num_clients) | settings
    return make_partition(scheme, labels, num_classes, num_clients=num_clients, seed=0, **settings)


def by_hand(scheme):
    return partition_from_clients([[0], [1]], scheme=scheme)


def make_tests(partition, seed=0, train=TRAIN, test=TEST, num_classes=10, **settings):
    return draw_local_tests(partition, train, test, num_classes, seed=seed, **settings)


@pytest.mark.parametrize("scheme", [n for n, s in PARTITIONS.items() if not s.clients_are_domains])
def test_local_tests_match_mixtures(scheme):
    partition = split(scheme)
    tests = make_tests(partition, per_client=60)
    np.testing.assert_array_equal(tests.sizes, 60)
    expected = 60 * compute_client_mixtures(partition, TRAIN, 10)
    np.testing.assert_allclose(expected.sum(1), 60)
    if PARTITIONS[scheme].mixtures is None:
        held = partition.label_counts(TRAIN, 10)
        np.testing.assert_allclose(expected, 60 * held / partition.sizes[:, None])
    assert np.abs(tests.label_counts(TEST, 10) - expected).max() < 1
    for k in range(20):
        assert len(np.unique(tests.client_indices(k))) == 60


def test_iid_local_tests_have_global_mixture():
    labels = shuffled_labels([100, 300, 600])
    test_labels = shuffled_labels([500] * 3)
    partition = split("iid", 10, labels, 3)
    counts = partition.label_counts(labels, 3)
    assert counts.std(0).min() > 0  # what was drawn differs, what is tested does not
    tests = make_tests(partition, train=labels, test=test_labels, num_classes=3, per_client=50)
    np.testing.assert_array_equal(tests.label_counts(test_labels, 3), [[5, 15, 30]] * 10)


def test_pathological_local_tests():
    partition = split("pathological")
    counts = make_tests(partition).label_counts(TEST, 10)
    np.testing.assert_array_equal(counts, 50 * (partition.label_counts(TRAIN, 10) > 0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_emnist_local_tests(seed):
    names = tuple(DATASETS["emnist_byclass"].published.class_names)
    train = shuffled_labels([3800] * 10 + [1200] * 26 + [500] * 26)
    test = shuffled_labels([600] * 10 + [200] * 26 + [150] * 26)
    partition = split("grouped", 62, train, 62, class_names=names)
    tests = make_tests(partition, seed, train, test, 62)
    counts = tests.label_counts(test, 62)
    np.testing.assert_array_equal(tests.sizes, 100)
    for low, high in ((0, 10), (10, 36), (36, 62)):
        np.testing.assert_array_equal(counts[low:high, low:high].sum(1), 80)
        dominating = counts[low:high, low:high]
        rest = np.delete(counts[low:high], range(low, high), axis=1)
        assert dominating.max() - dominating.min() <= 1 and rest.max() <= 1
    assert len(np.unique(tests.indices)) == 6200  # no two clients share one


def test_local_tests_exclude_training_examples():
    digits = load_dataset("digits")
    partition = split("grouped", 10, digits.train_labels)
    tests = make_tests(partition, train=digits.train_labels, test=digits.test_labels, per_client=30)
    trained = {image.tobytes() for image in digits.train_inputs[partition.indices]}
    tested = {image.tobytes() for image in digits.test_inputs[tests.indices]}
    assert len(tested) == len(np.unique(tests.indices)) and not trained & tested


def test_local_tests_share_scarce_examples(caplog):
    partition = partition_from_clients([[0, 1], [2, 3], [4, 5]])
    train, test = np.array([0, 1] * 3), np.array([0] * 10 + [1] * 40)
    with caplog.at_level(logging.WARNING):
        tests = make_tests(partition, train=train, test=test, num_classes=2, per_client=6)
        assert not caplog.records and len(np.unique(tests.indices)) == 18
        tests = make_tests(partition, train=train, test=test, num_classes=2, per_client=16)
    assert "48 examples are drawn from 50 test examples" in caplog.text
    assert "class 0 is in the tests of up to 3 clients" in caplog.text
    uses = np.bincount(tests.indices, minlength=50)
    # 24 are asked of ten examples: each is in two or three tests. Of the others, none is in two.
    assert set(uses[:10]) == {2, 3} and uses[:10].sum() == 24 and uses[10:].max() == 1
    for k in range(3):
        assert len(np.unique(tests.client_indices(k))) == 16


def test_local_tests_default_size():
    assert make_tests(split("grouped")).parameters["per_client"] == 100
    digits = load_dataset("digits")
    partition = split("pathological", 10, digits.train_labels)
    tests = make_tests(partition, train=digits.train_labels, test=digits.test_labels)
    smallest = int(np.bincount(digits.test_labels).min())  # half of a test is one class
    assert set(tests.sizes) == {2 * smallest}
    message = rf"per_client = {2 * smallest + 1}: expected at most {2 * smallest}: 50% of client"
    labels = {"train": digits.train_labels, "test": digits.test_labels}
    with pytest.raises(ConfigError, match=message):
        make_tests(partition, **labels, per_client=2 * smallest + 1)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 14, 15])
def test_local_tests_with_rare_class(count, caplog):
    """Class 2 has few test examples: clients 0 and 1 hold half and all of it."""
    train = np.repeat(np.arange(3), [60, 40, 60])
    test = np.repeat(np.arange(3), [50, 100, count])
    partition = partition_from_clients([[*range(20), *range(100, 120)], range(120, 160), range(60)])
    with caplog.at_level(logging.WARNING):
        tests = make_tests(partition, train=train, test=test, num_classes=3)
    counts = tests.label_counts(test, 3)
    if count >= 10:  # a test of this size is not too small, and common to all clients
        assert tests.sizes.tolist() == [count] * 3
        assert f"clients' tests have {count} examples each: 100% of client 1" in caplog.text
    elif count >= 5:  # enough for a test of 10 of client 0
        assert counts.tolist() == [[5, 0, 5], [0, 0, 5], [10, 0, 0]]
    else:
        assert counts.tolist() == [[50, 0, 0], [0, 0, count], [50, 0, 0]]
        assert "the tests of 1 clients leave out classes" in caplog.text or count == 0
        assert f"by class: {{2: {count}}}" in caplog.text
        assert "1 clients have smaller tests" in caplog.text
        assert f"class 2, which has {count} test examples" in caplog.text


def test_local_tests_leave_out_rare_classes_in_turn():
    """Without the absent class 2, the proportion of class 0 rises from 0.4 to 0.8."""
    partition, train = partition_from_clients([range(10)]), np.repeat(np.arange(3), [4, 1, 5])
    for count, expected in ((8, [8, 2, 0]), (7, [0, 50, 0])):
        test = np.repeat([0, 1], [count, 50])
        tests = make_tests(partition, train=train, test=test, num_classes=3)
        assert tests.label_counts(test, 3).tolist() == [expected]


def test_local_tests_require_a_class_of_the_clients():
    partition, labels = partition_from_clients([[0], [1]]), {"train": [0, 0], "test": [1] * 9}
    labels = {split: np.array(values) for split, values in labels.items()}
    with pytest.raises(ConfigError, match=r"test_labels: .* class 0, which has 0 test examples"):
        make_tests(partition, **labels, num_classes=2)


def test_empty_client_has_no_test():
    partition = partition_from_clients([[0, 1, 2], [], [3]])
    tests = make_tests(partition, per_client=10)
    assert tests.sizes.tolist() == [10, 0, 10]
    assert make_tests(partition_from_clients([[], []])).sizes.tolist() == [0, 0]


def test_full_tests():
    tests = make_full_tests(partition_from_clients([[0, 1, 2], [], [3]]), 5)
    everything = list(range(5))
    assert [list(tests.client_indices(k)) for k in range(3)] == [everything, [], everything]


@pytest.mark.parametrize("scheme", ["dirichlet", "pathological_unequal"])
def test_proportional_tests_divide_test_split(scheme):
    partition = split(scheme)
    tests = make_proportional_tests(partition, TRAIN, TEST, 10, seed=1)
    assert sorted(tests.indices) == list(range(len(TEST)))
    held, tested = partition.label_counts(TRAIN, 10), tests.label_counts(TEST, 10)
    expected = held * np.bincount(TEST) / np.bincount(TRAIN)
    assert np.abs(tested - expected).max() < 1
    images = [np.zeros((len(labels), 2, 2, 1), np.uint8) for labels in (TRAIN, TEST)]
    dataset = dataset_from_arrays(images[0], TRAIN, images[1], TEST)
    assert make_client_tests(partition, dataset, 1, "proportional").digest() == tests.digest()
    other = make_proportional_tests(partition, TRAIN, TEST, 10, seed=2)
    assert other.digest() != tests.digest()
    np.testing.assert_array_equal(other.label_counts(TEST, 10), tested)


def test_proportional_tests_leave_out_classes_of_nobody():
    partition = partition_from_clients([[0, 1], [], [2, 4]])
    train, test = np.array([0, 0, 1, 2, 1]), np.array([0, 1, 2, 2, 0, 0, 1])
    tests = make_proportional_tests(partition, train, test, 3, seed=0)
    assert [tests.client_indices(k).tolist() for k in range(3)] == [[0, 4, 5], [], [1, 6]]
    with pytest.raises(ConfigError, match="expected an example of a class that a client holds"):
        make_proportional_tests(partition, train, np.array([2, 2]), 3, seed=0)


def test_local_tests_follow_seed_and_load(tmp_path):
    partition = split("grouped")
    tests = make_tests(partition, seed=3)
    assert tests.digest() == make_tests(partition, seed=3).digest()
    assert tests.digest() != make_tests(partition, seed=4).digest()
    loaded = Partition.load(tests.save(tmp_path / "tests.npz"))
    assert loaded.digest() == tests.digest()
    assert loaded.parameters == {"per_client": 100, "of": partition.digest()}
    assert (loaded.scheme, loaded.seed) == ("local_tests", 3)
    assert "20 clients hold 2,000 examples: 100 to 100 each" in str(loaded.summarize(TEST, 10))
    # A partition read from its file has the same tests.
    again = Partition.load(partition.save(tmp_path / "split.npz"))
    assert make_tests(again, seed=3).digest() == tests.digest()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_client": 0}, "per_client = 0"),
        ({"per_client": 2.5}, "per_client = 2.5"),
        ({"seed": -1}, "seed = -1"),
        ({"test": np.array([0, 11])}, r"test_labels\[1\] = 11"),
        ({"train": TRAIN[:100]}, "another data set"),
        (
            {"test": TEST[TEST != 4], "per_client": 20},
            "per_client = 20: expected None: .*class 4, which has 0 test examples",
        ),
        ({"partition": by_hand("grouped")}, "partition.parameters = {}"),
        ({"partition": by_hand("by_domain")}, "'by_domain': expected a scheme by class"),
    ],
)
def test_local_tests_reject_invalid_arguments(arguments, message):
    partition = arguments.pop("partition", None) or split("iid")
    with pytest.raises(ConfigError, match=message) as error:
        make_tests(partition, **arguments)
    assert "\n" not in str(error.value)
