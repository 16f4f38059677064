"""A paper's table says what the results say and what is missing, in every form of print."""

import io
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from fedjax_het import analysis
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis import TableCell, TextTable
from fedjax_het.analysis.comparison import format_row
from fedjax_het.analysis.figures.style import GRAYS
from fedjax_het.analysis.render import TableSection, escape_latex, find_best_indices
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.utils.errors import ConfigError

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


@pytest.fixture
def results():
    rows = []
    for a_cell in CELLS:
        for run, accuracy in zip(a_cell.runs, ACCURACY.get(a_cell.method, []), strict=False):
            rows.append(
                {
                    "digest": f"made-{run.digest()}",
                    "settings": run.digest(),
                    "final_accuracy": accuracy,
                    "final_accuracy_std": None if accuracy is None else 0.02 + 0.01 * run.seed,
                    "diverged": accuracy is None,
                    "wall_seconds": 10.0 + run.seed,
                }
            )
    # A run of other settings in the same folder must not count.
    other = runs("fedavg", rounds=7)[0].digest()
    rows.append({**rows[0], "digest": "other", "settings": other, "final_accuracy": 0.1})
    return pd.DataFrame(rows)


@pytest.fixture
def reported():
    return load_reported_values("dynafed", "table5")


@pytest.fixture
def table(results, reported):
    return analysis.compare_with_reported(CELLS, results, reported).set_index("method", drop=False)


def test_a_cell_is_the_mean_over_seeds_beside_the_reported_value(table):
    row = table.loc["fedavg"]
    assert row["mean"] == pytest.approx(64.0)
    assert row["std"] == pytest.approx(np.std([60, 63, 69], ddof=1))
    assert row["within_std"] == pytest.approx(3.0)  # of 2, 3 and 4
    assert (row["reported_mean"], row["reported_std"]) == (65.64, 1.69)
    assert row["difference"] == pytest.approx(64.0 - 65.64)
    assert row["seconds"] == pytest.approx(11.0)
    assert (row["seeds"], row["diverged"], row["planned"]) == (3, 0, 3)


def test_a_diverged_run_is_marked_and_not_averaged(table):
    row = table.loc["fedprox"]
    assert row["mean"] == pytest.approx(64.0)  # 62 and 66
    assert (row["seeds"], row["diverged"], row["planned"]) == (2, 1, 3)
    texts = printed(table)
    assert "64.00 ± 2.83 †" in texts["fedprox"]
    assert "2 of 3" in texts["fedprox"]
    assert "diverged †" in texts["scaffold"]
    assert "0 of 3" in texts["scaffold"]


def test_a_run_without_a_final_accuracy_counts_as_diverged(results, reported):
    results["diverged"] = False
    row = (
        analysis.compare_with_reported(CELLS, results, reported).set_index("method").loc["fedprox"]
    )
    assert (row["seeds"], row["diverged"]) == (2, 1)


def test_what_is_missing_is_shown_as_missing(table):
    row = table.loc["feddf"]
    assert math.isnan(row["mean"])
    assert math.isnan(row["difference"])
    assert printed(table)["feddf"].split() == [
        "feddf",
        "—",
        "—",
        "64.59",
        "±",
        "1.70",
        "—",
        "—",
        "—",
    ]


def test_one_seed_has_no_deviation_over_seeds(table):
    assert math.isnan(table.loc["dynafed", "std"])
    assert printed(table)["dynafed"].split()[:2] == ["dynafed", "75.00"]


def test_without_any_result_the_reported_values_still_stand(reported):
    table = analysis.compare_with_reported(CELLS, pd.DataFrame(), reported)
    assert table["mean"].isna().all()
    assert table["reported_mean"].notna().all()
    assert not table[["seeds", "diverged"]].to_numpy().any()


def test_two_reported_values_for_one_cell_are_an_error(results, reported):
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


