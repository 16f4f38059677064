"""Validation examples: which are withheld, accuracies on them, and the decisions they make."""

import dataclasses

import numpy as np
import pytest
from support.data import consecutive_partition, make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import (
    make_spec,
    run_spec,
    run_sweep,
    with_placement,
)

from fedjax_het import ConfigError, RunSpec, federation, load_results, simulate
from fedjax_het.algorithms.base import FederationData
from fedjax_het.algorithms.dynafed import _make_control_inputs
from fedjax_het.data import partition_from_clients, register_server_source
from fedjax_het.data.partition import withhold_validation_examples
from fedjax_het.runtime.build import PreparedRun
from fedjax_het.runtime.data_assignment import assign_data
from fedjax_het.runtime.history import evaluate_rules
from fedjax_het.runtime.result_builder import summarize_metrics

FRACTION = 0.3
ROUNDS = 24
PARTITION = consecutive_partition((14, 0, 24, 1, 9, 20))


def make_dataset():
    return make_user_dataset((14, 0, 24, 1, 9, 20))


def run(name="fedavg", **settings):
    arguments = {"partition": settings.pop("partition", PARTITION)}
    for argument in [*settings]:
        if argument not in RunSpec.__dataclass_fields__:
            arguments[argument] = settings.pop(argument)
    spec = make_spec(name, **{"validation": FRACTION, **settings})
    return run_on(make_dataset(), spec, **arguments)


def run_on(dataset, spec, **arguments):
    return simulate(spec, dataset=dataset, progress=None, **with_placement(arguments))


