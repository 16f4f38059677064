"""PFLlib's leaderboard: rows, settings, pooled scores, paired differences, and learning rates."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.render import MISSING
from fedjax_het.papers.pfllib.table import (
    ADDED_METHODS,
    LEADERBOARD,
    LEARNING_RATES,
    METHOD_ROWS,
    PARTITIONS,
    TUNED,
    TUNING_SEED,
    RunScores,
    choose_learning_rates,
    main,
    make_accuracies_text,
    make_gains_table,
    make_gains_text,
    name_row,
)
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableArguments, make_cells


def resolve_runs(preset, **arguments):
    cells = make_cells(LEADERBOARD, TableArguments(preset, **arguments))
    return {cell.method: [run.resolved() for run in cell.runs] for cell in cells}


def test_reported_values_are_the_leaderboard():
    reported = load_reported_values("pfllib", "table")
    assert len(reported) == 40 and set(reported["partition"]) == {*PARTITIONS}
    values = reported.set_index(["partition", "method"])["mean"]
    assert values["pathological_unequal", "fedavg"] == 80.41
    assert values["dirichlet_capped", "gpfl"] == 97.81
    best = values.groupby("partition").idxmax()
    assert [name for _, name in best] == ["fedcp", "gpfl"]


def test_rows_are_the_methods_of_the_package():
    own = [name for name in load_reported_values("pfllib")["method"] if name in METHODS]
    assert {*own} <= {*METHOD_ROWS} and {*METHOD_ROWS} <= {*METHODS}
    assert {"fedavg", "fedgen", "fedamp", "fedper"} <= {*METHOD_ROWS}
    assert {*ADDED_METHODS} & {*METHODS} <= {*METHOD_ROWS}


def test_paper_preset_is_the_protocol():
    runs = resolve_runs("paper")
    assert len(runs) == 2 * len(METHOD_ROWS)
    for partition in PARTITIONS:
        for method in METHOD_ROWS:
            rows = runs[name_row(method, partition)]
            assert [run.seed for run in rows] == [1, 2, 3]
            run = rows[0]
            assert (run.algorithm, run.partition, run.protocol) == (method, partition, "pfllib")
            assert (run.dataset, run.model, run.rounds) == ("fashion_mnist_pooled", "cnn", 2000)
            assert (run.hyperparameters["local_lr"], run.eval_every) == (0.005, 10)
            assert run.partition_options == {"min_size": 30}
            assert run.alpha == (0.1 if partition == "dirichlet_capped" else None)
            assert run.has_client_tests and run.metrics == "pooled_accuracy"


def test_methods_have_equal_tuning_budgets():
    trials, reported = resolve_runs("tuning"), resolve_runs("cpu")
    assert len(trials) == len(LEARNING_RATES) * len(reported)
    seeds = {run.seed for runs in reported.values() for run in runs}
    assert {run.seed for runs in trials.values() for run in runs} == {TUNING_SEED}
    assert TUNING_SEED not in seeds and len(seeds) == 3
    for runs in reported.values():
        rate = runs[0].hyperparameters["local_lr"]
        assert rate == TUNED[runs[0].partition].get(runs[0].algorithm, LEARNING_RATES[1])
        assert rate in LEARNING_RATES
    assert all({*rates} <= {*METHOD_ROWS} for rates in TUNED.values())
    for runs in trials.values():
        hp = runs[0].hyperparameters
        assert hp.get("inner_lr", hp["local_lr"]) == hp["local_lr"]


def make_scores(partition="dirichlet_capped", rate=0.03, **gains):
    """Scores whose level differs by seed, with the gain of each seed over fine-tuned FedAvg."""
    records = []
    for method, own in {"fedavg_ft": [0.0] * 3, **gains}.items():
        for seed, gain in enumerate(own):
            best = 80.0 + 5 * seed + gain
            scores = (best, best - 1, np.nan, np.nan)
            records.append(RunScores(partition, method, rate, seed, *scores))
    return pd.DataFrame(records)


def test_gains_are_paired_by_seed():
    scores = make_scores(fedavg=[-10, -12, -14], fedper=[1, 2, 6], ditto=[1, 2])
    gains = make_gains_table(scores).set_index("method")
    assert gains["best"].to_dict() == pytest.approx({"fedavg": -12, "fedper": 3, "ditto": 1.5})
    np.testing.assert_allclose(gains["best"], gains["last"])
    # t quantile of two degrees of freedom: 4.3027.
    expected = 4.3027 * np.array([2, np.sqrt(7)]) / np.sqrt(3)
    np.testing.assert_allclose(gains["best_half_width"][:2], expected, rtol=1e-4)
    statistic = np.array([12 / (2 / np.sqrt(3)), 3 / np.sqrt(7 / 3)])
    p_values = 1 - statistic / np.sqrt(2 + statistic**2)
    np.testing.assert_allclose(gains["best_p"][:2], [2 * p_values[0], p_values[1]])
    assert np.isnan(gains.loc["ditto", ["best_p", "best_half_width"]].astype(float)).all()
    assert gains["seeds"].tolist() == [3, 3, 2]
    assert not len(make_gains_table(scores[scores["method"] != "fedavg_ft"]))


def test_tables_show_reported_values_and_missing_cells():
    scores = make_scores(fedper=[1, 2, 6])
    reported = load_reported_values("pfllib")
    table = make_accuracies_text(scores, reported, "T.")
    tuned, fedper = table.sections[0].rows
    assert tuned["Reported"] == tuned["Difference"] == tuned["Global, best"] == MISSING
    assert (fedper["Best"], fedper["Reported"]) == ("88.00 ± 7.55", "97.44 ± 0.06")
    assert (fedper["Difference"], fedper["lr"], fedper["Seeds"]) == ("−9.44", "0.03", "3")
    toy = make_accuracies_text(scores, reported.head(0), "T.").sections[0].rows
    assert toy[1]["Reported"] == toy[1]["Difference"] == MISSING
    gains = make_gains_text(make_gains_table(scores), "T.")
    assert gains.sections[0].title == "Dirichlet 0.1"
    assert [row["Best"] for row in gains.sections[0].rows] == ["+3.0 ± 6.6"]


def test_learning_rate_is_best_of_the_grid():
    trials = [
        make_scores(rate=0.01, fedper=[1, 2, 3]),
        make_scores(rate=0.03, fedper=[4, 5, 6]),
        make_scores("pathological_unequal", 0.01, fedper=[1, 2, 3]),
        make_scores("pathological_unequal", 0.03, fedper=[0, 0, 0]),
    ]
    chosen = choose_learning_rates(pd.concat(trials))
    assert chosen["dirichlet_capped"] == {"fedavg_ft": 0.01, "fedper": 0.03}
    assert chosen["pathological_unequal"] == {"fedavg_ft": 0.01, "fedper": 0.01}


def test_learning_rate_diverges_in_no_setting():
    scores = pd.concat(
        [
            make_scores(rate=0.01, fedper=[1, 2, 3]),
            make_scores(rate=0.03, fedper=[4, 5, 6]),
            make_scores("pathological_unequal", 0.01, fedper=[1, 2, 3]),
            make_scores("pathological_unequal", 0.03, fedper=[4, 5, 6]),
        ]
    )
    is_diverged = (scores["method"] == "fedper") & (scores["local_lr"] == 0.03)
    is_diverged &= (scores["partition"] == "pathological_unequal") & (scores["seed"] == 2)
    assert choose_learning_rates(scores)["dirichlet_capped"]["fedper"] == 0.03
    assert choose_learning_rates(scores[~is_diverged])["dirichlet_capped"]["fedper"] == 0.01


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--methods", "ccvr"],
            "--methods = 'ccvr' is no row of this table: expected fedavg, fedper",
        ),
        (
            ["--alphas", "0.1", "1"],
            "--alphas = '0.1 1': expected no value: the rows set the partition",
        ),
    ],
)
def test_invalid_filter_is_one_line(words, message, tmp_path, capsys):
    assert main([*words, "--list", "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and "partition=" not in error


@pytest.mark.slow
def test_leaderboard_program(tmp_path, capsys):
    assert main(["--output-dir", str(tmp_path)]) == 0
    assert "FedAvg-FT" in capsys.readouterr().out
    scores = pd.read_csv(tmp_path / "table.csv")
    assert len(scores) == 2 * 4 * 3 and scores[["best", "last"]].stack().between(0, 100).all()
    methods = scores.set_index("method")
    # The global model is tested on the whole test split, which the clients' tests divide.
    fedavg = methods.loc["fedavg"]
    np.testing.assert_allclose(fedavg["best"], fedavg["global_best"], atol=1e-4)
    assert methods.loc["fedper", "global_best"].isna().all()
    assert (methods.loc["fedavg_ft", "best"] > methods.loc["fedavg_ft", "global_best"]).all()
    assert len(pd.read_csv(tmp_path / "gains.csv")) == 2 * 3
    assert (tmp_path / "table.md").stat().st_size and (tmp_path / "gains.tex").stat().st_size
