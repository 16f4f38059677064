"""The table across papers: rows of runs, costs up to a target, what is best at some cost."""

import numpy as np
import pytest

from fedjax_het import load_results
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.papers.across import (
    ACROSS,
    CLIENT_METRIC,
    GLOBAL_METRIC,
    MethodCosts,
    collect_rows,
    describe_requirements,
    main,
    make_text_table,
    missing_methods_note,
    pareto_methods,
    plot_accuracy_vs_cost,
    stack_seed_accuracies,
)
from fedjax_het.papers.across import summarize_rows as numbers_of
from fedjax_het.papers.table import TableArguments, TableRun, make_cells
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.run_flops import RunFlops


def row(method, accuracy, flops, *, seeds=2, personal=False):
    """A method whose accuracies are the same in both seeds."""
    curve = np.tile(np.array(accuracy, float), (seeds, 1))
    none = np.full_like(curve, np.nan)
    curves = {GLOBAL_METRIC: none if personal else curve, CLIENT_METRIC: curve}
    rounds = np.arange(1, curve.shape[1] + 1)
    clients = dict.fromkeys(range(seeds), np.full(4, curve[0, -1]))
    return MethodCosts(method, curves, clients, 10.0 * rounds, flops * rounds, num_planned=2)


STEADY = [0.5] * 5 + [0.8] * 15
ROWS = [
    row("fedavg", STEADY, 1),
    row("moon", [0.8] * 20, 3),
    row("ditto", STEADY, 2, personal=True),
]


def test_costs_up_to_target_accuracy():
    table = numbers_of([*ROWS, row("separate", [0.4] * 20, 0, personal=True)]).set_index("method")
    # 90 % of 80; the mean of five rounds, 50 or 80, is above 72 when four of them are of 80.
    # Of methods with clients' own models: 90 % of separate's 40.
    assert table["rounds_to"].tolist() == [9, 1, 1, 1]
    assert table["megabytes_to"].tolist() == [90, 10, 10, 10]
    assert table["teraflops_to"].tolist() == [9, 3, 2, 0]
    assert table["teraflops"].tolist() == [20, 60, 40, 0]
    assert table["own"].tolist() == pytest.approx([80] * 3 + [40])
    assert table["personal"].tolist() == [False, False, True, True]
    low = numbers_of([ROWS[0], row("fsl", [0.1] * 20, 1)]).set_index("method")
    alone = numbers_of(ROWS).set_index("method")
    assert alone["rounds_to"].isna().tolist() == [False, False, True]
    assert np.isnan(low.loc["fsl", "rounds_to"]) and low.loc["fsl", "all_rank"] == 2


def test_accuracy_averages_second_half_of_rounds():
    late = row("moon", [0.0] * 10 + [1.0] * 5 + [0.0] * 5, 1)
    table = numbers_of([late])
    assert table["own"].item() == table["all"].item() == pytest.approx(50)


def test_pareto_methods():
    cost = np.array([1.0, 2.0, 3.0])
    lines = {
        "early": (cost, np.array([5.0, 6.0, 6.0])),
        "late": (cost, np.array([1.0, 2.0, 9.0])),
        "dear": (10 * cost, np.array([8.0, 8.0, 8.0])),
    }
    assert pareto_methods(lines) == ["early", "late"]


def test_method_requirements():
    assert describe_requirements("fedavg") == "" and "server" in describe_requirements("fsl")
    assert "synthetic images" in describe_requirements("feddm") and "own" in describe_requirements(
        "ditto"
    )


def test_presets_have_every_method():
    assert set(ACROSS.list_rows("cpu")) == set(ACROSS.list_rows("quick")) == set(METHODS)