def reference_split(clients, fraction, seed):
    """The withheld examples of each client, one client after the other."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x7A11,)))
    withheld = []
    for k, examples in enumerate(clients):
        others = {e for j, other in enumerate(clients) if j != k for e in other}
        own = [e for e in sorted(examples) if e not in others]
        count = min(int(np.floor(fraction * len(examples) + 0.5)), max(len(examples) - 1, 0))
        withheld.append(sorted(rng.permutation(own)[:count].astype(int).tolist()))
    return withheld


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("seed", [0, 7])
def test_withheld_examples_match_a_reference(fraction, seed):
    clients = [range(10), [], range(10, 33), [33], range(34, 50), [*range(50, 56), 5, 11]]
    partition = partition_from_clients(clients)
    training, validation = withhold_validation_examples(partition, fraction, seed)
    expected = reference_split(clients, fraction, seed)
    for k, examples in enumerate(clients):
        assert validation.client_indices(k).tolist() == expected[k]
        assert training.client_indices(k).tolist() == sorted({*examples} - {*expected[k]})
    assert not {5, 11} & {*validation.indices.tolist()}  # of two clients
    assert (training.sizes[partition.sizes > 0] >= 1).all()
    assert training.scheme == validation.scheme == partition.scheme


def test_fraction_that_withholds_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"^validation = 0\.01: expected a larger fraction"):
        withhold_validation_examples(partition_from_clients([[0, 1], [2]]), 0.01, 0)


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, "some"])
def test_setting_is_a_fraction(value):
    with pytest.raises(ConfigError, match=r"^validation = "):
        RunSpec(validation=value).resolved()


def test_setting_without_a_value_keeps_the_digest():
    assert "validation" not in RunSpec().resolved().to_dict()
    assert RunSpec(validation=0.1).digest() != RunSpec().digest()


SOURCES = {"iid": {"size": 12}, "clients": {"clients": 2, "per_client": 3}, "held_out": {"size": 4}}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("own_partition", [None, PARTITION])
@pytest.mark.parametrize("held_out", [None, 1])
def test_validation_examples_are_of_nobody_else(source, own_partition, held_out):
    settings = {"pretrain_epochs": 1, "server_data": source, "server_options": SOURCES[source]}
    num_clients = 6 if held_out is None else 5
    spec = make_spec(num_clients=num_clients, held_out_clients=held_out, **settings)
    spec = dataclasses.replace(spec, client_tests=True, test_per_client=5)
    if own_partition is not None and source == "held_out":
        own_partition = consecutive_partition((14, 0, 24, 1, 9, 14))  # leaves six examples
    dataset = make_dataset()
    whole = assign_data(spec.resolved(), dataset, None, own_partition)
    spec = dataclasses.replace(spec, validation=FRACTION)
    data = assign_data(spec.resolved(), dataset, None, own_partition)
    withheld = {*data.validation.indices.tolist()}
    assert withheld and not withheld & {*data.partition.indices.tolist()}
    assert not withheld & {*data.server_data.indices.tolist()}
    for k in range(num_clients):
        both = np.concatenate([data.partition.client_indices(k), data.validation.client_indices(k)])
        assert sorted(both) == whole.partition.client_indices(k).tolist()
    assert data.client_tests.digest() == whole.client_tests.digest()
    if held_out:
        assert data.held_out.partition.digest() == whole.held_out.partition.digest()
        assert not withheld & {*data.held_out.partition.indices.tolist()}


def test_source_that_draws_validation_examples_is_refused():
    def draw_all(dataset):
        """All training examples."""
        return np.arange(len(dataset.train_labels))

    register_server_source("draws_all", draw=draw_all)
    with pytest.raises(ConfigError, match=r"server_data 'draws_all' = .* validation examples"):
        run(server_data="draws_all", pretrain_epochs=1)


@pytest.mark.parametrize("name", method_cases(quick=["scaffold"]))
def test_training_equals_a_run_on_the_remaining_examples(name):
    """Curves on validation examples come in addition; the model and all other numbers stay."""
    settings = {"rounds": 4, "client_tests": True}
    with_validation = run(name, partition=None, **settings)
    assert with_validation.summary["validation_split"]["num_examples"] > 10
    without = run(name, validation=None, partition=with_validation.partition, **settings)
    for metric in ("train_loss", "update_norm", "test_loss", "test_accuracy"):
        # The compiler orders sums of NaiveMix's loss, and of q-FedAvg's norm, differently in the
        # larger program.
        tolerance = 1e-6 if name in ("naivemix", "qfedavg") else 0
        curves = with_validation.metrics[metric], without.metrics[metric]
        np.testing.assert_allclose(*curves, rtol=tolerance, atol=0, err_msg=metric)
    assert with_validation.summary["bytes_up"] == without.summary["bytes_up"]
    curve = with_validation.metrics["mean_client_validation_accuracy"]
    assert np.isfinite(curve).any()
    has_global_model = np.isfinite(with_validation.metrics["test_accuracy"]).any()
    assert ("validation_accuracy" in with_validation.metrics) == has_global_model


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
def test_accuracies_match_the_models(lanes):
    """The global model on all examples, and each client's model on its own."""
    dataset = make_dataset()
    result = run("ditto", lanes=lanes, rounds=4)
    indices = result.validation.indices
    expected = result.model().evaluate(dataset.train_inputs[indices], dataset.train_labels[indices])
    assert result.metrics["validation_accuracy"][-1] == pytest.approx(expected.accuracy, abs=1e-6)
    assert result.metrics["validation_loss"][-1] == pytest.approx(expected.loss, rel=1e-5)
    accuracies = result.metrics["client_validation_accuracy"][-1]
    for k in range(6):
        indices = result.validation.client_indices(k)
        assert np.isnan(accuracies[k]) == (len(indices) == 0)
        if len(indices):
            images, labels = dataset.train_inputs[indices], dataset.train_labels[indices]
            assert accuracies[k] == pytest.approx(result.model(k).evaluate(images, labels).accuracy)
    mean = result.metrics["mean_client_validation_accuracy"][-1]
    assert mean == pytest.approx(np.nanmean(accuracies), rel=1e-6)
    assert result.summary["validation_split"] == {
        "num_examples": len(result.validation.indices),
        "num_clients_without": 1,
    }
    assert result.summary["split"]["num_unused"] == 0


PLACEMENTS = [
    {"lanes": 3, "devices": 1},
    {"lanes": 2, "devices": 2},
    {"lanes": 1, "devices": 1, "client_state": "host"},
]


