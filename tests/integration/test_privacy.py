"""Runs with differential privacy: limits, one round by hand, placement, resuming, refusals."""

import jax
import numpy as np
import pytest
from support.markers import method_cases, slow_case
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
)

from fedjax_het import ConfigError, RunSpec, register_method
from fedjax_het.data import partition_from_clients
from fedjax_het.methods import (
    build_federated_algorithm,
    make_local_sgd,
    with_server_step,
)
from fedjax_het.privacy import (
    ClientLevel,
    ExampleLevel,
    compute_client_level_epsilons,
    compute_example_level_epsilons,
)

SMALL = {"network_options": {"hidden": [8]}, "rounds": 4, "num_clients": 6}
SMALL |= {"local_optimizer": "sgd", "learning_rate": 0.1, "participation": 1.0}
METRICS = ("train_loss", "test_loss", "test_accuracy", "update_norm", "bytes_up", "bytes_down")


def make(algorithm="fedavg", **settings):
    return make_spec(algorithm, **{**SMALL, **settings})


@pytest.mark.parametrize(
    ("algorithm", "participation"),
    [
        ("fedavg", 0.5),
        ("fedadam", 1.0),
        *(slow_case(*case) for case in (("fedavg", 1.0), ("fedadam", 0.5))),
        *(slow_case("fedprox", participation) for participation in (1.0, 0.5)),
    ],
)
def test_no_noise_and_a_large_norm_are_the_plain_run_to_the_bit(algorithm, participation):
    settings = {"participation": participation, "averaging": "uniform"}
    privacy = ClientLevel(noise_multiplier=0, clip_norm=1e20)
    plain, private = (run_spec(make(algorithm, **settings, privacy=p)) for p in (None, privacy))
    for name in METRICS:
        np.testing.assert_array_equal(private.metrics[name], plain.metrics[name], name)
    assert private.metrics["clipped_fraction"].tolist() == [0, 0, 0, 0]
    assert private.summary["epsilon"] is None and np.isinf(private.metrics["epsilon"]).all()


def test_dp_sgd_without_noise_and_clipping_is_sgd():
    plain, private = (
        run_spec(make(privacy=p)) for p in (None, "example_level:noise_multiplier=0,clip_norm=1e9")
    )
    for name in METRICS:
        np.testing.assert_allclose(private.metrics[name], plain.metrics[name], rtol=1e-4, atol=1e-6)


def get_change(result, start):
    end = result.model().variables["params"]
    leaves = jax.tree.leaves(jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), end, start))
    return np.concatenate([leaf.ravel() for leaf in leaves])


def test_a_round_is_the_mean_of_the_clients_clipped_changes():
    """The changes of single clients come from runs in which no other client holds examples."""
    settings = {"rounds": 1, "averaging": "uniform"}
    whole = run_spec(make(**settings))
    start = run_spec(make(**settings, learning_rate=0.0)).model().variables["params"]
    changes = []
    for k in range(6):
        own = [whole.partition.client_indices(j) if j == k else [] for j in range(6)]
        alone = run_spec(make(**settings), partition=partition_from_clients(own))
        changes.append(get_change(alone, start))
    norms = np.linalg.norm(changes, axis=1)
    clip_norm = float(np.median(norms))
    clipped = [d * min(1, clip_norm / n) for d, n in zip(changes, norms, strict=True)]
    privacy = ClientLevel(noise_multiplier=0, clip_norm=clip_norm)
    private = run_spec(make(**settings, privacy=privacy))
    expected = np.mean(clipped, axis=0)
    np.testing.assert_allclose(get_change(private, start), expected, rtol=1e-3, atol=2e-6)
    assert private.metrics["clipped_fraction"].tolist() == pytest.approx([0.5])


