"""What stands beside a table's accuracies: rows that are tuned, p-values, the matching loss."""

import math

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
from fedjax_het.papers.dynafed.settings import CONTROLS, TUNING
from fedjax_het.papers.dynafed.tables import TABLE1
from fedjax_het.papers.table import TableArguments, TableRun, make_cells
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
from fedjax_het.papers.table.tuning import (
    TUNING_FACTORS,
    TUNING_SEED,
    add_tuned_cells,
    describe_tuning,
    make_tuning_trials,
)
from fedjax_het.papers.table.writer import write_comparison_table

RNG = np.random.default_rng(0)


def cells(*methods, **filters):
    methods = methods or ("fedavg", "fedprox", "dynafed", *CONTROLS)
    arguments = {"alphas": (0.01,), "seeds": (0, 1), **filters}
    return make_cells(TABLE1, TableArguments(preset="quick", methods=methods, **arguments))


def outcome_of(cells, results, curves=None, directory=None):
    curves = pd.DataFrame() if curves is None else curves
    return TableRun(TABLE1, "quick", cells, results, curves, TABLE1.load_reported(), directory, {})


# --- tuning --------------------------------------------------------------------------------


def test_tuning_trials():
    every = cells("all")
    actual = make_tuning_trials(TABLE1, every)
    assert {parse_row(every[trial.cell_index].method)[0] for trial in actual} == set(TUNING)
    for place, name, tried in actual:
        cell = every[place]
        assert cell.method not in CONTROLS
        usual = cell.runs[0].resolved().hyperparameters[name]
        values = [each.runs[0].resolved().hyperparameters[name] for each in tried]
        wanted = [factor * usual for factor in TUNING_FACTORS]
        if name == "mixup_lambda":  # a share: ten times the usual one is none
            wanted = [value for value in wanted if value <= 1]
        np.testing.assert_allclose(values, wanted, rtol=5e-3)
        assert [[run.seed for run in each.runs] for each in tried] == [[TUNING_SEED]] * len(values)
        assert TUNING_SEED not in {run.seed for run in cell.runs}


def test_tuned_row_has_best_value():
    own = cells("fedavg", "fedprox")
    tried = [each for trial in make_tuning_trials(TABLE1, own) for each in trial.cells]
    best = {"local_lr": 0.003, "prox_mu": 0.0002}

    def accuracy(cell, run):
        wanted = any(
            math.isclose(run.hyperparameters.get(name, 0), value) for name, value in best.items()
        )
        if run.hyperparameters.get("local_lr") == 0.01:
            return None  # a trial that diverges is none of the best
        return 0.8 if wanted else 0.5

    results = make_results(tried, accuracy)
    actual = add_tuned_cells(TABLE1, own, results, TABLE1.load_reported())
    assert [cell.method for cell in actual] == [
        "fedavg",
        "fedavg(local_lr=0.003)",
        "fedprox",
        "fedprox(prox_mu=0.0002)",
    ]
    assert [run.seed for run in actual[1].runs] == [0, 1]
    assert actual[1].runs[0].resolved().hyperparameters["local_lr"] == 0.003
    assert actual[0] == own[0]
    note = describe_tuning(TABLE1, own, results)
    assert f"seed {TUNING_SEED}" in note and "10 of 10" in note and "5.0 hours" in note
    assert "on the test split" in note
    own_without, results_without = own, results
    # Validation accuracies decide where runs have them.
    own = cells("fedavg", validation=0.2)
    tried = [each for trial in make_tuning_trials(TABLE1, own) for each in trial.cells]
    assert {run.validation for cell in tried for run in cell.runs} == {0.2}
    results = make_results(tried, accuracy)
    values = [cell.runs[0].hyperparameters["local_lr"] for cell in tried]
    results["best_validation_accuracy"] = [0.9 if v == values[2] else 0.1 for v in values]
    actual = add_tuned_cells(TABLE1, own, results, TABLE1.load_reported())
    assert actual[1].runs[0].hyperparameters["local_lr"] == values[2] == 0.001
    assert "by validation accuracy" in describe_tuning(TABLE1, own, results)
    # A control is shown with what was best for its row.
    with_control = cells("dynafed", *CONTROLS)
    tried_there = [
        each for trial in make_tuning_trials(TABLE1, with_control) for each in trial.cells
    ]

    def best_of_dynafed(cell, run):
        return 0.9 if math.isclose(run.hyperparameters.get("fine_tune_lr", 0), 1e-3) else 0.5

    result = make_results(tried_there, best_of_dynafed)
    assert len(tried_there) == 5  # the controls themselves are not tried
    rows = [
        cell.method
        for cell in add_tuned_cells(TABLE1, with_control, result, TABLE1.load_reported())
    ]
    assert rows == [
        "dynafed",
        "dynafed(fine_tune_lr=0.001)",
        *(r for c in CONTROLS for r in (c, add_row_settings(c, fine_tune_lr=1e-3))),
    ]
    # Not all trials made: the row has no tuned one yet.
    own, results = own_without, results_without
    first = make_tuning_trials(TABLE1, own)[0].cells[0]
    fewer = results[results["settings"] != first.runs[0].digest()]
    assert [
        cell.method for cell in add_tuned_cells(TABLE1, own, fewer, TABLE1.load_reported())
    ] == [
        "fedavg",
        "fedprox",
        "fedprox(prox_mu=0.0002)",
    ]


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
