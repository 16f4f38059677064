"""DynaFed's tables and figures: they are the paper's, share their runs, and hold what they say; and
the one command for all papers."""

import json
import math
import sys
from itertools import product

import numpy as np
import pandas as pd
import pytest
from support.tables import list_cells, list_digests, list_specs

from fedjax_het import simulate
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.comparison import parse_row
from fedjax_het.analysis.synthetic_measures import load_trajectory
from fedjax_het.papers import all as every
from fedjax_het.papers.dynafed import fig3, fig6, figures, table4, tables
from fedjax_het.papers.programs import ProgramModule, load_program
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, list_protocol_deviations
from fedjax_het.runtime.result_display import format_run_label
from fedjax_het.runtime.results import Result
from fedjax_het.utils.errors import ConfigError

TABLES = ("table2", "table3", "table4", "table5", "table6")
MODULES = {"table4": table4, "fig4": figures, "fig6": fig6}
ALL = {
    name: getattr(MODULES.get(name, tables), name.upper())
    for name in ("table1", *TABLES, "fig2", "fig4", "fig6", "fig7")
}
ALL |= {"fig5_length": figures.FIG5_LENGTH, "fig5_samples": figures.FIG5_SAMPLES}
PRESETS = ("quick", "paper")
ROWS = tuple(dict.fromkeys(load_reported_values("dynafed", "table1")["method"]))
CONTROLS = ("dynafed(synthetic='untrained')", "dynafed(synthetic='real')")


def cells(name, *preset, **filters):
    return list_cells(ALL[name], *preset, **filters)


def specs(name, *preset, **filters):
    return list_specs(ALL[name], *preset, **filters)


def runs(name, *preset, **filters):
    return list_digests(ALL[name], *preset, **filters)


# The settings


def test_figures_name_controls():
    names = ALL["table1"].row_display_names
    assert [names[row] for row in CONTROLS] == [
        "DynaFed control: untrained",
        "DynaFed control: real images",
    ]
    assert set(names) == set(ALL["table1"].control_rows)


@pytest.mark.parametrize("name", ["table2", "table4", "table5", "table6"])
def test_cells_match_paper_and_controls(name):
    reported = load_reported_values("dynafed", name)
    own = {cell.method for cell in cells(name)} - set(ROWS)
    of_code = {row for row in own if row.startswith("dynafed(preset='code'")}
    assert own - of_code == set(CONTROLS)
    assert len(of_code) == (3 if name == "table5" else 0), "itself and two controls"
    of_paper = [cell for cell in cells(name) if cell.method in ROWS]
    places = [(cell.dataset, cell.model, cell.alpha, cell.method) for cell in of_paper]
    theirs = reported[["dataset", "model", "level", "method"]].itertuples(index=False, name=None)
    assert sorted(places) == sorted(theirs)
    assert all(len(cell.runs) == 3 for cell in cells(name))
    share = set(reported["participation"])
    assert {spec.participation for spec in specs(name)} == share
    assert {(spec.num_clients, spec.rounds, spec.local_epochs) for spec in specs(name)} == {
        (80, 200, 1)
    }


def test_table1_rows():
    rows = ALL["table1"].list_rows("paper")
    assert rows[:9] == ROWS and len(ROWS) == 9
    one_model = {name for name, e in METHODS.items() if e.evaluated_models[0] == "global"}
    assert set(rows) - set(CONTROLS) == one_model
    for name in PRESETS:
        every = specs("table1", name, methods=("all",))
        assert {spec.protocol or "dynafed" for spec in every} == {"dynafed"}
        assert {spec.algorithm for spec in every} == one_model


@pytest.mark.parametrize("preset", ("quick", "cpu", "paper"))
@pytest.mark.parametrize("name", ["table1", "table3", "table5"])
def test_run_labels_are_unique(name, preset):
    if preset in ALL[name].presets:
        by_digest = {spec.digest(): format_run_label(spec) for spec in specs(name, preset)}
        lines = by_digest.values()
        assert len(set(lines)) == len(lines)