def test_adaptive_clipping_follows_the_quantile():
    """C <- C exp(-clip_lr (b - quantile)) without noise, b the share of changes within C."""
    privacy = ClientLevel(noise_multiplier=0, clip_norm=0.1, quantile=0.7, clip_lr=0.5)
    result = run_spec(make(rounds=6, privacy=privacy))
    norm, within = 0.1, 1 - result.metrics["clipped_fraction"]
    for r in range(6):
        assert result.metrics["clip_norm"][r] == pytest.approx(norm, rel=1e-5)
        norm *= np.exp(-0.5 * (within[r] - 0.7))
    assert result.metrics["clip_norm"][-1] > 0.1  # the first norm clips most changes


ADAPTIVE = {"privacy": "client_level:noise_multiplier=0.3,clip_norm=0.2,quantile=0.5"}
ADAPTIVE |= {"system": "poisson_sampling", "participation": 0.5}
LOCAL = {"privacy": "example_level:noise_multiplier=0.3", "participation": 0.5}


@pytest.mark.parametrize("settings", [ADAPTIVE, slow_case(LOCAL)])
@pytest.mark.parametrize(
    "placement",
    [slow_case({"lanes": 3}), slow_case({"devices": 2}), {"devices": 2, "lanes": 2}],
)
def test_results_do_not_depend_on_the_placement(settings, placement):
    reference = run_spec(make(**settings), devices=1, lanes=1)
    private = run_spec(make(**settings), **placement)
    assert_results_equal(private, reference, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [ADAPTIVE, slow_case(LOCAL)])
def test_resume_is_bit_equal(eager, tmp_path, settings):
    spec = make(**settings, rounds=8)
    whole = run_spec(spec)
    with pytest.raises(KilledError):
        run_spec(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert_results_equal(run_spec(spec, output_dir=tmp_path, resume=True), whole)


def test_epsilon_is_recorded_for_each_round():
    result = run_spec(make(participation=0.5, privacy="client_level:noise_multiplier=2,delta=1e-4"))
    budget = {"noise_multiplier": 2.0, "delta": 1e-4, "num_rounds": 4, "num_clients": 6}
    expected = compute_client_level_epsilons(**budget, cohort_size=3, sampling="fixed")
    np.testing.assert_allclose(result.metrics["epsilon"], expected)
    assert result.summary["epsilon"] == expected[-1] and result.summary["delta"] == 1e-4
    assert RunSpec.from_dict(result.spec.to_dict()) == result.spec
    poisson = run_spec(
        make(participation=0.5, system="poisson_sampling", privacy="client_level:delta=1e-4")
    )
    budget["noise_multiplier"] = 1.0
    expected = compute_client_level_epsilons(**budget, cohort_size=3, sampling="poisson")
    np.testing.assert_allclose(poisson.metrics["epsilon"], expected)


def test_examples_are_counted_by_the_passes_of_the_busiest_client():
    spec = make(participation=0.34, local_epochs=2, privacy=ExampleLevel(noise_multiplier=3.0))
    result = run_spec(spec)
    sampled = run_spec(make(participation=0.34, local_epochs=2, system="selection_by_size:power=0"))
    assert sampled.metrics["client_samples"].tolist() == result.metrics["client_samples"].tolist()
    epsilons = result.metrics["epsilon"]
    budget = {"noise_multiplier": 3.0, "delta": 1e-5}
    possible = compute_example_level_epsilons(num_passes=[2, 4, 6, 8], **budget)
    assert epsilons[0] == possible[0]
    assert set(epsilons) <= set(possible) and (np.diff(epsilons) >= 0).all()
    # Two of six clients take part in each of four rounds, so one of them takes part twice.
    assert possible[1] <= epsilons[-1] <= possible[3]


def test_steps_count_begun_passes():
    settings = {"local_epochs": None, "local_steps": 1, "batch_size": 4, "rounds": 2}
    result = run_spec(make(**settings, privacy=ExampleLevel(noise_multiplier=3.0)))
    budget = {"noise_multiplier": 3.0, "delta": 1e-5}
    expected = compute_example_level_epsilons(num_passes=[1, 2], **budget)
    np.testing.assert_allclose(result.metrics["epsilon"], expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"averaging": "weighted"}, "averaging = 'weighted': expected uniform"),
        ({"aggregation": "median"}, "aggregation = 'median': expected no value"),
        ({"compression": "topk:fraction=0.1"}, "compression = .*: expected no value"),
        ({"system": ["dropout", "cyclic_selection"]}, "system = 'cyclic_selection': expected"),
        ({"system": ["speed", "deadline"]}, "system = 'deadline': expected"),
        ({"skew": "churn"}, "skew = 'churn': expected no drift"),
        ({"algorithm": "fsl", "server_data": "iid"}, "server_data = 'iid': expected examples that"),
        ({"algorithm": "scaffold"}, "privacy = 'client_level': expected no value: clients send"),
        ({"algorithm": "qfedavg"}, "privacy = 'client_level': expected no value: clients send"),
        ({"algorithm": "fedmix"}, "privacy = 'client_level': expected no value: fedmix"),
        ({"model": "convnet", "network_options": {}, "norm": "batch", "depth": 1}, "batch norm"),
        ({"privacy": ["client_level", "example_level"]}, "expected one mechanism"),
    ],
)
def test_configurations_without_a_guarantee_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        run_spec(make(**{"privacy": "client_level", **settings}))
    assert "\n" not in str(error.value)