def test_a_pipe_gets_plain_text_of_100_columns(table, capsys):
    text_table = analysis.format_comparison_table(
        table, title="A title", notes=[analysis.make_comparison_caption(table)]
    )
    analysis.print_table(text_table)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    lines = text.splitlines()
    heading = next(line for line in lines if line.startswith("Method"))
    body = [line for line in lines if line.startswith("  fed") or line.startswith("  dyna")]
    assert len(body) == 4
    for line in body:  # right-aligned columns end where their headings do
        assert len(line.rstrip()) == len(heading.rstrip())
        end = heading.index("Reported") + len("Reported")
        assert line[end - 1] != " "
        assert line[end] == " "


def test_markdown_has_the_same_cells(table):
    text = analysis.to_markdown(
        analysis.format_comparison_table(table, title="T", notes=["one note"])
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CELLS)
    assert len({row.count("|") for row in rows}) == 1
    assert "| fashion_mnist | mlp | 0.01 | fedprox | 64.00 ± 2.83 † |" in text
    assert "- one note" in text


def test_csv_holds_the_numbers(table):
    again = pd.read_csv(io.StringIO(analysis.to_csv(table))).set_index("method")
    for name in ("mean", "std", "within_std", "reported_mean", "difference", "seconds"):
        np.testing.assert_allclose(again[name], table[name], rtol=1e-11)


def test_latex_has_the_same_cells_and_the_best_in_bold(table):
    text = analysis.to_latex(
        analysis.format_comparison_table(table, title="T", notes=["5 % of a_b"])
    )
    lines = text.splitlines()
    assert r"\multicolumn{7}{@{}l}{fashion\_mnist, mlp, alpha 0.01} \\" in lines
    fedprox = next(line for line in lines if "fedprox" in line)
    assert fedprox.startswith(r"\quad fedprox & 64.00 $\pm$ 2.83 $^\dagger$ & ")
    assert fedprox.endswith(r" & 68.09 $\pm$ 1.47 & $-$4.09 & 2 of 3 & 11.0 s \\")
    (bold,) = [line for line in lines if "textbf" in line]
    assert bold.startswith(r"\quad dynafed & \textbf{75.00} & ")
    assert r"5 \% of a\_b}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


SMALL = TextTable(
    title="Two_rows & 5 %",
    label_columns=("Method", "mu"),
    value_columns=("Accuracy",),
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


def test_a_small_table_in_the_terminal(capsys):
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


def test_a_wide_table_is_not_cut(capsys):
    names = tuple(f"column {number}" for number in range(20))
    row = {name: f"{name} is {'long' * 5}" for name in names}
    analysis.print_table(TextTable("T", names, (), (TableSection(rows=(row,)),)))
    out = capsys.readouterr().out
    assert all(text in out for text in row.values())


def test_a_small_table_in_markdown():
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


def test_a_small_table_in_latex():
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
        r"one {[}red]note{[}/red]}",
        r"\end{table}",
    ]


def test_every_sign_that_latex_would_obey_is_escaped():
    assert escape_latex(r"[*]a_b%c&d#e$f{g}h~i^j\k<l>m±n−o†p—") == (
        r"{[}{*}]a\_b\%c\&d\#e\$f\{g\}h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k$<$l$>$m"
        r"$\pm$n$-$o$^\dagger$p---"
    )


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([1.0, 3.0, 2.0], [1]),
        ([3.001, 3.004, 2.0], [0, 1]),  # the same as printed
        ([math.nan, 3.0], []),  # nothing to compare with
        ([], []),
    ],
)
def test_the_best_are_the_highest_as_printed(values, best):
    assert find_best_indices(values) == best


def test_diverged_runs_are_named(results):
    assert analysis.list_diverged_runs(CELLS, results) == [
        "fedprox, fashion_mnist, mlp, alpha 0.01, seed 1",
        "scaffold, fashion_mnist, mlp, alpha 0.01, seed 0",
    ]


@pytest.fixture
def curves():
    """Accuracies whose last five rounds average to ACCURACY; measured every other round."""
    frames = []
    for a_cell in CELLS:
        for run, accuracy in zip(a_cell.runs, ACCURACY.get(a_cell.method, []), strict=False):
            values = np.full(20, np.nan)
            end = 0.99 if accuracy is None else accuracy
            last = [end - 0.02, end - 0.01, end, end + 0.03, end]
            values[1::2] = [0.1, 0.2, 0.3, 0.4, 0.5, *last]
            frames.append(
                pd.DataFrame(
                    {
                        "digest": f"made-{run.digest()}",
                        "round": np.arange(1, 21),
                        "test_accuracy": values,
                    }
                )
            )
    return pd.concat(frames)


