"""A user's data sets and partitions: validation, and digests that tell them from named ones."""

import dataclasses
import functools
import logging

import numpy as np
import pytest
from support.data import make_blobs, make_user_dataset
from support.small_runs import KilledError, make_killing_callback

from fedjax_het import ConfigError, RunSpec, load_dataset, register_dataset, simulate, sweep
from fedjax_het.data import (
    DATASETS,
    Dataset,
    dataset_from_arrays,
    make_partition,
    partition_from_clients,
)
from fedjax_het.runtime import checkpointing
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects, collect_user_digests
from fedjax_het.runtime.result_store import load_results, select_newest
from fedjax_het.runtime.sweep import plan_sweep

SMALL = {"partition": "iid", "model": "mlp", "num_clients": 6, "participation": 1.0, "rounds": 2}
SPEC = RunSpec("fedavg", "named", **SMALL)


@pytest.fixture(autouse=True)
def named():
    register_dataset("named", make_user_dataset)  # a set with a name, that tests need not wait for
    yield
    DATASETS.reset()


def part_of(data, count=40):
    kept = {"train_images": data.train_images[:count], "train_labels": data.train_labels[:count]}
    return dataclasses.replace(data, **kept)


quiet = functools.partial(sweep, progress=None)


# --- names


def test_loaded_dataset_is_the_named_one():
    data = load_dataset("named")
    by_name, given = simulate(SPEC), simulate(SPEC, dataset=data)
    assert given.digest() == by_name.digest()
    assert "own_dataset" not in given.summary and "own_partition" not in given.summary


MADE_OF_IT = {
    "a part": part_of,
    "other constants": lambda data: dataclasses.replace(data, std=(2.0,)),
    "an equal copy": dataclasses.replace,
    "images of its name": lambda data: make_user_dataset((9,) * 6, name="named"),
    "another set": lambda data: load_dataset("digits"),
}


@pytest.mark.parametrize("how", MADE_OF_IT)
def test_changed_dataset_has_its_own_digest(how):
    spec, data = SPEC.resolved(), MADE_OF_IT[how](load_dataset("named"))
    assert collect_user_digests(spec, data) == {"own_dataset": data.digest()}
    assert collect_user_digests(spec, load_dataset("named")) == {}


def test_equal_normalization_has_one_digest():
    data = load_dataset("digits")
    same, other = (
        RunSpec("fedavg", "digits", normalization=name).resolved() for name in ("dataset", "unit")
    )
    assert collect_user_digests(same, data) == {}
    assert collect_user_digests(other, data) == {"own_dataset": data.digest()}
    assert collect_user_digests(other, load_dataset("digits", normalization="unit")) == {}


def test_sweep_tells_own_data_from_named_data(tmp_path):
    own = part_of(load_dataset("named"))
    mine = simulate(SPEC, dataset=own, output_dir=tmp_path)
    assert mine.summary["own_dataset"] == own.digest()
    states = [[s for *_, s in plan_sweep([SPEC], tmp_path, dataset=d)] for d in (None, own)]
    assert states == [["missing"], ["done"]]
    (named,) = quiet([SPEC], tmp_path).results
    assert named.digest() == simulate(SPEC).digest() != mine.digest()
    assert named.summary["dataset_digest"] == load_dataset("named").digest()
    (again,) = quiet([SPEC], tmp_path, dataset=own).results
    assert again.digest() == mine.digest()

    results = load_results(tmp_path)
    short = own.digest()[:8]
    assert sorted(results["dataset"]) == ["named", f"named (own {short})"]
    assert len(select_newest(results)) == 2 and sum(results["settings"] == SPEC.digest()) == 1


def test_sweep_uses_own_data_for_user_specs():
    both = [SPEC, dataclasses.replace(SPEC, dataset="user")]
    own = part_of(load_dataset("named"))
    made = quiet(both, dataset=own).results
    found = [result.summary["dataset_digest"] for result in made]
    assert found == [load_dataset("named").digest(), own.digest()]
    assert not any("own_dataset" in result.summary for result in made)


