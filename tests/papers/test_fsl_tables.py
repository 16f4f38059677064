"""FSL's table and figures: they are the paper's, and no run of theirs is made twice."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from support.tables import list_cells, list_digests, make_results

from fedjax_het import RunSpec, analysis
from fedjax_het.analysis import TableCell, compare_with_reported, format_comparison_table
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.papers.fedamp.tables import TABLE1 as WITHOUT_CLASSES
from fedjax_het.papers.fsl import fig9, figures, server_examples, table1
from fedjax_het.papers.programs import load_program
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, list_protocol_deviations
from fedjax_het.runtime.results import Result
from fedjax_het.utils.errors import ConfigError

NAMES = ("table1", "fig1", "fig2", "fig5", "fig6", "fig7", "fig8", "fig9", "fig10", "fig11")
MODULES = dict.fromkeys(NAMES, figures) | {"table1": table1, "fig9": fig9}
ALL = {name: getattr(module, name.upper()) for name, module in MODULES.items()}
PROGRAMS = {name: load_program(f"fsl.{name}") for name in NAMES}
PRESETS = ("quick", "cpu", "paper")
CONTROLS = ("data_sharing", "fedavg(pretrain_epochs=50)")


def cells(name, *preset, **filters):
    return list_cells(ALL[name], *preset, **filters)


def specs(name, *preset, **filters):
    """By row, the first seed's runs."""
    actual = {}
    for cell in cells(name, *preset, **filters):
        actual.setdefault(cell.method, []).append(cell.runs[0].resolved())
    return actual


def runs(name, *preset, **filters):
    return list_digests(ALL[name], *preset, **filters)


# The settings


@pytest.mark.parametrize(
    ("dataset", "clients", "share", "size", "classes"),
    [("cifar10", 10, 4 / 10, 500, (2, 5, 10)), ("emnist_45", 45, 5 / 45, 225, (1, 5, 45))],
)
def test_scenario1_settings(dataset, clients, share, size, classes):
    own = specs("fig1", datasets=(dataset,))
    smallest = clients * size / {"cifar10": 50_000, "emnist_45": 108_000}[dataset]
    gammas = (smallest, 0.5, 1.0, 1.5, 2.0)
    assert [*own] == ["fedavg", "data_sharing", *(f"fsl(gamma={gamma})" for gamma in gammas)]
    for row, actual in own.items():
        assert tuple(spec.classes for spec in actual) == classes
        for spec in actual:
            assert (spec.num_clients, spec.participation) == (clients, share)
            assert (spec.rounds, spec.local_epochs, spec.batch_size) == (1000, 1, 50)
            assert (spec.partition, spec.model) == ("classes_per_client", "fsl_cnn")
            assert spec.hyperparameters["local_lr"] == 0.01 and spec.averaging == "uniform"
            assert spec.hyperparameters["server_lr"] == pytest.approx(
                math.sqrt(round(clients * share))
            )
            learns = row != "fedavg"
            assert spec.pretrain_epochs == (500 if learns else None)
            assert spec.server_data == ("iid" if learns else None)
            assert spec.server_options == ({"size": size} if learns else {})
    assert all(len(cell.runs) == 3 for cell in cells("fig1"))
    assert list_protocol_deviations(ALL["fig1"], cells("fig1")) == []


def test_figure6_is_figure1_without_pretraining():
    assert not any(s.pretrain_epochs for actual in specs("fig6").values() for s in actual)
    for preset in PRESETS:
        assert runs("fig1", preset, methods=("fedavg",)) <= runs("fig6", preset)
    assert runs("fig1", "cpu") == runs("fig6", "cpu")
    assert not runs("fig1", methods=("fsl",)) & runs("fig6")


def test_scenario2_settings():
    for dataset, (clients, sampled, batch, givers, elsewhere) in {
        "cifar10": (1000, 10, 10, 10, "stl10"),
        "emnist_45": (450, 5, 50, 9, "glyphs"),
    }.items():
        own = specs("fig5", datasets=(dataset,), methods=("fsl", "fslsyn", "feddyn", "scaffold"))
        assert len(own) == 16
        for row, actual in own.items():
            for spec in actual:
                assert (spec.num_clients, spec.batch_size, spec.rounds) == (clients, batch, 1000)
                assert round(spec.num_clients * spec.participation) == sampled
                assert not spec.pretrain_epochs
                if spec.algorithm != "feddyn":
                    assert spec.hyperparameters["server_lr"] == pytest.approx(math.sqrt(sampled))
                if row.startswith("fslsyn"):
                    assert (spec.algorithm, spec.server_data) == ("fsl", elsewhere)
                elif row.startswith("fsl"):
                    assert spec.server_options == {"clients": givers, "per_client": 50}
                    assert (spec.server_data, spec.hyperparameters["gamma"]) == ("clients", 1.0)
                else:
                    assert spec.server_data is None
                if row.startswith("feddyn"):
                    assert spec.hyperparameters["feddyn_alpha"] == 0.01