def test_a_curve_ends_at_the_value_of_the_table(results, curves, reported, table):
    figure = analysis.plot_table_curves(CELLS, results, curves, reported)
    (panel,) = figure.axes
    lines = {line.get_label(): line for line in panel.lines}
    for method in ("fedavg", "fedprox", "dynafed"):
        x, y = lines[method].get_data()
        assert x[-1] == 20
        assert y[-1] == pytest.approx(table.loc[method, "mean"])
    assert "scaffold" not in lines  # its one run diverged
    assert [text.get_text() for text in panel.texts] == ["fedavg", "fedprox †", "dynafed"]
    assert figure.get_supxlabel().endswith("left out: fedprox, scaffold")
    assert max(lines["fedprox"].get_ydata()) < 70  # nor does a diverged seed enter a mean
    for method, value in {"fedavg": 65.64, "fedprox": 68.09, "dynafed": 73.89}.items():
        mark = lines[f"reported {method}"]
        assert mark.get_ydata() == [value]
        assert mark.get_color() == lines[method].get_color()
        assert panel.get_ylim()[0] <= value <= panel.get_ylim()[1]


@pytest.mark.parametrize(
    ("row", "without", "text"),
    [
        ("fedavg", {}, "fedavg"),
        ("dynafed(synthetic='real')", {}, "dynafed, real"),
        ("feddm(private=True, image_lr=0)", {}, "feddm, private, image_lr 0"),
        ("fsl(gamma=0.5, rounds=30)", {"rounds": 30}, "fsl, gamma 0.5"),
        ("fsl(gamma=0.5, rounds=30)", {"rounds": 20}, "fsl, gamma 0.5, rounds 30"),
    ],
)
def test_rows_in_few_words(row, without, text):
    assert format_row(row, omit=without) == text


def test_curves_do_not_say_what_all_rows_share_in_few_words(results, curves, reported):
    rows = ("fedavg(rounds=30)", "fedprox(rounds=30)", "dynafed(rounds=30, synthetic='real')")
    cells = [replace(cell, method=row) for cell, row in zip(CELLS, rows, strict=False)]
    figure = analysis.plot_table_curves(cells, results, curves, reported)
    labels = {line.get_label() for panel in figure.axes for line in panel.lines}
    assert {"fedavg", "fedprox"} <= labels
    assert not any("rounds 30" in label for label in labels)


def test_a_row_is_called_what_it_is_named(results, curves, reported):
    named = {"dynafed": "dynafed, as it is"}
    for how in ({}, {"separate_panels": True}):
        figure = analysis.plot_table_curves(
            CELLS, results, curves, reported, display_names=named, **how
        )
        told = {text.get_text() for panel in figure.axes for text in panel.texts}
        told |= {panel.get_title(loc="left") for panel in figure.axes}
        assert "dynafed, as it is" in told and "dynafed" not in told and "fedavg" in told


def test_a_panel_without_runs_says_so(results, curves, reported):
    other = TableCell("cinic10", "mlp", ALPHA, "fedavg", runs("fedavg", seeds=(5,)))
    figure = analysis.plot_table_curves([*CELLS, other], results, curves, reported)
    assert [text.get_text() for text in figure.axes[1].texts] == ["not run"]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")  # a layout that does not fit would warn
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_colours_are_told_apart():
    methods = list(load_reported_values("fedaf", "table1")["method"].unique())
    colours = analysis.assign_method_colors([*METHODS, *methods])
    assert len(set(colours.values())) == len(colours)


def test_reported_values_are_those_of_the_paper():
    table1 = load_reported_values("dynafed", "table1")
    assert len(table1) == 3 * 3 * 9
    key = ["dataset", "level", "method"]
    value = table1.set_index(key).loc[("cifar10", 0.16, "scaffold")]
    assert (value["mean"], value["std"]) == (68.57, 0.91)
    assert table1["mean"].between(10, 100).all()


