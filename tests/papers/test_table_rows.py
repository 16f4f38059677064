"""What stands beside a table's accuracies: rows that are tuned, p-values, the matching loss."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.tables import make_results

from fedjax_het.analysis.comparison import (
    add_row_settings,
    compare_with_reported,
    format_row,
    parse_row,
)
from fedjax_het.papers.dynafed.settings import CONTROLS
from fedjax_het.papers.dynafed.tables import TABLE1
from fedjax_het.papers.table import TableArguments, TableRun, make_cells, make_table_program
from fedjax_het.papers.table.columns import (
    MIN_PAIRS,
    compute_gains_over_real,
    compute_matching_losses,
    compute_p_values,
    correct_p_values,
    describe_gains_column,
    describe_matching_losses,
    describe_p_values,
    describe_relative_gains,
    run_paired_test,
)
from fedjax_het.papers.table.search import add_tuned_cells
from fedjax_het.papers.table.writer import write_comparison_table
from fedjax_het.tuning.tuner import CHOSEN_FILE, DEFAULT_BUDGET, TUNING_SEED

RNG = np.random.default_rng(0)


def cells(*methods, **filters):
    methods = methods or ("fedavg", "fedprox", "dynafed", *CONTROLS)
    arguments = {"alphas": (0.01,), "seeds": (0, 1), **filters}
    return make_cells(TABLE1, TableArguments(preset="quick", methods=methods, **arguments))


def outcome_of(cells, results, curves=None, directory=None):
    curves = pd.DataFrame() if curves is None else curves
    return TableRun(TABLE1, "quick", cells, results, curves, TABLE1.load_reported(), directory, {})


# --- tuning --------------------------------------------------------------------------------


def write_chosen(directory, every, values):
    """Write the file of the search; cells without values have their default values as the best."""
    records = {
        cell.runs[0].digest(): {
            "method": cell.runs[0].algorithm,
            "hp": {**cell.runs[0].hyperparameters, **values.get(cell.method, {})},
            "trials": [],
        }
        for cell in every
    }
    (directory / CHOSEN_FILE).write_text(json.dumps(records))


def test_tuned_rows_follow_their_rows(tmp_path):
    own = cells("fedavg", "fedprox", "dynafed", *CONTROLS)
    mains = [cell for cell in own if cell.method not in CONTROLS and cell.method != "fedprox"]
    values = {"fedavg": {"local_lr": 0.003}, "dynafed": {"local_lr": 0.1, "fine_tune_lr": 0.001}}
    write_chosen(tmp_path, mains, values)
    actual = add_tuned_cells(own, tmp_path, TABLE1.control_rows, runs_trials=False)
    changes = values["dynafed"]
    assert [cell.method for cell in actual] == [
        *("fedavg", "fedavg(local_lr=0.003)"),
        "fedprox",  # not tuned
        *("dynafed", add_row_settings("dynafed", **changes)),
        *(row for control in CONTROLS for row in (control, add_row_settings(control, **changes))),
    ]
    assert [actual[i] for i in (0, 2, 3, 5, 7)] == own
    assert [run.seed for run in actual[1].runs] == [0, 1]
    assert {run.resolved().hyperparameters["local_lr"] for run in actual[1].runs} == {0.003}
    for tuned in (actual[4], actual[6], actual[8]):
        assert changes.items() <= tuned.runs[0].resolved().hyperparameters.items()


def test_row_with_best_default_values_is_not_repeated(tmp_path):
    own = cells("fedavg", "fedprox")
    write_chosen(tmp_path, own, {"fedprox": {"prox_mu": 0.5}})
    actual = add_tuned_cells(own, tmp_path, {}, runs_trials=False)
    assert [cell.method for cell in actual] == ["fedavg", "fedprox", "fedprox(prox_mu=0.5)"]


def test_columns_are_tuned_apart(tmp_path):
    own = cells("fedavg", alphas=(0.01, 0.04))
    write_chosen(tmp_path, own[:1], {"fedavg": {"local_lr": 0.5}})
    actual = add_tuned_cells(own, tmp_path, {}, runs_trials=False)
    assert [(cell.method, cell.alpha) for cell in actual] == [
        *(("fedavg", 0.01), ("fedavg(local_lr=0.5)", 0.01)),
        ("fedavg", 0.04),
    ]


@pytest.mark.slow
def test_tuned_flag_runs_the_search_once(tmp_path, capsys, monkeypatch):
    quick = replace(TABLE1.presets["quick"], rows=("fedavg",), alphas=(0.1,), seeds=(0,))
    quick = replace(quick, settings={**quick.settings, "rounds": 3})
    main = make_table_program(replace(TABLE1, presets={"quick": quick}))
    folder = ["--tuned", "--wide", "--output-dir", str(tmp_path)]
    assert main(folder) == 0
    chosen = json.loads((tmp_path / CHOSEN_FILE).read_text())
    (record,) = chosen.values()
    trials = pd.DataFrame(record["trials"])
    rungs = [(len(group), group["rounds"].max()) for _, group in trials.groupby("rung")]
    assert rungs == DEFAULT_BUDGET.list_rungs(3)
    best = trials[trials["rounds"] == 3].set_index("score").sort_index().iloc[-1]
    table = pd.read_csv(tmp_path / "table.csv")
    rate = record["hp"].get("local_lr", 0.01)
    assert best["hp.local_lr"] == rate
    assert list(table["method"]) == ["fedavg", f"fedavg(local_lr={rate})"]
    assert f"with seed {TUNING_SEED}, which no row averages" in " ".join(
        capsys.readouterr().out.split()
    )
    monkeypatch.setattr("fedjax_het.papers.table.search.tune", None)  # a second search would fail
    assert main([*folder, "--show"]) == 0 and main(folder) == 0


def test_table_that_is_tuned_without_the_flag_refuses_it(capsys):
    assert make_table_program(replace(TABLE1, budget=DEFAULT_BUDGET))(["--tuned", "--list"]) == 2
    error = capsys.readouterr().err
    assert "--tuned" in error and "a table whose rows are not tuned without this flag" in error


def test_add_row_settings():
    assert add_row_settings("fedavg", local_lr=0.1) == "fedavg(local_lr=0.1)"
    row = add_row_settings("dynafed(preset='code')", fine_tune_lr=1e-3)
    assert parse_row(row) == ("dynafed", {"preset": "code", "fine_tune_lr": 1e-3})
    assert add_row_settings(row, fine_tune_lr=1) == "dynafed(preset='code', fine_tune_lr=1)"


# --- p-values ------------------------------------------------------------------------------

LEVELS = {"fedavg": 0.5, "fedprox": 0.79}


def make_seed_results(own, seeds):
    """Return runs whose accuracies have noise of their own, and the accuracies by method."""
    values = {
        (cell.method, seed): LEVELS.get(cell.method, 0.8) + 0.01 * RNG.normal()
        for cell in own
        for seed in seeds
    }
    results = make_results(own, lambda cell, run: values[cell.method, run.seed])
    return results, {c.method: np.array([values[c.method, s] for s in seeds]) for c in own}


def test_p_values_are_of_paired_seeds():
    seeds = tuple(range(MIN_PAIRS))
    own = cells("fedavg", "fedprox", "dynafed", seeds=seeds)
    results, values = make_seed_results(own, seeds)
    actual = dict(
        zip([c.method for c in own], compute_p_values(outcome_of(own, results)), strict=True)
    )
    assert math.isnan(actual["dynafed"])
    raw = {n: stats.ttest_rel(values[n], values["dynafed"]).pvalue for n in LEVELS}
    assert actual["fedavg"] == pytest.approx(2 * raw["fedavg"])  # Holm: the least of two
    assert actual["fedprox"] == pytest.approx(max(raw["fedprox"], actual["fedavg"]))
    assert actual["fedavg"] < 1e-4
    assert "over seeds of the difference from DynaFed" in describe_p_values(outcome_of(own, []))


def test_no_p_value_of_fewer_than_five_seeds():
    seeds = tuple(range(MIN_PAIRS))
    own = cells("fedavg", "dynafed", seeds=seeds)

    def accuracy(cell, run):
        return None if cell.method == "fedavg" and run.seed == 0 else 0.5 + 0.01 * run.seed

    assert compute_p_values(outcome_of(own, make_results(own, accuracy))).isna().all()
    (equal, _) = compute_p_values(outcome_of(own, make_results(own, lambda cell, run: 0.5)))
    assert equal == 1.0

    def round_differently(cell, run):  # equal differences apart from rounding
        return 0.1 * run.seed + (0.01 if cell.method == "fedavg" else 0.0)

    assert compute_p_values(outcome_of(own, make_results(own, round_differently))).isna().all()
    nothing = compute_p_values(outcome_of(own, make_results(own, accuracy).head(0)))
    assert nothing.isna().all()


def test_paired_test_has_the_interval_of_the_mean():
    values = pd.Series([71.0, 73.5, 70.2, 68.0], index=[1, 2, 3, 4])
    others = pd.Series([70.0, 71.0, 69.9, 90.0], index=[1, 2, 3, 9])
    test = run_paired_test(values, others, min_pairs=3)
    differences = np.array([1.0, 2.5, 0.3])  # seeds 4 and 9 have no pair
    half_width = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / math.sqrt(3)
    expected = differences.mean(), differences.std(ddof=1), half_width
    np.testing.assert_allclose(test[:3], expected)
    assert test.p_value == pytest.approx(stats.ttest_rel(values[:3], others[:3]).pvalue)
    few = run_paired_test(values, others, min_pairs=4)
    assert few.mean == test.mean and np.isnan([few.half_width, few.p_value]).all()


def test_holm_correction():
    p_values = np.array([0.01, 0.04, np.nan, 0.03, 0.9])
    expected = [0.04, 0.09, np.nan, 0.09, 0.9]  # 4 * 0.01, 3 * 0.03, at least 2 * 0.04, 0.9
    np.testing.assert_allclose(correct_p_values(p_values), expected)


# --- the quality of synthetic data ---------------------------------------------------------


def test_matching_loss_column(tmp_path, capsys):
    own = cells()
    losses = {"matching_loss": lambda cell, run: 0.9 if cell.method == "dynafed" else None}
    losses["matching_loss_by_start.3"] = lambda cell, run: (
        0.87 if cell.method == "dynafed" else None
    )
    results = make_results(own, lambda cell, run: 0.5, **losses).astype({"matching_loss": float})
    actual = dict(zip([c.method for c in own], compute_matching_losses(own, results), strict=True))
    assert actual.pop("dynafed") == 0.9 and all(map(math.isnan, actual.values()))
    assert "3: 0.87" in describe_matching_losses(own, results)
    outcome = outcome_of(own, results, directory=tmp_path)
    write_comparison_table(outcome)
    said = capsys.readouterr().out
    assert " J " in said and "0.900" in said and " p " not in said  # of two seeds
    assert "| J |" in (tmp_path / "table.md").read_text()
    table = compare_with_reported(own, results, TABLE1.load_reported())
    assert "p_value" not in table


# --- gains ---------------------------------------------------------------------------------


def test_gain_columns():
    own = cells("fedavg", "dynafed", *CONTROLS, alphas=(0.01, 0.04))
    levels = {"fedavg": 0.4, "dynafed": 0.6, CONTROLS[0]: 0.5, CONTROLS[1]: 0.75}
    results = make_results(own, lambda cell, run: levels[cell.method] + cell.alpha)
    table = compare_with_reported(own, results, TABLE1.load_reported())
    gains = compute_gains_over_real(table, own, TABLE1)
    for cell, gain in zip(own, gains, strict=True):
        wanted = {"dynafed": -15.0, CONTROLS[0]: -25.0}.get(cell.method, math.nan)
        np.testing.assert_allclose(gain, wanted, atol=1e-9)
    note = describe_relative_gains(table, own, TABLE1)
    assert "alpha 0.01: +48.8 % measured" in note and "alpha 0.04: +45.5 % measured" in note
    paper = describe_relative_gains(
        table.assign(reported_mean=table["method"].map({"fedavg": 50.0, "dynafed": 75.0})),
        own,
        TABLE1,
    )
    assert paper.count("+50.0 % reported") == 2
    assert f"({format_row(CONTROLS[1])})" in describe_gains_column(TABLE1)
