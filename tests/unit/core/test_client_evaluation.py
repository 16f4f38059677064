"""Clients' own tests in whole runs: what is counted, on any number of lanes and devices."""

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import method_cases

from fedjax_het import ConfigError, Placement, RunSpec, simulate
from fedjax_het.algorithms import METHODS
from fedjax_het.core import evaluation
from fedjax_het.data import Partition
from fedjax_het.nn import make_model
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.result_builder import summarize_metrics

DATA = make_user_dataset()
DEVICES = sorted({1, len(jax.devices())})


def spec(algorithm="fedavg", **more):
    common = {
        "dataset": "user",
        "partition": "dirichlet",
        "alpha": 0.5,
        "model": "mlp",
        "num_clients": 5,
        "participation": 1.0,
        "batch_size": 4,
        "rounds": 3,
        "protocol": "fedamp",
        "local_epochs": 2,
        "hp": {"local_lr": 0.3},
    }
    return RunSpec(algorithm, **{**common, **more})


def counted(result, variables_of):
    """[K] accuracies by a loop over clients, in NumPy."""
    model = make_model("mlp", DATA.input_shape, DATA.num_classes)
    images = (DATA.test_inputs - np.asarray(DATA.mean)) / np.asarray(DATA.std)
    accuracies = np.full(result.tests.num_clients, np.nan)
    for k in np.flatnonzero(result.tests.sizes):
        mine = result.tests.client_indices(k)
        logits, _ = model.apply(variables_of(k), images[mine].astype(np.float32), train=False)
        accuracies[k] = (np.asarray(logits).argmax(1) == DATA.test_labels[mine]).mean()
    return accuracies


@pytest.mark.slow
@pytest.mark.parametrize("batch", [5, 250])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("lanes", [1, 2])
def test_personal_accuracy_equals_numpy(lanes, devices, batch, monkeypatch):
    monkeypatch.setattr(
        evaluation, "CPU_BATCH_SIZE", batch
    )  # tests larger than a batch, and smaller
    one = spec("separate", test_per_client=13)  # three batches of five, the last with padding
    result = simulate(one, dataset=DATA, placement=Placement(lanes=lanes, devices=devices))
    models = result.state.clients.variables
    expected = counted(result, lambda k: jax.tree.map(lambda a: a[k], models))
    np.testing.assert_allclose(result.metrics["client_accuracy"][-1], expected, rtol=1e-6)
    assert len(set(expected[np.isfinite(expected)])) > 1
    assert np.isnan(result.metrics["test_accuracy"]).all()


