"""Runs with attacks and robust aggregation: one round by hand, placement, resuming, refusals."""

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from support.markers import method_cases, slow_case
from support.small_runs import (
    FAST_OPTIONS,
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import (
    ConfigError,
    RunSpec,
    dataset_from_arrays,
    grid,
    load_dataset,
    register_method,
    simulate,
)
from fedjax_het.algorithms import METHODS
from fedjax_het.attacks import Backdoor, SignFlip
from fedjax_het.data import partition_from_clients
from fedjax_het.methods import build_federated_algorithm, make_local_sgd

SMALL = {"network_options": {"hidden": [8]}, "rounds": 4, "num_clients": 6}
SMALL |= {"local_optimizer": "sgd", "learning_rate": 0.1, "participation": 1.0}
TOLERANCES = {"rtol": 1e-3, "atol": 2e-6}
METRICS = ("train_loss", "test_loss", "test_accuracy", "update_norm")


def make(algorithm="fedavg", **settings):
    return make_spec(algorithm, **{**SMALL, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"attack": "sign_flip:fraction=0"},
        {"aggregation": "norm_clipping:max_norm=inf"},
        slow_case({"aggregation": "norm_clipping:max_norm=1e20"}),
        {"attack": "label_flip:fraction=0.01"},  # of six clients none
        slow_case({"attack": "alie:fraction=0.01,z=9"}),
        slow_case({"aggregation": "bucketing:size=1"}),
    ],
)
@pytest.mark.parametrize("algorithm", ["fedavg", slow_case("scaffold")])
def test_neutral_settings_are_the_plain_run_to_the_bit(algorithm, settings):
    plain, other = (run_spec(make(algorithm, **more)) for more in ({}, settings))
    for name in METRICS:
        np.testing.assert_array_equal(other.metrics[name], plain.metrics[name], name)


def get_change(result, start):
    end = result.model().variables["params"]
    return jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), end, start)


def test_a_round_is_the_rule_of_the_clients_own_changes():
    """The changes of single clients come from runs in which no other client holds examples."""
    spec = make(rounds=1, averaging="uniform")
    whole = run_spec(spec)
    start = run_spec(make(rounds=1, averaging="uniform", learning_rate=0.0))
    start = start.model().variables["params"]
    changes = []
    for k in range(6):
        own = [whole.partition.client_indices(j) if j == k else [] for j in range(6)]
        alone = run_spec(spec, partition=partition_from_clients(own))
        changes.append(get_change(alone, start))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *changes)
    mean = get_change(whole, start)
    expected = jax.tree.map(lambda a: a.mean(0), stacked)
    assert_trees_all_close(mean, expected, **TOLERANCES)
    median = run_spec(make(rounds=1, averaging="uniform", aggregation="median"))
    expected = jax.tree.map(lambda a: np.median(a, 0), stacked)
    assert_trees_all_close(get_change(median, start), expected, **TOLERANCES)
    attack = SignFlip(fraction=0.4, scale=3)
    signs = np.where(attack.choose_clients(6, spec.resolved().partition_seed), -3.0, 1.0)
    assert (signs < 0).sum() == 2
    flipped = run_spec(make(rounds=1, averaging="uniform", attack=attack))
    expected = jax.tree.map(lambda a: np.tensordot(signs, a, 1) / 6, stacked)
    assert_trees_all_close(get_change(flipped, start), expected, **TOLERANCES)


DEFENDED = {"attack": "gaussian:fraction=0.4,std=0.1"}
BACKDOOR = {"attack": ["backdoor:fraction=0.4,size=1", "scaled_update:fraction=0.4,scale=2"]}
DEFENDED |= {"aggregation": ["norm_clipping:max_norm=0.5", "bucketing:size=2", "geometric_median"]}


@pytest.mark.parametrize(
    "placement",
    [slow_case({"lanes": 3}), slow_case({"devices": 2}), {"devices": 2, "lanes": 2}],
)
@pytest.mark.parametrize("settings", [DEFENDED, slow_case(BACKDOOR)])
def test_results_do_not_depend_on_the_placement(placement, settings):
    spec = make(**settings, participation=0.7)
    reference = run_spec(spec, devices=1, lanes=1)
    assert_results_equal(run_spec(spec, **placement), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [DEFENDED, slow_case(BACKDOOR)])