def test_table1_variants():
    table, own = table1, specs("table1")
    sharing, pretraining = (own.pop(row) for row in CONTROLS)
    assert [spec.server_options for (spec,) in (sharing, pretraining)] == [
        {"clients": 10, "per_client": 50}
    ] * 2
    assert [spec.pretrain_epochs for (spec,) in (sharing, pretraining)] == [0, 50]
    reported = load_reported_values("fsl", "table1")
    assert tuple(dict.fromkeys(reported["method"])) == table.ROWS
    assert [*own] == [variant for row in table.ROWS for variant in table.VARIANTS[row]]
    assert len(own) == 5 * 4
    expected = {
        "fslsyn(n0=504": {"per_class": 56},
        "fslsyn(n0=720": {"per_class": 80},
        "fsl(n0=250": {"clients": 10, "per_client": 25},
        "fsl(n0=500": {"clients": 10, "per_client": 50},
    }
    for row, (spec,) in own.items():
        assert (spec.dataset, spec.classes, spec.hyperparameters["local_lr"]) == (
            "cifar10",
            2,
            0.05,
        )
        if row.startswith("feddyn"):
            continue
        (start,) = [start for start in expected if row.startswith(start)]
        assert spec.server_options == expected[start]
        assert spec.hyperparameters["gamma"] in (0.6, 0.8, 1.0, 1.2)
    alphas = [
        spec.hyperparameters["feddyn_alpha"] for row, (spec,) in own.items() if row[:6] == "feddyn"
    ]
    assert alphas == [0.01, 0.05, 0.1, 0.5]


@pytest.mark.slow
def test_figures_share_runs():
    assert {experiment.results_folder for experiment in ALL.values()} == {"fsl"}
    assert runs("fig10") == runs("fig5", datasets=("cifar10",))
    assert runs("fig11") == runs("fig5", datasets=("emnist_45",))
    assert runs("fig2", "cpu") < runs("fig1", "cpu")
    sizes = {("cifar10", 500), ("emnist_45", 225)}
    for cell in cells("fig2"):
        spec = cell.runs[0].resolved()
        if spec.hyperparameters["local_lr"] == 0.01 and (
            (cell.dataset, spec.server_options["size"]) in sizes
        ):
            assert {run.digest() for run in cell.runs} <= runs("fig1")
    both = runs("fig8", datasets=("cifar10",)) & runs("fig1", datasets=("cifar10",))
    assert len(both) == 3 * (1 + 5)  # data sharing and FSL, at C = 2


def test_figures_7_to_9_match_paper():
    for spec in (s for actual in specs("fig7", datasets=("cifar10",)).values() for s in actual):
        assert spec.server_options == {"size": 200}
        assert spec.hyperparameters.get("gamma", 1.0) == 1.0
    sampled = {round(s.num_clients * s.participation) for f in specs("fig7").values() for s in f}
    assert sampled == {2, 4, 5, 10}
    own = [(s.dataset, s.classes) for actual in specs("fig8").values() for s in actual]
    assert set(own) == {("emnist_45", 5), ("cifar10", 2)}
    gaps = [s for actual in specs("fig9").values() for s in actual]
    assert {spec.gradient_gaps for spec in gaps} == {50}
    assert {spec.rounds for spec in gaps} == {1001}  # the last begins with x_1000
    assert {(s.dataset, s.server_options["size"]) for s in gaps} == {
        *(("emnist_45", 90), ("emnist_45", 225)),
        *(("cifar10", 200), ("cifar10", 500)),
    }


def test_class_filter(tmp_path, capsys):
    (cell,) = cells("fig1", "quick", classes=(3,), methods=("fedavg",))
    assert cell.level == 3 and cell.runs[0].resolved().classes == 3
    with pytest.raises(ConfigError, match="classes = '2': expected no value: the table"):
        list_cells(WITHOUT_CLASSES, "quick", classes=(2,))


