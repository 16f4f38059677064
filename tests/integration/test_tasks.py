"""Runs on features, series and tokens, and of every kind of task."""

import dataclasses

import flax.linen as nn
import numpy as np
import pytest
from support.markers import method_cases, slow_case
from support.small_runs import (
    FAST_OPTIONS,
    KilledError,
    assert_results_equal,
    make_killing_callback,
)

from fedjax_het import (
    ConfigError,
    Placement,
    RunSpec,
    dataset_from_arrays,
    evaluate,
    grid,
    load_dataset,
    load_model,
    simulate,
    sweep,
)
from fedjax_het.algorithms import METHODS
from fedjax_het.condensation import DSA_STRATEGY
from fedjax_het.tasks import TASKS
from fedjax_het.tasks.survival import encode_survival

SETTINGS = {"partition": "iid", "num_clients": 3, "rounds": 3, "local_epochs": 1}
SETTINGS |= {"local_optimizer": "sgd", "learning_rate": 0.1, "batch_size": 8, "protocol": "fedamp"}
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(60, 4)).astype(np.float32)
SERIES = RNG.normal(size=(60, 6, 2)).astype(np.float32)
TOKENS = RNG.integers(0, 5, (60, 7))
WEIGHTS = RNG.normal(size=(4, 2))
TIMES, EVENTS = np.exp(FEATURES[:, 0]), FEATURES[:, 1] > -0.5


def make_dataset(inputs, labels, **settings):
    return dataset_from_arrays(inputs[:40], labels[:40], inputs[40:], labels[40:], **settings)


CASES = {
    "classification": (
        make_dataset(FEATURES, (FEATURES @ WEIGHTS).argmax(1)),
        {"model": "mlp", "network_options": {"hidden": [6]}},
    ),
    "multi_label": (
        make_dataset(SERIES, (SERIES.sum(1) > 0).astype(int), task="multi_label"),
        {"model": "gru", "network_options": {"hidden": 6, "layers": 1}},
    ),
    "regression": (
        make_dataset(FEATURES, FEATURES @ WEIGHTS, task="regression"),
        {"model": "mlp", "network_options": {"hidden": [6]}},
    ),
    "next_token": (
        make_dataset(TOKENS[:, :-1], TOKENS[:, 1:], task="next_token", num_tokens=5),
        {"model": "lstm", "network_options": {"hidden": 6, "layers": 1}},
    ),
    "survival": (
        make_dataset(FEATURES, encode_survival(TIMES, EVENTS, [0.5, 1, 2]), task="survival"),
        {"model": "mlp", "network_options": {"hidden": [6]}},
    ),
}


def run(task, **settings):
    dataset, network = CASES[task]
    placement = settings.pop("placement", Placement())
    folders = {name: settings.pop(name) for name in ("output_dir", "resume") if name in settings}
    callbacks = settings.pop("callbacks", ())
    spec = RunSpec(**{**SETTINGS, **network, **settings})
    return simulate(spec, dataset=dataset, placement=placement, callbacks=callbacks, **folders)


