"""Searches of hyperparameters: scores, rungs, stored trials, the command line."""

import json

import numpy as np
import pandas as pd
import pytest

from fedjax_het import RunSpec, register_method, simulate, tune
from fedjax_het.algorithms import METHODS
from fedjax_het.cli import main
from fedjax_het.runtime import sweep as sweep_module
from fedjax_het.utils.errors import ConfigError

SETTINGS = {"dataset": "digits", "model": "mlp", "num_clients": 4, "rounds": 4, "local_epochs": 1}
SPEC = RunSpec("fedavg", **SETTINGS)
BUDGET = {"trials": 4, "rungs": 2, "reduction": 2, "progress": None}


def test_scores_are_validation_accuracies_and_the_best_half_continues():
    specs = [SPEC, RunSpec("ditto", **SETTINGS)]
    result = tune(specs, **BUDGET)
    table = result.trials
    assert table.groupby(["spec", "rung"]).size().tolist() == [4, 2, 4, 2]
    assert table.groupby("rung")["rounds"].unique().map(list).tolist() == [[2], [4]]
    for index in range(2):
        own = table[table["spec"] == index]
        first, last = own[own["rung"] == 0], own[own["rung"] == 1]
        best_half = first.sort_values("score", ascending=False, kind="stable")["trial"][:2]
        assert set(last["trial"]) == set(best_half)
        assert last.loc[last["score"].idxmax(), "chosen"]
        assert table["chosen"].sum() == 2
    # The chosen settings have the seed and rounds of the specs, and the score of their own run.
    for index, name in enumerate(("best_validation_accuracy", "best_client_validation_accuracy")):
        chosen = result.chosen[index]
        assert (chosen.seed, chosen.rounds, chosen.validation) == (0, 4, None)
        run = RunSpec.from_dict(chosen.to_dict() | {"seed": 1000, "validation": 0.1})
        score = simulate(run, progress=None).summary[name]
        own = table[(table["spec"] == index) & table["chosen"]]
        np.testing.assert_allclose(own["score"].item(), score)


def test_trials_are_as_long_as_the_method_needs():
    register_method("late", METHODS["fedavg"].build, min_rounds=lambda options: 3)
    lines: list[str] = []
    specs = [SPEC, RunSpec("late", **SETTINGS)]
    table = tune(specs, **BUDGET | {"progress": lines.append}).trials
    rounds = table.groupby(["method", "rung"])["rounds"].unique().map(list)
    assert rounds["fedavg"].tolist() == [[2], [4]]
    assert rounds["late"].tolist() == [[3], [4]]
    assert lines[0] == "Rung 1 of 2: 8 runs up to round 3"


def test_folder_resumes_a_search(tmp_path, monkeypatch):
    first = tune([SPEC], tmp_path, **BUDGET)
    stored = pd.read_csv(tmp_path / "tuning.csv")
    assert stored["score"].tolist() == first.trials["score"].tolist()
    settings = json.loads((tmp_path / "tuned.json").read_text())
    assert [RunSpec.from_dict(values) for values in settings] == first.chosen

    def fail(*args, **kwargs):
        raise AssertionError("a finished trial is repeated")

    monkeypatch.setattr(sweep_module.GroupRunner, "run_jobs", fail)
    lines: list[str] = []
    second = tune([SPEC], tmp_path, **BUDGET | {"progress": lines.append})
    parts = [line for line in lines if line.startswith("Rung")]
    assert parts == ["Rung 1 of 2: 4 runs up to round 2", "Rung 2 of 2: 2 runs up to round 4"]
    pd.testing.assert_frame_equal(second.trials, first.trials)


def test_diverged_trials_lose():
    result = tune([SPEC], space={"local_lr": (0.01, 1e6)}, **BUDGET)
    assert result.trials["diverged"].any()
    assert not result.trials.loc[result.trials["diverged"], "chosen"].any()
    with pytest.raises(ConfigError, match="all trials of fedavg diverged"):
        tune([SPEC], space={"local_lr": 1e9}, **BUDGET)


def test_optuna_has_the_rounds_of_halving():
    result = tune([SPEC], sampler="optuna", **BUDGET)
    # 4 trials of 2 rounds and 2 of 2 more are 12 rounds: 3 trials of 4 rounds.
    assert result.trials["rounds"].tolist() == [4, 4, 4]
    lines: list[str] = []
    again = tune([SPEC], sampler="optuna", **BUDGET | {"progress": lines.append})
    parts = [line for line in lines if line.startswith("Batch")]
    assert parts == ["Batch 1 of 2: 2 runs up to round 4", "Batch 2 of 2: 1 run up to round 4"]
    pd.testing.assert_frame_equal(result.trials, again.trials)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"seeds": (0,)}, "seeds"),
        ({"trials": 1}, "trials"),
        ({"seeds": ()}, "seeds"),
        ({"sampler": "grid"}, "sampler"),
        ({"validation": 1.0}, "validation"),
    ],
)
def test_bad_arguments_are_refused(arguments, word):
    with pytest.raises(ConfigError, match=word):
        tune([SPEC], **BUDGET | arguments)
    with pytest.raises(ConfigError, match="specs"):
        tune([], **BUDGET)


def test_command_prints_the_chosen_settings(tmp_path, capsys):
    words = (
        "tune --algorithm fedavg fedprox --dataset digits --model mlp --num-clients 4 --rounds 2"
    )
    words += " --trials 2 --rungs 1 --space prox_mu=0.1,0.2 --quiet --output-dir"
    assert main([*words.split(), str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [spec["algorithm"] for spec in summary["chosen"]] == ["fedavg", "fedprox"]
    assert (tmp_path / "tuned.json").exists()
