"""Natural users: who holds which example, clients' tests, digests, folders, and invalid users."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from fedjax_het import (
    ConfigError,
    RunSpec,
    dataset_from_arrays,
    grid,
    load_dataset,
    load_image_folder,
    make_partition,
    simulate,
    sweep,
)
from fedjax_het.data import DATASETS, make_client_tests
from fedjax_het.data.dataset import validate_dataset
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.skews import PowerLaw
from fedjax_het.skews.assignment import select_examples

RNG = np.random.default_rng(0)
NAMES = np.array(["ann", "bob", "cyd", "dan", "eve"])
TRAIN_USERS, TEST_USERS = NAMES[RNG.integers(0, 5, 200)], NAMES[RNG.integers(0, 4, 60)]
IMAGES = RNG.integers(0, 256, (200, 4, 4, 1), np.uint8)
LABELS = RNG.integers(0, 3, 200)
SETTINGS = {"model": "mlp", "rounds": 2, "learning_rate": 0.1, "partition": "natural"}


def make_dataset(train_users=TRAIN_USERS, test_users=TEST_USERS):
    arrays = (IMAGES, LABELS, IMAGES[:60], LABELS[:60])
    return dataset_from_arrays(
        *arrays, num_classes=3, train_users=train_users, test_users=test_users
    )


def divide(num_clients=5, users=TRAIN_USERS, seed=0):
    return make_partition("natural", LABELS, 3, num_clients=num_clients, seed=seed, users=users)


def test_each_client_holds_the_examples_of_its_user():
    partition = divide()
    assert partition.client_names == tuple(NAMES)
    for k, name in enumerate(NAMES):
        np.testing.assert_array_equal(
            partition.client_indices(k), np.flatnonzero(name == TRAIN_USERS)
        )
    assert partition.digest() == divide(seed=7).digest()
    numbers = divide(users=np.searchsorted(NAMES, TRAIN_USERS) + 10)
    assert numbers.digest() == partition.digest() and numbers.client_names[0] == "10"


@pytest.mark.parametrize("name", ["speakers", "cylinder_bell_funnel", "digits_by_writer"])
def test_settings_name_the_number_of_users(name):
    assert load_dataset(name).num_users == DATASETS[name].num_users
    settings = {"partition": "natural", "held_out_clients": 2}
    spec = RunSpec(dataset=name, **settings)
    assert spec.resolved().num_clients == DATASETS[name].num_users - 2
    assert UserObjects().resolve(spec).digest() == spec.digest()
    assert (
        dataclasses.replace(spec, num_clients=spec.resolved().num_clients).digest() == spec.digest()
    )
    assert RunSpec(dataset=name, partition="iid").resolved().num_clients == 10
    assert dataclasses.replace(spec, num_clients=3).resolved().num_clients == 3


@pytest.mark.slow
def test_digest_of_a_run_is_the_digest_of_its_settings():
    spec = RunSpec("fedprox", "cylinder_bell_funnel", rounds=1, local_epochs=1, client_tests=True)
    result = simulate(spec)
    assert result.spec.digest() == spec.digest() and result.spec.num_clients == 20


def test_fewer_clients_are_a_uniform_sample_of_users():
    counts = dict.fromkeys(NAMES, 0)
    for seed in range(300):
        partition = divide(2, seed=seed)
        for k, name in enumerate(partition.client_names):
            counts[name] += 1
            assert set(TRAIN_USERS[partition.client_indices(k)]) == {name}
    np.testing.assert_allclose(list(counts.values()), 120, atol=30)
    assert divide(2, seed=3).digest() == divide(2, seed=3).digest()


def test_clients_are_tested_on_the_test_examples_of_their_user():
    tests = make_client_tests(divide(), make_dataset(), seed=0)
    for k, name in enumerate(NAMES):
        np.testing.assert_array_equal(tests.client_indices(k), np.flatnonzero(name == TEST_USERS))
    assert tests.sizes[4] == 0
    assert make_client_tests(divide(), make_dataset(), 0, "all").sizes.tolist() == [60] * 5
    by_class = make_client_tests(divide(), make_dataset(test_users=None), seed=0, per_client=6)
    assert by_class.sizes.tolist() == [6] * 5


def test_digest_contains_the_users():
    digests = [
        make_dataset().digest(),
        make_dataset(test_users=None).digest(),
        make_dataset(None, None).digest(),
        make_dataset(np.roll(TRAIN_USERS, 1)).digest(),
    ]
    assert len(set(digests)) == 4
    for users in (TRAIN_USERS.astype("U9"), TRAIN_USERS.astype(object), TRAIN_USERS.tolist()):
        assert make_dataset(users).digest() == digests[0]
    by_hand = dataclasses.replace(make_dataset(), name="other")
    assert validate_dataset(by_hand).digest() == digests[0]


@pytest.mark.slow
def test_number_of_clients_is_the_number_of_users():
    dataset = make_dataset()
    result = simulate(RunSpec(**SETTINGS, client_tests=True), dataset=dataset)
    assert result.spec.num_clients == 5 and result.partition.client_names == tuple(NAMES)
    assert np.isfinite(result.metrics["client_accuracy_ann"]).all()
    explicit = RunSpec(**SETTINGS, num_clients=5, client_tests=True)
    np.testing.assert_array_equal(
        simulate(explicit, dataset=dataset).metrics["train_loss"], result.metrics["train_loss"]
    )
    held_out = simulate(RunSpec(**SETTINGS, held_out_clients=2), dataset=dataset)
    assert held_out.spec.num_clients == 3
    skew = {"noise.std": [0.0, 0.5]}
    specs = grid(**{**SETTINGS, "partition": None, "rounds": 1}, skew={"natural": True, **skew})
    results = sweep(specs, dataset=dataset, progress=None).results
    assert [run.spec.num_clients for run in results] == [5, 5]
    assert results[0].metrics["train_loss"] != results[1].metrics["train_loss"]


def test_size_skews_keep_the_users():
    partition = divide()
    selected = select_examples([PowerLaw(exponent=1.0)], partition, LABELS, 3, seed=0)
    shares = selected.sizes / partition.sizes
    np.testing.assert_allclose(np.sort(shares)[::-1], 1 / np.arange(1, 6), atol=0.02)
    for k in range(5):
        assert np.isin(selected.client_indices(k), partition.client_indices(k)).all()


def test_folders_of_users(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_HET_CACHE", str(tmp_path / "cache"))
    users = {"train": [], "test": []}
    for split, expected in users.items():
        for label, name in enumerate(("cat", "dog")):
            for user in ("bob", "ann") if split == "train" else ("bob",):
                folder = tmp_path / "set" / split / name / user
                folder.mkdir(parents=True)
                for i in range(label + 1):
                    Image.new("L", (4, 4), color=len(expected)).save(folder / f"{i}.png")
                    expected.append(user)
    for _ in range(2):  # the second time from the cache
        dataset = load_image_folder(tmp_path / "set", color=False, has_user_folders=True)
        assert dataset.train_users.tolist() == ["ann", "bob", "ann", "ann", "bob", "bob"]
        assert dataset.test_users.tolist() == ["bob"] * 3
        assert dataset.train_labels.tolist() == [0, 0, 1, 1, 1, 1]
        assert dataset.train_inputs[:, 0, 0, 0].tolist() == [1, 0, 4, 5, 2, 3]


def test_every_writer_has_examples():
    dataset = load_dataset("digits_by_writer")
    for users in (dataset.train_users, dataset.test_users):
        names, counts = np.unique(users, return_counts=True)
        assert len(names) == 30 and counts.min() >= 2
    partition = make_partition(
        "natural", dataset.train_labels, 10, num_clients=30, seed=0, users=dataset.train_users
    )
    assert partition.summarize(dataset.train_labels, 10).label_hellinger < 0.2
    assert dataset.digest() == load_dataset("digits_by_writer").digest()
    digits = load_dataset("digits")
    assert not np.array_equal(digits.train_inputs, dataset.train_inputs)
    np.testing.assert_array_equal(digits.train_labels, dataset.train_labels)


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ((TRAIN_USERS[:4], None), r"len\(train_users\) = 4: expected 200, one user for each"),
        ((None, TEST_USERS), "train_users = None: expected users, as test_users is set"),
        ((TRAIN_USERS, np.arange(60)), r"dtype of test_users = 'int64': expected texts as train"),
        ((np.ones(200), None), r"train_users = .float64 .*: expected integers or texts"),
        (([*TRAIN_USERS[1:], ""], None), "train_users = '': expected a text of at least one"),
        ((np.ones((200, 2), int), None), "train_users = .*: expected integers or texts"),
    ],
)
def test_invalid_users_are_one_line(users, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make_dataset(*users)
    assert "\n" not in str(raised.value)


def test_data_set_without_users_is_one_line():
    message = "partition = 'natural': expected a data set with users, see train_users"
    for spec in (RunSpec(model="mlp", skew="natural"), RunSpec(**SETTINGS, num_clients=3)):
        with pytest.raises(ConfigError, match=message):
            simulate(spec)
    with pytest.raises(ConfigError, match="num_clients = 6: expected at most 5, the number of use"):
        simulate(RunSpec(**SETTINGS, num_clients=6), dataset=make_dataset())