@pytest.mark.parametrize("task", ["regression", slow_case("multi_label"), "next_token", "survival"])
def test_test_loss_and_score_are_means_of_the_outputs(task, tmp_path):
    """In float64, from the outputs of the final model; also of a model that is read from a file."""
    dataset, _ = CASES[task]
    result = run(task)
    model = load_model(result.save_model(tmp_path / "model.msgpack"))
    outputs, labels = np.float64(model.logits(dataset.test_inputs)), dataset.test_labels
    if task == "regression":
        errors = (outputs - labels) ** 2
        loss, score = errors.mean(), 1 - (errors / labels.astype(np.float64).var(0)).mean()
    elif task == "multi_label":
        loss = np.logaddexp(0, np.where(labels > 0, -outputs, outputs)).mean()
        score = ((outputs > 0) == (labels > 0)).mean()
    elif task == "survival":
        is_at_risk, events = labels >= 0, (labels == 1).sum(0)
        losses = np.logaddexp(0, np.where(labels == 1, -outputs, outputs))
        hazards = np.broadcast_to(events / is_at_risk.sum(0), labels.shape)
        null_losses = -np.log(np.where(labels == 1, hazards, 1 - hazards))
        loss = (losses * is_at_risk).sum() / len(labels)
        score = 1 - loss / ((null_losses * is_at_risk).sum() / len(labels))
    else:
        log_sums = np.log(np.exp(outputs).sum(-1))
        loss = (log_sums - np.take_along_axis(outputs, labels[..., None], -1)[..., 0]).mean()
        score = (outputs.argmax(-1) == labels).mean()
    np.testing.assert_allclose(result.metrics["test_loss"][-1], loss, rtol=1e-5)
    np.testing.assert_allclose(result.metrics["test_accuracy"][-1], score, rtol=1e-5)
    evaluation = evaluate(model, dataset)
    np.testing.assert_allclose((evaluation.score, evaluation.loss), (score, loss), rtol=1e-5)
    assert evaluation.score_name == TASKS[task].make.score_name in repr(result)


def test_a_round_of_regression_is_fedavg_by_hand():
    """One step of SGD on a linear model at each client, averaged by size."""
    dataset, _ = CASES["regression"]
    settings = {"network_options": {"hidden": []}, "rounds": 1, "batch_size": 40}
    start = run("regression", **settings, learning_rate=0.0).model().variables["params"]["head"]
    result = run("regression", **settings)
    x = (dataset.train_inputs - np.float64(dataset.mean)) / np.float64(dataset.std)
    kernel, bias = np.float64(start["kernel"]), np.float64(start["bias"])
    errors = x @ kernel + bias - dataset.train_labels
    # The clients together hold each example once: the mean of the gradients weighted by size.
    gradient = 2 * x.T @ errors / errors.size
    layer = result.model().variables["params"]["head"]
    np.testing.assert_allclose(layer["kernel"], kernel - 0.1 * gradient, rtol=1e-4, atol=1e-6)
    expected = bias - 0.1 * 2 * errors.sum(0) / errors.size
    np.testing.assert_allclose(layer["bias"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["next_token", slow_case("regression"), slow_case("multi_label")])
def test_placement_and_resuming_do_not_change_a_run(task, tmp_path):
    expected = run(task)
    lanes = run(task, placement=Placement(lanes=3))
    for name in ("test_loss", "test_accuracy", "train_loss"):
        np.testing.assert_allclose(lanes.metrics[name], expected.metrics[name], atol=1e-5)
    with pytest.raises(KilledError):
        run(task, output_dir=tmp_path, callbacks=[make_killing_callback(2)])
    assert_results_equal(run(task, output_dir=tmp_path, resume=True), expected)


def test_sweep_finds_results_of_a_regression_with_a_user_network(tmp_path):
    class TwoOutputs(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x)

    dataset, _ = CASES["regression"]
    spec, lines = RunSpec(**SETTINGS), []
    for _ in range(2):
        outcome = sweep(
            [spec], tmp_path, dataset=dataset, network=TwoOutputs(), progress=lines.append
        )
        assert outcome.results[0] is not None
    assert any("already" in line for line in lines)


def test_runs_of_a_sweep_equal_single_runs():
    dataset, network = CASES["regression"]
    specs = grid(**SETTINGS, **network, seed=[0, 1])
    for result in sweep(specs, dataset=dataset).results:
        single = run("regression", seed=result.spec.seed)
        np.testing.assert_allclose(
            result.metrics["test_loss"], single.metrics["test_loss"], rtol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "kind", "num_outputs", "num_users"),
    [
        ("speakers", "tokens", 60, 20),
        ("breast_cancer", "features", 2, 0),
        ("diabetes", "features", 1, 0),
        ("cylinder_bell_funnel", "series", 3, 20),
    ],
)
def test_data_sets_without_images(name, kind, num_outputs, num_users):
    dataset = load_dataset(name)
    assert (dataset.input_kind, dataset.num_outputs, dataset.num_users) == (
        *(kind, num_outputs),
        num_users,
    )
    spec = RunSpec(dataset=name).resolved()
    assert (spec.partition == "natural") == (num_users > 0)
    assert load_dataset(name).digest() == dataset.digest()
    if kind == "tokens":  # the label of a character is the next one
        np.testing.assert_array_equal(dataset.train_inputs[:, 1:], dataset.train_labels[:, :-1])
    else:
        normalized = (dataset.train_inputs - np.array(dataset.mean)) / np.array(dataset.std)
        np.testing.assert_allclose(normalized.std(tuple(range(normalized.ndim - 1))), 1, rtol=1e-3)