# A table with rounds beside accuracies


def make_seed_results(cell, accuracies, rounds):
    """Results of the seeds 0 and 1."""

    def accuracy(cell, run):
        return accuracies[run.seed]

    columns = {"window_accuracy": accuracy, "rise_time": lambda cell, run: 100}
    columns["rounds_to_half"] = lambda cell, run: rounds[run.seed]
    return make_results([cell], accuracy, **columns)


def a_cell(method, row=None, classes=2):
    first = RunSpec(method, "cifar10", protocol="fsl", classes=classes)
    many = [RunSpec(**{**first.to_dict(), "seed": seed}) for seed in (0, 1)]
    return TableCell("cifar10", "fsl_cnn", None, row or method, tuple(many), classes=classes)


def test_rounds_to_half_columns():
    reported = load_reported_values("fsl", "table1")
    feddyn, fsl = a_cell("feddyn"), a_cell("fsl", "fsl(n0=500)")
    other = a_cell("scaffold")
    results = pd.concat(
        [
            make_seed_results(feddyn, (0.56, 0.58), (500, 520)),
            make_seed_results(fsl, (0.60, 0.61), (210, None)),
            make_seed_results(other, (0.40, None), (None, None)),
        ]
    )
    table = compare_with_reported([feddyn, fsl, other], results, reported).set_index("method")
    row = table.loc["feddyn"]
    assert row["mean"] == pytest.approx(57.0) and row["reported_mean"] == 57.79
    assert row["difference"] == pytest.approx(-0.79)
    assert (row["rounds"], row["reported_rounds"], row["rounds_difference"]) == (510, 502, 8)
    assert row["rounds_std"] == pytest.approx(np.std([500, 520], ddof=1))
    row = table.loc["fsl(n0=500)"]
    assert math.isnan(row["rounds"]) and row["reached"] == 1 and row["reported_rounds"] == 203
    text = format_comparison_table(
        table.reset_index(), title="T", notes=[analysis.make_comparison_caption(table)]
    )
    (section,) = text.sections
    assert section.labels["Classes"] == "2" and "alpha" not in section.labels
    first, second, third = section.rows
    assert (first["Rounds to 50 %"], first["Reported rounds"]) == ("510 ± 14", "502")
    assert first["Difference in rounds"] == "+8" and first["Difference"] == "−0.79"
    assert second["Rounds to 50 %"] == "1 of 2 runs reach it"
    assert third["Rounds to 50 %"] == "not reached" and third["Reported rounds"] == "—"
    assert "%" not in first["Rounds to 50 %"] and "Rounds to 50 %" in text.notes[0]


def test_table1_row_is_best_variant():
    planned = [cell for cell in cells("table1", seeds=(0, 1)) if "fslsyn" not in cell.method]
    frames = []
    for place, cell in enumerate(planned):
        low = (0.5, 0.5) if place % 4 else (0.4, 0.4)
        if cell.method == "fsl(n0=500, gamma=0.8)":
            low = (0.61, 0.62)
        if cell.method == "fsl(n0=500, gamma=1.0)":
            low = (0.9, None)  # higher, but one of its runs diverged
        frames.append(make_seed_results(cell, low, (100, 100)))
    results = pd.concat(frames)
    reported = load_reported_values("fsl", "table1")
    outcome = TableRun(ALL["table1"], "paper", planned, results, None, reported, None, {})
    best, note = table1.select_best_cells(outcome)
    assert [cell.method for cell in best] == ["feddyn", "fsl(n0=250)", "fsl(n0=500)", *CONTROLS]
    assert best[2].runs[0].hyperparameters["gamma"] == 0.8
    assert best[0].runs[0].hyperparameters["feddyn_alpha"] == 0.05  # of equal ones the first
    assert "FSL (n0 500, gamma 0.8)" in note and "1 of all runs diverged" in note
    table = compare_with_reported(best, results, reported)
    assert table["reported_mean"].dropna().tolist() == [57.79, 58.45, 61.44]


def test_table1_row_of_unfinished_table():
    planned = [cell for cell in cells("table1", seeds=(0, 1)) if "fslsyn" not in cell.method]
    (cell,) = (cell for cell in planned if cell.method == "fsl(n0=500, gamma=1.0)")
    results = make_seed_results(cell, (0.6, 0.6), (100, 100)).iloc[:1]
    reported = load_reported_values("fsl", "table1")
    outcome = TableRun(ALL["table1"], "paper", planned, results, None, reported, None)
    best, note = table1.select_best_cells(outcome)
    (row,) = (row for row in best if row.method == "fsl(n0=500)")
    assert row.runs[0].hyperparameters["gamma"] == 1.0 and format_row(cell.method) in note