def test_own_partition_is_part_of_the_digest(tmp_path):
    data = load_dataset("named")
    same, other = (
        make_partition("iid", data.train_labels, 3, num_clients=6, seed=seed) for seed in (0, 1)
    )
    plain = simulate(SPEC)
    assert simulate(SPEC, partition=same).digest() == plain.digest()
    own = simulate(SPEC, partition=other, output_dir=tmp_path)
    assert own.summary["own_partition"] == other.digest() and own.digest() != plain.digest()
    plain.save(tmp_path)
    results = load_results(tmp_path)
    assert sorted(results["partition"]) == ["iid", f"iid (own {other.digest()[:8]})"]
    assert len(select_newest(results)) == 2
    by_hand = partition_from_clients([same.client_indices(k) for k in range(6)])  # tests go by how
    assert collect_user_digests(SPEC.resolved(), data, by_hand) == {"own_partition": same.digest()}


def test_resume_rejects_other_data_and_partitions(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0)
    spec = dataclasses.replace(SPEC, rounds=40)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    data = load_dataset("named")
    other = make_partition("iid", data.train_labels, 3, num_clients=6, seed=1)
    for given, what in (({"dataset": part_of(data)}, "dataset"), ({"partition": other}, "part")):
        with pytest.raises(ConfigError, match=f"expected a checkpoint of this {what}"):
            simulate(spec, output_dir=tmp_path, resume=True, **given)


# --- what does not fit


BAD_PARTITIONS = {
    "a generator": (lambda: (k for k in ([0], [1])), "partition = a generator: expected a Part"),
    "a list": (lambda: [[0], [1]], "partition = .*: .*partition_from_clients"),
    "a name": (lambda: "iid", "partition = 'iid'"),
    "too few clients": (lambda: partition_from_clients([[0], [1]]), "num_clients = 6: .*=2"),
    "positions of more": (
        lambda: partition_from_clients([[0, 51]] + [[1]] * 5),
        r"position 51 is none of the 51 training examples of named: .*\[0, 51\)",
    ),
    "an example twice": (
        lambda: partition_from_clients([[0], [3, 3], [4], [], [], []]),
        "client 1 holds example 3 2 times",
    ),
    "nothing": (lambda: partition_from_clients([[]] * 6), "partition = 'no examples'"),
}


@pytest.mark.parametrize("case", BAD_PARTITIONS)
def test_invalid_partitions_are_rejected(case):
    make, message = BAD_PARTITIONS[case]
    with pytest.raises(ConfigError, match=message) as error:
        simulate(SPEC, partition=make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["mnist", (1, 2), {"train_images": 0}, 3])
def test_objects_of_other_types_are_rejected(given, tmp_path):
    for run, *args in ((simulate, SPEC), (quiet, [SPEC]), (plan_sweep, [SPEC], tmp_path)):
        with pytest.raises(ConfigError, match=r"^dataset = .*: expected a Data"):
            run(*args, dataset=given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": (0.0,)}, r"std\[0\] = 0.0: expected a number in \[1e-06"),
        ({"train_labels": np.zeros(3, int)}, r"len\(train_labels\) = 3"),
        ({"train_images": np.full((51, 2, 2, 1), np.nan)}, "train_images.* = nan"),
        ({"test_labels": [], "test_images": []}, "shape of test_images"),
    ],
)
def test_invalid_datasets_are_rejected(change, message):
    with pytest.raises(ConfigError, match=message):
        simulate(SPEC, dataset=dataclasses.replace(load_dataset("named"), **change))


def test_dataset_record_equals_dataset_from_arrays(tmp_path):
    data = make_user_dataset()
    fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init}
    by_hand = Dataset(**fields | {"train_labels": data.train_labels.tolist()})
    spec = dataclasses.replace(SPEC, dataset="user")
    one, other = (simulate(spec, dataset=each) for each in (data, by_hand))
    assert one.digest() == other.digest()


# --- what a method needs of the network


@pytest.mark.parametrize(("network", "said"), [("mlp", True), ("convnet", False)])
def test_fedbn_warns_of_missing_norm_layers(network, said, caplog):
    images, labels = make_blobs()
    images = np.repeat(np.repeat(images, 4, 1), 4, 2)
    data = dataset_from_arrays(images, labels, images, labels)
    more = {"width": 2, "depth": 1} if network == "convnet" else {}
    settings = SMALL | {"model": network} | more
    with caplog.at_level(logging.WARNING, "fedjax_het"):
        prepare_group([RunSpec("fedbn", "user", **settings)], UserObjects(data))
    assert ("network 'mlp' has none" in caplog.text) == said