@pytest.mark.parametrize("method", [slow_case("dynafed"), "feddm"])
def test_condensation_of_features(method):
    """Synthetic features have the shape of the inputs, and families of augmentation are refused."""
    dataset = load_dataset("breast_cancer")
    options = {}
    if method == "dynafed":
        options = {"trajectory_rounds": 4, "segment_length": 2, "num_iterations": 3}
        options |= {"inner_steps": 2, "target_counts": 1, "num_samples": 4, "fine_tune_epochs": 1}
    else:
        options = {"ipc": 2, "steps": 3, "server_epochs": 2}
    settings = {"partition": "iid", "num_clients": 3, "rounds": 6, "model": "mlp"}
    spec = RunSpec(method, dataset="breast_cancer", options=options, **settings)
    result = simulate(spec)
    assert result.synthetic_dataset().inputs.shape[1:] == dataset.input_shape
    assert np.isfinite(result.metrics["test_loss"]).all()
    images_only = options | {"augment_strategy": DSA_STRATEGY}
    augmented = simulate(RunSpec(method, dataset="breast_cancer", options=images_only, **settings))
    np.testing.assert_array_equal(augmented.metrics["test_loss"], result.metrics["test_loss"])
    options["augment_strategy"] = "flip"
    with pytest.raises(ConfigError, match="expected 'none', as inputs of shape"):
        simulate(RunSpec(method, dataset="breast_cancer", options=options, **settings))


@pytest.mark.parametrize("method", method_cases(quick=()))
def test_table_of_inputs_is_right(method):
    """A method runs on the inputs and tasks that its entry names, and refuses the others."""
    entry = METHODS[method]
    for task, (dataset, network) in CASES.items():
        settings = {"num_clients": 3, "rounds": 1, "partition": "iid", **network}
        options = {**FAST_OPTIONS.get(method, {})}
        if "augment_strategy" in entry.option_names:
            options["augment_strategy"] = "none"
        if entry.requires_server_examples:
            settings |= {"server_options": {"size": 6}, "pretrain_epochs": 1}
        if method not in ("feddm", "fedaf"):
            settings |= {"local_epochs": 1, "learning_rate": 0.1, "local_optimizer": "sgd"}
        spec = RunSpec(method, options=options, batch_size=8, **settings)
        is_accepted = dataset.input_kind in entry.input_kinds
        is_accepted &= TASKS[task].make.has_classes or not entry.needs_classes
        if is_accepted and not reads_features_of_tokens(method, task):
            assert np.isfinite(simulate(spec, dataset=dataset).metrics["update_norm"]).all()
        else:
            with pytest.raises(ConfigError):
                simulate(spec, dataset=dataset)


def reads_features_of_tokens(method, task):
    """Networks with logits per token have no `embed`."""
    return task == "next_token" and method in ("moon", "feddecorr", "fedrod", "ccvr")


NUMBERS, CATEGORIES = RNG.normal(30, 10, (60, 3)), RNG.integers(0, 4, (60, 2))
MIXED_LABELS = ((NUMBERS[:, 0] > 30) + (CATEGORIES[:, 1] > 1)).astype(int)


def take_mixed(rows):
    return {"numbers": NUMBERS[rows], "category": CATEGORIES[rows]}