# Figures


def gamma_runs():
    rows = []
    for method, gammas in (("data_sharing", (None,)), ("fsl", (0.5, 2.0)), ("fsl_p", (0.5, 2.0))):
        for place, (gamma, seed) in enumerate(product(gammas, (0, 1)), len(rows)):
            row = {"digest": f"d{place}", "settings": f"s{place}", "algorithm": method}
            row |= {"dataset": "digits", "classes": 2, "seed": seed, "hp.gamma": gamma}
            row |= {"final_accuracy": 0.5, "window_accuracy": 0.5 + 0.01 * place}
            rows.append(row | {"rise_time": 10.0 + place, "diverged": False})
    return pd.DataFrame(rows)


def test_metrics_vs_gamma_with_data_sharing_at_zero():
    results = gamma_runs()
    figure = analysis.plot_metric_vs_setting(
        results,
        x="hp.gamma",
        by=["algorithm"],
        panels=["dataset"],
        metrics=("window_accuracy", "rise_time"),
        missing_value=0.0,
    )
    top, bottom = figure.axes
    assert top.get_xscale() == "linear" and tuple(top.get_xticks()) == (0.0, 0.5, 2.0)
    assert top.get_ylabel().endswith("(%)") and bottom.get_ylabel() == "Rise time (rounds)"
    assert bottom.get_xlabel() == f"gamma (at 0: {get_method_title('data_sharing')})"
    lines = {line.get_label(): line for line in top.lines}
    assert lines[get_method_title("fsl")].get_xdata().tolist() == [0.5, 2.0]
    assert lines[get_method_title("fsl")].get_ydata() == pytest.approx([52.5, 54.5])
    assert lines[get_method_title("data_sharing")].get_xdata().tolist() == [0.0]
    rise = {line.get_label(): line.get_ydata() for line in bottom.lines}
    rise_time = rise[get_method_title("fsl_p")]
    assert rise_time == pytest.approx([16.5, 18.5])
    assert max(rise_time) < bottom.get_ylim()[1]
    without = analysis.plot_metric_vs_setting(results, x="hp.gamma", by=["algorithm"])
    labels = {line.get_label() for line in without.axes[0].lines}
    assert get_method_title("data_sharing") not in labels
    with pytest.raises(ConfigError, match=r"x = 'dataset'"):
        analysis.plot_metric_vs_setting(results, x="dataset")


def test_wide_range_has_log_axis():
    results = gamma_runs().dropna(subset="hp.gamma").drop(columns="classes")
    wide = results.assign(**{"hp.gamma": results["hp.gamma"].replace(2.0, 5.0)})
    for table, scale in ((results, "linear"), (wide, "log")):
        (panel,) = analysis.plot_metric_vs_setting(table, x="hp.gamma", by=["algorithm"]).axes
        assert panel.get_xscale() == scale


def test_gradient_gaps_are_geometric_means():
    results = gamma_runs().query("algorithm == 'fsl' and `hp.gamma` == 0.5")
    frames = []
    for digest, factor in zip(results["digest"], (1.0, 100.0), strict=True):
        server = np.full(7, np.nan)
        server[::3] = factor * np.array([1e-3, 1e-2, 1e-1])
        columns = {"server_gap": server, "client_gap": 10 * server}
        frames.append(pd.DataFrame({"digest": digest, "round": range(1, 8), **columns}))
    figure = analysis.plot_gradient_gaps(results, pd.concat(frames), panels=["dataset", "classes"])
    (panel,) = figure.axes
    assert panel.get_yscale() == "log"
    server, client = panel.lines[:2]
    assert server.get_xdata().tolist() == [1, 4, 7]
    assert server.get_ydata() == pytest.approx([1e-2, 1e-1, 1.0])
    assert client.get_ydata() == pytest.approx([1e-1, 1.0, 10.0])