@pytest.mark.parametrize(("paper", "item"), [("dynafeed", "table1"), ("dynafed", "table9")])
def test_an_unknown_table_lists_the_known_ones(paper, item):
    with pytest.raises(ConfigError, match=r"did you mean.*(dynafed|table)"):
        load_reported_values(paper, item)


# Tables of the best round, as FedAF reports, and of domains


def best_results(**more):
    rows = []
    for method, accuracies in (("fedavg", (0.60, 0.66)), ("fedprox", (0.70, 0.80))):
        for run, accuracy in zip(runs(method, seeds=(0, 1)), accuracies, strict=True):
            rows.append(
                {
                    "digest": f"made-{run.digest()}",
                    "settings": run.digest(),
                    "final_accuracy": accuracy - 0.1,
                    "final_accuracy_std": 0.5,
                    "best_accuracy": accuracy,
                    "diverged": False,
                    "wall_seconds": 3.0,
                    **{name: accuracy + shift for name, shift in more.items()},
                }
            )
    return pd.DataFrame(rows)


def theirs(level, **values):
    rows = [
        {"dataset": "fashion_mnist", "model": "mlp", "level": level, "method": name, "mean": mean}
        for name, mean in values.items()
    ]
    return pd.DataFrame(rows).assign(std=np.nan, metric="test_accuracy_best")


def two_seeds(method, **place):
    alpha = None if place else ALPHA
    return TableCell("fashion_mnist", "mlp", alpha, method, runs(method, seeds=(0, 1)), **place)


def test_what_the_paper_reports_decides_the_measure():
    cells = [two_seeds("fedavg"), two_seeds("fedprox")]
    table = analysis.compare_with_reported(cells, best_results(), theirs(ALPHA, fedavg=61.0))
    assert table["mean"].tolist() == pytest.approx([63.0, 75.0])
    assert table["final_mean"].tolist() == pytest.approx([53.0, 65.0])
    assert "within_std" not in table
    assert table["difference"][0] == pytest.approx(2.0)
    assert "round where it is highest" in analysis.make_comparison_caption(table)
    lines = printed(table)
    assert lines["Method"].split()[1:4] == ["Measured", "Last", "five"]
    assert lines["fedavg"].split()[1:6] == ["63.00", "±", "4.24", "53.00", "61.00"]
    other = theirs(ALPHA, fedavg=61.0).assign(metric="bytes")
    with pytest.raises(ValueError, match=r"metric of reported = .'bytes'.: expected one of"):
        analysis.compare_with_reported(cells, best_results(), other)


def test_curves_of_a_table_of_the_best_round_are_not_smoothed():
    curves = pd.concat(
        pd.DataFrame({"digest": digest, "round": [1, 2, 3], "test_accuracy": [0.1, 0.6, 0.3]})
        for digest in best_results()["digest"]
    )
    figure = analysis.plot_table_curves(
        [two_seeds("fedavg")], best_results(), curves, theirs(ALPHA, fedavg=61.0)
    )
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


def test_domains_are_columns_with_the_papers_values_below():
    table = analysis.compare_with_reported(*by_domain())
    text_table = analysis.format_comparison_table(table, title="T")
    assert text_table.value_columns == ("sketch", "real", "average", "Seeds", "Time")
    rows = analysis.to_markdown(text_table).splitlines()[4:]
    place = "| fashion_mnist | mlp |"
    assert rows == [
        f"{place} fedavg | measured | 43.00 ± 4.24 | 73.00 ± 4.24 | 58.00 ± 4.24 | 2 | 3.0 s |",
        f"{place}  | reported | 40.00 | — | 50.00 |  |  |",
        f"{place}  | difference | +3.00 | — | +8.00 |  |  |",
        f"{place} fedprox | measured | 55.00 ± 7.07 | 85.00 ± 7.07 | 70.00 ± 7.07 | 2 | 3.0 s |",
        "",
    ]
    bold = [line for line in analysis.to_latex(text_table).splitlines() if "textbf" in line]
    (line,) = bold
    assert line.count("textbf") == 3 and line.startswith(r"\quad fedprox & measured & \textbf{55")
    assert "unweighted mean" in analysis.make_comparison_caption(table)
    assert (
        analysis.to_csv(table).splitlines()[0].startswith("dataset,model,alpha,domain,method,mean")
    )


