"""The tables' declarations, their command line, and one table filled for real."""

import re
import runpy
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support.markers import slow_case
from support.paths import ROOT

import fedjax_het
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import parse_row
from fedjax_het.papers.dynafed.tables import TABLE1, TABLE5
from fedjax_het.papers.dynafed.tables import table1 as main
from fedjax_het.papers.programs import PROGRAM_MODULES
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableArguments, TableRun, make_cells
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.results import Result

# Programs of figures and tables that are not made of runs of a table.
OTHER_PROGRAMS = ("dynafed.fig3", "fedaf.table7", "fedaf.fig9", "fsl.fig3", "fsl.fig4")
OTHER_PROGRAMS += ("fedaf.fig6", "fedaf.fig7", "fedaf.fig8")


@pytest.mark.parametrize("experiment", [TABLE1, TABLE5], ids=lambda e: e.name)
def test_paper_preset_matches_reported_cells(experiment):
    cells = make_cells(experiment, TableArguments(preset="paper"))
    reported = load_reported_values(experiment.paper, experiment.item)
    places = [(cell.dataset, cell.model, cell.alpha, cell.method) for cell in cells]
    theirs = reported[["dataset", "model", "level", "method"]].itertuples(index=False, name=None)
    theirs = list(theirs)
    assert sorted(place for place in places if place[3] in {row[3] for row in theirs}) == sorted(
        theirs
    )
    for cell in cells:
        for run in cell.runs:
            spec = run.resolved()
            method, variant = parse_row(cell.method)
            assert (spec.algorithm, spec.dataset) == (method, cell.dataset)
            assert {**spec.options, **variant} == spec.options
            assert (spec.num_clients, spec.participation, spec.rounds) == (80, 0.4, 200)
            trains = METHODS[method].trains_locally
            expected = ("dirichlet_balanced", 1 if trains else None)
            assert (spec.partition, spec.local_epochs) == expected
            assert (spec.width, spec.depth, spec.norm) == (None, None, None)
    filled = {cell.method for cell in cells if cell.runs}
    assert filled >= {"fedavg", "fedprox", "scaffold", "dynafed"}


def test_scores_are_of_finished_runs(tmp_path, monkeypatch):
    cells = make_cells(TABLE1, TableArguments("quick"))
    first, second = (cell.runs[0] for cell in cells[:2])
    empty = TableRun.from_directory(TABLE1, "quick", cells, tmp_path)
    assert not len(empty.collect_scores(lambda result: {"rounds": result.summary["rounds"]}))
    finished = empty._replace(results=pd.DataFrame({"settings": [first.digest(), second.digest()]}))
    result = SimpleNamespace(summary={"rounds": 7})
    # The second run diverged.
    monkeypatch.setattr(
        TableRun, "load_run_result", lambda _, run: result if run is first else None
    )
    scores = finished.collect_scores(lambda result: {"rounds": result.summary["rounds"]})
    assert scores["row"].tolist() == [cell.method for cell in cells[:2]]
    assert scores["seed"].tolist() == [first.seed, second.seed]
    assert scores["rounds"].iloc[0] == 7 and np.isnan(scores["rounds"].iloc[1])


TABLE_PROGRAMS = [
    *(name for name in PROGRAM_MODULES if name not in ("all", *OTHER_PROGRAMS)),
    *("fedaf.ablations", "fedaf.privacy"),
]


PARTS_OF_DATA = {
    ("pfllib.table", "cpu"): ("fashion_mnist_twentieth",),
    ("niid_bench.table3", "cpu"): ("mnist_tenth", "fashion_mnist_tenth", "cifar10_tenth"),
    ("heterogeneity.atlas", "cpu"): ("fashion_mnist_tenth",),
    ("heterogeneity.systems", "cpu"): ("fashion_mnist_twentieth",),
    ("robustness.table", "cpu"): ("mnist_tenth", "fashion_mnist_tenth"),
    ("text.speakers", "quick"): ("speakers",),
    ("text.speakers", "cpu"): ("speakers",),
    **{
        (f"leaderboard.{name}", "cpu"): ("fashion_mnist_tenth",)
        for name in ("label", "feature", "quantity", "noise", "personal")
    },
}


PRESETS = [("quick", name) for name in TABLE_PROGRAMS]
PRESETS += [slow_case(preset, name) for preset in ("cpu", "paper") for name in TABLE_PROGRAMS]


@pytest.mark.parametrize(("preset", "name"), PRESETS)
def test_presets_list_runs(name, preset, tmp_path, capsys):
    program = import_module(f"experiments.{name}").main
    command = ["--preset", preset, "--list", "--output-dir", str(tmp_path)]
    status, printed = program(command), capsys.readouterr()
    if status == 2:
        assert f"preset = '{preset}' is unknown" in printed.err and preset != "quick"
        return
    lines = printed.out.splitlines()
    assert status == 0 and lines and not list(tmp_path.iterdir())
    if name != "dynafed.fig5":  # whose halves may share runs
        assert len(set(lines)) == len(lines)
    if preset != "paper":
        data = ("digits", "user") if preset == "quick" else ("fashion_mnist", "mnist", "cifar10")
        data = PARTS_OF_DATA.get((name, preset), data)
        assert all(re.search(rf", ({'|'.join(data)}), ", line) for line in lines)