def test_learning_curve_ends_at_window_mean():
    results = gamma_runs().query("algorithm != 'data_sharing'")
    rng = np.random.default_rng(0)
    accuracy = {digest: rng.random(50) for digest in results["digest"]}
    curves = pd.concat(
        pd.DataFrame({"digest": digest, "round": range(1, 51), "test_accuracy": values})
        for digest, values in accuracy.items()
    )
    figure = analysis.plot_learning_curves(
        results, curves, by=["algorithm"], panels=["hp.gamma"], window=20
    )
    assert [panel.get_title() for panel in figure.axes] == ["gamma 0.5", "gamma 2"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    ends = [100 * accuracy[digest][-20:].mean() for digest in ("d2", "d3")]
    assert lines[get_method_title("fsl")].get_ydata()[-1] == pytest.approx(np.mean(ends))
    assert "line: mean of 20 rounds (running) and 2 seeds" in " ".join(
        figure.get_supxlabel().split()
    )


def test_server_options_follow_from_source():
    results = gamma_runs().query("algorithm == 'fsl'").drop(columns="hp.gamma")
    results["server_data"] = ["iid", "iid", "glyphs", "glyphs"]
    results["server_options.size"] = [50.0, 50.0, None, None]
    assert analysis.find_varying_settings(results) == ["algorithm", "server_data"]
    results["server_options.size"] = [50.0, 20.0, None, None]
    expected = ["algorithm", "server_data", "server_options.size"]
    assert analysis.find_varying_settings(results) == expected


def test_pretrain_lr_follows_from_pretraining():
    results = gamma_runs().query("algorithm == 'fsl'").drop(columns="hp.gamma")
    results["pretrain_epochs"] = [0, 0, 50, 50]
    results["hp.pretrain_lr"] = [None, None, 0.01, 0.01]
    assert analysis.find_varying_settings(results) == ["algorithm", "pretrain_epochs"]
    results["hp.pretrain_lr"] = [None, None, 0.01, 0.1]
    assert analysis.find_varying_settings(results)[-1] == "hp.pretrain_lr"


def test_rounds_to_half_overview():
    results = gamma_runs().assign(rounds_to_half=[10, None, *[20] * 8])
    table = analysis.make_overview_table(results, by=["algorithm"], metric="rounds_to_half")
    first = next(row for row in table.sections[0].rows if row["Method"] == "Data sharing")
    assert (first["Rounds to 50 %"], first["Seeds"]) == ("10 †", "1")  # one run has no value
    assert "of the runs that reach it" in table.notes[0]


# The quick presets, for real


def figure(name, folder, *command):
    few = ["--rounds", "3", "--seeds", "0", "--output-dir", str(folder)]
    assert PROGRAMS[name]([*command, *few]) == 0
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Rise time" in (folder / f"{name}.md").read_text()
    return [Result.load(path) for path in folder.glob("*.json")]


@pytest.mark.slow
def test_figure8_has_means_of_runs(tmp_path, capsys):
    actual = figure("fig8", tmp_path, "--methods", "data_sharing", "fsl(gamma=0.5)")
    out = capsys.readouterr().out
    assert "runs that differ in" not in out and "nan" not in out
    table = pd.read_csv(tmp_path / "fig8.csv").set_index("algorithm")
    assert sorted(table.index) == sorted(result.spec.algorithm for result in actual)
    for result in actual:
        accuracy = result.metrics["test_accuracy"]
        row = table.loc[result.spec.algorithm]
        assert row["mean"] == pytest.approx(100 * accuracy.mean(), abs=1e-4)
        means = np.cumsum(accuracy) / np.arange(1, 4)
        assert row["rise_time"] == 1 + np.argmax(means >= 0.9 * means[-1])


@pytest.mark.slow
def test_figure9_measures_gradients(tmp_path):
    (result,) = figure("fig9", tmp_path, "--classes", "2", "--methods", "fsl(n0=20)")
    assert len({path.name for path in tmp_path.rglob("fig9*.png")}) == 3
    for name in ("server_gap", "client_gap"):
        assert np.isfinite(result.metrics[name]).tolist() == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig3", "fig4"])
def test_server_example_figures(name, tmp_path, capsys):
    draw = load_program(f"fsl.{name}")
    for preset in getattr(server_examples, f"{name.upper()}_PRESETS"):
        listed = ["--preset", preset, "--list", "--output-dir", str(tmp_path / "x")]
        assert draw(listed) == 0
    assert not (tmp_path / "x").exists()
    assert draw(["--output-dir", str(tmp_path / "x")]) == 0
    assert (tmp_path / "x" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "the server holds" in capsys.readouterr().out
    assert draw(["--preset", "papr"]) == 2
    assert "did you mean 'paper'" in capsys.readouterr().err
