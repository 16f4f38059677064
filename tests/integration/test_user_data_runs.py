"""A user's data sets, partitions and server sources, passed to runs or registered by name."""

import dataclasses
import functools
import logging

import numpy as np
import pytest
from support.data import make_blobs, make_user_dataset
from support.small_runs import KilledError, make_killing_callback

from fedjax_het import (
    ConfigError,
    RunSpec,
    grid,
    load_dataset,
    make_partition,
    register_dataset,
    register_partition,
    register_server_source,
    simulate,
    sweep,
)
from fedjax_het import data as data_sets
from fedjax_het.cli import main
from fedjax_het.data import (
    DATASETS,
    PARTITIONS,
    SERVER_SOURCES,
    Dataset,
    Partition,
    compute_client_mixtures,
    dataset_from_arrays,
    draw_withheld_examples,
    find_parameter_name,
    make_server_data,
    make_server_pool,
    partition_from_clients,
    resolve_server_options,
)
from fedjax_het.data.prepare import prepare_dataset
from fedjax_het.runtime import checkpointing
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects, build_partition, collect_user_digests
from fedjax_het.runtime.result_store import load_results, select_newest
from fedjax_het.runtime.sweep import plan_sweep
from fedjax_het.utils.io import write_npz
from fedjax_het.utils.registry import REQUIRED

SMALL = {"model": "mlp", "num_clients": 3, "rounds": 2, "participation": 1.0}
SETTINGS = {**SMALL, "partition": "iid", "num_clients": 6}
SPEC = RunSpec.from_dict({"dataset": "named", **SETTINGS})  # registered below


@pytest.fixture(autouse=True)
def named():
    register_dataset("named", make_user_dataset)  # a set with a name, that tests need not wait for


def part_of(data, count=40):
    kept = {"train_inputs": data.train_inputs[:count], "train_labels": data.train_labels[:count]}
    return dataclasses.replace(data, **kept)


quiet = functools.partial(sweep, progress=None)


# --- the names of results


def test_loaded_dataset_is_the_named_one():
    data = load_dataset("named")
    by_name, result = simulate(SPEC), simulate(SPEC, dataset=data)
    assert result.digest() == by_name.digest()
    assert "own_dataset" not in result.summary and "own_partition" not in result.summary


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
    assert sorted(results["dataset"]) == ["named", f"own {short}"]
    assert len(select_newest(results)) == 2 and sum(results["settings"] == SPEC.digest()) == 1


def test_sweep_uses_own_data_for_user_specs():
    both = [SPEC, dataclasses.replace(SPEC, dataset="user")]
    own = part_of(load_dataset("named"))
    results = quiet(both, dataset=own).results
    actual = [result.summary["dataset_digest"] for result in results]
    assert actual == [load_dataset("named").digest(), own.digest()]
    assert not any("own_dataset" in result.summary for result in results)


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
    assert sorted(results["partition"]) == ["iid", f"own {other.digest()[:8]}"]
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
    for arguments, what in (
        ({"dataset": part_of(data)}, "dataset"),
        ({"partition": other}, "part"),
    ):
        with pytest.raises(ConfigError, match=f"expected a checkpoint of this {what}"):
            simulate(spec, output_dir=tmp_path, resume=True, **arguments)


# --- what does not fit


BAD_PARTITIONS = {
    "a generator": (lambda: (k for k in ([0], [1])), "partition = a generator: expected a Part"),
    "a list": (lambda: [[0], [1]], "partition = .*: .*partition_from_clients"),
    "a name": (lambda: "iid", "partition = 'iid'"),
    "too few clients": (lambda: partition_from_clients([[0], [1]]), "num_clients = 6: .*=2"),
    "positions of more": (
        lambda: partition_from_clients([[0, 51]] + [[1]] * 5),
        r"position 51 is outside the 51 training examples of named: .*\[0, 51\)",
    ),
    "an example twice": (
        lambda: partition_from_clients([[0], [3, 3], [4], [], [], []]),
        "partition 'user': client 1 holds example 3 2 times: expected different examples",
    ),
    "nothing": (lambda: partition_from_clients([[]] * 6), "partition = 'no examples'"),
}


@pytest.mark.parametrize("case", BAD_PARTITIONS)
def test_invalid_partitions_are_rejected(case):
    make, message = BAD_PARTITIONS[case]
    with pytest.raises(ConfigError, match=message) as error:
        simulate(SPEC, partition=make())
    assert "\n" not in str(error.value)