def test_a_domain_without_results_is_missing():
    cells, _, reported = by_domain()
    table = analysis.compare_with_reported(cells, pd.DataFrame(), reported)
    assert table["mean"].isna().all() and len(table) == 6
    assert "| fedprox | measured | — | — | — | 0 of 2 | — |" in analysis.to_markdown(
        analysis.format_comparison_table(table, title="T")
    )


def test_domains_have_panels():
    cells, results, reported = by_domain()
    measured = {"test_accuracy_sketch": [0.2], "test_accuracy_real": [0.4]}
    curves = pd.concat(
        pd.DataFrame({"digest": d, "round": [1], **measured, "test_accuracy_domains": [0.3]})
        for d in results["digest"]
    )
    figure = analysis.plot_table_curves(cells, results, curves, reported)
    found = {panel.get_title(): panel.lines[0].get_ydata().tolist() for panel in figure.axes}
    names = [f"fashion_mnist, {name}" for name in ("sketch", "real", "average")]
    assert found == {name: pytest.approx([y]) for name, y in zip(names, (20, 40, 30), strict=True)}


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ("fedavg", ("fedavg", {})),
        ("fedaf(ipc=10)", ("fedaf", {"ipc": 10})),
        ("fedaf(gamma=0.2, lgkm='exact')", ("fedaf", {"gamma": 0.2, "lgkm": "exact"})),
    ],
)
def test_a_row_names_a_method_and_its_settings(row, read):
    assert analysis.parse_row(row) == read


@pytest.mark.parametrize("row", ["fedaf()", "fedaf(ipc)", "fedaf(ipc=)", "fedaf(ipc=ten)"])
def test_a_row_that_cannot_be_read_is_refused(row):
    with pytest.raises(ConfigError, match="expected a method, or one with settings"):
        analysis.parse_row(row)


# Tables of clients' accuracies (BMTA), which have neither alphas nor domains