def test_batch_norm_is_refused_by_dp_sgd():
    settings = {"model": "convnet", "network_options": {}, "norm": "batch", "depth": 1}
    with pytest.raises(ConfigError, match="statistics of batch norm"):
        run_spec(make(**settings, privacy="example_level"))


@pytest.mark.parametrize("level", ["client_level", "example_level"])
@pytest.mark.parametrize("name", method_cases(quick=["ditto", "fedcm"]))
def test_methods_are_private_or_refuse(name, level):
    """A private run differs from the plain one, or the method names the setting."""
    settings = {"rounds": 2, "server_data": "held_out"}
    try:
        plain = run_spec(make_spec(name, **settings))
    except ConfigError:
        settings.pop("server_data")
        plain = run_spec(make_spec(name, **settings))
    try:
        private = run_spec(make_spec(name, **settings, privacy=f"{level}:noise_multiplier=0.5"))
    except ConfigError as error:
        assert f"privacy = '{level}': expected" in str(error) and "\n" not in str(error)
        return
    assert private.summary["epsilon"] > 0
    assert not np.array_equal(private.metrics["train_loss"], plain.metrics["train_loss"])


def test_a_server_step_of_the_user_is_refused():
    """A step may read the clients' examples, so that nothing is known of its privacy."""

    def build(training, plan):
        algorithm = build_federated_algorithm(training, plan, make_local_sgd(training))
        step = lambda hp, state, context: (context.variables_after, state)  # noqa: E731
        return with_server_step(algorithm, step)

    register_method("unknown_server_step", build)
    with pytest.raises(ConfigError, match="privacy = 'client_level': expected no value"):
        run_spec(make("unknown_server_step", privacy="client_level"))


def test_users_method_is_private():
    def build(training, plan):
        return build_federated_algorithm(training, plan, make_local_sgd(training))

    register_method("private_average_of_the_user", build)
    names = ("private_average_of_the_user", "fedavg")
    results = [run_spec(make(name, privacy="client_level:clip_norm=0.2")) for name in names]
    np.testing.assert_array_equal(*(result.metrics["test_loss"] for result in results))


def test_malicious_clients_cannot_exceed_the_norm():
    """The server clips forged updates: the mean of six changes of norm 0.01 is not longer."""
    settings = {"attack": "scaled_update:fraction=0.5,scale=1000", "rounds": 1}
    private = run_spec(make(**settings, privacy=ClientLevel(noise_multiplier=0, clip_norm=0.01)))
    assert 0 < private.metrics["update_norm"][0] <= 0.01 * (1 + 1e-5)
