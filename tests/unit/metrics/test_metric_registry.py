"""Metrics of runs besides accuracy and loss, against NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import make_domains_dataset, make_user_dataset
from support.markers import slow_case
from support.small_runs import assert_results_equal, final_model_logits, make_spec, run_spec

from fedjax_het import (
    ConfigError,
    MetricInfo,
    RunSpec,
    register_metric,
    simulate,
    sweep,
)
from fedjax_het.core.evaluation import evaluate, place_evaluation_set
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.gradient_diagnostics import GRADIENT_GAP_NAMES
from fedjax_het.core.task import Task
from fedjax_het.data import partition_from_clients
from fedjax_het.metrics.personal import worst_decile
from fedjax_het.metrics.registry import (
    METRICS,
    compute_fairness,
    compute_pooled_accuracy,
    get_metric_info,
    parse_metrics,
)
from fedjax_het.nn import to_model
from fedjax_het.runtime.sweep import plan_sweep

DATA = make_user_dataset()
OF_EXAMPLES = "class_accuracy, macro_f1, calibration, confusion"


@pytest.fixture(autouse=True)
def _forget():
    yield
    METRICS.reset()


# --- oracles -------------------------------------------------------------------------------------


def confusion(logits, labels):
    table = np.zeros((logits.shape[1],) * 2)
    for row, label in zip(logits, labels, strict=True):
        table[label, int(np.argmax(row))] += 1
    return table


def f1_of(table):
    """The mean over the classes that occur."""
    scores = []
    for c in range(len(table)):
        true, said = table[c].sum(), table[:, c].sum()
        if true + said:
            precision = table[c, c] / said if said else 0.0
            recall = table[c, c] / true if true else 0.0
            either = precision + recall
            scores.append(2 * precision * recall / either if either else 0.0)
    return np.mean(scores)


def calibration_error(logits, labels):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    confidence, right = shares.max(1), logits.argmax(1) == labels
    error = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def measured_of(logits, labels):
    table = confusion(logits, labels)
    held = table.sum(1)
    by_class = np.full(len(held), np.nan)
    by_class[held > 0] = table.diagonal()[held > 0] / held[held > 0]
    return {
        "confusion": table,
        "class_accuracy": by_class,
        "macro_f1": f1_of(table),
        "calibration_error": calibration_error(logits, labels),
    }


# --- of outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("count", [7, 250, 613])
def test_metrics_match_numpy(count, blocks):
    """Logits that are read off the images; batches and blocks that are not full; a class without
    examples and one that is never predicted."""
    rng = np.random.default_rng(count)
    logits = rng.normal(size=(count, 5)).astype(np.float32) * 3
    logits[:, 4] = -9
    labels = rng.integers(0, 5, count)
    labels[labels == 2] = 0
    pair = (lambda key: {"unused": jnp.zeros(1)}, lambda params, x: x[:, 0, :, 0])
    model = to_model(pair, (1, 5, 1), 5)
    task = Task(model, (0.0,), (1.0,))
    plan = make_execution_plan(1, 1, mesh_axis=None, blocks=blocks)
    variables = model.init(jax.random.key(0))
    data = place_evaluation_set(plan, logits[:, None, :, None], labels)
    actual = jax.jit(lambda v, d: evaluate(task, plan, v, d, metrics=parse_metrics(OF_EXAMPLES)))
    measured = actual(variables, data).metrics
    expected = measured_of(logits.astype(np.float64), labels)
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    bad = logits.copy()
    bad[count // 2, 1] = np.inf
    data = place_evaluation_set(plan, bad[:, None, :, None], labels)
    lost = actual(variables, data).metrics
    assert np.isnan(lost["macro_f1"]) and np.isnan(lost["calibration_error"])


def test_metrics_of_run_match_model():
    result = run_spec(make_spec(rounds=6, eval_every=2, metrics=OF_EXAMPLES, hp={"local_lr": 0.2}))
    expected = measured_of(final_model_logits(result, DATA), DATA.test_labels)
    for name, value in expected.items():
        curve = result.metrics[name]
        assert curve.shape == (6, *np.shape(value))
        np.testing.assert_allclose(curve[-1], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert np.isnan(curve[0]).all()  # before the first evaluation
    for name in ("macro_f1", "calibration_error"):
        mean = np.mean(result.metrics[name][-5:])
        assert result.summary[f"final_{name}"] == pytest.approx(mean)
    actual = result.model().evaluate(DATA.test_inputs, DATA.test_labels)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(actual, name), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", *map(slow_case, ("dynafed", "scaffold", "fedaf"))])
def test_metrics_do_not_change_run(name):
    plain, measured = run_spec(make_spec(name)), run_spec(make_spec(name, metrics=OF_EXAMPLES))
    expected = measured_of(np.zeros((1, 2)), [0]).keys()
    assert measured.metrics.keys() - plain.metrics.keys() == expected
    for metric, values in plain.metrics.items():
        np.testing.assert_allclose(measured.metrics[metric], values, rtol=1e-6, err_msg=metric)


@pytest.mark.parametrize(
    "settings", [slow_case({"lanes": 2}), slow_case({"lanes": 1, "devices": 1}), {"blocks": 3}]
)
def test_metrics_do_not_depend_on_placement(settings):
    asked = make_spec(metrics=f"{OF_EXAMPLES}, drift", rounds=5)
    here, there = run_spec(asked, lanes=1), run_spec(asked, **settings)
    for name in ("confusion", "macro_f1", "calibration_error", "drift_cosine", "drift_distance"):
        np.testing.assert_allclose(
            here.metrics[name], there.metrics[name], rtol=2e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.slow
def test_metrics_in_sweep_and_resumed(tmp_path):
    asked = make_spec(metrics=f"{OF_EXAMPLES}, drift", rounds=5, eval_every=2)
    whole = run_spec(asked)
    others = [dataclasses.replace(asked, seed=seed) for seed in range(3)]
    swept = sweep(others, dataset=DATA, progress=lambda line: None).results
    assert_results_equal(swept[0], run_spec(asked))
    run_spec(dataclasses.replace(asked, rounds=3), output_dir=tmp_path)
    assert_results_equal(run_spec(asked, output_dir=tmp_path, resume=True), whole)


# --- of clients ----------------------------------------------------------------------------------


def test_compute_fairness():
    rng = np.random.default_rng(0)
    table = rng.random((4, 28))  # 28: a tenth rounded down is 2 clients
    table[0, :9] = np.nan
    table[1] = np.nan
    table[2] = 0.4
    actual = compute_fairness(table)
    for r in (0, 2, 3):
        known = [a for a in table[r] if not np.isnan(a)]
        worst = sorted(known)[: max(1, len(known) // 10)]
        pairs = [abs(a - b) for a in known for b in known]
        expected = {
            "worst_decile": np.mean(worst),
            "accuracy_variance": np.var(known),
            "accuracy_gini": np.mean(pairs) / (2 * np.mean(known)),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name][r], value, atol=1e-12, err_msg=name)
        assert actual["worst_decile"][r] == worst_decile(table[r])
    assert all(np.isnan(values[1]) for values in actual.values())
    assert compute_fairness(np.zeros((1, 3)))["accuracy_gini"][0] == 0


@pytest.mark.parametrize("name", [slow_case("fedavg"), "fedamp"])
def test_fairness_of_run(name):
    settings = {"rounds": 3, "client_tests": True, "test_per_client": 6}
    result = run_spec(make_spec(name, **settings, metrics="fairness"))
    expected = compute_fairness(result.metrics["client_accuracy"])
    for curve, values in expected.items():
        np.testing.assert_allclose(result.metrics[curve], values, rtol=1e-6)
        assert result.summary[f"final_{curve}"] == pytest.approx(np.mean(values), rel=1e-5)


def test_pooled_accuracy_counts_each_example():
    correct, sizes = np.array([[3, 0, 7], [1, 5, 0]]), np.array([4, 5, 9])
    np.testing.assert_allclose(compute_pooled_accuracy(correct / sizes, sizes), [10 / 18, 6 / 18])
    accuracy = np.array([[0.5, np.nan, 1.0], [np.nan, 0.5, 1.0]])
    actual = compute_pooled_accuracy(accuracy, np.array([4, 0, 12]))
    np.testing.assert_allclose(actual, [14 / 16, np.nan])


@pytest.mark.parametrize("model", ["global", "client"])
def test_pooled_accuracy_of_run(model):
    settings = {"client_tests": True, "test_per_client": "proportional", "participation": 1.0}
    spec = make_spec(rounds=3, metrics="pooled_accuracy", client_test_model=model, **settings)
    result = run_spec(spec)
    accuracy, sizes = result.metrics["client_accuracy"], result.tests.sizes
    pooled = result.metrics["pooled_client_accuracy"]
    has_test = sizes > 0
    expected = (accuracy[:, has_test] * sizes[has_test]).sum(1) / sizes.sum()
    np.testing.assert_allclose(pooled, expected, rtol=1e-6)
    assert result.summary["final_pooled_client_accuracy"] == pytest.approx(pooled.mean(), rel=1e-5)
    # The clients' tests are the whole test split, on which the global model is tested.
    assert sizes.sum() == len(DATA.test_labels)
    if model == "global":
        np.testing.assert_allclose(pooled, result.metrics["test_accuracy"], atol=1e-6)


# --- of what they send ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("averaging", [slow_case("uniform"), "weighted"])
def test_drift_matches_client_updates(averaging, tmp_path):
    """Whole batches and all clients: what one of them sends is the change of a federation that it
    makes up by itself, begun with the same model."""
    owners = [np.arange(0, 5), np.arange(5, 21), np.arange(21, 30), np.zeros(0, np.int64)]
    settings = {"batch_size": 51, "hp": {"local_lr": 0.3}, "participation": 1.0, "rounds": 1}
    first = run_spec(make_spec(rounds=1, num_clients=4, hp={"local_lr": 0.0}, seed=2))
    path = str(first.save_model(tmp_path / "first.msgpack"))
    settings |= {"local_epochs": 3, "init_from": path}
    spec = make_spec(**settings, num_clients=4, averaging=averaging, metrics="drift")
    result = run_spec(spec, partition=partition_from_clients(owners))
    begun = np.concatenate([np.ravel(a) for a in jax.tree.leaves(first.model().variables)])
    sent = []
    for own in owners[:3]:
        spec = make_spec(**settings, num_clients=1)
        alone = run_spec(spec, partition=partition_from_clients([own]))
        ended = np.concatenate([np.ravel(a) for a in jax.tree.leaves(alone.model().variables)])
        sent.append(ended.astype(np.float64) - begun)
    weights = np.array([5, 16, 9]) / 30 if averaging == "weighted" else np.full(3, 1 / 3)
    mean = weights @ np.array(sent)
    norm = np.linalg.norm(mean)
    cosines = [d @ mean / np.linalg.norm(d) / norm for d in sent]
    distance = np.sqrt(weights @ [np.sum((d - mean) ** 2) for d in sent]) / norm
    np.testing.assert_allclose(result.metrics["drift_cosine"], weights @ cosines, rtol=1e-4)
    np.testing.assert_allclose(result.metrics["drift_distance"], distance, rtol=1e-3)
    assert 0.1 < result.metrics["drift_cosine"][0] < 0.999


def test_drift_of_one_client():
    result = run_spec(make_spec(rounds=3, num_clients=6, participation=1 / 6, metrics="drift"))
    np.testing.assert_allclose(result.metrics["drift_cosine"], 1, rtol=1e-4)
    # The root of a difference of two numbers that are equal to rounding.
    np.testing.assert_allclose(result.metrics["drift_distance"], 0, atol=1e-2)


DRIFT_METHODS = (
    *("fednova", "feddc", "moon", "fedprox", "dynafed"),
    *("fsl", "fedmix", "ditto", "feddyn", "fedadam", "per_fedavg"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", *DRIFT_METHODS])
def test_drift_of_methods(name):
    plain = run_spec(make_spec(name, rounds=5))
    result = run_spec(make_spec(name, rounds=5, metrics="drift"))
    cosine = result.metrics["drift_cosine"]
    assert np.isfinite(cosine).all() and (cosine <= 1 + 1e-5).all()
    assert (result.metrics["drift_distance"] >= 0).all()
    losses = result.metrics["test_loss"], plain.metrics["test_loss"]
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-5)


# --- a user's own --------------------------------------------------------------------------------


def test_user_metric(tmp_path):
    def top_two(logits, labels, known):
        best = jax.lax.top_k(logits, 2)[1]
        return {"right": ((best == labels[:, None]).any(1) * known).sum(), "seen": known.sum()}

    register_metric("top_two", top_two, lambda sums: {"top2": sums["right"] / sums["seen"]})
    result = run_spec(make_spec(rounds=5, metrics=["top_two", "macro_f1"]))
    best = np.argsort(-final_model_logits(result, DATA), 1)[:, :2]
    expected = np.mean([label in two for two, label in zip(best, DATA.test_labels, strict=True)])
    assert result.metrics["top2"][-1] == pytest.approx(expected, abs=1e-6)
    assert result.spec.metrics == "top_two, macro_f1"
    ((plain_digest, _, _),) = plan_sweep([make_spec(rounds=5)], tmp_path, dataset=DATA)
    assert result.digest() != plain_digest


@pytest.mark.parametrize(
    ("sums", "finish", "expected"),
    [
        (lambda a, b, c: 1 / 0, lambda s: {}, "one raises ZeroDivisionError"),
        (lambda a: a, lambda s: {}, "one raises TypeError"),
        (lambda a, b, c: a.sum(), lambda s: s, "expected a dict of arrays by name"),
        (lambda a, b, c: a.sum(), lambda s: {"test_loss": s}, "a name that no other metric"),
        (lambda a, b, c: a.sum(), lambda s: {"macro_f1": s}, "a name that no other metric"),
        (lambda a, b, c: a.sum(), lambda s: {"accuracy": s}, "a name that no other metric"),
        (lambda a, b, c: a.sum(), lambda s: {"worst_decile": s}, "a name that no other metric"),
        (lambda a, b, c: a.sum(), lambda s: {"objective": s}, "a name that no other metric"),
        (lambda a, b, c: a.sum(), lambda s: {"digest": s}, "a name that no other metric"),
        (lambda a, b, c: "text", lambda s: {"x": s}, "one raises"),
        (
            lambda a, b, c: a.sum(-1) * c,
            lambda s: {"x": s.sum()},
            r"sums returned the shapes \[\(2,\)\] for 2 examples and \[\(3,\)\] for 3: expected",
        ),
    ],
)
def test_user_metric_rejects_invalid_functions(sums, finish, expected):
    register_metric("mine", sums, finish)
    with pytest.raises(ConfigError, match=expected) as caught:
        run_spec(make_spec(rounds=2, metrics="macro_f1, mine"))
    assert "metric 'mine'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"metrics": "macro"}, "did you mean 'macro_f1'"),
        ({"metrics": "drift, drift"}, "each name once"),
        ({"metrics": "drift,"}, "metrics = ''"),
        ({"metrics": "drift\n"}, "metrics = 'drift"),
        ({"metrics": "fairness"}, "client_tests = True, or another"),
        ({"algorithm": "fedamp", "metrics": "calibration"}, "no global model to evaluate"),
        ({"algorithm": "fedamp", "metrics": "drift"}, "send changes of the model"),
        ({"algorithm": "feddm", "metrics": "drift"}, "clients of feddm send no updates"),
        ({"metrics": 3}, "metrics = 3"),
    ],
)
def test_metrics_reject_invalid_settings(settings, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        run_spec(make_spec(**{"rounds": 2, **settings}))
    assert "\n" not in str(caught.value)


def test_metrics_in_digest():
    assert "metrics" not in RunSpec().resolved().to_dict()
    as_text = RunSpec(metrics=" drift,macro_f1")
    assert RunSpec(metrics=["drift", "macro_f1"]).digest() == as_text.digest()


def test_metrics_with_domains():
    data = make_domains_dataset()
    result = simulate(make_spec(rounds=5, metrics="confusion"), dataset=data)
    table = result.metrics["confusion"][-1]
    assert table.sum() == len(data.test_labels)
    share = np.diagonal(table).sum() / table.sum()
    assert share == pytest.approx(result.metrics["test_accuracy"][-1])


# --- declarations --------------------------------------------------------------------------------


def count_zero(logits, labels, known):
    return known.sum()


def test_user_declaration():
    info = MetricInfo("Top-two error", "", higher_is_better=False, is_fraction=True)
    register_metric("mine", count_zero, lambda sums: {"error": sums}, infos={"error": info})
    assert get_metric_info("error") == info and info.axis_label == "Top-two error (%)"
    final = get_metric_info("final_error")
    assert (final.higher_is_better, final.scale, final.missing) == (False, 100, "undefined")
    assert get_metric_info("accuracy of nothing") == MetricInfo(missing="undefined")


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({"test_loss": MetricInfo()}, "infos = 'test_loss': expected a name that no other metric"),
        ({"macro_f1": MetricInfo()}, "infos = 'macro_f1': expected a name that no other metric"),
        ({"accuracy": MetricInfo()}, "infos = 'accuracy': expected a name that no other metric"),
        ({"accuracy_x": MetricInfo()}, "infos = 'accuracy_x'"),
        ({"error": "higher"}, "infos"),
        ({"error": MetricInfo(higher_is_better="up")}, "higher_is_better"),
    ],
)
def test_user_declaration_rejects_invalid_values(infos, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        register_metric("mine", count_zero, lambda sums: {"error": sums}, infos=infos)
    assert "\n" not in str(caught.value)


def test_declared_values_are_returned():
    infos = {"eror": MetricInfo()}
    register_metric("mine", count_zero, lambda sums: {"error": sums}, infos=infos)
    with pytest.raises(ConfigError, match="'mine' = 'eror': expected a value that finish returns"):
        run_spec(make_spec(rounds=2, metrics="mine"))


def test_every_metric_is_declared():
    metrics = ", ".join(METRICS)
    result = run_spec(make_spec(rounds=2, metrics=metrics, client_tests=True, test_per_client=6))
    for name in result.metrics:
        assert get_metric_info(name).label, name
    numbers = {name for name, value in result.summary.items() if type(value) is float}
    of_methods = {*GRADIENT_GAP_NAMES, "objective", "objective_gradient", "collaboration"}
    of_methods |= {"matching_loss", "synthesis_step_size", "condensed_images", "epsilon"}
    for name in numbers | of_methods:
        assert get_metric_info(name).label, name


@pytest.mark.parametrize(
    ("name", "higher_is_better", "scale"),
    [
        ("final_accuracy", True, 100),
        ("final_accuracy_variance", False, 1),
        ("accuracy_gini", False, 1),
        ("final_worst_decile", True, 100),
        ("bmta_worst_decile", True, 100),
        ("final_macro_f1", True, 1),
        ("calibration_error", False, 1),
        ("drift_cosine", None, 1),
        ("test_loss", False, 1),
        ("bytes_up", False, 1),
        ("client_samples_per_second", True, 1),
        ("final_accuracy_std", None, 100),
        ("rise_time", None, 1),
        ("rounds_to_half", False, 1),
        ("bmta_round", None, 1),
        ("test_accuracy_photo", True, 100),
        ("client_accuracy_a", True, 100),
        ("accuracy_photo", True, 100),
    ],
)
def test_declared_direction_and_scale(name, higher_is_better, scale):
    info = get_metric_info(name)
    assert (info.higher_is_better, info.scale) == (higher_is_better, scale)
