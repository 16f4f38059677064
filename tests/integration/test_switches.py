"""Settings of JAX and NumPy that a user's process may have."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)
from support.x64 import enable_x64

from fedjax_het import ConfigError, federation, make_model
from fedjax_het.algorithms import METHODS
from fedjax_het.data import make_partition

UNSUPPORTED = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_check_tracer_leaks": True,
    "jax_disable_jit": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_transfer_guard_host_to_device": "disallow",
    "jax_transfer_guard_device_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_host": "disallow",
}


@pytest.mark.parametrize("method", method_cases(quick=()))
def test_methods_run_with_x64(method):
    with enable_x64():
        result = run_spec(make_spec(method, rounds=2, eval_every=2))
        model = result.model(client=None if METHODS[method].has_global_model else 0)
        model.evaluate(make_user_dataset().test_inputs, make_user_dataset().test_labels)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(model.variables["params"]))


ALL_METRICS = (
    *("class_accuracy", "macro_f1", "calibration", "confusion"),
    *("drift", "fairness", "pooled_accuracy"),
)
X64_PLACEMENTS = {
    "host": ("scaffold", {"devices": 1, "client_state": "host"}),
    "split": ("fedbn", {"devices": 2, "client_state": "split"}),
    "lanes": ("ditto", {"devices": 2, "lanes": 2}),
    "server": ("fsl", {"devices": 2, "server_work": "shared"}),
    "debug": ("fedavg", {"debug": True}),
}


@pytest.mark.parametrize("case", [slow_case(name) for name in X64_PLACEMENTS])
def test_x64_does_not_depend_on_placement(case):
    method, keywords = X64_PLACEMENTS[case]
    spec = make_spec(method, rounds=2)
    with enable_x64():
        actual, expected = run_spec(spec, **keywords), run_spec(spec)
    _assert_curves_agree(actual, expected, 1e-6)  # curves have 32 bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, settings",
    [
        ("scaffold", {"metrics": ALL_METRICS, "client_tests": True}),
        ("moon", {"gradient_accumulation": 3}),
        ("fedavg", {"precision": "bfloat16"}),
        ("fedavg", {"local_optimizer": "adam", "optimizer_state": "keep"}),
    ],
)
def test_settings_with_x64(method, settings):
    with enable_x64():
        result = run_spec(make_spec(method, rounds=2, **settings))
    assert result.summary["x64"]
    assert np.isfinite(result.metrics["test_loss"]).all()


def _run_with_x64(enabled, spec, **keywords):
    with enable_x64(enabled):
        return run_spec(spec, **keywords)


def _assert_curves_agree(result, expected, tolerance):
    assert result.metrics.keys() == expected.metrics.keys()
    for name in result.metrics.keys() - {"bytes_up", "bytes_down"}:  # twice as many
        np.testing.assert_allclose(
            *(r.metrics[name] for r in (result, expected)), tolerance, tolerance, err_msg=name
        )


class BatchNormNetwork(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(len(x), -1))
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(6)(x)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedaf", "dynafed"])
def test_flax_batch_norm_with_x64(method):
    """The parameters and statistics of flax's layers have 32 bits."""
    expected, wide = (
        _run_with_x64(enabled, make_spec(method, model=None, rounds=2), network=BatchNormNetwork)
        for enabled in (False, True)
    )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(wide.model().variables)}
    assert dtypes == {np.dtype(np.float32)}
    if method == "fedavg":  # condensation draws in 64 bits
        _assert_curves_agree(wide, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [False, True])
def test_resume_with_x64(enabled, eager, tmp_path):
    spec = make_spec("scaffold", rounds=6)
    with enable_x64(enabled), pytest.raises(KilledError):
        run_spec(spec, output_dir=tmp_path, progress=make_killing_callback(2))
    changed = rf"x64 {enabled} -> {not enabled}"
    with enable_x64(not enabled), pytest.raises(ConfigError, match=changed) as raised:
        run_spec(spec, output_dir=tmp_path, resume=True)
    assert "\n" not in str(raised.value)
    with enable_x64(enabled):
        resumed = run_spec(spec, output_dir=tmp_path, resume=True)
        assert_results_equal(resumed, run_spec(spec))


@pytest.mark.parametrize("enabled", [False, True])
def test_x64_is_constant_in_a_run(enabled):
    expected = f"jax_enable_x64 = {not enabled}: expected {enabled}"
    with enable_x64(enabled):
        session = federation(make_spec(rounds=4), dataset=make_user_dataset())
        next(iter(session.rounds(every=1)))
    with enable_x64(not enabled):
        with pytest.raises(ConfigError, match=expected):
            next(iter(session.rounds()))
        with pytest.raises(ConfigError, match=expected):
            session.result()
    with enable_x64(enabled):
        assert session.result().summary["x64"] == enabled


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_jax_setting_is_rejected(name):
    model, images = run_spec(make_spec(rounds=1)).model(), make_user_dataset().test_inputs
    before = getattr(jax.config, name)
    jax.config.update(name, UNSUPPORTED[name])
    try:
        for use in (
            lambda: run_spec(make_spec(rounds=1)),
            lambda: run_sweep([make_spec(rounds=1)]),
            lambda: make_model("mlp", (4, 4, 1), 3),
            lambda: model.predict(images),
        ):
            with pytest.raises(ConfigError, match=rf"^{name} = .*: expected '?[Fsa].*$"):
                use()
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet_balanced", "dirichlet_capped"])
def test_proportions_may_underflow(scheme):
    options = {"alpha": 0.01, **({"min_size": 0} if scheme == "dirichlet_capped" else {})}
    with np.errstate(all="raise"):
        make_partition(
            scheme, np.arange(1200) % 4, num_classes=4, num_clients=12, seed=0, **options
        )


def test_run_with_numpy_errors():
    with np.errstate(all="raise"):
        result = run_spec(make_spec(partition="dirichlet", alpha=0.01, metrics=("calibration",)))
        result.model().evaluate(make_user_dataset().test_inputs, make_user_dataset().test_labels)
    assert len(result.metrics["test_accuracy"]) == 9
