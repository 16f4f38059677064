"""Results on disk, read as data frames."""

import numpy as np

from fedjax_het import sweep
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.result_store import load_curves, load_results, select_newest
from fedjax_het.runtime.results import Result

FEDAVG = RunSpec("fedavg", "digits", model="mlp", alpha=0.1, rounds=6)
FEDPROX = RunSpec("fedprox", "digits", model="mlp", alpha=0.1, rounds=6, hp={"prox_mu": 0.5})


def save(spec, directory, **summary):
    spec = spec.resolved()
    accuracy = np.linspace(0.1, 0.6, spec.rounds) + spec.seed / 100
    result = Result(
        spec,
        {"test_accuracy": accuracy, "per_class": np.zeros((spec.rounds, 10))},
        {
            "algorithm": "not the setting",
            "final_accuracy": float(accuracy[-5:].mean()),
            "finished": "2026-01-01T00:00:00+00:00",
            "nested": {"value": 3},
            **describe_environment(),
            **summary,
        },
    )
    result.save(directory)
    return result.digest()


def test_load_results_and_curves(tmp_path):
    seventh = RunSpec("fedavg", "digits", model="mlp", rounds=3, seed=7)
    specs = [FEDAVG, FEDPROX, seventh]
    digests = [save(spec, tmp_path) for spec in specs]
    (tmp_path / "table.json").write_text("{}")  # not a run
    results = load_results(tmp_path).set_index("digest").loc[digests]
    assert list(results["settings"]) == [spec.digest() for spec in specs]
    assert results["hp.prox_mu"].iloc[1] == 0.5 and np.isnan(results["hp.prox_mu"].iloc[0])
    assert list(results["learning_rate"]) == list(results["hp.local_lr"]) == [0.01] * 3
    assert list(results["seed"]) == [0, 0, 7]
    assert list(results["algorithm"]) == ["fedavg", "fedprox", "fedavg"]
    assert set(results["nested.value"]) == {3}

    curves = load_curves(tmp_path)
    assert set(curves.columns) == {"digest", "round", "test_accuracy"}
    last = curves[curves["digest"] == digests[2]]
    assert list(last["round"]) == [1, 2, 3]
    np.testing.assert_allclose(last["test_accuracy"], [0.17, 0.42, 0.67])


def test_load_results_of_an_empty_folder(tmp_path):
    assert len(load_results(tmp_path)) == 0 and len(load_curves(tmp_path)) == 0
    assert len(select_newest(load_results(tmp_path))) == 0
    assert load_results(tmp_path)["final_accuracy"].empty and sweep([]).to_pandas()["seed"].empty


def test_select_newest_of_several_devices(tmp_path):
    late = "2026-02-01T00:00:00+00:00"
    on_gpu = save(FEDAVG, tmp_path, device="gpu", finished=late, final_accuracy=0.9)
    assert save(FEDAVG, tmp_path) != on_gpu
    save(FEDPROX, tmp_path)
    results = load_results(tmp_path)
    assert len(results) == 3
    kept = select_newest(results).set_index("settings")
    assert len(kept) == 2 and kept.loc[FEDAVG.digest(), "digest"] == on_gpu


def test_select_newest_keeps_user_datasets(tmp_path):
    spec = RunSpec("fedavg", "user", model="mlp", partition="iid", rounds=6)
    for data in ("one", "two"):
        save(spec, tmp_path, dataset_digest=data)
    save(FEDAVG, tmp_path, dataset_digest="three")
    assert len(select_newest(load_results(tmp_path))) == 3