@pytest.mark.parametrize("devices", DEVICES)
def test_global_model_client_accuracy_equals_numpy(devices):
    result = simulate(spec("fedprox"), dataset=DATA, placement=Placement(devices=devices))
    expected = counted(result, lambda k: result.state.server.variables)
    np.testing.assert_allclose(result.metrics["client_accuracy"][-1], expected, rtol=1e-6)
    assert np.isfinite(result.metrics["test_accuracy"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_local_model_accuracy_equals_numpy(name):
    result = simulate(spec(name, client_test_model="client"), dataset=DATA)
    kept = result.state.clients.variables
    expected = counted(result, lambda k: jax.tree.map(lambda a: a[k], kept))
    np.testing.assert_allclose(result.metrics["client_accuracy"][-1], expected, rtol=1e-6)
    plain = simulate(spec(name, client_test_model="global"), dataset=DATA)
    np.testing.assert_allclose(
        plain.metrics["test_accuracy"], result.metrics["test_accuracy"], rtol=1e-6
    )
    assert not np.array_equal(
        plain.metrics["client_accuracy"], result.metrics["client_accuracy"], equal_nan=True
    )


def test_fedamp_protocol_evaluates_scaffold_clients():
    assert spec("scaffold").resolved().evaluated_model == "client"
    again = spec("scaffold", client_test_model="global").resolved()
    assert again.evaluated_model == again.resolved().evaluated_model == "global"
    assert RunSpec("scaffold").resolved().evaluated_model == "global"
    assert spec("fedavg").resolved().evaluated_model == "global"


PERSONAL = [name for name, entry in METHODS.items() if entry.evaluated_models[0] != "global"]


@pytest.mark.parametrize("name", method_cases(["fedavg", *PERSONAL], quick=()))
def test_accuracy_does_not_depend_on_lanes_or_devices(name):
    one = simulate(spec(name), dataset=DATA, placement=Placement(lanes=1, devices=1)).metrics
    for lanes, devices in ((3, 1), (2, len(jax.devices()))):
        other = simulate(
            spec(name), dataset=DATA, placement=Placement(lanes=lanes, devices=devices)
        ).metrics
        for curve in ("client_accuracy", "mean_client_accuracy", "train_loss"):
            # an example on the edge may fall to either side of it
            gap = 0.02 if "accuracy" in curve else 1e-5
            np.testing.assert_allclose(other[curve], one[curve], atol=gap)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg_ft", "fedamp"])
def test_rounds_without_evaluation_are_nan(name):
    every = simulate(spec(name, rounds=9), dataset=DATA).metrics
    some = simulate(spec(name, rounds=9, eval_every=3), dataset=DATA).metrics
    measured = np.array([False, False, True, False, True, True, True, True, True])
    clients = np.isfinite(every["client_accuracy"]).any(0)
    assert (np.isfinite(some["client_accuracy"]) == measured[:, None] & clients).all()
    np.testing.assert_array_equal(
        some["client_accuracy"][measured], every["client_accuracy"][measured]
    )
    np.testing.assert_array_equal(np.isfinite(some["mean_client_accuracy"]), measured)


def test_client_without_data_has_no_accuracy():
    parts = Partition("user", 0, {}, np.arange(20), np.array([0, 8, 8, 20]))
    one = spec("fedamp", num_clients=3, partition="iid", alpha=None)
    result = simulate(one, dataset=DATA, partition=parts)
    assert np.isnan(result.metrics["client_accuracy"][:, 1]).all()
    assert np.isfinite(result.metrics["client_accuracy"][:, [0, 2]]).all()
    assert np.isfinite(result.metrics["mean_client_accuracy"]).all()


def test_summary_describes_best_round(tmp_path):
    result = simulate(spec("fedamp", rounds=8), dataset=DATA, output_dir=tmp_path)
    accuracy, summary = result.metrics["client_accuracy"].astype(np.float64), result.summary
    means = np.nanmean(accuracy, 1)
    assert summary["bmta"] == pytest.approx(means.max())
    assert summary["bmta_round"] == means.argmax() + 1
    assert summary["bmta_worst_decile"] == pytest.approx(np.nanmin(accuracy[means.argmax()]))
    assert summary["final_client_accuracy"] == pytest.approx(means[-5:].mean())
    assert summary["final_accuracy"] is None and not summary["diverged"]
    saved = Partition.load(next(tmp_path.glob("*.client_tests.npz")))
    assert saved.digest() == result.tests.digest()


def test_divergence_without_global_model_is_marked():
    metrics = {
        "test_accuracy": np.full(6, np.nan),
        "train_loss": np.ones(6),
        "client_accuracy": np.full((6, 2), 0.5),
        "mean_client_accuracy": np.full(6, 0.5),
    }
    assert not summarize_metrics(metrics)["diverged"]
    metrics["train_loss"][4:] = np.nan
    for name in ("client_accuracy", "mean_client_accuracy"):
        metrics[name][4:] = np.nan
    summary = summarize_metrics(metrics)
    assert summary["diverged"] and summary["final_client_accuracy"] is None
    assert summary["bmta"] == 0.5
    result = simulate(spec("fedamp", hp={"local_lr": 1e30}), dataset=DATA)
    assert result.summary["diverged"]


def test_client_tests_do_not_depend_on_method_or_seed():
    def tests(algorithm, **more):
        (federation,) = prepare_group(
            [spec(algorithm, partition_seed=3, **more)], UserObjects(DATA)
        ).prepared_runs
        return federation.client_tests.digest()

    assert tests("fedavg") == tests("fedamp", seed=5) == tests("fedavg_ft")
    assert tests("fedavg") != tests("fedavg", test_per_client=9)


def test_domain_clients_have_domain_tests():
    from support.data import make_domains_dataset

    data = make_domains_dataset()
    settings = {"partition": "by_domain", "alpha": None, "num_clients": 3}
    ours = simulate(
        spec("fedavg", client_tests=True, client_test_model="global", **settings), dataset=data
    ).metrics
    names = [f"test_accuracy_{name}" for name in data.domain_names]
    of_domains = np.stack([ours[name] for name in names], 1)
    np.testing.assert_allclose(ours["client_accuracy"], of_domains, atol=1e-6)
    assert len(np.unique(of_domains[-1])) > 1
    with pytest.raises(ConfigError, match="per_client = 5"):
        simulate(spec("separate", test_per_client=5, **settings), dataset=data)