def test_table1_default_methods():
    def methods(**filters):
        return {spec.algorithm for spec in specs("table1", "quick", **filters)}

    assert methods() == set(ROWS)
    assert methods(methods=("fedyogi", "fedavg")) == {"fedyogi", "fedavg"}
    assert methods(methods=("all", "fedavg")) > set(ROWS)
    with pytest.raises(ConfigError, match=r"methods = 'al' is unknown: did you mean .*'all'"):
        specs("table1", methods=("al",))


@pytest.mark.parametrize("name", ["table1", *TABLES])
@pytest.mark.parametrize("preset", PRESETS)
def test_rows_have_runs_and_held_out_proxy_data(name, preset):
    with_proxy = {"quick": {"size": 50}, "paper": {"size": 100}}[preset]
    assert all(cell.runs for cell in cells(name, preset))
    for spec in specs(name, preset):
        if spec.algorithm in ("feddf", "fedbe", "abavg"):
            assert (spec.server_data, spec.server_options) == ("held_out", with_proxy)
        elif spec.algorithm in ROWS:
            assert spec.server_data is None


def test_table3_local_epochs_and_rounds():
    reported = tables.rename_reported_rows(load_reported_values("dynafed", "table3"))
    of_paper = [cell for cell in cells("table3") if "synthetic" not in cell.method]
    assert len(cells("table3")) == len(of_paper) * 11 / 9
    places = [(cell.alpha, cell.method) for cell in of_paper]
    assert sorted(places) == sorted(zip(reported["level"], reported["method"], strict=True))
    assert {(spec.local_epochs, spec.rounds) for spec in specs("table3")} == {(5, 100), (10, 50)}
    assert reported.set_index(["level", "method"]).loc[
        (0.01, "dynafed(local_epochs=10, rounds=50)"), "mean"
    ] == pytest.approx(59.04)
    own_settings = ("(FedDF (", "(FedBE (")  # theirs, which the paper leaves open
    changed = list_protocol_deviations(ALL["table3"], cells("table3"))
    assert changed and all(any(row in text for row in own_settings) for text in changed)


def test_cifar100_synthetic_samples():
    for spec in specs("fig2", methods=("dynafed",)):
        many = spec.dataset == "cifar100"
        counts = (spec.options["samples_per_class"], spec.options["num_samples"])
        assert counts == ((15, None) if many else (None, 150))
        assert spec.options["fine_tune_epochs"] == (8 if many else 20)
    (mixed,) = {s.hyperparameters["mixup_lambda"] for s in specs("table2", methods=("fedmix",))}
    assert mixed == 0.1


@pytest.mark.slow
def test_tables_share_runs():
    assert {
        ALL[name].results_folder or ALL[name].name for name in ("table1", "table2", "fig2")
    } == {"table1"}
    for preset in PRESETS:
        assert runs("table4", preset) < runs("table1", preset)
        assert runs("fig2", preset) < runs("table1", preset) | runs("table2", preset)
        assert runs("fig7", preset) == runs("table6", preset)
    assert ALL["table4"].results_folder == "table1" and ALL["fig7"].name == ALL["table6"].name


def test_figures_match_paper():
    (spec,) = specs("fig4")
    assert (spec.dataset, spec.alpha, spec.algorithm) == ("cifar10", 0.01, "dynafed")
    assert spec.rounds > spec.options["trajectory_rounds"] == 20
    length = specs("fig5_length")
    assert {s.alpha for s in length} == {0.01}
    assert [s.algorithm for s in length][:2] == ["fedavg", "fedgen"]
    assert [s.options["trajectory_rounds"] for s in length[2:]] == [10, 15, 20, 25]
    number = specs("fig5_samples")
    assert {s.alpha for s in number} == {0.01, 0.04, 0.16}
    assert {s.options["num_samples"] for s in number} >= {50, 150, 300}
    quality = specs("fig6")
    assert {(s.alpha, s.local_epochs) for s in quality} == {
        (alpha, epochs) for alpha in (0.01, 0.04, 0.16) for epochs in (1, 5, 10)
    }
    assert all(s.rounds > s.options["trajectory_rounds"] for s in quality)
    paper = fig3.PRESETS["paper"]
    assert (paper.dataset, paper.alpha, paper.num_clients) == ("cifar10", 0.01, 80)


