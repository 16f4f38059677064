"""Clients that never take part, and the final global model on them."""

import dataclasses

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import assert_results_equal, make_spec, run_sweep

from fedjax_het import ConfigError, Result, simulate
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime.data_assignment import build_partition

DATA = make_user_dataset()
SETTINGS = {"rounds": 3, "num_clients": 4, "held_out_clients": 2, "test_per_client": None}


def run(spec_, **settings):
    return simulate(spec_, dataset=DATA, **settings)


def compute_held_out_accuracy(model, result, h):
    held = result.held_out.tests.client_indices(h)
    return model.evaluate(DATA.test_inputs[held], DATA.test_labels[held]).accuracy


@pytest.mark.parametrize(
    "name", ["fedavg", slow_case("dynafed"), slow_case("scaffold"), slow_case("per_fedavg")]
)
def test_accuracy_is_that_of_the_final_model(name):
    result = run(make_spec(name, **SETTINGS))
    expected = [compute_held_out_accuracy(result.model(), result, h) for h in range(2)]
    np.testing.assert_allclose(result.artifacts["held_out_accuracy"], expected, rtol=1e-6)
    assert result.summary["held_out_accuracy"] == pytest.approx(np.mean(expected))
    assert result.artifacts["held_out_tuned_accuracy"].shape == (2,)


@pytest.mark.parametrize("name", ["fedavg", slow_case("fedprox"), slow_case("fedavg_ft")])
def test_zero_epochs_keep_the_global_model(name):
    result = run(make_spec(name, **SETTINGS, held_out_epochs=0))
    received, tuned = (result.artifacts[f"held_out{what}_accuracy"] for what in ("", "_tuned"))
    np.testing.assert_array_equal(received, tuned)


@pytest.mark.slow
def test_fine_tuning_is_local_training(tmp_path):
    """Whole batches, so that their order does not matter: a federation of that client alone."""
    settings = {**SETTINGS, "batch_size": 30, "hp": {"local_lr": 0.3}}
    result = run(make_spec(**settings, held_out_epochs=4))
    path = str(result.save_model(tmp_path / "model.msgpack"))
    for h in range(2):
        alone = partition_from_clients([result.held_out.partition.client_indices(h)])
        own = make_spec(
            rounds=1,
            num_clients=1,
            participation=1.0,
            batch_size=30,
            local_epochs=4,
            init_from=path,
            hp={"local_lr": 0.3},
        )
        tuned = run(own, partition=alone).model()
        expected = compute_held_out_accuracy(tuned, result, h)
        np.testing.assert_allclose(result.artifacts["held_out_tuned_accuracy"][h], expected)
    tuned = result.artifacts["held_out_tuned_accuracy"]
    assert not np.array_equal(tuned, result.artifacts["held_out_accuracy"])


def test_held_out_clients_take_no_part():
    """The federation is that of the other clients' data, passed as a partition."""
    held = make_spec(**SETTINGS, partition_seed=7).resolved()
    result = run(held)
    everyone = build_partition(held, DATA)
    apart = result.artifacts["held_out_clients"]
    rest = [everyone.client_indices(k) for k in range(6) if k not in apart]
    assert len(rest) == 4 and apart[0] < 3  # not the last ones
    for h, k in enumerate(apart):
        np.testing.assert_array_equal(
            result.held_out.partition.client_indices(h), everyone.client_indices(k)
        )
    plain = dataclasses.replace(held, held_out_clients=None)
    other = run(plain, partition=partition_from_clients(rest))
    for name, values in other.metrics.items():
        np.testing.assert_array_equal(result.metrics[name], values, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, result.model().variables, other.model().variables)
    others = {int(i) for own in rest for i in own}
    assert not others & set(result.held_out.partition.indices.tolist())


def test_held_out_clients_of_sweeps_and_user_partitions(tmp_path):
    specs = [make_spec(**SETTINGS, seed=seed) for seed in range(3)]
    swept = run_sweep(specs, tmp_path).results
    for each, one in zip(swept, specs, strict=True):
        alone = run(one)
        assert_results_equal(each, alone)
        assert each.summary["held_out_accuracy"] == alone.summary["held_out_accuracy"]
    everyone = build_partition(specs[0].resolved(), DATA)
    assert_results_equal(run(specs[0], partition=everyone), swept[0])
    kept = run(specs[0], output_dir=tmp_path / "one")
    loaded = Result.load(tmp_path / "one" / f"{kept.digest()}.json")
    assert loaded.summary["held_out_tuned_accuracy"] == kept.summary["held_out_tuned_accuracy"]
    assert (tmp_path / "one" / f"{kept.digest()}.held_out.npz").exists()


def test_client_tests_exclude_held_out_clients():
    result = run(make_spec(**SETTINGS, client_tests=True))
    assert result.tests.num_clients == 4 and result.held_out.tests.num_clients == 2
    assert result.metrics["client_accuracy"].shape == (3, 4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"held_out_clients": 60}, "num_clients = "),
        ({"algorithm": "fedamp", "held_out_clients": 2}, "held_out_clients = 2: .*no global model"),
        ({"held_out_epochs": 2}, "held_out_epochs = 2: expected no value, or held_out_clients"),
        (
            {"algorithm": "feddm", "held_out_clients": 2, "held_out_epochs": 2},
            "held_out_epochs = 2: expected 0: clients of feddm condense",
        ),
        ({"held_out_clients": 0}, "held_out_clients = 0"),
    ],
)
def test_invalid_settings(settings, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        run(make_spec(**{"rounds": 2, **settings}))
    assert "\n" not in str(caught.value)


def test_held_out_clients_have_examples():
    sizes = [10, 0, 10, 0, 0, 0]
    starts = np.cumsum([0, *sizes])
    clients = [np.arange(starts[k], starts[k + 1]) for k in range(6)]
    asked = make_spec(rounds=1, num_clients=4, held_out_clients=2)
    with pytest.raises(ConfigError, match="held_out_clients = 2: expected at most 1 of the 2"):
        run(asked, partition=partition_from_clients(clients))
    one = dataclasses.replace(asked, num_clients=5, held_out_clients=1)
    result = run(one, partition=partition_from_clients(clients))
    assert result.artifacts["held_out_clients"][0] in (0, 2)
