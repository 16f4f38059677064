"""Comparison of measured with reported values, as tables of numbers, texts and curves."""

import io
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedjax_het import analysis
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import TableCell, TextTable
from fedjax_het.analysis.comparison import REPORTED_METRICS, add_row_settings, format_row
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.analysis.render import TableSection, find_best_indices
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.utils.errors import ConfigError, display_names

ALPHA = 0.01


def runs(method, seeds=(0, 1, 2), rounds=20):
    return tuple(
        RunSpec(method, "fashion_mnist", model="mlp", alpha=ALPHA, rounds=rounds, seed=seed)
        for seed in seeds
    )


def cell(method, planned):
    return TableCell("fashion_mnist", "mlp", ALPHA, method, planned)


CELLS = [
    cell("fedavg", runs("fedavg")),
    cell("fedprox", runs("fedprox")),
    cell("scaffold", runs("scaffold")),
    cell("feddf", ()),
    cell("dynafed", runs("fedavg", seeds=(9,))),
]
ACCURACY = {  # by method, of each seed that ran
    "fedavg": [0.60, 0.63, 0.69],
    "fedprox": [0.62, None, 0.66],  # the second diverged
    "scaffold": [None],  # two have not run
    "dynafed": [0.75],
}


def make_results(cells, values, make_columns):
    """A row for each run that has a value by its cell's method; None: it diverged."""
    rows = [
        {
            "digest": f"made-{run.digest()}",
            "settings": run.digest(),
            "diverged": value is None,
            **make_columns(cell, run, value),
        }
        for cell in cells
        for run, value in zip(cell.runs, values.get(cell.method, []), strict=False)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def results():
    def columns(cell, run, accuracy):
        std = None if accuracy is None else 0.02 + 0.01 * run.seed
        accuracies = {"final_accuracy": accuracy, "final_accuracy_std": std}
        return {**accuracies, "wall_seconds": 10.0 + run.seed}

    frame = make_results(CELLS, ACCURACY, columns)
    # A run of other settings in the same folder must not count.
    other = runs("fedavg", rounds=7)[0].digest()
    extra = frame.iloc[[0]].assign(digest="other", settings=other, final_accuracy=0.1)
    return pd.concat([frame, extra], ignore_index=True)


@pytest.fixture
def reported():
    return load_reported_values("dynafed", "table5")


@pytest.fixture
def table(results, reported):
    return analysis.compare_with_reported(CELLS, results, reported).set_index("method", drop=False)


def test_cell_has_mean_and_reported_value(table):
    row = table.loc["fedavg"]
    assert row["mean"] == pytest.approx(64.0)
    assert row["std"] == pytest.approx(np.std([60, 63, 69], ddof=1))
    assert row["within_std"] == pytest.approx(3.0)  # of 2, 3 and 4
    assert (row["reported_mean"], row["reported_std"]) == (65.64, 1.69)
    assert row["difference"] == pytest.approx(64.0 - 65.64)
    assert row["seconds"] == pytest.approx(11.0)
    assert (row["seeds"], row["diverged"], row["planned"]) == (3, 0, 3)


def test_diverged_and_missing_runs(table):
    row, texts = table.loc["fedprox"], printed(table)
    assert row["mean"] == pytest.approx(64.0)  # 62 and 66
    assert (row["seeds"], row["diverged"], row["planned"]) == (2, 1, 3)
    assert "64.00 ± 2.83 †" in texts["FedProx"] and "2 of 3" in texts["FedProx"]
    assert "diverged †" in texts["SCAFFOLD"] and "0 of 3" in texts["SCAFFOLD"]
    assert table.loc["feddf", ["mean", "difference"]].isna().all()
    assert texts["FedDF"].split() == ["FedDF", "—", "—", "64.59", "±", "1.70", "—", "—", "—"]
    assert math.isnan(table.loc["dynafed", "std"])  # one seed has no deviation
    assert texts["DynaFed"].split()[:2] == ["DynaFed", "75.00"]


def test_runs_that_ended_early(results, reported):
    results["is_partial"] = results["diverged"]
    results.loc[results["diverged"], "final_accuracy"] = 0.2
    results["diverged"] = False
    table = analysis.compare_with_reported(CELLS, results, reported)
    texts = printed(table.set_index("method", drop=False))
    assert "64.00 ± 2.83 †" in texts["FedProx"] and "ended early †" in texts["SCAFFOLD"]
    assert table.set_index("method").loc["scaffold", ["diverged", "partial"]].tolist() == [1, 1]
    (prox, scaffold) = analysis.list_diverged_runs(CELLS, results)
    assert prox.endswith("seed 1 (ended early)") and scaffold.endswith("seed 0 (ended early)")


def test_run_without_accuracy_counts_as_diverged(results, reported):
    results["diverged"] = False
    table = analysis.compare_with_reported(CELLS, results, reported).set_index("method")
    assert table.loc["fedprox", ["seeds", "diverged"]].tolist() == [2, 1]


def test_comparison_without_results(reported):
    table = analysis.compare_with_reported(CELLS, pd.DataFrame(), reported)
    assert table["mean"].isna().all()
    assert table["reported_mean"].notna().all()
    assert not table[["seeds", "diverged"]].to_numpy().any()


def test_duplicate_reported_value_is_error(results, reported):
    with pytest.raises(ValueError, match="2 reported values for fedavg"):
        analysis.compare_with_reported(CELLS, results, pd.concat([reported, reported]))


def printed(table):
    """What the pipe gets, by the first word of each line."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=100)
    text_table = analysis.format_comparison_table(table, title="T", notes=["a note"])
    analysis.print_table(text_table, console=console)
    return {line.split()[0]: line for line in file.getvalue().splitlines() if line.strip()}


def test_print_table_in_pipe(table, capsys):
    notes = [analysis.make_comparison_caption(table)]
    analysis.print_table(analysis.format_comparison_table(table, title="A title", notes=notes))
    text = capsys.readouterr().out
    assert "\x1b" not in text and "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_comparison_in_files(table):
    text_table = analysis.format_comparison_table(table, title="T", notes=["5 % of a_b"])
    text = analysis.to_markdown(text_table)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CELLS) and len({row.count("|") for row in rows}) == 1
    assert "| fashion_mnist | mlp | 0.01 | FedProx | 64.00 ± 2.83 † |" in text
    assert "- 5 % of a_b" in text
    text = analysis.to_latex(text_table)
    lines = text.splitlines()
    assert r"\multicolumn{7}{@{}l}{fashion\_mnist, mlp, alpha 0.01} \\" in lines
    fedprox = next(line for line in lines if "FedProx" in line)
    assert fedprox.startswith(r"\quad FedProx & 64.00 $\pm$ 2.83 $^\dagger$ & ")
    assert fedprox.endswith(r" & 68.09 $\pm$ 1.47 & $-$4.09 & 2 of 3 & 11.0 s \\")
    (bold,) = [line for line in lines if "textbf" in line]
    assert bold.startswith(r"\quad DynaFed & \textbf{75.00} & ")
    assert r"5 \% of a\_b\\" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    again = pd.read_csv(io.StringIO(analysis.to_csv(table))).set_index("method")
    for name in ("mean", "std", "within_std", "reported_mean", "difference", "seconds"):
        np.testing.assert_allclose(again[name], table[name], rtol=1e-11)


SMALL = TextTable(
    title="Two_rows & 5 %",
    label_columns=("Method", "mu"),
    sections=(
        TableSection(
            title="a|b, alpha 0.1",
            labels={"data": "a|b", "alpha": "0.1"},
            rows=(
                {"Method": "fed[bold]avg", "mu": "—", "Accuracy": "−1.50 ± 0.25"},
                {"Method": "x", "mu": "0.1", "Accuracy": "2.00"},
            ),
            best_cells=frozenset({(1, "Accuracy")}),
        ),
    ),
    notes=("one [red]note[/red]",),
)


def test_print_table(capsys):
    analysis.print_table(SMALL)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "Two_rows & 5 %",
        "Method           mu        Accuracy",
        "───────────────────────────────────",
        "a|b, alpha 0.1",
        "  fed[bold]avg   —     −1.50 ± 0.25",
        "  x              0.1           2.00",
        "",
        "one [red]note[/red]",
    ]


WIDE = TextTable(
    title="T",
    label_columns=("Method",),
    sections=(
        TableSection(
            title="alpha 0.1",
            rows=[
                {
                    "Method": f"a method with a long name {number}",
                    "Test accuracy (%)": "74.29 ± 0.50",
                    **{f"Value {k}": f"{k}0.25 ± 1.75" for k in range(5)},
                    "Empty": "—",
                    "Time": "11,508.0 s",
                }
                for number in range(2)
            ],
        ),
    ),
    notes=("a note " * 60, *(f"note {number}" for number in range(12)), "† a mark"),
    minor_columns=("Time", "Value 4"),
)


def print_on_terminal(table, width, **options):
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    analysis.print_table(table, console=console, **options)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_table_fits_terminal(width):
    text = print_on_terminal(WIDE, width)
    assert max(map(len, text.splitlines())) <= width and "Empty" not in text
    kept = [f"{k}0.25 ± 1.75" for k in range(4)] + ["74.29 ± 0.50"]
    assert all(text.count(value) == 2 for value in kept)  # none is wrapped
    has_all = width == 140
    assert ("11,508.0 s" in text) == has_all
    assert ("Columns without room: " in text) == (not has_all)
    assert text.count("Method") == {40: 5, 60: 3, 80: 2}.get(width, 1)  # blocks


def test_wide_table_has_all_columns():
    text = print_on_terminal(WIDE, 80, wide=True)
    assert "11,508.0 s" in text and "without room" not in text and "note 11" in text


def test_notes_are_short_beside_a_file():
    text = print_on_terminal(WIDE, 140, notes_file="table.md")
    notes = text.split("\n\n")[-1].rstrip().splitlines()
    assert len(notes) == 8 and notes[-1] == "All notes are in table.md."
    assert notes[0] == "† a mark" and notes[2].endswith("…") and "note 11" not in text
    assert "note 11" in print_on_terminal(WIDE, 140)


def test_notes_are_whole_in_a_pipe(capsys):
    analysis.print_table(WIDE, notes_file="table.md")
    text = capsys.readouterr().out
    assert "note 11" in text and "All notes are in" not in text


def test_caption_of_one_seed_mentions_no_deviation_over_seeds():
    table = pd.DataFrame({"final_mean": [71.2], "seeds": [2]})
    assert "deviation over seeds" in analysis.make_comparison_caption(table)
    caption = analysis.make_comparison_caption(table.assign(seeds=1))
    assert "Measured: one seed." in caption and "over seeds" not in caption


def test_columns_without_content_are_omitted():
    for text in (analysis.to_markdown(WIDE), analysis.to_latex(WIDE)):
        assert "Empty" not in text and "Time" in text


def test_methods_equal_to_fedavg_are_marked(results, reported):
    results = results.assign(final_accuracy=0.5, diverged=False)
    of_fedavg = results["settings"].isin([run.digest() for run in runs("fedavg")])
    results.loc[of_fedavg, "final_accuracy"] = 0.50009
    of_scaffold = results["settings"].isin([run.digest() for run in runs("scaffold")])
    results.loc[of_scaffold, "final_accuracy"] = 0.5003
    table = analysis.compare_with_reported(CELLS, results, reported)
    text_table = analysis.format_comparison_table(table, title="T", notes=["a note"])
    marked = [row["Method"] for row in text_table.sections[0].rows if "≈" in row["Measured"]]
    assert marked == ["FedProx", "DynaFed"]
    assert text_table.notes[1].startswith("≈ The mean is FedAvg's within 0.01 points")
    assert r"$\approx$" in analysis.to_latex(text_table)


def test_print_table_does_not_cut(capsys):
    names = tuple(f"column {number}" for number in range(20))
    row = {name: f"{name} is {'long' * 5} 漢字" for name in names}
    analysis.print_table(TextTable("T", names, (TableSection(rows=(row,)),)))
    out = capsys.readouterr().out
    assert all(text in out for text in row.values())


def test_to_markdown_and_latex():
    assert analysis.to_markdown(SMALL).splitlines() == [
        "# Two_rows & 5 %",
        "",
        "| data | alpha | Method | mu | Accuracy |",
        "| --- | --- | --- | --- | ---: |",
        r"| a\|b | 0.1 | fed[bold]avg | — | −1.50 ± 0.25 |",
        r"| a\|b | 0.1 | x | 0.1 | 2.00 |",
        "",
        "- one [red]note[/red]",
    ]
    assert analysis.to_latex(SMALL).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\small",
        r"\caption{Two\_rows \& 5 \%}",
        r"\begin{tabular}{@{}llr@{}}",
        r"\toprule",
        r"Method & mu & Accuracy \\",
        r"\midrule",
        r"\multicolumn{3}{@{}l}{a|b, alpha 0.1} \\",
        r"\quad fed{[}bold]avg & --- & $-$1.50 $\pm$ 0.25 \\",
        r"\quad x & 0.1 & \textbf{2.00} \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
        r"\medskip",
        r"\parbox{\linewidth}{\footnotesize",
        r"one {[}red]note{[}/red]\\",
        r"Bold: the best value of a column among rows that are compared.}",
        r"\end{table}",
    ]


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([1.0, 3.0, 2.0], [1]),
        ([3.001, 3.004, 2.0], [0, 1]),  # the same as printed
        ([math.nan, 3.0], []),  # nothing to compare with
        ([], []),
    ],
)
def test_find_best_indices(values, best):
    assert find_best_indices(values) == best


def test_find_best_indices_by_direction():
    values = [0.0123, 0.0124, 12_345.0, math.nan]
    assert find_best_indices(values, higher_is_better=False) == [0, 1]  # both print 0.01
    assert find_best_indices(values, higher_is_better=False, format_spec=".4g") == [0]
    assert find_best_indices(values, format_spec=",.0f") == [2]
    assert find_best_indices(values, higher_is_better=None) == []


def test_list_diverged_runs(results):
    assert analysis.list_diverged_runs(CELLS, results) == [
        "FedProx, fashion_mnist, mlp, alpha 0.01, seed 1",
        "SCAFFOLD, fashion_mnist, mlp, alpha 0.01, seed 0",
    ]


@pytest.fixture
def curves():
    """Accuracies whose last five rounds average to ACCURACY; measured every other round."""
    frames = []
    for a_cell in CELLS:
        for run, accuracy in zip(a_cell.runs, ACCURACY.get(a_cell.method, []), strict=False):
            frame = pd.DataFrame({"digest": f"made-{run.digest()}", "round": np.arange(1, 21)})
            end = 0.99 if accuracy is None else accuracy
            last = [end - 0.02, end - 0.01, end, end + 0.03, end]
            frame.loc[1::2, "test_accuracy"] = [0.1, 0.2, 0.3, 0.4, 0.5, *last]
            frames.append(frame)
    return pd.concat(frames)


def test_table_curves_end_at_table_values(results, curves, reported, table):
    figure = analysis.plot_table_curves(CELLS, results, curves, reported)
    (panel,) = figure.axes
    lines = {line.get_label(): line for line in panel.lines}
    fedavg, fedprox, dynafed = map(get_method_title, ("fedavg", "fedprox", "dynafed"))
    for method in ("fedavg", "fedprox", "dynafed"):
        x, y = lines[get_method_title(method)].get_data()
        assert x[-1] == 20
        assert y[-1] == pytest.approx(table.loc[method, "mean"])
    assert get_method_title("scaffold") not in lines  # its one run diverged
    assert [text.get_text() for text in panel.texts] == [fedavg, f"{fedprox} †", dynafed]
    assert figure.get_supxlabel().endswith(f"left out: {fedprox}, {get_method_title('scaffold')}")
    assert max(lines[fedprox].get_ydata()) < 70  # nor does a diverged seed enter a mean
    for method, value in {fedavg: 65.64, fedprox: 68.09, dynafed: 73.89}.items():
        mark = lines[f"reported {method}"]
        assert mark.get_ydata() == [value]
        assert mark.get_color() == lines[method].get_color()
        assert panel.get_ylim()[0] <= value <= panel.get_ylim()[1]


def test_parse_and_format_row():
    assert analysis.parse_row("fedavg") == ("fedavg", {})
    row = "fedaf(gamma=0.2, lgkm='exact')"
    assert analysis.parse_row(row) == ("fedaf", {"gamma": 0.2, "lgkm": "exact"})
    row = "fedaf(names=['a, b', \"c=(1)\"], at={'x': (1, 2)})"
    assert analysis.parse_row(row)[1] == {"names": ["a, b", "c=(1)"], "at": {"x": (1, 2)}}
    assert analysis.parse_row(add_row_settings(row)) == analysis.parse_row(row)
    arguments = ("", "ipc", "ipc=", "ipc=ten", "ipc=1, ipc=2", "ipc=1)(ipc=2", "**{'ipc': 1}")
    for row in (*(f"fedaf({words})" for words in arguments), "fedaf(ipc=1", "fedaf(ipc={[]: 1})"):
        with pytest.raises(ConfigError, match="expected a method, or one with settings"):
            analysis.parse_row(row)
    with (
        display_names({"methods": "--methods"}),
        pytest.raises(ConfigError, match=r"^--methods = "),
    ):
        analysis.parse_row("fedaf()")
    assert format_row("my_method") == "my_method"
    assert format_row("dynafed(synthetic='real')") == f"{get_method_title('dynafed')} (real)"
    assert (
        format_row("feddm(private=True, image_lr=0)")
        == f"{get_method_title('feddm')} (private, image_lr 0)"
    )
    row = "fsl(gamma=0.5, rounds=30)"
    assert format_row(row, omit={"rounds": 30}) == f"{get_method_title('fsl')} (gamma 0.5)"
    assert (
        format_row(row, omit={"rounds": 20}) == f"{get_method_title('fsl')} (gamma 0.5, rounds 30)"
    )


def test_table_curves_omit_shared_settings(results, curves, reported):
    rows = ("fedavg(rounds=30)", "fedprox(rounds=30)", "dynafed(rounds=30, synthetic='real')")
    cells = [replace(cell, method=row) for cell, row in zip(CELLS, rows, strict=False)]
    figure = analysis.plot_table_curves(cells, results, curves, reported)
    labels = {line.get_label() for panel in figure.axes for line in panel.lines}
    assert {get_method_title("fedavg"), get_method_title("fedprox")} <= labels
    assert not any("rounds 30" in label for label in labels)


def test_table_curves_display_names(results, curves, reported):
    named = {"dynafed": "dynafed, as it is"}
    for how in ({}, {"separate_panels": True}):
        how["display_names"] = named
        figure = analysis.plot_table_curves(CELLS, results, curves, reported, **how)
        entries = {text.get_text() for panel in figure.axes for text in panel.texts}
        entries |= {panel.get_title(loc="left") for panel in figure.axes}
        assert "dynafed, as it is" in entries and get_method_title("dynafed") not in entries
        assert get_method_title("fedavg") in entries


def test_panel_without_runs(results, curves, reported):
    other = TableCell("cinic10", "mlp", ALPHA, "fedavg", runs("fedavg", seeds=(5,)))
    figure = analysis.plot_table_curves([*CELLS, other], results, curves, reported)
    assert [text.get_text() for text in figure.axes[1].texts] == ["not run"]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")  # a layout that does not fit would warn
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_all_method_colors_are_distinct():
    methods = list(load_reported_values("fedaf", "table1")["method"].unique())
    colors = analysis.assign_method_colors([*METHODS, *methods])
    assert len(set(colors.values())) == len(colors)


def test_load_reported_values():
    table1 = load_reported_values("dynafed", "table1")
    assert len(table1) == 3 * 3 * 9
    key = ["dataset", "level", "method"]
    value = table1.set_index(key).loc[("cifar10", 0.16, "scaffold")]
    assert (value["mean"], value["std"]) == (68.57, 0.91)
    assert table1["mean"].between(10, 100).all()


@pytest.mark.parametrize(("paper", "item"), [("dynafeed", "table1"), ("dynafed", "table9")])
def test_load_reported_values_rejects_unknown_names(paper, item):
    with pytest.raises(ConfigError, match=r"did you mean.*(dynafed|table)"):
        load_reported_values(paper, item)


# Tables of the best round, as FedAF reports, and of domains


def best_results(**more):
    accuracies = {"fedavg": (0.60, 0.66), "fedprox": (0.70, 0.80)}

    def columns(cell, run, accuracy):
        return {
            "final_accuracy": accuracy - 0.1,
            "final_accuracy_std": 0.5,
            "best_accuracy": accuracy,
            "wall_seconds": 3.0,
            **{name: accuracy + shift for name, shift in more.items()},
        }

    return make_results([two_seeds(name) for name in accuracies], accuracies, columns)


def theirs(level, **values):
    rows = [
        {"dataset": "fashion_mnist", "model": "mlp", "level": level, "method": name, "mean": mean}
        for name, mean in values.items()
    ]
    return pd.DataFrame(rows).assign(std=np.nan, metric="test_accuracy_best")


def two_seeds(method, **place):
    alpha = None if place else ALPHA
    return TableCell("fashion_mnist", "mlp", alpha, method, runs(method, seeds=(0, 1)), **place)


def test_reported_metric_determines_compared_metric():
    cells = [two_seeds("fedavg"), two_seeds("fedprox")]
    table = analysis.compare_with_reported(cells, best_results(), theirs(ALPHA, fedavg=61.0))
    assert table["mean"].tolist() == pytest.approx([63.0, 75.0])
    assert table["final_mean"].tolist() == pytest.approx([53.0, 65.0])
    assert "within_std" not in table
    assert table["difference"][0] == pytest.approx(2.0)
    assert "round where it is highest" in analysis.make_comparison_caption(table)
    lines = printed(table)
    assert lines["Method"].split()[1:4] == ["Measured", "Last", "five"]
    assert lines["FedAvg"].split()[1:6] == ["63.00", "±", "4.24", "53.00", "61.00"]
    other = theirs(ALPHA, fedavg=61.0).assign(metric="bytes")
    with pytest.raises(ValueError, match=r"metric of reported = .'bytes'.: expected one of"):
        analysis.compare_with_reported(cells, best_results(), other)


def test_best_round_curves_are_not_smoothed():
    curves = pd.concat(
        pd.DataFrame({"digest": digest, "round": [1, 2, 3], "test_accuracy": [0.1, 0.6, 0.3]})
        for digest in best_results()["digest"]
    )
    reported = theirs(ALPHA, fedavg=61.0)
    figure = analysis.plot_table_curves([two_seeds("fedavg")], best_results(), curves, reported)
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([10, 60, 30])
    assert figure.axes[0].get_xlabel() == "Round"
    assert figure.get_supxlabel().endswith("reported best value")


def by_domain():
    cells = [
        two_seeds(method, domain=domain)
        for domain in ("sketch", "real", analysis.AVERAGE)
        for method in ("fedavg", "fedprox")
    ]
    results = best_results(accuracy_sketch=-0.2, accuracy_real=0.1, best_domains_accuracy=-0.05)
    reported = [theirs("sketch", fedavg=40.0), theirs(analysis.AVERAGE, fedavg=50.0)]
    return cells, results, pd.concat(reported)


def test_domain_table():
    table = analysis.compare_with_reported(*by_domain())
    text_table = analysis.format_comparison_table(table, title="T")
    assert text_table.value_columns == ("sketch", "real", "average", "Seeds", "Time")
    rows = analysis.to_markdown(text_table).splitlines()[4:]
    place = "| fashion_mnist | mlp |"
    assert rows == [
        f"{place} FedAvg | measured | 43.00 ± 4.24 | 73.00 ± 4.24 | 58.00 ± 4.24 | 2 | 3.0 s |",
        f"{place}  | reported | 40.00 | — | 50.00 |  |  |",
        f"{place}  | difference | +3.00 | — | +8.00 |  |  |",
        f"{place} FedProx | measured | 55.00 ± 7.07 | 85.00 ± 7.07 | 70.00 ± 7.07 | 2 | 3.0 s |",
        "",
    ]
    bold = [line for line in analysis.to_latex(text_table).splitlines() if "textbf" in line]
    (line,) = bold
    assert line.count("textbf") == 3 and line.startswith(r"\quad FedProx & measured & \textbf{55")
    assert "unweighted mean" in analysis.make_comparison_caption(table)
    assert [*table][:6] == ["dataset", "model", "alpha", "domain", "method", "mean"]
    cells, _, reported = by_domain()
    table = analysis.compare_with_reported(cells, pd.DataFrame(), reported)
    assert table["mean"].isna().all() and len(table) == 6
    text = analysis.to_markdown(analysis.format_comparison_table(table, title="T"))
    assert "| FedProx | measured | — | — | 0 of 2 |" in text and "Time" not in text


def test_domain_curves():
    cells, results, reported = by_domain()
    measured = {"test_accuracy_sketch": [0.2], "test_accuracy_real": [0.4]}
    curves = pd.concat(
        pd.DataFrame({"digest": d, "round": [1], **measured, "test_accuracy_domains": [0.3]})
        for d in results["digest"]
    )
    figure = analysis.plot_table_curves(cells, results, curves, reported)
    actual = {panel.get_title(): panel.lines[0].get_ydata().tolist() for panel in figure.axes}
    names = [f"fashion_mnist, {name}" for name in ("sketch", "real", "average")]
    assert actual == {name: pytest.approx([y]) for name, y in zip(names, (20, 40, 30), strict=True)}


# Tables of clients' accuracies (BMTA), which have neither alphas nor domains


def of_clients(method, dataset="mnist", model="mlp", seeds=(0, 1)):
    planned = tuple(
        RunSpec(method, dataset, model=model, partition="iid", client_tests=True, seed=seed)
        if method in ("fedavg", "fedprox", "scaffold")
        else RunSpec(method, dataset, model=model, partition="iid", seed=seed)
        for seed in seeds
    )
    return TableCell(dataset, model, None, method, planned)


BMTA = {  # of two seeds; None diverged
    "separate": (0.80, 0.82),
    "fedavg": (0.90, 0.92),
    "fedprox": (0.9099, 0.91009),  # prints as 91.00: shares the rank of fedavg
    "fedavg_ft": (0.95, 0.97),
    "scaffold": (0.99, None),
    "fedamp": (0.93, 0.95),
    "ditto": (0.98, 0.98),
}
REPORTED = {
    **{"fedamp": 97.0, "separate": 86.0, "fedavg": 81.0, "fedprox": 81.5, "fedavg_ft": 91.0},
    "scaffold": 98.5,  # of which a seed diverged here: in no rank
}


def clients_results(cells):
    def columns(cell, run, value):
        lost, alone = value is None, cell.method in ("separate", "fedamp")
        return {
            "final_accuracy": None if lost or alone else 0.5,
            "final_client_accuracy": None if lost else value - 0.01,
            "bmta": 0.99 if lost else value,  # of a round before it diverged
            "bmta_round": 10 + 5 * run.seed,
            "bmta_worst_decile": 0.2 if lost else value - 0.3,
            "wall_seconds": 4.0,
        }

    return make_results(cells, BMTA, columns)


def clients_reported(dataset="mnist", values=REPORTED):
    rows = [{"dataset": dataset, "method": name, "mean": mean} for name, mean in values.items()]
    missing = dict.fromkeys(("std", "model", "level"), np.nan)
    return pd.DataFrame(rows).assign(**missing, metric="bmta", partition="iid")


CLIENT_CELLS = [of_clients(method) for method in BMTA if method != "ditto"]
CLIENT_CELLS.append(TableCell("mnist", "mlp", None, "ditto"))


def compare_clients(reported, *more_cells):
    cells = [*CLIENT_CELLS, *more_cells]
    return analysis.compare_with_reported(cells, clients_results(cells), reported)


def test_bmta_columns():
    table = compare_clients(clients_reported())
    row = table.set_index("method").loc["fedamp"]  # it has no global model, and did not diverge
    assert (row["mean"], row["worst_decile"]) == pytest.approx((94.0, 64.0))
    assert (row["best_round"], row["diverged"], row["reported_mean"]) == (12.5, 0, 97.0)
    notes = [analysis.make_comparison_caption(table)]
    text_table = analysis.format_comparison_table(table, title="T", notes=notes)
    (section,) = text_table.sections
    assert section.title == "mnist, mlp"
    assert section.labels == {"Data": "mnist", "Network": "mlp"}
    names = "Measured, Worst decile, Round, Reported, Difference, Rank, Seeds, Time"
    assert text_table.value_columns == tuple(names.split(", "))
    assert [*section.rows[5].values()] == [
        "FedAMP", "94.00 ± 1.41", "64.00", "12.5", "97.00", "−3.00", "2 / 1", "2", "4.0 s"
    ]  # fmt: skip
    everything = analysis.to_markdown(text_table) + analysis.to_latex(text_table)
    assert "nan" not in everything.lower() and "alpha" not in everything
    assert "BMTA" in analysis.make_comparison_caption(table)


def test_ranks_of_methods_with_both_values():
    table = compare_clients(clients_reported()).set_index("method")
    # 81 and 96, 91.00 twice, 94 of separate, fedavg_ft, fedavg and fedprox, fedamp.
    measured = {"separate": 5, "fedavg": 3, "fedprox": 3, "fedavg_ft": 1, "fedamp": 2}
    reported = {"separate": 3, "fedavg": 5, "fedprox": 4, "fedavg_ft": 2, "fedamp": 1}
    assert table["rank"].dropna().to_dict() == measured
    assert table["reported_rank"].dropna().to_dict() == reported
    assert table.loc["scaffold", "mean"] == pytest.approx(99)  # but it lost a seed
    (actual,) = analysis.compute_rank_correlations(table)
    # Spearman's is Pearson's of the ranks, ties at their mean: 5, 3.5, 3.5, 1, 2.
    expected = np.corrcoef([5, 3.5, 3.5, 1, 2], [3, 5, 4, 2, 1])[0, 1]
    assert actual.rho == pytest.approx(expected) and 0 < expected < 1
    assert (actual.section, actual.num_methods) == ("mnist, mlp", 5)
    few = compare_clients(clients_reported(values={"fedavg": 80.0, "fedamp": 90.0}))
    assert analysis.compute_rank_correlations(few) == []


def test_ranks_without_reported_values():
    digits = (of_clients("separate", "digits"), of_clients("fedamp", "digits"))
    table = compare_clients(clients_reported("digits"), *digits)
    here = table[table["dataset"] == "mnist"].set_index("method")
    ranks = {"separate": 5, "fedavg": 3, "fedprox": 3, "fedavg_ft": 1, "fedamp": 2}
    assert here["rank"].dropna().to_dict() == ranks
    assert here["reported_rank"].isna().all()
    text_table = analysis.format_comparison_table(table, title="T")
    assert [section.rows[0]["Rank"] for section in text_table.sections] == ["5", "2 / 2"]


def test_client_curves_have_panel_per_dataset():
    cells = [of_clients(m, d) for d in ("mnist", "digits") for m in ("separate", "scaffold")]
    results = clients_results(cells)
    columns = {"round": [1, 2, 3], "test_accuracy": np.nan}
    columns["mean_client_accuracy"] = [0.3, 0.8, 0.6]
    curves = pd.concat(pd.DataFrame({"digest": d, **columns}) for d in results["digest"])
    figure = analysis.plot_table_curves(cells, results, curves, clients_reported())
    assert [panel.get_title() for panel in figure.axes] == ["mnist", "digits"]
    first, second = figure.axes
    assert first.get_subplotspec().rowspan == second.get_subplotspec().rowspan
    assert first.lines[0].get_ydata().tolist() == pytest.approx([30, 80, 60])
    assert first.get_ylabel() == "Mean accuracy of clients (%)"
    marks = {line.get_label(): line.get_ydata() for line in first.lines}
    for method in ("separate", "scaffold"):
        assert marks[f"reported {get_method_title(method)}"] == [REPORTED[method]]
    names = [get_method_title("separate"), f"{get_method_title('scaffold')} †"]
    assert [text.get_text() for text in first.texts] == names


def test_compared_metrics_are_accuracies():
    for metric in REPORTED_METRICS.values():  # ranks and bold values are of the highest
        info = get_metric_info(metric)
        assert info.is_fraction and info.higher_is_better