def test_clients_with_repeated_examples_are_rejected(tmp_path):
    """Registered partitions, passed partitions and files have one check."""
    register_partition("twice", lambda rng, num_clients: [[0, 1], *[[4, 2, 4, 4]] * 5])
    message = "client 1 holds example 4 3 times: expected different examples"
    with pytest.raises(ConfigError, match=f"partition 'twice': {message}"):
        simulate(dataclasses.replace(SPEC, partition="twice"))
    fields = {"scheme": "hand", "seed": 0, "parameters": {}}
    arrays = {"indices": np.array([0, 1, 4, 2, 4, 4]), "offsets": np.array([0, 2, 6, 6, 6, 6, 6])}
    write_npz(tmp_path / "twice.npz", arrays, fields)
    for partition in (Partition(**fields, **arrays), Partition.load(tmp_path / "twice.npz")):
        with pytest.raises(ConfigError, match=f"partition 'hand': {message}"):
            simulate(SPEC, partition=partition)


def test_empty_clients_and_shared_examples_are_logged(caplog):
    clients = [[0, 1, 2], [2, 1], [3], [4], [], []]
    register_partition("shared", lambda rng: clients)
    passed = partition_from_clients(clients, scheme="passed")
    for name, partition in (("shared", None), ("passed", passed)):
        caplog.clear()
        spec = SPEC if partition else dataclasses.replace(SPEC, partition=name)
        simulate(spec, partition=partition)
        settings = "" if partition else " (seed 0)"
        assert f"partition '{name}': 2 of 6 clients hold no examples{settings}\n" in caplog.text
        assert f"partition '{name}': 2 examples belong to several clients" in caplog.text
    caplog.clear()
    simulate(SPEC)
    assert not caplog.records


