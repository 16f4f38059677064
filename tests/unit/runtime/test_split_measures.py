"""Measures of a split: gradients against NumPy, limits, skews, resume, results and sweeps."""

import numpy as np
import pytest
from support.small_runs import KilledError, make_killing_callback

from fedjax_het import (
    ConfigError,
    Placement,
    RunSpec,
    dataset_from_arrays,
    grid,
    load_results,
    measure_split,
    simulate,
    sweep,
)
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime import split_measures
from fedjax_het.runtime.results import Result

RNG = np.random.default_rng(0)
IMAGES = RNG.random((60, 4, 4, 1)).astype(np.float32)
LABELS = np.concatenate([np.arange(60) % 3])
DATA = dataset_from_arrays(IMAGES, LABELS, IMAGES[:9], LABELS[:9])
CLIENTS = [np.arange(0, 7), np.arange(7, 30), np.arange(0), np.arange(30, 60)]
PARTITION = partition_from_clients(CLIENTS)
SETTINGS = {"dataset": "user", "num_clients": 4, "rounds": 2, "batch_size": 8, "seed": 3}
DIGITS = {"dataset": "digits", "model": "mlp", "num_clients": 6, "partition": "iid", "rounds": 2}
METRICS = ("feature_distance", "gradient_dissimilarity")


def linear():
    """A linear softmax model as a pair of functions."""

    def init(key, images, train):
        del key, train
        size = int(np.prod(images.shape[1:]))
        rng = np.random.default_rng(5)
        kernel = rng.normal(size=(size, 3)).astype(np.float32)
        return {"params": {"kernel": kernel, "bias": np.float32([0.1, 0.0, -0.2])}}

    def apply(variables, images, train):
        params = variables["params"]
        return images.reshape(len(images), -1) @ params["kernel"] + params["bias"]

    return init, apply


def reference_gradients(images, labels):
    """Gradients of the cross-entropy of `linear` for each client, by hand in float64."""
    params = {
        k: np.asarray(v, np.float64) for k, v in linear()[0](None, images, 0)["params"].items()
    }
    inputs = (images.astype(np.float64) - DATA.mean) / DATA.std
    inputs = inputs.reshape(len(images), -1)
    gradients = []
    for own in CLIENTS:
        x = inputs[own]
        logits = x @ params["kernel"] + params["bias"]
        shares = np.exp(logits - logits.max(1, keepdims=True))
        errors = shares / shares.sum(1, keepdims=True) - np.eye(3)[labels[own]]
        kernel, bias = x.T @ errors, errors.sum(0)
        gradients.append(np.concatenate([kernel.ravel(), bias]) / max(len(own), 1))
    return np.stack(gradients)


def test_gradients_of_a_linear_model():
    measures = measure_split(
        RunSpec(**SETTINGS),
        dataset=DATA,
        partition=PARTITION,
        network=linear(),
        metrics=METRICS[1:],
    )
    gradients, shares = reference_gradients(IMAGES, LABELS), np.array([7, 23, 0, 30]) / 60
    mean = shares @ gradients
    norms, distances = np.square(gradients).sum(1), np.square(gradients - mean).sum(1)
    expected = shares @ norms / (mean @ mean)
    assert measures.values["gradient_dissimilarity"] == pytest.approx(expected, rel=1e-4)
    assert measures.values["gradient_variance"] == pytest.approx(shares @ distances, rel=1e-4)
    has_data = shares > 0
    for name, values in (("norm", norms), ("distance", distances)):
        actual = measures.client_values[f"gradient_{name}"]
        np.testing.assert_allclose(actual[has_data], np.sqrt(values[has_data]), rtol=1e-4)
        assert np.isnan(actual[2])
    # The measures are related: variance = (B^2 - 1) ||grad F||^2.
    excess = (measures.values["gradient_dissimilarity"] - 1) * (mean @ mean)
    assert measures.values["gradient_variance"] == pytest.approx(excess, rel=1e-3)


def test_clients_with_equal_data_do_not_differ():
    copies = [np.tile(a[:20], (3,) + (1,) * (a.ndim - 1)) for a in (IMAGES, LABELS[:, None])]
    data = dataset_from_arrays(copies[0], copies[1][:, 0], IMAGES[:9], LABELS[:9])
    partition = partition_from_clients(np.arange(60).reshape(3, 20))
    spec = RunSpec(**{**SETTINGS, "num_clients": 3}, model="mlp")
    measures = measure_split(spec, dataset=data, partition=partition)
    assert measures.values["feature_distance_max"] == pytest.approx(0, abs=1e-9)
    assert measures.values["gradient_dissimilarity"] == pytest.approx(1, abs=1e-5)
    assert measures.values["gradient_variance"] == pytest.approx(0, abs=1e-9)
    frame = measures.to_pandas()
    assert frame["label_total_variation"].tolist() == [0, 0, 0] and len(frame) == 3


