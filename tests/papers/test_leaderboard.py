"""Leaderboards: search, statistics, costs, and rows that join later."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedjax_het import register_method
from fedjax_het.algorithms import METHODS, get_algorithm_spec
from fedjax_het.papers.leaderboard import board, tables
from fedjax_het.papers.table import Preset, TableArguments, make_cells
from fedjax_het.runtime import sweep as sweep_module
from fedjax_het.tuning.tuner import Budget

BOARDS = (tables.LABEL, tables.FEATURE, tables.QUANTITY, tables.NOISE, tables.PERSONAL)


@pytest.mark.parametrize("declaration", BOARDS, ids=lambda declaration: declaration.name)
def test_rows_have_valid_settings_and_one_budget(declaration):
    cells = make_cells(declaration, TableArguments("cpu"))
    assert {len(cell.runs) for cell in cells} == {5}
    specs = [cell.runs[0].resolved() for cell in cells]
    assert len({(s.rounds, s.num_clients, s.local_epochs, s.batch_size) for s in specs}) == 1
    assert board.BASELINE in [cell.method for cell in cells]


@pytest.mark.parametrize("preset", ["cpu", "cifar"])
@pytest.mark.parametrize("declaration", BOARDS, ids=lambda declaration: declaration.name)
def test_methods_take_effect_in_all_trials(declaration, preset):
    for cell in make_cells(declaration, TableArguments(preset)):
        spec = cell.runs[0].resolved()
        method = get_algorithm_spec(spec.algorithm, spec.options)
        (_, rounds), *_ = board.DEFAULT_BUDGET.list_rungs(spec.rounds)
        assert method.get_min_rounds(spec.options) <= rounds


def test_rows_are_the_methods_of_the_registry():
    rows = {*tables.LABEL.list_rows("cpu"), *tables.PERSONAL.list_rows("cpu")}
    assert rows >= set(METHODS.built_in)


GAINS = np.array([1, 2, 1, 2, 2])


def make_scores():
    rng = np.random.default_rng(0)
    base = rng.normal(80, 1, 5)
    accuracies = {"fedavg": base, "fedprox": base + GAINS, "scaffold": base + 0.1}
    return pd.DataFrame(
        [
            {
                **{"method": method, "seed": seed, "accuracy": value},
                **{"highest": value + 1, "worst": value - 10},
            }
            for method, values in accuracies.items()
            for seed, value in enumerate(values)
        ]
    )


def test_comparison_by_hand():
    table = board.compare_with_baseline(make_scores()).set_index("method")
    assert math.isnan(table.loc["fedavg", "gain"])
    row = table.loc["fedprox"]
    np.testing.assert_allclose(row["gain"], 1.6)
    # The bootstrap's means are multiples of 0.2 between the smallest and the largest difference.
    assert 1.0 <= row["low"] < 1.6 < row["high"] <= 2.0
    np.testing.assert_allclose(row["worst"], row["accuracy"] - 10)
    np.testing.assert_allclose(row["highest"], row["accuracy"] + 1)
    # SCAFFOLD's differences are constant and have no test, so Holm's correction is over one row.
    expected = stats.ttest_1samp(GAINS, 0).pvalue
    np.testing.assert_allclose(row["p"], expected)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_detectable_difference_has_the_power(num_seeds):
    effect = board.compute_detectable_difference(2.0, num_seeds) / 2.0
    rng = np.random.default_rng(0)
    samples = rng.normal(effect, 1.0, (20_000, num_seeds))
    share = (stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05).mean()
    assert abs(share - 0.8) < 0.015


@pytest.fixture
def small_board():
    """A leaderboard of two methods and a user's with short runs."""
    register_method("mine", METHODS["fedavg"].build)
    preset = Preset(
        datasets=("digits",),
        models=("mlp",),
        seeds=(0, 1, 2),
        rows=("fedavg", "fedprox"),
        optional_rows=("mine",),
        settings={"rounds": 2, "eval_every": 1, "num_clients": 4},
    )
    declaration = replace(tables.QUANTITY, budget=Budget(2, 1, 2), presets={"quick": preset})
    yield board.make_leaderboard_program(declaration)
    METHODS.pop("mine", None)