def of_clients(method, dataset="mnist", model="mlp", seeds=(0, 1)):
    planned = tuple(
        RunSpec(method, dataset, model=model, partition="iid", local_tests=True, seed=seed)
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
    rows = []
    for a_cell in cells:
        for run, value in zip(a_cell.runs, BMTA[a_cell.method], strict=False):
            lost, alone = value is None, a_cell.method in ("separate", "fedamp")
            rows.append(
                {
                    "digest": f"made-{run.digest()}",
                    "settings": run.digest(),
                    "final_accuracy": None if lost or alone else 0.5,
                    "final_client_accuracy": None if lost else value - 0.01,
                    "bmta": 0.99 if lost else value,  # of a round before it diverged
                    "bmta_round": 10 + 5 * run.seed,
                    "bmta_worst_decile": 0.2 if lost else value - 0.3,
                    "diverged": lost,
                    "wall_seconds": 4.0,
                }
            )
    return pd.DataFrame(rows)


def clients_reported(dataset="mnist", values=REPORTED):
    rows = [{"dataset": dataset, "method": name, "mean": mean} for name, mean in values.items()]
    return pd.DataFrame(rows).assign(
        std=np.nan, model=np.nan, level=np.nan, metric="bmta", partition="iid"
    )


def clients_cells():
    cells = [of_clients(method) for method in BMTA if method != "ditto"]
    return [*cells, TableCell("mnist", "mlp", None, "ditto")]


def test_bmta_is_shown_with_its_worst_decile_and_round():
    cells = clients_cells()
    table = analysis.compare_with_reported(cells, clients_results(cells), clients_reported())
    row = table.set_index("method").loc["fedamp"]  # it has no global model, and did not diverge
    assert (row["mean"], row["worst_decile"]) == pytest.approx((94.0, 64.0))
    assert (row["best_round"], row["diverged"], row["reported_mean"]) == (12.5, 0, 97.0)
    text_table = analysis.format_comparison_table(
        table, title="T", notes=[analysis.make_comparison_caption(table)]
    )
    (section,) = text_table.sections
    assert section.title == "mnist, mlp"
    assert section.labels == {"Data": "mnist", "Network": "mlp"}
    names = "Measured, Worst decile, Round, Reported, Difference, Rank, Seeds, Time"
    assert text_table.value_columns == tuple(names.split(", "))
    assert [*section.rows[5].values()] == [
        "fedamp", "94.00 ± 1.41", "64.00", "12.5", "97.00", "−3.00", "2 / 1", "2", "4.0 s"
    ]  # fmt: skip
    everything = analysis.to_markdown(text_table) + analysis.to_latex(text_table)
    assert "nan" not in everything.lower() and "alpha" not in everything
    assert "BMTA" in analysis.make_comparison_caption(table)


def test_ranks_are_among_methods_that_have_both_values():
    cells = clients_cells()
    table = analysis.compare_with_reported(
        cells, clients_results(cells), clients_reported()
    ).set_index("method")
    # 81 and 96, 91.00 twice, 94 of separate, fedavg_ft, fedavg and fedprox, fedamp.
    measured = {"separate": 5, "fedavg": 3, "fedprox": 3, "fedavg_ft": 1, "fedamp": 2}
    reported = {"separate": 3, "fedavg": 5, "fedprox": 4, "fedavg_ft": 2, "fedamp": 1}
    assert table["rank"].dropna().to_dict() == measured
    assert table["reported_rank"].dropna().to_dict() == reported
    assert table.loc["scaffold", "mean"] == pytest.approx(99)  # but it lost a seed


def test_the_rank_correlation_is_spearmans():
    cells = clients_cells()
    table = analysis.compare_with_reported(cells, clients_results(cells), clients_reported())
    (found,) = analysis.compute_rank_correlations(table)
    # Spearman's is Pearson's of the ranks, ties at their mean: 5, 3.5, 3.5, 1, 2.
    expected = np.corrcoef([5, 3.5, 3.5, 1, 2], [3, 5, 4, 2, 1])[0, 1]
    assert found.rho == pytest.approx(expected) and 0 < expected < 1
    assert (found.section, found.num_methods) == ("mnist, mlp", 5)
    few = clients_reported(values={"fedavg": 80.0, "fedamp": 90.0})
    assert (
        analysis.compute_rank_correlations(
            analysis.compare_with_reported(cells, clients_results(cells), few)
        )
        == []
    )


def test_without_reported_values_all_measured_methods_are_ranked():
    cells = [*clients_cells(), of_clients("separate", "digits"), of_clients("fedamp", "digits")]
    table = analysis.compare_with_reported(
        cells, clients_results(cells), clients_reported("digits")
    )
    here = table[table["dataset"] == "mnist"].set_index("method")
    ranks = {"separate": 5, "fedavg": 3, "fedprox": 3, "fedavg_ft": 1, "fedamp": 2}
    assert here["rank"].dropna().to_dict() == ranks
    assert here["reported_rank"].isna().all()
    text_table = analysis.format_comparison_table(table, title="T")
    assert [section.rows[0]["Rank"] for section in text_table.sections] == ["5", "2 / 2"]


def test_curves_of_clients_have_a_panel_per_data_set():
    cells = [of_clients(m, d) for d in ("mnist", "digits") for m in ("separate", "scaffold")]
    results = clients_results(cells)
    curves = pd.concat(
        pd.DataFrame(
            {
                "digest": digest,
                "round": [1, 2, 3],
                "test_accuracy": np.nan,
                "mean_client_accuracy": [0.3, 0.8, 0.6],
            }
        )
        for digest in results["digest"]
    )
    figure = analysis.plot_table_curves(cells, results, curves, clients_reported())
    assert [panel.get_title() for panel in figure.axes] == ["mnist", "digits"]
    first, second = figure.axes
    assert first.get_subplotspec().rowspan == second.get_subplotspec().rowspan
    assert first.lines[0].get_ydata().tolist() == pytest.approx([30, 80, 60])
    assert first.get_ylabel().startswith("Mean accuracy of clients (%)\n")
    marks = {line.get_label(): line.get_ydata() for line in first.lines}
    for method in ("separate", "scaffold"):
        assert marks[f"reported {method}"] == [REPORTED[method]]
    assert [text.get_text() for text in first.texts] == ["separate", "scaffold †"]


@pytest.mark.parametrize(
    ("measure", "scale"),
    [
        ("bmta", 100),
        ("bmta_worst_decile", 100),
        ("final_client_accuracy", 100),
        ("mean_client_accuracy", 100),
        ("bmta_round", 1),
        ("bytes_up", 1),
    ],
)
def test_shares_are_shown_in_percent(measure, scale):
    from fedjax_het.analysis.overview import get_display_scale, is_higher_better

    assert get_display_scale(measure) == scale
    assert is_higher_better(measure) == (scale == 100)


# Clients: their accuracies, and who learns from whom


def test_paired_tests_compare_the_same_clients():
    base = np.array([0.80, 0.75, 0.90, 0.60, 0.85, 0.70])
    better = base + np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    mixed = base + np.array([0.01, 0.02, 0.03, -0.04, 0.05, 0.06])
    accuracies = {"fedavg": base, "fedamp": better, "heurfedamp": mixed}
    pairs = analysis.run_paired_tests(accuracies, ["fedamp", "heurfedamp"])
    found = pairs.set_index(["method", "against"])
    assert list(found.index) == [
        ("fedamp", "fedavg"),
        ("fedamp", "heurfedamp"),
        ("heurfedamp", "fedavg"),
        ("heurfedamp", "fedamp"),
    ]
    assert found.loc[("fedamp", "fedavg"), "p_value"] == pytest.approx(2 / 64)
    assert found.loc[("heurfedamp", "fedavg"), "p_value"] == pytest.approx(14 / 64)  # by all signs
    assert found.loc[("fedamp", "fedavg"), "mean_difference"] == pytest.approx(3.5)
    assert found.loc[("fedamp", "heurfedamp"), "ties"] == 5
    assert (pairs["clients"] == 6).all()
    with pytest.raises(ConfigError, match="methods = 'fedap' is unknown: did you mean 'fedamp'"):
        analysis.run_paired_tests(accuracies, ["fedap"])


def test_every_client_is_a_point_in_the_methods_colour():
    accuracies = {"fedavg": np.array([0.5, np.nan, 0.7]), "fedamp": np.array([0.6, 0.8, 0.9])}
    figure = analysis.plot_client_accuracies({"digits": accuracies, "mnist": {}})
    digits, mnist = figure.axes
    drawn = [points.get_offsets()[:, 1].tolist() for points in digits.collections]
    assert drawn == [pytest.approx([50, 70]), pytest.approx([60, 80, 90])]
    assert [text.get_text() for text in digits.get_xticklabels()] == ["fedavg", "fedamp"]
    medians = [line.get_ydata()[0] for line in digits.lines if line.get_linewidth() == 1.6]
    assert medians == pytest.approx([60, 80])
    assert [text.get_text() for text in mnist.texts] == ["not run"]
    saved(figure)


def test_methods_in_focus_are_in_colour_and_the_others_grey():
    accuracies = {"fedavg": np.array([0.5, 0.7]), "fedamp": np.array([0.6, 0.8])}

    def colours(**how):
        (panel,) = analysis.plot_client_accuracies({"digits": accuracies}, **how).axes
        return [to_hex(points.get_facecolor()[0]).upper() for points in panel.collections]

    assert colours(highlight=["fedamp"]) == [GRAYS[1], METHODS["fedamp"].color.upper()]
    assert not {*colours()} & {*GRAYS}


def saved(figure):
    """A layout that does not fit would warn."""
    figure.savefig(io.BytesIO(), format="png")


def test_collaboration_has_colours_for_others_alone():
    weights = np.array([[0.9, 0.08, 0.02], [0.05, 0.94, 0.01], [0.0, 0.03, 0.97]])
    figure = analysis.plot_collaboration(weights, np.array([0, 0, 1]), titles=["fedamp"])
    panel = figure.axes[0]
    (image,) = panel.images
    values = image.get_array()
    assert values.mask.diagonal().all() and values.mask.sum() == 3
    assert image.get_clim() == (0, 0.08)
    np.testing.assert_array_equal(values.filled(0), weights * (1 - np.eye(3)))
    places = {(*line.get_xdata(), *line.get_ydata()) for line in panel.lines}
    assert places == {(0, 1, 1.5, 1.5), (1.5, 1.5, 0, 1)}  # between the second and third client
    assert panel.get_xticks().tolist() == panel.get_yticks().tolist() == [0.5, 2]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["0", "1"]
    assert "own model: 0.900 to 0.970" in panel.get_xlabel()
    assert panel.get_title() == "fedamp"
    top, bottom = panel.get_ylim()[::-1]
    assert top < bottom  # client 0 is the first row
    saved(figure)


def test_matrices_have_scales_of_their_own_or_one():
    matrices = [np.full((4, 4), 0.1), np.full((4, 4), 0.2)]
    own = analysis.plot_collaboration(matrices, titles=["a", "b"])
    assert [panel.images[0].get_clim()[1] for panel in own.axes[:2]] == [0.1, 0.2]
    assert len(own.axes) == 4  # two bars
    shared = analysis.plot_collaboration(np.stack(matrices), titles=["a", "a"], scale="shared")
    assert [panel.images[0].get_clim()[1] for panel in shared.axes[:2]] == [0.2, 0.2]
    assert [panel.get_title() for panel in shared.axes] == ["a", "a", ""]
    saved(shared)
    saved(analysis.plot_collaboration(np.eye(3)))  # nobody hears anybody


def image_of(figure):
    return figure.axes[0].images[0].get_array().filled(0)


def test_clients_that_hear_each_other_stand_side_by_side():
    random = np.random.default_rng(0)
    clusters = random.permutation(np.repeat([0, 1, 2], 4))
    weights = (clusters[:, None] == clusters) + 0.01 * random.random((12, 12))
    figure = analysis.plot_collaboration(weights)
    ticks = [int(text.get_text()) for text in figure.axes[0].get_xticklabels()]
    assert sorted(ticks) == list(range(12))
    found = clusters[ticks]
    assert (found[1:] != found[:-1]).sum() == 2
    np.testing.assert_array_equal(
        image_of(figure), weights[np.ix_(ticks, ticks)] * (1 - np.eye(12))
    )
    saved(figure)


def test_groups_that_hear_each_other_stand_side_by_side_and_stay_whole():
    near = np.array([[5, 0, 4, 0], [0, 5, 0, 1], [4, 0, 5, 0], [0, 1, 0, 5]])
    groups = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    weights = near[np.ix_(groups, groups)].astype(float)
    figure = analysis.plot_collaboration(weights, groups)
    names = [int(text.get_text()) for text in figure.axes[0].get_xticklabels()]
    assert sorted(names) == [0, 1, 2, 3] and abs(names.index(0) - names.index(2)) == 1
    order = [k for name in names for k in np.flatnonzero(groups == name)]
    np.testing.assert_array_equal(image_of(figure), weights[np.ix_(order, order)] * (1 - np.eye(8)))
    given = analysis.plot_collaboration(weights, groups, order="given")
    np.testing.assert_array_equal(image_of(given), weights * (1 - np.eye(8)))
    chosen = analysis.plot_collaboration(weights, order=np.arange(8)[::-1], scale=9.0)
    np.testing.assert_array_equal(image_of(chosen), weights[::-1, ::-1] * (1 - np.eye(8)))
    assert chosen.axes[0].images[0].get_clim() == (0, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [np.eye(3), np.eye(2)]}, r"shape of weights = \(2, 2\)"),
        ({"weights": np.eye(3), "order": "random"}, "order = 'random' is unknown"),
        ({"weights": np.eye(3), "order": [0, 1, 1]}, r"order = .*expected 'similar'"),
        ({"weights": np.ones((2, 3))}, r"shape of weights = \(2, 3\)"),
        ({"weights": []}, "weights = 'none'"),
        ({"weights": np.eye(3), "groups": [0, 1]}, r"shape of groups = \(2,\)"),
        ({"weights": np.eye(3), "titles": ["a", "b"]}, "titles = .*expected 1 of them"),
        ({"weights": np.eye(3), "scale": "log"}, "scale = 'log' is unknown"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        analysis.plot_collaboration(**arguments)