@pytest.mark.parametrize(
    ("skew", "strengths"),
    [
        ("noise:std", (0.2, 0.6)),
        ("inversion:amount", (0.3, 1.0)),
        ("rotation:degrees", (20, 90)),
        ("contrast:amount", (0.3, 0.9)),
        ("permutation:share", (0.3, 1.0)),
    ],
)
def test_features_see_skews_of_images(skew, strengths):
    def measure(text):
        return measure_split(RunSpec(**DIGITS, skew=text), metrics=METRICS[:1]).values

    plain = measure(None)
    assert measure(f"{skew}=0") == plain
    values = [measure(f"{skew}={strength}")["feature_distance"] for strength in strengths]
    assert plain["feature_distance"] < values[0] < values[1]


def test_gradients_see_labels_and_images():
    def measure(**settings):
        spec = RunSpec(**{**DIGITS, **settings})
        return measure_split(spec, metrics=METRICS[1:]).values["gradient_dissimilarity"]

    equal, skewed = measure(), measure(partition="dirichlet", alpha=0.1)
    assert 1 < equal < skewed
    assert measure(skew="label_noise:rate=0") == equal < measure(skew="inversion:amount=1")
    assert equal < measure(skew="concept:share=1")


def test_results_have_the_measures_and_resuming_does_not_change_them(eager, tmp_path):
    spec = RunSpec(**DIGITS, skew="inversion:amount=1", metrics=METRICS)
    plain = simulate(RunSpec(**DIGITS, skew="inversion:amount=1"))
    result = simulate(spec, placement=Placement(lanes=2), output_dir=tmp_path / "whole")
    np.testing.assert_array_equal(result.metrics["test_loss"], plain.metrics["test_loss"])
    measures = measure_split(spec)
    split = result.summary["split"]
    assert {name: split[name] for name in measures.values} == measures.values
    assert split == measures.to_summary() and "feature_distance" not in plain.summary["split"]
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    resumed = simulate(spec, output_dir=tmp_path, resume=True)
    assert resumed.summary["split"] == split
    loaded = Result.load(next((tmp_path / "whole").glob("*.json")))
    for name, values in measures.client_values.items():
        np.testing.assert_array_equal(loaded.artifacts[f"split_{name}"], values)


def test_runs_with_an_equal_split_share_the_measures(monkeypatch):
    split_measures.clear_programs()
    calls = {"_measure_features": 0, "_measure_gradients": 0}

    def count(name):
        function = getattr(split_measures, name)

        def counted(*arguments):
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(split_measures, name, counted)

    for name in calls:
        count(name)
    specs = [
        RunSpec(**{**DIGITS, **changes})
        for changes in (
            {"skew": "noise:std=0.5"},
            {"skew": "noise:std=0.5", "algorithm": "fedprox"},
            {"skew": "noise:std=0.5", "seed": 1, "partition_seed": 0},
            {"skew": "noise:std=0.4"},
            {"skew": "noise:std=0.5", "partition_seed": 5},
        )
    ]
    values = [measure_split(spec).values for spec in specs]
    assert values[0] == values[1] and calls == {"_measure_features": 3, "_measure_gradients": 4}
    for i, name in ((2, METRICS[1]), (3, METRICS[0]), (4, METRICS[0])):
        assert values[i][name] != values[0][name]
    split_measures.clear_programs()
    assert measure_split(specs[1]).values == values[0]


def test_columns_of_a_sweep(tmp_path):
    specs = grid(**{**DIGITS, "rounds": 1}, skew={"noise.std": [0.0, 0.5]}, metrics=METRICS)
    sweep(specs, tmp_path, progress=None)
    results = load_results(tmp_path).sort_values("split.feature_distance")
    assert results["skew.noise.std"].fillna(0).tolist() == [0, 0.5]
    assert (results["split.gradient_dissimilarity"] >= 1).all()
    assert {"split.label_hellinger", "split.size_gini"} <= set(results)


@pytest.mark.parametrize("names", [["drift"], ["feature"]])
def test_unknown_measure_is_one_line(names):
    with pytest.raises(ConfigError, match=r"metrics = .*feature_distance, gradient") as caught:
        measure_split(RunSpec(**DIGITS), metrics=names)
    assert "\n" not in str(caught.value)