def test_note_requires_its_methods():
    quick = ALL["table1"].presets["quick"]
    assert "FedDM" in quick.get_note(["fedavg", "feddm"])
    assert quick.get_note([parse_row(row)[0] for row in quick.rows]) == ""


# Rounds to a target


def make_table_run(tmp_path, curves):
    """Table 4's CIFAR-10 cells of two methods at alpha .01, with these curves by method."""
    own = cells("table4", datasets=("cifar10",), alphas=(0.01,), methods=tuple(curves))
    rows = []
    for cell in own:
        for run, curve in zip(cell.runs, curves[cell.method], strict=False):
            result = Result(run.resolved(), {"test_accuracy": np.array(curve)}, {"diverged": False})
            path = result.save(tmp_path)
            rows.append({"digest": path.stem, "settings": run.digest(), "algorithm": cell.method})
    reported = load_reported_values("dynafed", "table4")
    results = pd.DataFrame(rows)
    return TableRun(ALL["table4"], "paper", own, results, None, reported, tmp_path, {})


def test_rounds_to_target_over_seeds(tmp_path):
    # The first has the target in one round alone, and falls again.
    first = [[0.1, 0.45, 0.2, 0.5], [0.1, 0.2, 0.3, 0.5], [0.6, 0.2, 0.2, 0.2]]
    second = [[0.5, 0.5], [0.1, 0.44], [0.5, 0.5]]
    outcome = make_table_run(tmp_path, {"fedavg": first, "dynafed": second})
    assert table4.TARGETS["cifar10", 0.01] == 0.45
    assert table4.TARGETS["cinic10", 0.01] == 0.33
    table = table4.make_rounds_table(outcome).set_index("method")
    row = table.loc["fedavg"]
    assert row["rounds"] == pytest.approx((2 + 4 + 1) / 3)
    assert row["std"] == pytest.approx(np.std([2, 4, 1], ddof=1))
    assert (row["reported"], row["reported_std"]) == (132.0, 15.0)
    assert row["difference"] == pytest.approx(7 / 3 - 132)
    row = table.loc["dynafed"]
    assert math.isnan(row["rounds"]) and (row["reached"], row["made"]) == (2, 3)
    text = table4.make_text_table(table.reset_index(), "T", ())
    (section,) = text.sections
    assert section.labels["Target"] == "45 %"
    assert [row["Reached"] for row in section.rows] == ["3 of 3", "2 of 3"]
    assert [row["Seeds"] for row in section.rows] == ["3", "3"]
    assert [row["Measured"] for row in section.rows] == ["2.3 ± 1.5", "—"]


def test_rounds_to_target_with_missing_runs(tmp_path):
    outcome = make_table_run(tmp_path, {"fedavg": [[0.5], [0.1, 0.2, 0.5]], "fedprox": []})
    table = table4.make_rounds_table(outcome)
    first, second = table.itertuples(index=False)
    assert (first.rounds, first.reached, first.made, first.planned) == (2.0, 2, 2, 3)
    assert math.isnan(second.rounds)
    (section,) = table4.make_text_table(table, "T", ()).sections
    texts = [[row[name] for name in ("Reached", "Measured", "Seeds")] for row in section.rows]
    assert texts == [["2 of 2", "2.0 ± 1.4", "2 of 3"], ["—", "—", "0 of 3"]]