def test_filters_and_settings():
    arguments = TableArguments(
        preset="paper",
        models=("mlp", "convnet"),
        datasets=("fashion_mnist",),
        methods=("scaffold",),
        alphas=(0.3,),
        seeds=(7, 8),
        rounds=3,
        width=32,
    )
    mlp, convnet = make_cells(TABLE1, arguments)
    assert [run.seed for run in mlp.runs] == [7, 8]
    assert {(run.alpha, run.rounds) for run in (*mlp.runs, *convnet.runs)} == {(0.3, 3)}
    assert (mlp.runs[0].width, convnet.runs[0].width) == (None, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavgg"], "methods = 'fedavgg' is unknown: did you mean 'fedavg'"),
        (["--preset", "papr"], "preset = 'papr' is unknown: did you mean 'paper'"),
        (["--datasets", "digit"], "--datasets = 'digit' is unknown: did you mean 'digits'"),
        (["--models", "mlp", "--width", "32"], "width = 32"),
        (["--alphas", "0"], "--alphas = 0.0"),
        (["--rounds", "0"], "rounds = 0"),
    ],
)
def test_bad_flag_has_exit_status_2(arguments, message, capsys, tmp_path):
    status = main([*arguments, "--output-dir", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip()
    assert status == 2
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


def test_table_program_end_to_end(tmp_path, capsys, request):
    command = ["--methods", "fedavg", "--alphas", "0.1", "0.5", "--seeds", "0", "1"]
    command += ["--rounds", "2", "--output-dir", str(tmp_path)]
    assert main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("missing") == 4
    assert not list(tmp_path.iterdir())

    assert main(command) == 0
    text = capsys.readouterr().out
    assert "rounds 2 instead of 200" in (tmp_path / "table.md").read_text()
    assert "Toy scale: accuracies and ranks are not the paper's" in " ".join(text.split())
    assert text.splitlines()[-1].startswith("The installation works: all 4 runs ended.")
    assert "no values for digits" in text
    assert "Preset quick, but --rounds 2." in text
    accuracy = 100 * load_results(tmp_path).groupby("alpha")["final_accuracy"].mean()
    for alpha in (0.1, 0.5):
        assert re.search(rf"^  FedAvg +{accuracy[alpha]:.2f} ± ", text, flags=re.MULTILINE)
        line = f"| {alpha} | FedAvg | {accuracy[alpha]:.2f} ± "
        assert line in (tmp_path / "table.md").read_text()
        assert (
            rf"\quad FedAvg & {accuracy[alpha]:.2f} $\pm$ " in (tmp_path / "table.tex").read_text()
        )
    assert (tmp_path / "table.csv").read_text().count("\n") == 3
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    request.getfixturevalue("forbid_runs")
    assert main(command) == 0
    assert "4 of 4 runs" in capsys.readouterr().out
    assert main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == 4

    # A third seed is planned, but --show runs nothing.
    result = {path.name: path.read_bytes() for path in tmp_path.glob("*[0-9a-f].json")}
    (tmp_path / "table.md").unlink()
    more = [*command[:-4], "2", *command[-4:]]  # after "--seeds 0 1"
    assert main([*more, "--show"]) == 0
    assert capsys.readouterr().out.count("2 of 3") == 2
    assert "| 2 of 3 |" in (tmp_path / "table.md").read_text()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*[0-9a-f].json")} == result

    # Of a row that is shown and was not run, no setting is said.
    assert main([*command, "--methods", "fedavg", "dynafed", "--show"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  DynaFed +—", text, flags=re.MULTILINE)
    assert "rounds 2 instead of 200" in (tmp_path / "table.md").read_text()
    assert "(DynaFed)" not in (tmp_path / "table.md").read_text()
    assert "installation works" not in text  # --show runs nothing


def test_note_on_datasets_without_reported_values(tmp_path, capsys):
    # None for this alpha, that is.
    assert TABLE1.load_reported()["dataset"].eq("fashion_mnist").any()
    command = ["--datasets", "fashion_mnist", "--methods", "fedavg", "--alphas", "0.5", "--show"]
    assert main([*command, "--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  FedAvg +0 of 2$", text, flags=re.MULTILINE)
    assert "no values" not in text


def test_show_requires_folder(tmp_path, capsys):
    assert main(["--show", "--output-dir", str(tmp_path / "out")]) == 2
    assert "--output-dir" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_missing_dataset_is_explained(tmp_path, capsys, monkeypatch):
    def simulate(spec, **keywords):
        fedjax_het.load_dataset(spec.dataset)
        summary = {"final_accuracy": 0.5, "final_accuracy_std": 0.0, "diverged": False}
        summary |= {"wall_seconds": 1.0, "finished": "2026-01-01T00:00:00+00:00"}
        return Result(spec, {"test_accuracy": np.full(1, 0.5)}, summary)

    monkeypatch.setattr(fedjax_het, "simulate", simulate)
    monkeypatch.delenv("CINIC10_DIR", raising=False)
    command = ["--methods", "fedavg", "--alphas", "0.01", "--seeds", "0", "--rounds", "1"]
    command += ["--models", "mlp", "--output-dir", str(tmp_path), "--preset", "paper"]
    assert main([*command, "--datasets", "cinic10", "digits"]) == 0
    text = capsys.readouterr().out
    assert "Not run (1 runs)" in text
    assert "CINIC10_DIR" in text
    assert "0 of 1" in text
    assert main([*command, "--datasets", "cinic10"]) == 2


PROGRAMS = sorted(
    path
    for path in (ROOT / "experiments").glob("**/*.py")
    if path.parent.name != "peers" and "__main__" in path.read_text()
)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_lists_presets(path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    said = capsys.readouterr().out
    asked = ("preset", "scale", "rounds", "steps", "target", "folders")
    assert "usage" in said and any(word in said for word in asked)
