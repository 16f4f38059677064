"""Runs with compressed uploads: placement, resuming, sweeps, traffic, and refused methods."""

import numpy as np
import pytest
from support.markers import slow_case
from support.small_runs import (
    KilledError,
    assert_results_equal,
    make_killing_callback,
    make_spec,
    run_spec,
    run_sweep,
)

from fedjax_het import ConfigError, RunSpec, grid, simulate
from fedjax_het.compression import QSGD, TopK

SMALL = {"network_options": {"hidden": [8]}, "rounds": 4}
NUM_WEIGHTS = 4 * 8 + 8 + 8 * 3 + 3


def compressed(compression, algorithm="fedavg", **settings):
    return make_spec(algorithm, **{**SMALL, "compression": compression, **settings})


def test_runs_without_loss_equal_the_plain_run():
    plain = run_spec(compressed(None))
    assert_results_equal(run_spec(compressed("topk:fraction=1")), plain)
    assert compressed("none").resolved().digest() == compressed(None).resolved().digest()
    for fine in (QSGD(levels=2**22), "uniform:bits=24"):
        other = run_spec(compressed(fine))
        for name in ("train_loss", "test_accuracy", "update_norm"):
            np.testing.assert_allclose(other.metrics[name], plain.metrics[name], rtol=1e-4)
    coarse = run_spec(compressed("sign"))
    assert np.abs(coarse.metrics["train_loss"] - plain.metrics["train_loss"]).max() > 2e-4


@pytest.mark.parametrize(
    ("compression", "placement"),
    [
        ("topk:fraction=0.3", {"lanes": 2}),
        ("topk:fraction=0.3", {"devices": 2}),
        slow_case("qsgd:levels=2", {"devices": 2, "lanes": 2}),
    ],
)
def test_results_do_not_depend_on_the_placement(compression, placement):
    spec = compressed(compression, local_optimizer="sgd", learning_rate=0.1)
    reference = run_spec(spec, devices=1, lanes=1)
    assert_results_equal(run_spec(spec, **placement), reference, rtol=1e-4, atol=1e-5)


def test_states_on_the_host_are_bit_equal():
    spec = compressed("topk:fraction=0.2", num_clients=12, participation=0.25)
    paged, device = (run_spec(spec, client_state=place) for place in ("host", "device"))
    assert_results_equal(paged, device)


def test_resume_is_bit_equal(eager, tmp_path):
    spec = compressed("qsgd:levels=2,error_feedback=true", rounds=9)
    whole = run_spec(spec)
    with pytest.raises(KilledError):
        run_spec(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert (tmp_path / "checkpoint.npz").exists()
    assert_results_equal(run_spec(spec, output_dir=tmp_path, resume=True), whole)


@pytest.mark.slow
def test_sweep_equals_single_runs():
    specs = grid(**vars(compressed(None)) | {"compression": ["none", "topk:fraction=0.1,0.5"]})
    assert [s.compression for s in specs] == [None, "topk:fraction=0.1", "topk:fraction=0.5"]
    results = run_sweep(specs).results
    for spec, result in zip(specs, results, strict=True):
        assert_results_equal(result, run_spec(spec), rtol=1e-5, atol=1e-6)
    uploads = [result.summary["bytes_up"] for result in results]
    num_uploads = uploads[0] / (4 * NUM_WEIGHTS)
    # 67 weights have positions of 7 bits; round(6.7) = 7 and round(33.5) = 34 of them are sent.
    assert uploads[1:] == [num_uploads * np.ceil(k * (32 + 7) / 8) for k in (7, 34)]
    assert len({result.summary["bytes_down"] for result in results}) == 1


def test_error_feedback_sends_what_was_lost():
    """With 2 % of the entries, memories make up for most of the loss of accuracy."""
    settings = {"dataset": "digits", "model": "mlp", "num_clients": 4, "local_epochs": 1}
    settings |= {"rounds": 12, "learning_rate": 0.1, "partition": "iid"}
    with_memory, without = (
        simulate(RunSpec(**settings, compression=TopK(fraction=0.02, error_feedback=feedback)))
        for feedback in (True, False)
    )
    assert with_memory.final_accuracy > without.final_accuracy + 0.02


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            "fedproto",
            "expected no value: the server of fedproto does not average changes of one model",
        ),
        ("fedamp", "expected no value: the server of fedamp does not average changes of one model"),
        ("ifca", "expected no value: the server of ifca does not average changes of one model"),
        ("feddf", "expected no value: the server of feddf does not average changes of one model"),
        ("fedgen", "expected no value: the server of fedgen does not average changes of one model"),
        (
            "fedbuff",
            "expected no value: the server of fedbuff does not average changes of one model",
        ),
        ("feddm", "expected no value: clients of feddm condense their data"),
    ],
)
def test_methods_without_model_changes_are_refused(algorithm, message):
    with pytest.raises(ConfigError, match=f"compression = 'topk:fraction=0.01': {message}"):
        run_spec(compressed("topk:fraction=0.01", algorithm))