def test_presets_have_targets():
    for preset in ALL["table4"].presets.values():
        assert table4.TARGETS.keys() >= {*product(preset.datasets, preset.alphas)}


# The steps of Figure 3


def test_batches_visit_every_example_once():
    there = np.arange(7) < np.array([[7], [3], [0]])
    steps = fig3.draw_batches(there, 2, 3, np.random.default_rng(0))
    assert steps.shape == (3, 3 * 4, 2)
    for client, size in enumerate((7, 3, 0)):
        for epoch in steps[client].reshape(3, -1):
            assert sorted(epoch[epoch >= 0]) == [*range(size)]


# All papers


def test_all_has_every_table_and_figure():
    actual = every.select_items()
    names = [program.name for program in actual]
    assert len(names) == len(set(names))
    for paper in ("dynafed", "fedaf", "fedamp", "fsl"):
        items = {f"{paper}-{item}" for item in set(load_reported_values(paper)["item"])}
        assert items <= set(names)
    assert names[:2] == ["dynafed-table1", "dynafed-table2"]
    assert names.index("fsl-fig2") < names.index("fsl-fig10")
    assert {p.paper for p in every.select_items(["fsl", "fedaf-fig9"])} == {"fsl", "fedaf"}
    with pytest.raises(ValueError, match="only = 'fls' is unknown"):
        every.select_items(["fls"])