def test_resume_is_bit_equal(eager, tmp_path, settings):
    spec = make(**settings, rounds=8)
    whole = run_spec(spec)
    with pytest.raises(KilledError):
        run_spec(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert_results_equal(run_spec(spec, output_dir=tmp_path, resume=True), whole)


@pytest.mark.slow
def test_sweep_equals_single_runs():
    texts = ["sign_flip:fraction=0.3", "label_flip:fraction=0.3,0.6"]
    specs = [spec for text in texts for spec in grid(**vars(make()) | {"attack": text})]
    assert [s.attack for s in specs] == [
        {"sign_flip.fraction": 0.3},
        {"label_flip.fraction": 0.3},
        {"label_flip.fraction": 0.6},
    ]
    for spec, result in zip(specs, run_sweep(specs).results, strict=True):
        assert_results_equal(result, run_spec(spec), rtol=1e-5, atol=1e-6)


def test_label_flips_change_malicious_clients_only():
    spec = make("separate", attack="label_flip:fraction=0.5", client_tests=True, rounds=1)
    plain = run_spec(make("separate", client_tests=True, rounds=1))
    attacked = run_spec(spec)
    is_malicious = SignFlip(fraction=0.5).choose_clients(6, spec.resolved().partition_seed)
    own = [
        run.model(client=k).variables["params"]["head"]["bias"]
        for run in (plain, attacked)
        for k in range(6)
    ]
    changed = [not np.array_equal(a, b) for a, b in zip(own[:6], own[6:], strict=True)]
    assert changed == is_malicious.tolist()


@pytest.mark.parametrize("name", method_cases(quick=["scaffold"]))
def test_methods_combine_changes_or_refuse(name):
    """A method runs with an attack and a robust rule, or names the setting that it cannot use."""
    spec = make_spec(name, rounds=2, attack="sign_flip:fraction=0.5,scale=9", aggregation="median")
    plain = run_spec(make_spec(name, rounds=2))
    try:
        defended = run_spec(spec)
    except ConfigError as error:
        assert f"attack = 'sign_flip': expected no value: the server of {name}" in str(error)
        return
    key = "test_loss" if METHODS[name].has_global_model else "train_loss"
    assert np.isfinite(defended.metrics[key]).all()
    assert not np.array_equal(defended.metrics[key], plain.metrics[key])


@pytest.mark.parametrize("name", ["feddf", "fedamp", "fedasync", "ifca", "feddm"])
def test_refused_methods(name):
    options = FAST_OPTIONS.get(name, {})
    for setting, kind in (("aggregation", "median"), ("attack", "sign_flip")):
        with pytest.raises(ConfigError, match=f"{setting} = '{kind}': expected no value") as error:
            run_spec(make_spec(name, options=options, rounds=2, **{setting: kind}))
        assert "\n" not in str(error.value)


def test_users_method_is_defended():
    def build(training, plan):
        return build_federated_algorithm(training, plan, make_local_sgd(training))

    register_method("average_of_the_user", build)
    median = {"aggregation": "median", "attack": "sign_flip:fraction=0.4"}
    results = [run_spec(make(name, **median)) for name in ("average_of_the_user", "fedavg")]
    np.testing.assert_array_equal(*(result.metrics["test_loss"] for result in results))


def test_backdoor_equals_training_on_changed_arrays():
    """The host stamps images and replaces labels of the poisoned examples itself."""
    digits = load_dataset("digits")
    settings = {"model": "mlp", "num_clients": 4, "rounds": 2, "learning_rate": 0.1}
    attack = Backdoor(fraction=0.5, poisoned=0.6, size=3, target=2)
    result = simulate(RunSpec(**settings, attack=attack), progress=None)
    partition, seed = result.partition, result.spec.partition_seed
    images, labels = np.array(digits.train_inputs), np.array(digits.train_labels)
    is_malicious = attack.choose_clients(4, seed)
    for k in np.flatnonzero(is_malicious):
        for position in partition.client_indices(k):
            if attack.select_poisoned(np.array([position]), seed)[0]:
                images[position, -4:-1, -4:-1] = 255
                labels[position] = 2
    changed = dataset_from_arrays(
        *(images, labels, digits.test_inputs, digits.test_labels), mean=digits.mean, std=digits.std
    )
    expected = simulate(
        RunSpec(**settings, dataset="user"), dataset=changed, partition=partition, progress=None
    )
    for name in ("train_loss", "test_loss", "test_accuracy"):
        np.testing.assert_allclose(result.metrics[name], expected.metrics[name], rtol=2e-4)
    # The success, from the outputs of the final model on stamped images.
    stamped = np.array(digits.test_inputs)
    stamped[:, -4:-1, -4:-1] = 255
    predicted = result.model().predict(stamped)
    is_other = digits.test_labels != 2
    success = np.mean(predicted[is_other] == 2)
    assert result.metrics["attack_success"][-1] == pytest.approx(success, abs=1e-6)
    assert success > 0.2


def test_accuracy_of_honest_clients_is_the_mean_over_them():
    spec = make("ditto", attack="label_flip:fraction=0.5", rounds=2)
    result = run_spec(spec)
    is_malicious = SignFlip(fraction=0.5).choose_clients(6, spec.resolved().partition_seed)
    expected = result.metrics["client_accuracy"][:, ~is_malicious].mean(1)
    np.testing.assert_allclose(result.metrics["honest_client_accuracy"], expected, rtol=1e-6)
    assert result.summary["final_honest_client_accuracy"] == pytest.approx(expected.mean())
    assert "honest_client_accuracy" not in run_spec(make("ditto", rounds=2)).metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attack": "backdoor:size=2"}, "attack backdoor:size = 2: expected at most 1"),
        ({"attack": "backdoor:target=9,size=1"}, "attack backdoor:target = 9: expected at most"),
    ],
)
def test_backdoors_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        run_spec(make(**settings))
    assert "\n" not in str(error.value)


def test_attack_is_recorded_and_printed():
    result = run_spec(make(attack="sign_flip", aggregation="krum:selected=3"))
    assert result.spec.attack == {"sign_flip.fraction": 0.2}
    assert RunSpec.from_dict(result.spec.to_dict()) == result.spec