def make_mixed_dataset(**settings):
    train, test = slice(40), slice(40, 60)
    labels = (MIXED_LABELS[train], MIXED_LABELS[test])
    settings = {"num_tokens": {"category": 4}} | settings
    return dataset_from_arrays(
        take_mixed(train), labels[0], take_mixed(test), labels[1], **settings
    )


MIXED_SPEC = RunSpec(
    model="tabular_mlp", **SETTINGS, network_options={"hidden": [6], "embedding": 3}
)


def test_inputs_of_several_arrays(tmp_path):
    """The outputs of a trained model in float64, and the same run in lanes and from a file."""
    dataset = make_mixed_dataset()
    result = simulate(MIXED_SPEC, dataset=dataset)
    params = result.model().variables["params"]
    mean, std = (np.array(getattr(dataset, name)["numbers"]) for name in ("mean", "std"))
    np.testing.assert_allclose(mean, NUMBERS[:40].mean(0), rtol=1e-5)
    vectors = params["embedding_category"]["embedding"][dataset.test_inputs["category"]]
    numbers = (dataset.test_inputs["numbers"] - mean) / std
    x = np.concatenate([vectors.reshape(20, -1), numbers], 1)
    hidden = np.maximum(x @ params["hidden1"]["kernel"] + params["hidden1"]["bias"], 0)
    expected = hidden @ params["head"]["kernel"] + params["head"]["bias"]
    model = load_model(result.save_model(tmp_path / "model.msgpack"))
    np.testing.assert_allclose(model.logits(dataset.test_inputs), expected, rtol=1e-4, atol=1e-5)
    accuracy = (expected.argmax(1) == dataset.test_labels).mean()
    np.testing.assert_allclose(result.metrics["test_accuracy"][-1], accuracy, rtol=1e-6)
    folder = tmp_path / "runs"
    with pytest.raises(KilledError):
        kill = make_killing_callback(1)
        simulate(MIXED_SPEC, dataset=dataset, output_dir=folder, callbacks=[kill])
    assert list(folder.rglob("*.npz"))
    resumed = simulate(MIXED_SPEC, dataset=dataset, output_dir=folder, resume=True)
    assert_results_equal(resumed, result)
    paged = simulate(MIXED_SPEC, dataset=dataset, placement=Placement(client_data="host"))
    assert_results_equal(paged, result)
    lanes = simulate(MIXED_SPEC, dataset=dataset, placement=Placement(lanes=3))
    np.testing.assert_allclose(lanes.metrics["test_loss"], result.metrics["test_loss"], atol=1e-5)
    assert make_mixed_dataset().digest() == dataset.digest()
    assert make_mixed_dataset(num_tokens={"category": 5}).digest() != dataset.digest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_tokens": {"cat": 4}}, "num_tokens = {'cat': 4}: expected numbers by name"),
        ({"num_tokens": 4}, "num_tokens = 4: expected numbers by name"),
        ({"num_tokens": {"category": 2}}, r"range of train_inputs\['category'\]"),
        (
            {"num_tokens": None},
            r"train_inputs\['category'\] = 'int64 .*expected num_tokens for tokens",
        ),
        ({"mean": {"number": (1.0,)}}, "mean"),
        ({"task": "next_token"}, "train_inputs = 'several arrays': expected one array of tokens"),
    ],
)
def test_invalid_inputs_of_several_arrays(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_mixed_dataset(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["feddf", "ccvr", "fsl", "moon", "fedrep", "dynafed", "fedmix"])
def test_methods_on_inputs_of_several_arrays(method):
    options = FAST_OPTIONS.get(method, {})
    settings = {"server_options": {"size": 6}} if METHODS[method].requires_server_examples else {}
    spec = dataclasses.replace(MIXED_SPEC, algorithm=method, options=options, rounds=1, **settings)
    if "mixed" not in METHODS[method].input_kinds:
        with pytest.raises(ConfigError, match=f"{method} does not accept inputs"):
            simulate(spec, dataset=make_mixed_dataset())
    else:
        result = simulate(spec, dataset=make_mixed_dataset())
        assert np.isfinite(result.metrics["update_norm"]).all()