@pytest.mark.parametrize(
    "score, expected, drawn",
    [(GLOBAL_METRIC, "moon", {"fedavg", "moon"}), (CLIENT_METRIC, "apfl", {"fedavg", "apfl"})],
)
def test_cost_figure_has_a_column_for_each_pareto_method(score, expected, drawn):
    rows = [*ROWS, row("apfl", [0.9] * 20, 1, personal=True)]
    panels = plot_accuracy_vs_cost(rows, score).axes
    assert [panel.get_xlabel() for panel in panels] == ["Rounds", "Megabytes", "TFLOP"]
    assert panels[0].get_title() == get_method_title(expected)
    for panel in panels:
        assert [text.get_text() for text in panel.texts] == ["FedAvg"]
        assert {line.get_label() for line in panel.lines} == drawn


def test_cost_figure_has_one_color_for_each_method():
    rows = [*ROWS, row("fsl", [0.9] * 20, 9)]
    rows[1] = row("moon", [0.85] * 20, 0.1)
    figure = plot_accuracy_vs_cost(rows, GLOBAL_METRIC)
    lines = [line for panel in figure.axes for line in panel.lines]
    colors = {}
    for line in lines:
        colors.setdefault(line.get_label(), set()).add(line.get_color())
    assert set(colors) == {"fedavg", "moon", "fsl", "_behind"}
    assert all(len(own) == 1 for own in colors.values())
    assert len(set.union(*colors.values())) == 4
    dashed = {line.get_label() for line in lines if line.get_linestyle() == "--"}
    assert dashed == {"fedavg"}


def test_note_names_methods_without_row(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_het.papers.across.count_flops", lambda run: RunFlops(np.ones(2)))
    kept = {"fedavg": [0, 0], "moon": [0], "ditto": [], "pfedme": [1, 0], "scaffold": ["early"]}
    cells = make_cells(ACROSS, TableArguments("quick", methods=tuple(kept), seeds=(0, 1)))
    for cell in cells:
        for run, lost in zip(cell.runs, kept[cell.method], strict=False):
            summary = {"diverged": lost == 1, "rounds": 2}
            if lost == "early":
                summary["stopped_early"] = {"why": "callback", "reason": "a test"}
            metrics = dict.fromkeys(
                (GLOBAL_METRIC, CLIENT_METRIC, "bytes_up", "bytes_down"), np.ones(2)
            )
            metrics["client_accuracy"] = np.ones((2, 4))
            Result(run.resolved(), metrics, summary).save(tmp_path)
    results = load_results(tmp_path)
    outcome = TableRun(ACROSS, "quick", cells, results, None, None, tmp_path, {})
    rows = collect_rows(outcome)
    assert [row.method for row in rows] == ["fedavg", "moon"]
    assert missing_methods_note(outcome, rows) == [
        "Without a row: SCAFFOLD (ended early), Ditto (not run), pFedMe (diverged)."
    ]
    first = outcome._replace(cells=cells[:1])
    assert missing_methods_note(first, collect_rows(first)) == []
    text = make_text_table(numbers_of(rows), "T", ())
    assert [row["Seeds"] for row in text.sections[0].rows] == ["2", "1 of 2"]


def test_ranks_use_common_seeds():
    few, many = row("fedavg", STEADY, 1, seeds=1), row("moon", STEADY, 1, seeds=3)
    few.client_accuracies[0] = np.arange(4.0)
    assert stack_seed_accuracies([few, many]).tolist() == [[1.5, pytest.approx(0.8)]]
    none = few._replace(client_accuracies={5: np.ones(4)})
    assert stack_seed_accuracies([none, many]).shape == (0, 2)


@pytest.mark.slow
def test_across_program(tmp_path, capsys):
    words = ["--methods", "fedavg", "ditto", "separate", "--rounds", "2", "--seeds", "0"]
    assert main([*words, "--output-dir", str(tmp_path)]) == 0
    assert "TFLOP to" in capsys.readouterr().out
    assert not (tmp_path / "critical_difference.png").exists()  # of one seed
    files = ("across.md", "across.csv", "across_all.png", "across_own.png")
    assert all((tmp_path / name).stat().st_size for name in files)
    kept = list((tmp_path / "arithmetic").iterdir())
    assert main([*words, "--show", "--output-dir", str(tmp_path)]) == 0
    assert list((tmp_path / "arithmetic").iterdir()) == kept and len(kept) == 3
