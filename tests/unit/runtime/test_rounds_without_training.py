"""Rounds in which no client trains: missing values, divergence and early stopping."""

import json

import jax
import numpy as np
import pytest
from support.markers import method_cases

from fedjax_het import RunSpec, load_curves, load_dataset, register_method, simulate
from fedjax_het.data import partition_from_clients
from fedjax_het.methods import build_federated_algorithm, make_local_sgd
from fedjax_het.runtime.callbacks import RunStatus

CONDENSATION = {"options": {"ipc": 1, "steps": 1, "server_epochs": 1}}


@pytest.fixture(scope="module")
def partition():
    """Six clients, of which two hold examples."""
    order = np.random.default_rng(0).permutation(len(load_dataset("digits").train_labels))[:200]
    return partition_from_clients([order[:120], [], [], order[120:], [], []])


def make_spec(algorithm="fedavg", **settings):
    shared = {"model": "mlp", "num_clients": 6, "participation": 1 / 6, "rounds": 6}
    return RunSpec(algorithm, "digits", partition="iid", batch_size=32, **{**shared, **settings})


def assert_missing(result):
    """Check the curves of the rounds in which no client trained."""
    is_idle = result.metrics["client_samples"] == 0
    assert 0 < is_idle.sum() < len(is_idle)
    assert result.rounds == len(is_idle) and not result.diverged
    np.testing.assert_array_equal(np.isnan(result.metrics["train_loss"]), is_idle)
    assert np.isnan(result.metrics["update_norm"][is_idle]).all()
    assert (result.metrics["update_norm"][~is_idle] >= 0).all()


def test_idle_rounds_are_missing_values(partition, tmp_path):
    stopped: list[RunStatus] = []

    def stop_at_low_loss(status):
        if status.done and status.metrics["train_loss"][-1] < 0.5:
            stopped.append(status)
            status.stop("the loss is low")

    spec = make_spec(metrics="drift")
    result = simulate(
        spec,
        partition=partition,
        output_dir=tmp_path,
        callbacks=[stop_at_low_loss],
        track=["csv"],
    )
    assert_missing(result)
    assert not stopped
    is_idle = result.metrics["client_samples"] == 0
    np.testing.assert_array_equal(np.isnan(result.metrics["drift_cosine"]), is_idle)
    curves = load_curves(tmp_path)
    trained = result.metrics["train_loss"][~is_idle]
    assert curves["train_loss"].mean() == pytest.approx(trained.mean())
    (table,) = (tmp_path / "csv").glob("*.csv")
    lines = table.read_text().splitlines()
    column = lines[0].split(",").index("train_loss")
    assert [line.split(",")[column] == "" for line in lines[1:]] == is_idle.tolist()
    (record,) = tmp_path.glob("*.json")
    assert json.loads(record.read_text())["summary"]["diverged"] is False


def test_server_without_clients_reports_its_norm(partition):
    def build_shifted(training, plan):
        def update(hp, server, client_update, counts):
            return server._replace(variables=jax.tree.map(lambda v: v + 0.1, server.variables))

        return build_federated_algorithm(training, plan, make_local_sgd(training), update=update)

    register_method("shifted", build_shifted)
    result = simulate(make_spec("shifted"), partition=partition)
    is_idle = result.metrics["client_samples"] == 0
    np.testing.assert_array_equal(np.isnan(result.metrics["train_loss"]), is_idle)
    assert (result.metrics["update_norm"] > 1).all() and not result.diverged


def test_patience_counts_idle_rounds(partition):
    result = simulate(make_spec(rounds=8, patience=3, min_delta=1.0), partition=partition)
    assert result.summary["stopped_early"]["why"] == "plateau"
    assert not result.diverged and result.rounds == 4


def test_nonfinite_loss_diverges(partition):
    result = simulate(make_spec(hp={"local_lr": 1e30}), partition=partition)
    assert result.diverged
    assert result.rounds == 1 + int(np.flatnonzero(result.metrics["client_samples"])[0])


@pytest.mark.parametrize("algorithm", method_cases(quick=()))
def test_idle_rounds_of_method(algorithm, partition):
    settings = CONDENSATION if algorithm in ("feddm", "fedaf") else {}
    result = simulate(make_spec(algorithm, **settings), partition=partition)
    is_idle = result.metrics["client_samples"] == 0
    np.testing.assert_array_equal(np.isnan(result.metrics["train_loss"]), is_idle)
    assert not result.diverged and result.rounds == len(is_idle)
