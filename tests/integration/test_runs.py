"""Whole runs: checkpoints, chunks, divergence, dynafed's phases, what a result holds."""

import json

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support.data import make_domains_dataset, make_user_dataset
from support.markers import method_cases
from support.small_runs import (
    SYNTHESIS_OPTIONS,
    KilledError,
    assert_domain_accuracies,
    assert_results_equal,
    final_model_logits,
    make_killing_callback,
    make_spec,
    run_spec,
)

from fedjax_het import Placement, Result, simulate
from fedjax_het.core import evaluation
from fedjax_het.data import make_partition
from fedjax_het.runtime import group_state
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.result_builder import summarize_metrics
from fedjax_het.runtime.result_store import load_curves, load_results


@pytest.mark.parametrize("name", method_cases())
def test_killed_run_resumes(name, tmp_path, eager, monkeypatch):
    whole = run_spec(make_spec(name))
    # One round or iteration at a time.
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    for stop in (2, 6):  # dynafed: in its rounds, in its synthesis
        folder = tmp_path / str(stop)
        with pytest.raises(KilledError):
            run_spec(make_spec(name), output_dir=folder, progress=make_killing_callback(stop))
        assert (folder / "checkpoint.npz").exists() and not list(folder.glob("*.json"))
        assert_results_equal(run_spec(make_spec(name), output_dir=folder, resume=True), whole)


@pytest.mark.slow
def test_chunk_size_does_not_change_run(monkeypatch):
    whole = run_spec(make_spec("dynafed"))
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 3)
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    assert_results_equal(run_spec(make_spec("dynafed")), whole)


def test_resume_without_checkpoint(tmp_path):
    resumed = run_spec(make_spec(), output_dir=tmp_path, resume=True)
    assert_results_equal(resumed, run_spec(make_spec()))


def test_result_save_and_load(tmp_path):
    result = run_spec(make_spec("dynafed"), output_dir=tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.stem == result.digest()
    loaded = Result.load(path)
    assert loaded.spec == result.spec and loaded.summary == result.summary
    assert_results_equal(loaded, result)


def test_run_summary():
    result = run_spec(make_spec())
    accuracy = result.metrics["test_accuracy"]
    assert accuracy.shape == (9,) and np.isfinite(accuracy).all()
    assert result.summary["final_accuracy"] == pytest.approx(accuracy[-5:].mean())
    assert result.summary["best_accuracy"] == pytest.approx(accuracy.max())
    assert result.summary["rounds"] == 9 and result.summary["diverged"] is False
    for name in ("client_samples_per_second", "compile_seconds", "wall_seconds"):
        assert result.summary[name] > 0
    model = 4 * sum(a * b + b for a, b in ((4, 128), (128, 128), (128, 3)))
    assert result.metrics["bytes_up"].tolist() == [3 * model] * 9
    json.dumps(result.summary, allow_nan=False)


def test_metrics_match_final_model():
    result, data = run_spec(make_spec()), make_user_dataset()
    x = final_model_logits(result, data)
    right = (x.argmax(1) == data.test_labels).mean()
    losses = np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), data.test_labels]
    assert result.metrics["test_accuracy"][-1] == pytest.approx(right)
    assert result.metrics["test_loss"][-1] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", sorted({1, len(jax.devices())}))
def test_domain_accuracies(devices, monkeypatch):
    monkeypatch.setattr(evaluation, "CPU_BATCH_SIZE", 7)  # several batches, the last of them short
    data = make_domains_dataset()
    result = simulate(make_spec(), dataset=data, placement=Placement(devices=devices))
    counted = assert_domain_accuracies(result, data)
    assert len(set(counted)) > 1 and len(set(np.bincount(data.test_domains))) == 3
    plain = run_spec(make_spec(), devices=devices)
    assert not [name for name in plain.metrics if name.startswith("test_accuracy_")]
    np.testing.assert_array_equal(result.metrics["test_accuracy"], plain.metrics["test_accuracy"])


def test_best_domain_round(tmp_path):
    data = make_domains_dataset()
    result = simulate(make_spec(rounds=12, eval_every=4), dataset=data, output_dir=tmp_path)
    mean = result.metrics["test_accuracy_domains"]
    for curve in (mean, result.metrics["test_accuracy"]):
        assert np.flatnonzero(np.isfinite(curve)).tolist() == [3, 7, 8, 9, 10, 11]
    best = result.summary["best_domain_round"]
    assert result.summary["best_domains_accuracy"] == mean[best - 1] == np.nanmax(mean)
    assert not (mean[: best - 1] >= mean[best - 1]).any()
    row, curves = load_results(tmp_path).iloc[0], load_curves(tmp_path)
    for name in data.domain_names:
        curve = result.metrics[f"test_accuracy_{name}"]
        assert result.summary[f"accuracy_{name}"] == curve[best - 1] == row[f"accuracy_{name}"]
        np.testing.assert_array_equal(curves[f"test_accuracy_{name}"], curve)
    assert row["best_domains_accuracy"] == mean[best - 1] and row["best_domain_round"] == best
    np.testing.assert_array_equal(curves["test_accuracy_domains"], mean)