def make_result(client_accuracy, validation=None, **summary):
    client_accuracy = np.array(client_accuracy)
    means = client_accuracy.mean(1)
    metrics = {"client_accuracy": client_accuracy, "mean_client_accuracy": means}
    metrics["test_accuracy"] = means - 0.05
    spec = SimpleNamespace(validation=validation)
    return SimpleNamespace(spec=spec, summary=summary, metrics=metrics)


# The accuracy falls after round 2.
ROUNDS = [[0.1, 0.2], [0.9, 0.8], [0.5, 0.1], [0.5, 0.2], [0.5, 0.3], [0.5, 0.4], [0.5, 0.5]]


def test_scores_are_of_the_last_five_rounds():
    result = make_result(ROUNDS, final_accuracy=0.4, final_client_accuracy=0.45)
    scores = board.score_run(result, on_client_tests=False)
    assert scores == pytest.approx({"accuracy": 40, "highest": 80, "worst": 30})
    scores = board.score_run(result, on_client_tests=True)
    assert scores == pytest.approx({"accuracy": 45, "highest": 85, "worst": 30})


def test_scores_are_of_the_best_round_by_validation():
    """Validation by the global model selects round 3, by the clients' models round 4."""
    result = make_result(
        ROUNDS,
        validation=0.1,
        **{"best_validation_accuracy": 0.9, "best_round": 3, "best_accuracy": 0.25},
        **{"bmta": 0.35, "bmta_round": 4, "final_accuracy": 0.4, "final_client_accuracy": 0.45},
    )
    scores = board.score_run(result, on_client_tests=False)
    assert scores == pytest.approx({"accuracy": 25, "highest": 80, "worst": 10})
    scores = board.score_run(result, on_client_tests=True)
    assert scores == pytest.approx({"accuracy": 35, "highest": 85, "worst": 20})
    # A method without a global model has no validation accuracy of this model.
    result.summary.update(best_validation_accuracy=None, best_round=None, best_accuracy=None)
    assert board.score_run(result, on_client_tests=True) == scores
    scores = board.score_run(result, on_client_tests=False)
    assert math.isnan(scores["accuracy"]) and math.isnan(scores["worst"])


def test_accuracy_of_zero_is_a_score():
    result = make_result([[0.0, 0.1]], final_accuracy=0.0)
    scores = board.score_run(result, on_client_tests=False)
    assert (scores["accuracy"], scores["worst"]) == (0.0, 0.0)
    assert math.isnan(board.score_run(result, on_client_tests=True)["accuracy"])
    scores = board.score_run(make_result([[math.nan] * 2]), on_client_tests=False)
    assert all(math.isnan(value) for value in scores.values())


@pytest.mark.slow
def test_method_joins_without_repeating_the_others(small_board, tmp_path, monkeypatch, capsys):
    folder = ["--output-dir", str(tmp_path)]
    assert small_board(folder) == 0
    first = pd.read_csv(tmp_path / "leaderboard.csv").set_index("method")
    assert sorted(first.index) == ["fedavg", "fedprox"]
    assert first["spread"].notna().all() and (first["seeds"] == 3).all()
    chosen = json.loads((tmp_path / "tuned.json").read_text())
    assert {record["method"] for record in chosen.values()} == {"fedavg", "fedprox"}
    assert all(len(record["trials"]) == 2 for record in chosen.values())

    executed = []
    run_jobs = sweep_module.GroupRunner.run_jobs

    def record_jobs(runner, **arguments):
        executed.extend(job.spec.algorithm for job in runner.jobs)
        return run_jobs(runner, **arguments)

    monkeypatch.setattr(sweep_module.GroupRunner, "run_jobs", record_jobs)
    assert small_board(["--methods", "mine", *folder]) == 0
    assert set(executed) == {"mine"}
    second = pd.read_csv(tmp_path / "leaderboard.csv").set_index("method")
    assert sorted(second.index) == ["fedavg", "fedprox", "mine"]
    # The method is FedAvg by another name: its accuracies are equal.
    assert second.loc["mine", "accuracy"] == second.loc["fedavg", "accuracy"]
    pd.testing.assert_series_equal(
        second.loc["fedprox", "accuracy":"worst"], first.loc["fedprox", "accuracy":"worst"]
    )