PROGRAMS_OF_FSL = ("table1", "fig1", "fig2")


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """Three programs of one paper: one draws, one fails, one writes a table."""
    here = tmp_path / "experiments"
    (here / "fsl").mkdir(parents=True)
    draw = "from pathlib import Path\nPath('results/x').mkdir(parents=True, exist_ok=True)\n"
    (here / "fsl" / "fig1.py").write_text(
        f'"""A picture <1>.\n\nMore."""\n{draw}Path("results/x/fig1.png").write_bytes(b"PNG")\n'
        'with open("count", "a") as f: f.write("1")\n'
    )
    (here / "fsl" / "fig2.py").write_text('"""A failure."""\nraise SystemExit("it went wrong")\n')
    table = "| a | b |\\n| --- | --: |\\n| **1** | 2 |\\n"
    (here / "fsl" / "table1.py").write_text(
        f'"""A table."""\n{draw}Path("results/x/table1.md").write_text("{table}")\n'
    )
    modules = [
        ProgramModule(f"fsl.{name}", here / "fsl" / f"{name}.py") for name in PROGRAMS_OF_FSL
    ]
    monkeypatch.setattr(every, "HERE", here)
    monkeypatch.setattr(every, "find_programs", lambda: {each.name: each for each in modules})
    monkeypatch.setattr(every, "archives_of", lambda name: [])
    monkeypatch.setattr(
        every, "item_command", lambda item, preset: [sys.executable, item.module.path]
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_continues_after_failure(papers, capsys):
    command = ["--preset", "quick", "--only", "fsl"]
    assert every.main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("missing") == 3
    assert every.main(command) == 1
    out = capsys.readouterr().out
    assert "[3/3] fsl-fig2: made, FAILED with exit status 1" in out
    folder = papers / "results" / "all-quick"
    text = (folder / "report.md").read_text()
    assert "3 of 3 tables and figures" in text and "failed: fsl-fig2." in text
    assert "it went wrong" in text and "| **1** | 2 |" in text
    assert "![fsl-fig1: fig1](../x/fig1.png)" in text
    page = (folder / "report.html").read_text()
    assert '<tr><td><strong>1</strong></td><td class="n">2</td></tr>' in page and "--:" not in page
    assert 'src="data:image/png;base64,UE5H"' in page and "A picture &lt;1&gt;." in page
    record = json.loads((folder / "fsl-fig1.json").read_text())
    assert record["files"] == ["results/x/fig1.png"] and record["seconds"] > 0

    # Done: not started again, unless its file is gone or its program another.
    assert every.main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == 2
    assert every.main([*command, "--list", "--output-dir", "elsewhere"]) == 0
    assert capsys.readouterr().out.count("missing") == 3
    assert every.main(command) == 1
    assert (papers / "count").read_text() == "1"
    (papers / "results/x/fig1.png").unlink()
    assert every.main(command) == 1
    assert (papers / "count").read_text() == "11"
    assert every.main([*command, "--again"]) == 1
    assert (papers / "count").read_text() == "111"


# The quick presets, for real


def test_table3_round(tmp_path, capsys):
    row = "fedavg(local_epochs=10, rounds=30)"
    few = ["--rounds", "1", "--seeds", "0", "--alphas", "0.04", "--methods", row]
    assert load_program("dynafed.table3")([*few, "--output-dir", str(tmp_path)]) == 0
    (result,) = map(Result.load, tmp_path.glob("*.json"))
    assert (result.spec.local_epochs, result.spec.rounds) == (10, 1)
    accuracy = 100 * result.metrics["test_accuracy"].mean()
    assert (
        f"FedAvg (local_epochs 10, rounds 30) | {accuracy:.2f} "
        in (tmp_path / "table.md").read_text()
    )
    assert "rounds 1 instead of 30" in capsys.readouterr().out


@pytest.mark.slow
def test_figure6_measures_synthetic_data(tmp_path, monkeypatch):
    monkeypatch.setattr(fig6, "SCRATCH_EPOCHS", 4)
    few = ["--seeds", "0", "--alphas", "0.01", "--methods", "dynafed(local_epochs=2, rounds=21)"]
    assert fig6.main([*few, "--output-dir", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "fig6_distance.csv")
    assert table["start"].tolist() == [*range(16)]
    assert (table[["synthetic", "real", "noise"]] > 0).all(axis=None)
    assert table["synthetic"].mean() < table["noise"].mean()
    accuracy = pd.read_csv(tmp_path / "fig6_scratch.csv")
    assert accuracy["data"].tolist() == ["real"] * 3 + ["synthetic"] * 3
    assert accuracy["accuracy"].between(0, 1).all()

    # What a kept run does not keep is made once more; Figure 3 is of any of them.
    (path,) = tmp_path.glob("*.json")
    kept = Result.load(path)
    result = simulate(kept.spec)
    assert result.state is not None and kept.state is None
    again = load_trajectory(kept)
    np.testing.assert_allclose(again, load_trajectory(result), rtol=1e-5, atol=1e-6)
    assert not np.allclose(again[0], again[-1])
    own = ["--result", str(path), "--shown", "1", "--output-dir", str(tmp_path / "fig3")]
    assert fig3.main(own) == 0
    losses = pd.read_csv(tmp_path / "fig3" / "fig3.csv")
    assert set(losses["phase"]) == {"local", "tuning", "control", "all"}
    local = losses[losses["phase"] == "local"].groupby("client")["loss"]
    assert (local.last() < local.first()).all()


@pytest.mark.parametrize("program", ["fig3", "fig6"])
def test_figures_reject_result_without_images(program, tmp_path, capsys):
    row = "dynafed(local_epochs=2, rounds=21)"
    filters = ["--seeds", "0", "--alphas", "0.01", "--methods", row, "--output-dir", str(tmp_path)]
    (spec,) = specs("fig6", "quick", seeds=(0,), alphas=(0.01,), methods=(row,))
    curves = {"test_accuracy": np.zeros(spec.rounds)}
    Result(spec, curves, {"diverged": False}).save(tmp_path)
    (path,) = tmp_path.glob("*.json")
    argv = {"fig3": ["--result", str(path)], "fig6": [*filters, "--show"]}[program]
    assert load_program(f"dynafed.{program}")(argv) == 2
    assert "a run of dynafed with synthetic data" in capsys.readouterr().err
