"""Results on disk, read as data frames."""

import numpy as np

from fedjax_het import sweep
from fedjax_het.analysis import make_overview_table
from fedjax_het.analysis.figures.metric_vs_setting import find_numeric_pair
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


def test_runs_without_a_kind_have_its_neutral_strength(tmp_path):
    """Rows group by strength and stand below a heading; alternatives have no heat map."""
    skews = [None, "noise:std=0.3", "rotation:degrees=180", "quantity"]
    systems = [{}, {"system": ["speed", "over_selection:factor=2"]}]
    for algorithm in ("fedavg", "scaffold"):
        for settings in [*({"skew": skew} for skew in skews), *systems[1:]]:
            save(RunSpec(algorithm, model="mlp", rounds=6, **settings), tmp_path, diverged=False)
    results = load_results(tmp_path)
    assert sorted(results["skew.noise.std"]) == [0] * 8 + [0.3] * 2
    assert set(results["system.over_selection.factor"]) == {1, 2}
    assert results["skew.quantity.alpha"].isna().sum() == 8
    table = make_overview_table(results)
    titles = ["none", "noise.std 0.3", "rotation.degrees 180"]
    assert {*titles, "quantity.alpha 0.5"} <= {section.title for section in table.sections}
    assert all(section.title for section in table.sections)
    only_noise = results[results["skew.rotation.degrees"] == 0].dropna(axis=1, how="all")
    is_noise = only_noise["skew.quantity.alpha"].isna()
    only_noise = only_noise[is_noise & (only_noise["system.over_selection.factor"] == 1)]
    table = make_overview_table(
        only_noise.drop(columns="skew.quantity.alpha"), by=["skew.noise.std", "algorithm"]
    )
    assert [section.title for section in table.sections] == ["noise.std 0", "noise.std 0.3"]
    assert find_numeric_pair(results, ["skew.noise.std", "skew.rotation.degrees"]) == []


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