def test_summary_of_unmeasured_domains():
    nothing = np.full(3, np.nan)
    names = ("test_accuracy", "train_loss", "test_accuracy_a", "test_accuracy_domains")
    summary = summarize_metrics(dict.fromkeys(names, nothing), ("a",))
    assert summary["best_domains_accuracy"] is summary["best_domain_round"] is None
    assert summary["accuracy_a"] is None
    json.dumps(summary, allow_nan=False)


def test_dynafed_equals_fedavg_before_synthesis():
    plain, tuned = run_spec(make_spec("fedavg")), run_spec(make_spec("dynafed"))
    same = plain.metrics["test_loss"] == tuned.metrics["test_loss"]
    assert same[:4].all() and not same[4:].any()
    log = tuned.artifacts
    assert np.isfinite(log["matching_loss"]).all() and len(log["matching_loss"]) == 6
    assert set(log["start"]) <= {1, 2}
    assert tuned.summary["synthesis_iterations"] == 6


@pytest.mark.slow
def test_dynafed_over_fedsam():
    """The trajectory is FedSAM's, as sharpness-aware teachers of FTD (Du et al., CVPR 2023)."""
    options = {**SYNTHESIS_OPTIONS, "base": "fedsam"}
    tuned = run_spec(make_spec("dynafed", options=options)).metrics["test_loss"]
    alone = run_spec(make_spec("fedsam")).metrics["test_loss"]
    length = SYNTHESIS_OPTIONS["trajectory_rounds"]
    np.testing.assert_allclose(tuned[:length], alone[:length], rtol=1e-6)
    assert np.isfinite(tuned).all() and (tuned[length:] != alone[length:]).all()


@pytest.mark.slow
def test_dynafed_without_fine_tuning():
    plain = run_spec(make_spec("fedavg"))
    tuned = run_spec(make_spec("dynafed", options={**SYNTHESIS_OPTIONS, "fine_tune_epochs": 0}))
    np.testing.assert_array_equal(plain.metrics["test_loss"], tuned.metrics["test_loss"])


@pytest.mark.slow
def test_dynafed_trajectory():
    tuned = run_spec(make_spec("dynafed"))
    for rounds in (1, 4):
        model = run_spec(make_spec("fedavg", rounds=rounds)).state.server.variables["params"]
        vector = ravel_pytree(model)[0]
        np.testing.assert_array_equal(tuned.state.server.step_state.trajectory[rounds], vector)


def test_run_with_user_partition():
    data = make_user_dataset()
    mine = make_partition("iid", data.train_labels, 3, num_clients=6, seed=5)
    a = simulate(make_spec(), dataset=data, partition=mine)
    b = simulate(make_spec(partition_seed=5), dataset=data)
    np.testing.assert_array_equal(a.metrics["test_loss"], b.metrics["test_loss"])


@pytest.mark.slow
def test_runs_share_compiled_program(no_program_eviction):
    own = {"local_epochs": 5}  # no other test's program
    first = prepare_group([make_spec(**own)], UserObjects(make_user_dataset()))
    for change in ({}, {"seed": 9}, {"hp": {"local_lr": 0.2}}):
        other = make_spec(**own, **change)
        run_spec(other)
        assert prepare_group([other], UserObjects(make_user_dataset())).program is first.program
    assert first.program.chunk.program._cache_size() == 1


REPEATED_SYNTHESIS = {**SYNTHESIS_OPTIONS, "max_syntheses": 2, "synthesis_interval": 3}


@pytest.mark.slow
def test_repeated_synthesis_resumes(tmp_path, eager, monkeypatch):
    """The syntheses before rounds 4 and 7 have six iterations each."""
    spec = make_spec("dynafed", options=REPEATED_SYNTHESIS)
    whole = run_spec(spec)
    assert whole.summary["synthesis_iterations"] == 12
    assert np.isfinite(whole.artifacts["matching_loss"]).all()
    assert whole.artifacts["snapshot_iterations"].tolist() == [*range(8), 12]
    between = run_spec(make_spec("dynafed", options=REPEATED_SYNTHESIS, rounds=6)).artifacts
    assert between["snapshot_iterations"].tolist() == [*range(7)]
    for images, of_whole in zip(between["snapshots"], whole.artifacts["snapshots"], strict=False):
        np.testing.assert_array_equal(images, of_whole)
    once = run_spec(make_spec("dynafed")).metrics["test_loss"]
    same = whole.metrics["test_loss"] == once
    assert same[:7].all() and not same[7:].any()
    monkeypatch.setattr("fedjax_het.runtime.long_phases.CHUNK_SECONDS", 0.0)
    for stop in (8, 16):  # in the first and in the second synthesis
        folder = tmp_path / str(stop)
        with pytest.raises(KilledError):
            run_spec(spec, output_dir=folder, progress=make_killing_callback(stop))
        assert_results_equal(run_spec(spec, output_dir=folder, resume=True), whole)


@pytest.mark.slow
def test_trajectory_of_repeated_synthesis():
    options = {**REPEATED_SYNTHESIS, "fine_tune_epochs": 0}
    state = run_spec(make_spec("dynafed", options=options)).state
    for row, rounds in enumerate((5, 6, 7, 8, 9)):
        model = run_spec(make_spec("fedavg", rounds=rounds)).state.server.variables["params"]
        vector = ravel_pytree(model)[0]
        np.testing.assert_array_equal(state.server.step_state.trajectory[row], vector)
