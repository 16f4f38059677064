"""Runs whose clients are selected by losses."""

import itertools

import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.small_runs import (
    FAST_OPTIONS,
    OWN_METHOD_RUN,
    KilledError,
    assert_results_equal,
    make_killing_callback,
)

from fedjax_het import ConfigError, Placement, RunSpec, dataset_from_arrays, simulate, sweep
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime.benchmark import benchmark_rounds
from fedjax_het.runtime.run_flops import count_flops
from fedjax_het.systems import Speed

SETTINGS = {
    "model": "mlp",
    "num_clients": 8,
    "participation": 0.25,
    "rounds": 8,
    "local_epochs": 1,
    "alpha": 0.3,
    "learning_rate": 0.1,
}
SYSTEM = ["power_of_choice:factor=2,losses=current", "speed:sigma=1", "dropout:probability=0.2"]


def make_spec(algorithm="scaffold", system=SYSTEM, **settings):
    return RunSpec(algorithm, **{**SETTINGS, "system": system, **settings})


@pytest.fixture(scope="module")
def whole_run():
    return simulate(make_spec())


def find_participants(result):
    return np.isfinite(result.metrics["client_train_loss"])


def test_rounds_follow_the_recorded_losses():
    # All clients are candidates: new clients first, then the largest losses.
    spec = make_spec("fedavg", ["power_of_choice:factor=4", "speed:sigma=1,step_seconds=2"])
    result = simulate(spec)
    losses, sizes = result.metrics["client_train_loss"], result.partition.sizes
    assert losses.shape == (8, 8)
    last_losses = np.where(sizes > 0, np.inf, -np.inf)
    for r, took_part in enumerate(find_participants(result)):
        assert took_part.sum() == 2
        assert last_losses[took_part].min() >= last_losses[~took_part].max()
        last_losses[took_part] = losses[r, took_part]
        mean = np.average(losses[r, took_part], weights=sizes[took_part])
        assert result.metrics["train_loss"][r] == pytest.approx(mean, rel=1e-5)
        assert result.metrics["client_samples"][r] == sizes[took_part].sum()
    assert np.isfinite(last_losses).all()
    speed = Speed(sigma=1, step_seconds=2)
    rng = speed.make_rng(result.spec.partition_seed)
    durations = 2 * np.exp(rng.standard_normal(8)) * -(-sizes // result.spec.batch_size)
    expected = [durations[took_part].max() for took_part in find_participants(result)]
    np.testing.assert_allclose(result.metrics["simulated_seconds"], expected)
    num_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(result.model().variables))
    np.testing.assert_array_equal(result.metrics["bytes_up"], np.full(8, 2 * num_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedamp", "fedgen", "fedproto", "separate"])
def test_methods_with_own_rounds_report_losses(algorithm):
    settings = {**OWN_METHOD_RUN, "options": FAST_OPTIONS.get(algorithm, {}), "system": "oort"}
    result = simulate(RunSpec(algorithm, **settings), dataset=make_user_dataset())
    losses, sizes = result.metrics["client_train_loss"], result.partition.sizes
    means = np.nansum(losses * sizes, 1) / (np.isfinite(losses) * sizes).sum(1)
    np.testing.assert_allclose(result.metrics["train_loss"], means, rtol=1e-5)


@pytest.mark.parametrize("losses", ["current", pytest.param("stale", marks=pytest.mark.slow)])
def test_resume_is_bit_equal(whole_run, eager, tmp_path, losses):
    spec = make_spec(system=[SYSTEM[0].replace("current", losses), *SYSTEM[1:]])
    expected = whole_run if losses == "current" else simulate(spec)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(3))
    assert (tmp_path / "checkpoint.npz").exists()
    assert_results_equal(simulate(spec, output_dir=tmp_path, resume=True), expected)


@pytest.mark.parametrize("placement", [Placement(lanes=2), Placement(devices=2)])
def test_placement_does_not_change_the_clients(whole_run, placement):
    result = simulate(make_spec(), placement=placement)
    np.testing.assert_array_equal(find_participants(result), find_participants(whole_run))
    assert_results_equal(result, whole_run, rtol=1e-4, atol=6e-3)


@pytest.mark.slow
def test_sweep_equals_single_runs(whole_run):
    specs = [make_spec(system=system) for system in (SYSTEM, ["oort", "speed:sigma=1"], None)]
    results = sweep(specs, progress=None).results
    assert_results_equal(results[0], whole_run, rtol=1e-4, atol=6e-3)
    for spec, result in zip(specs[1:], results[1:], strict=True):
        assert_results_equal(result, simulate(spec), rtol=1e-4, atol=6e-3)


SIZES = [3, 8, 0, 12, 5, 9]


def linear():
    """A linear softmax model as a pair of functions."""

    def init(key, images, train):
        del key, train
        kernel = np.random.default_rng(0).normal(size=(images[0].size, 3))
        return {"params": {"kernel": kernel.astype(np.float32)}}

    def apply(variables, images, train):
        return images.reshape(len(images), -1) @ variables["params"]["kernel"]

    return init, apply


def compute_losses(kernel, inputs, labels):
    """Cross-entropy of each example, and softmax minus the label's one."""
    logits = inputs @ kernel
    log_shares = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -log_shares[np.arange(len(labels)), labels], np.exp(log_shares) - np.eye(3)[labels]


@pytest.mark.parametrize("losses", ["current", "minibatch"])
def test_losses_of_the_current_model_equal_numpy(losses):
    """FedAvg with a step on a whole batch, in float64."""
    rng = np.random.default_rng(1)
    images = rng.random((sum(SIZES), 2, 2, 1)).astype(np.float32)
    labels = rng.integers(0, 3, len(images))
    data = dataset_from_arrays(images, labels, images[:9], labels[:9])
    bounds = np.cumsum([0, *SIZES])
    partition = partition_from_clients([range(*pair) for pair in itertools.pairwise(bounds)])
    batch_size = {"current": 12, "minibatch": 6}[losses]
    settings = {"num_clients": 6, "participation": 0.34, "rounds": 4, "local_epochs": 1, "seed": 2}
    settings |= {"learning_rate": 2.0, "batch_size": batch_size, "averaging": "uniform"}
    settings |= {"weight_decay": 0.0}
    settings["system"] = f"power_of_choice:factor=1.5,losses={losses}"
    spec = RunSpec("fedavg", "user", **settings)
    result = simulate(spec, dataset=data, partition=partition, network=linear())

    inputs = ((images.astype(np.float64) - data.mean) / data.std).reshape(len(images), -1)
    kernel = linear()[0](None, images, 0)["params"]["kernel"].astype(np.float64)
    for r in range(4):
        sizes, clients = np.array(SIZES), np.flatnonzero(SIZES)
        draw = make_host_rng(2, Stream.PARTICIPATION, r)
        shares = sizes[clients] / sizes.sum()
        candidates = draw.choice(clients, 3, replace=False, p=shares).tolist()
        expected = np.full(6, np.nan)
        for k in candidates:
            own = partition.client_indices(k)
            if losses == "minibatch":
                path = Stream.SYSTEM, *b"candidate_loss", r, k
                own = make_host_rng(2, *path).permutation(own)[:6]
            expected[k] = compute_losses(kernel, inputs[own], labels[own])[0].mean()
        actual = result.metrics["candidate_loss"][r]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        selected = sorted(candidates, key=lambda k: (-expected[k], candidates.index(k)))[:2]
        assert set(np.flatnonzero(find_participants(result)[r])) == set(selected)
        if losses == "minibatch":  # another round would need the minibatches of training
            break
        updates = []
        for k in selected:
            own = partition.client_indices(k)
            slopes = compute_losses(kernel, inputs[own], labels[own])[1]
            updates.append(-2.0 * inputs[own].T @ slopes / len(own))
        kernel = kernel + np.mean(updates, 0)
    np.testing.assert_array_equal(result.metrics["bytes_down"], np.full(4, 3 * 4 * 12))
    np.testing.assert_array_equal(result.metrics["bytes_up"], np.full(4, 2 * 4 * 12))


def test_candidates_see_the_skews_of_training():
    system = "power_of_choice:factor=2,losses=current"
    skew = ["noise:std=0.5", "concept:share=1"]
    spec = make_spec("fedavg", system, skew=skew, learning_rate=0.0, rounds=2)
    metrics = simulate(spec).metrics
    took_part = np.isfinite(metrics["client_train_loss"])
    np.testing.assert_allclose(
        metrics["candidate_loss"][took_part], metrics["client_train_loss"][took_part], rtol=1e-5
    )


def test_uses_without_losses_are_one_line():
    for function in (count_flops, lambda spec: benchmark_rounds(spec, 2)):
        with pytest.raises(ConfigError, match="system power_of_choice: expected clients that are"):
            function(make_spec())
    with pytest.raises(ConfigError, match="stale losses of candidates: separate has no global mod"):
        make_spec("separate")
    with pytest.raises(ConfigError, match="condense data instead of training"):
        RunSpec("feddm", system="power_of_choice")
    with pytest.raises(ConfigError, match="system power_of_choice: expected a method with synchr"):
        simulate(make_spec("fedbuff"))