def test_clients_without_tests_are_logged(caplog, capsys):
    inputs, labels = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 2
    users = np.repeat([f"u{i}" for i in range(10)], 3)
    data = dataset_from_arrays(
        inputs, labels, inputs[:6], labels[:6], train_users=users, test_users=users[:6]
    )
    settings = {"model": "mlp", "partition": "natural", "rounds": 1, "local_epochs": 1}
    result = simulate(RunSpec(**settings, client_tests=True), dataset=data)
    note = "8 of 10 clients have no test examples, and means over clients leave them out: "
    assert f"note: {note}u2, u3, u4, u5, u6, ...\n" in caplog.text
    accuracy = result.metrics["client_accuracy"][-1]
    np.testing.assert_array_equal(np.isnan(accuracy), np.arange(10) >= 2)
    assert result.metrics["mean_client_accuracy"][-1] == pytest.approx(np.nanmean(accuracy))
    caplog.clear()
    simulate(RunSpec(**settings), dataset=data)  # of the global model on all test examples
    assert "no test examples" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": (0.0,)}, r"std\[0\] = 0.0: expected a number in \[1e-30"),
        ({"train_labels": np.zeros(3, int)}, r"len\(train_labels\) = 3"),
        ({"train_inputs": np.full((51, 2, 2, 1), np.nan)}, "train_inputs.* = nan"),
        ({"test_labels": [], "test_inputs": []}, "shape of test_inputs"),
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
    settings = SETTINGS | {"model": network} | more
    with caplog.at_level(logging.WARNING, "fedjax_het"):
        prepare_group([RunSpec("fedbn", "user", **settings)], UserObjects(data))
    assert ("network 'mlp' has none" in caplog.text) == said


# --- registered records

LABELS = np.arange(60) % 5


def blobs(domains=None):
    """60 images of five classes, 30 tests; where asked for, of two domains in turn."""
    draw = np.random.default_rng(0)
    centres = draw.integers(0, 200, (5, 4, 4, 1))
    images = (centres[LABELS] + draw.integers(0, 50, (60, 4, 4, 1))).astype(np.uint8)
    parts = {}
    if domains:
        numbers = np.arange(60) % len(domains)
        parts = {"train_domains": numbers, "test_domains": numbers[:30], "domain_names": domains}
    return dataset_from_arrays(images, LABELS, images[:30], LABELS[:30], name="blobs", **parts)


def thirds(rng, labels, num_clients, *, alpha, offset=0):
    """Runs of the training set. And more."""
    del alpha
    return np.array_split((np.arange(len(labels)) + offset) % len(labels), num_clients)


# --- data sets


@pytest.mark.slow
def test_sweep_uses_a_registered_dataset(tmp_path):
    seen = []

    def load(data_dir=None):
        seen.append(data_dir)
        return blobs()

    register_dataset("spots", load, "five blobs")
    assert DATASETS["spots"].description == "five blobs"
    assert load_dataset("spots", data_dir="here").name == "spots" and seen == ["here"]
    specs = grid(dataset=["digits", "spots"], partition="iid", **SMALL)
    sweep_result = sweep(specs, tmp_path, progress=lambda line: None)
    assert [run.spec.dataset for run in sweep_result.results] == ["digits", "spots"]
    assert all(np.isfinite(run.metrics["train_loss"]).all() for run in sweep_result.results)


def test_normalization_of_registered_datasets():
    register_dataset("plain", blobs)
    plain = load_dataset("plain")
    assert plain.mean == blobs().mean
    assert load_dataset("plain", normalization="unit").mean == (0.0,)
    with pytest.raises(ConfigError, match="has no constants for 'plain'"):
        load_dataset("plain", normalization="fedaf")

    def load_blobs(*, normalization):
        return dataclasses.replace(blobs(), mean=(0.5 if normalization else 0.25,))

    register_dataset("own", load_blobs)
    assert load_dataset("own").mean == (0.25,)
    assert load_dataset("own", normalization="anything").mean == (0.5,)


def test_invalid_registered_datasets_are_rejected():
    with pytest.raises(ConfigError, match="name = 'mnist': expected a name that no data set of"):
        register_dataset("mnist", blobs)
    with pytest.raises(ConfigError, match="load = 3: expected a function"):
        register_dataset("three", 3)
    register_dataset("three", lambda path, size: blobs())
    register_dataset("empty", lambda: (LABELS, LABELS))
    for call, name, message in (
        (load_dataset, "three", "dataset = 'three': its function requires path, size"),
        (load_dataset, "empty", "value of data set 'empty' = .*: expected a Dataset"),
        (prepare_dataset, "empty", "'empty': expected a data set that needs prep"),
        (prepare_dataset, "digits", "'digits': expected a data set that needs prep"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(name)
    with pytest.raises(ConfigError, match="dataset = 'emty' is unknown: did you mean 'empty'"):
        RunSpec(dataset="emty").resolved()


# --- partitions


def test_registered_partition_has_its_parameters():
    register_partition("thirds", thirds)
    assert PARTITIONS["thirds"].description == "Runs of the training set. And more"
    assert PARTITIONS["thirds"].parameters == {"alpha": REQUIRED, "offset": 0}
    spec = RunSpec(partition="thirds", alpha=0.3, partition_options={"offset": 2}, **SMALL)
    assert spec.resolved().alpha == 0.3
    result = simulate(spec)
    assert result.partition.parameters == {"alpha": 0.3, "offset": 2}
    assert result.partition.client_indices(0)[0] == 2
    with pytest.raises(ConfigError, match=r"has no parameter 'ofset'.*did you mean 'offset'"):
        make_partition("thirds", LABELS, 5, num_clients=3, seed=0, alpha=1, ofset=2)
    with pytest.raises(ConfigError, match="partition 'thirds' needs alpha"):
        make_partition("thirds", LABELS, 5, num_clients=3, seed=0)


def test_alpha_and_classes_follow_from_signatures():
    with_alpha = {name for name in PARTITIONS if find_parameter_name(name, "alpha")}
    assert with_alpha >= {"dirichlet", "dirichlet_balanced", "dirichlet_capped"}
    with_classes = {name for name in PARTITIONS if find_parameter_name(name, "classes")}
    assert "classes_per_client" in with_classes and "iid" not in with_alpha | with_classes
    seen = []

    def some(rng, labels, num_classes, num_clients, classes=2):
        seen.append(classes)
        return np.array_split(np.arange(len(labels)), num_clients)

    register_partition("some", some)
    spec = RunSpec(partition="some", classes=3, **SMALL).resolved()
    build_partition(spec, load_dataset("digits"))
    make_partition("some", LABELS, 5, num_clients=3, seed=0, classes_per_client=4)
    assert spec.classes == 3 and seen == [3, 4]
    with pytest.raises(
        ConfigError, match=r"alpha = 0.1: expected no value: partition some has no alpha"
    ):
        RunSpec(partition="some", alpha=0.1, **SMALL).resolved()


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (3, "return value of partition 'odd' = 3: expected 3 arrays"),
        ([[0], [1]], "length of return value of partition 'odd' = 2: expected 3 arrays"),
        ([[0], [1], [np.nan]], r"for client 2 = 'float64 \(1,\)': expected integers"),
        ([c == LABELS for c in range(3)], "for client 0 = 'bool"),
        ([[0], [60], []], r"for client 1\[0\] = 60: expected a position in \[0, 60\)"),
        ([[0], [1], [2, -1]], r"for client 2\[1\] = -1: expected a position"),
        ([[], [], []], "return value of partition 'odd' = .*: expected at least one"),
    ],
)
def test_return_value_of_partitions_is_checked(clients, message):
    register_partition("odd", lambda rng: clients)
    with pytest.raises(ConfigError, match=message) as error:
        make_partition("odd", LABELS, 5, num_clients=3, seed=0)
    assert "\n" not in str(error.value)


def test_mixtures_of_wrong_shape_are_rejected():
    register_partition("odd", lambda num_clients: [[0]] * num_clients, mixtures=lambda *a: [[1.0]])
    partition = make_partition("odd", LABELS, 5, num_clients=3, seed=0)
    with pytest.raises(ConfigError, match=r"mixtures of partition 'odd' = \(1, 1\): .*\(3, 5\)"):
        compute_client_mixtures(partition, LABELS, 5)


@pytest.mark.slow
def test_clients_that_are_domains_have_domain_tests(tmp_path):
    def halved(rng, labels, domains):
        return [np.flatnonzero(domains == k)[::2] for k in range(domains.max() + 1)]

    register_partition("halved", halved, "half of each domain", clients_are_domains=True)
    dataset = blobs(domains=("ink", "oil"))
    settings = {"num_clients": 2, "client_tests": True}
    spec = RunSpec("fedavg", "user", partition="halved", **(SMALL | settings))
    result = simulate(spec, dataset=dataset)
    assert result.partition.client_names == ("ink", "oil")
    clients = result.metrics["client_accuracy"]
    np.testing.assert_array_equal(result.metrics["client_accuracy_oil"], clients[:, 1])
    tests = data_sets.make_client_tests(result.partition, dataset, seed=0)
    second = np.flatnonzero(dataset.test_domains == 1)
    np.testing.assert_array_equal(tests.client_indices(1), second)
    loaded = Partition.load(result.partition.save(tmp_path / "split.npz"))
    assert loaded.client_names == ("ink", "oil") and loaded.digest() == result.partition.digest()
    nameless = dataclasses.replace(loaded, client_names=())
    assert nameless.digest() == loaded.digest()
    with pytest.raises(
        ConfigError, match=r"client_names = .*: expected none, or 2 different names"
    ):
        dataclasses.replace(loaded, client_names=("ink", "ink"))
    with pytest.raises(ConfigError, match="'blobs': expected a data set whose examples have dom"):
        data_sets.make_client_tests(loaded, blobs(), seed=0)


# --- the server's examples


def test_registered_source_has_its_options():
    def first(dataset, partition, *, size=4):
        """The first ones."""
        return partition.indices[:size]

    register_server_source("first", draw=first)
    assert SERVER_SOURCES["first"].options == {"size": 4}
    assert resolve_server_options("first") == {"size": 4}
    spec = RunSpec("data_sharing", partition="iid", server_data="first", **SMALL)
    assert spec.resolved().server_options == {"size": 4}
    result = simulate(dataclasses.replace(spec, server_options={"size": 6}))
    assert np.isfinite(result.metrics["train_loss"]).all()
    with pytest.raises(ConfigError, match="server_data 'first' has no option 'sise'"):
        dataclasses.replace(spec, server_options={"sise": 6}).resolved()


def test_sources_withhold_examples_or_return_images():
    register_server_source(
        "last",
        draw=lambda withheld: withheld,
        withheld=lambda num_train: num_train // 10,
    )
    withheld = draw_withheld_examples("last", blobs(), seed=0)
    assert len(withheld) == 6
    register_server_source("drawn", pool=lambda dataset: (dataset.test_inputs, LABELS[:30]))
    images, labels = make_server_pool("drawn", blobs())
    assert images.shape == (30, 4, 4, 1) and labels.dtype == np.int32
    with pytest.raises(ConfigError, match="server_data 'both': expected exactly one of draw and"):
        register_server_source("both")
    with pytest.raises(ConfigError, match="withheld only together with draw"):
        register_server_source("both", pool=blobs, withheld=len)


ODD_IMAGES = blobs().test_inputs


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"draw": lambda: [60]}, r"value of draw of server_data 'odd'\[0\] = 60: expected a pos"),
        ({"draw": lambda: [0.5]}, r"odd' = 'float64 \(1,\)': expected integers"),
        ({"pool": lambda dataset: ODD_IMAGES}, r"pool of server_data 'odd' = .*: expected"),
        (
            {"pool": lambda dataset: (ODD_IMAGES, LABELS[:30] + 9)},
            r"server_labels\[0\] = 9: expected a label in",
        ),
    ],
)
def test_return_value_of_sources_is_checked(source, message):
    split = make_partition("iid", LABELS, 5, num_clients=3, seed=0)
    register_server_source("odd", **source)
    with pytest.raises(ConfigError, match=message):
        make_server_pool("odd", blobs()) if "pool" in source else make_server_data(
            "odd", blobs(), split, seed=0
        )


# --- all of them


def test_list_command_shows_registered_records(capsys):
    register_dataset("spots", blobs, "five blobs")
    register_partition("thirds", thirds)
    register_server_source("first", "the first ones", draw=thirds)
    assert main(["list"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["spots", "five blobs"] in lines and ["first", "the first ones"] in lines
    assert ["thirds", "Runs of the training set. And more"] in lines
