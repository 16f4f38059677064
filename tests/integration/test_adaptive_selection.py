"""Runs whose clients are selected by the losses of earlier rounds."""

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

from fedjax_het import ConfigError, Placement, RunSpec, simulate, sweep
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
SYSTEM = ["power_of_choice:factor=4", "speed:sigma=1", "dropout:probability=0.2"]


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


def test_resume_is_bit_equal(whole_run, tmp_path):
    with pytest.raises(KilledError):
        simulate(make_spec(), output_dir=tmp_path, progress=make_killing_callback(3))
    assert_results_equal(simulate(make_spec(), output_dir=tmp_path, resume=True), whole_run)


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


def test_uses_without_losses_are_one_line():
    for function in (count_flops, lambda spec: benchmark_rounds(spec, 2)):
        with pytest.raises(ConfigError, match="system power_of_choice: expected clients that are"):
            function(make_spec())
    with pytest.raises(ConfigError, match="condense data instead of training"):
        RunSpec("feddm", system="power_of_choice")
    with pytest.raises(ConfigError, match="system power_of_choice: expected a method with synchr"):
        simulate(make_spec("fedbuff"))