@pytest.mark.slow
@pytest.mark.parametrize("placement", [slow_case(PLACEMENTS[0]), *PLACEMENTS[1:]])
def test_placement_does_not_change_accuracies(placement):
    settings = {"rounds": 5, "client_tests": True}
    if "client_state" in placement:
        settings = {"rounds": 5}
    reference = run("scaffold", lanes=1, devices=1, **settings)
    result = run("scaffold", **placement, **settings)
    for name in reference.metrics:
        if "validation" in name:
            np.testing.assert_allclose(
                result.metrics[name], reference.metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.slow
def test_runs_of_a_sweep_equal_single_runs(tmp_path):
    """Runs that share programs have validation sets of different sizes."""
    specs = [
        make_spec(
            seed=seed, partition="dirichlet", alpha=0.5, validation=0.2, rounds=12, patience=2
        )
        for seed in range(3)
    ]
    results = run_sweep(specs, tmp_path, lanes=1).results
    assert len({len(result.validation.indices) for result in results}) > 1
    for result, spec in zip(results, specs, strict=True):
        single = run_spec(spec, lanes=1, devices=1)
        assert result.summary["rounds"] == single.summary["rounds"]
        assert result.validation.digest() == single.validation.digest()
        for name, values in single.metrics.items():
            np.testing.assert_allclose(
                result.metrics[name], values, rtol=2e-4, atol=2e-5, err_msg=name
            )
    frame = load_results(tmp_path)
    assert frame["best_validation_accuracy"].notna().all() and (frame["validation"] == 0.2).all()


def make_dataset_with_other_tests():
    """Test labels are another function of the images than the labels of training."""
    dataset = make_dataset()
    return dataclasses.replace(dataset, test_labels=(dataset.test_labels + 1) % 3)


def test_validation_decides_when_to_stop():
    """The tests, on which the model gets worse, would have stopped the run before."""
    dataset = make_dataset_with_other_tests()
    settings = {"rounds": ROUNDS, "validation": FRACTION}
    whole = run_on(dataset, make_spec(**settings), partition=PARTITION)
    rules = RunSpec(patience=3, validation=FRACTION)
    stops = {
        split: evaluate_rules(rules, whole.metrics[f"{split}_accuracy"]).early_stop
        for split in ("test", "validation")
    }
    assert stops["test"].round < stops["validation"].round < ROUNDS
    result = run_on(dataset, make_spec(patience=3, **settings), partition=PARTITION)
    stop = result.summary["stopped_early"]
    assert result.rounds == stop["round"] == stops["validation"].round
    assert stop["split"] == "validation" and "over validation accuracy" in stop["reason"]
    assert "test split" not in stop["reason"] + repr(result)
    assert "best validation accuracy" in repr(result)

    target = float(whole.metrics["validation_accuracy"].max())
    first = int((whole.metrics["validation_accuracy"] == np.float32(target)).argmax()) + 1
    result = run_on(dataset, make_spec(target_accuracy=target, **settings), partition=PARTITION)
    assert first < ROUNDS and result.rounds == first
    assert "validation accuracy" in result.summary["stopped_early"]["reason"]


def test_settings_without_training_are_reported(caplog):
    run(validation=0.999, hp={"local_lr": 0.0}, rounds=1)
    assert "validation = 0.999 leaves one training example to 4 of 6 clients" in caplog.text
    assert "learning_rate = 0: clients do not train" in caplog.text


def test_stop_on_the_test_split_is_reported(caplog):
    with caplog.at_level("INFO", logger="fedjax_het"):
        result = run(validation=None, rounds=ROUNDS, patience=2)
    advice = "stopped on the test split, pass validation=0.1"
    stop = result.summary["stopped_early"]
    assert stop["split"] == "test" and advice in stop["reason"]
    assert advice in repr(result) and advice in result._repr_html_() and advice in caplog.text


def test_method_without_a_global_model_stops_on_its_clients():
    result = run("fedamp", rounds=ROUNDS, patience=3)
    curve = result.metrics["mean_client_validation_accuracy"]
    stop = evaluate_rules(RunSpec(patience=3, validation=FRACTION), curve).early_stop
    assert result.rounds == stop.round < ROUNDS
    assert result.summary["bmta_round"] == int(np.nanargmax(curve)) + 1
    assert result.summary["bmta"] == pytest.approx(
        result.metrics["mean_client_accuracy"][result.summary["bmta_round"] - 1]
    )


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedamp", marks=pytest.mark.slow)])
def test_no_decision_reads_the_test_split(name):
    spec = make_spec(name, validation=FRACTION, rounds=ROUNDS, patience=3)
    first, second = (
        run_on(dataset, spec, partition=PARTITION)
        for dataset in (make_dataset(), make_dataset_with_other_tests())
    )
    assert first.rounds == second.rounds < ROUNDS
    for metric, values in first.metrics.items():
        if "test" not in metric and metric not in ("client_accuracy", "mean_client_accuracy"):
            np.testing.assert_array_equal(second.metrics[metric], values, err_msg=metric)
    for metric in ("bmta_round", "best_round", "best_validation_accuracy"):
        assert first.summary.get(metric) == second.summary.get(metric)
    accuracy = "bmta" if name == "fedamp" else "best_accuracy"
    assert first.summary[accuracy] != second.summary[accuracy]


def test_best_round_is_chosen_by_validation():
    nan = np.nan
    metrics = {
        "test_accuracy": np.float32([0.5, 0.9, nan, 0.6, 0.7]),
        "validation_accuracy": np.float32([0.4, 0.6, nan, 0.8, 0.8]),
        "client_accuracy": np.float32([[0.1, 0.3], [0.9, 0.9], [nan] * 2, [0.2, 0.4], [0.5, 0.5]]),
        "mean_client_accuracy": np.float32([0.2, 0.9, nan, 0.3, 0.5]),
        "mean_client_validation_accuracy": np.float32([0.9, 0.1, nan, 0.2, 0.3]),
    }
    summary = summarize_metrics(metrics)
    assert summary["best_accuracy"] == pytest.approx(0.6) and summary["best_round"] == 4
    assert summary["best_validation_accuracy"] == pytest.approx(0.8)
    assert summary["bmta"] == pytest.approx(0.2) and summary["bmta_round"] == 1
    assert summary["bmta_worst_decile"] == pytest.approx(0.1)
    assert summary["best_client_validation_accuracy"] == pytest.approx(0.9)
    for name in [name for name in metrics if "validation" in name]:
        del metrics[name]
    summary = summarize_metrics(metrics)
    assert summary["best_accuracy"] == pytest.approx(0.9) and summary["bmta_round"] == 2
    assert not [name for name in summary if "validation" in name or name == "best_round"]


@pytest.mark.slow
def test_loop_and_progress_show_validation(capsys):
    spec = make_spec(validation=0.2, rounds=3)
    seen = []
    live = federation(spec, dataset=make_user_dataset(), progress=seen.append)
    curves = [status.metrics["validation_accuracy"][-1] for status in live.rounds(every=1)]
    result = live.result()
    assert curves == result.metrics["validation_accuracy"].tolist()
    assert {progress.accuracy_name for progress in seen} <= {"accuracy", "validation accuracy"}
    assert seen[-1].accuracy_name == "validation accuracy"
    assert seen[-1].accuracy == pytest.approx(curves[-1])
    debug = run_spec(spec, debug=True)
    np.testing.assert_array_equal(
        debug.metrics["validation_accuracy"], result.metrics["validation_accuracy"]
    )


def test_real_control_of_dynafed_excludes_validation_examples():
    dataset = make_dataset()
    validation = np.flatnonzero(dataset.train_labels == 0)[2:]
    data = FederationData(dataset, PARTITION, None, 1, 0, None, validation)
    ((images, _),) = _make_control_inputs(True, 6, [data])
    withheld = {image.tobytes() for image in dataset.train_inputs[validation]}
    assert not withheld & {image.tobytes() for image in images}


def test_method_inputs_know_examples_of_validation_and_held_out_clients():
    spec = make_spec(num_clients=5, held_out_clients=1, validation=FRACTION)
    data = assign_data(spec.resolved(), make_dataset(), None, PARTITION)
    run = PreparedRun(**vars(data), scheduler=None)
    withheld = {*run.federation_data.withheld_indices.tolist()}
    assert withheld == {
        *data.validation.indices.tolist(),
        *data.held_out.partition.indices.tolist(),
    }
    run = dataclasses.replace(run, validation=None, held_out=None)
    assert run.federation_data.withheld_indices is None
