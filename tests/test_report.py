"""Tables and figures say what the results say, and show what is missing."""

import io
import math

import numpy as np
import pandas as pd
import pytest

from fedjax_het import report
from fedjax_het.errors import ConfigError
from fedjax_het.report import Cell
from fedjax_het.reported import reported_values
from fedjax_het.spec import RunSpec

ALPHA = 0.01


def runs(method, seeds=(0, 1, 2), rounds=20):
    return tuple(
        RunSpec(method, "fashion_mnist", model="mlp", alpha=ALPHA, rounds=rounds, seed=seed)
        for seed in seeds
    )


def cell(method, planned):
    return Cell("fashion_mnist", "mlp", ALPHA, method, planned)


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
    return reported_values("dynafed", "table5")


@pytest.fixture
def table(results, reported):
    return report.compare(CELLS, results, reported).set_index("method", drop=False)


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
    row = report.compare(CELLS, results, reported).set_index("method").loc["fedprox"]
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
    table = report.compare(CELLS, pd.DataFrame(), reported)
    assert table["mean"].isna().all()
    assert table["reported_mean"].notna().all()
    assert not table[["seeds", "diverged"]].to_numpy().any()


def test_two_reported_values_for_one_cell_are_an_error(results, reported):
    with pytest.raises(ValueError, match="2 reported values for fedavg"):
        report.compare(CELLS, results, pd.concat([reported, reported]))


def printed(table):
    """What the pipe gets, by the first word of each line."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=100)
    report.print_table(table, title="T", notes=["a note"], console=console)
    return {line.split()[0]: line for line in file.getvalue().splitlines() if line.strip()}


def test_a_pipe_gets_plain_text_of_100_columns(table, capsys):
    report.print_table(table, title="A title", notes=[report.CAPTION])
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
    text = report.to_markdown(table, title="T", notes=["one note"])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CELLS)
    assert len({row.count("|") for row in rows}) == 1
    assert "| fashion_mnist | mlp | 0.01 | fedprox | 64.00 ± 2.83 † |" in text
    assert "- one note" in text


def test_csv_holds_the_numbers(table):
    again = pd.read_csv(io.StringIO(report.to_csv(table))).set_index("method")
    for name in ("mean", "std", "within_std", "reported_mean", "difference", "seconds"):
        np.testing.assert_allclose(again[name], table[name], atol=1e-4)


def test_diverged_runs_are_named(results):
    assert report.diverged_runs(CELLS, results) == [
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
    figure = report.plot_curves(CELLS, results, curves, reported)
    (panel,) = figure.axes
    lines = {line.get_label(): line for line in panel.lines}
    for method in ("fedavg", "fedprox", "dynafed"):
        x, y = lines[method].get_data()
        assert x[-1] == 20
        assert y[-1] == pytest.approx(table.loc[method, "mean"])
        assert lines[method].get_color() == report.COLOURS[method]
    assert "scaffold" not in lines  # its one run diverged
    assert max(lines["fedprox"].get_ydata()) < 70  # nor does a diverged seed enter a mean
    ticks = [line.get_ydata()[0] for line in panel.lines if line.get_xdata()[0] > 20]
    assert ticks == [65.64, 68.09, 73.89]


def test_a_panel_without_runs_says_so(results, curves, reported):
    other = Cell("cinic10", "mlp", ALPHA, "fedavg", runs("fedavg", seeds=(5,)))
    figure = report.plot_curves([*CELLS, other], results, curves, reported)
    assert [text.get_text() for text in figure.axes[1].texts] == ["not run"]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")  # a layout that does not fit would warn
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_colours_are_told_apart():
    methods = list(reported_values("fedaf", "table1")["method"].unique())
    colours = report._colours([*report.COLOURS, *methods])
    assert len(set(colours.values())) == len(colours)


def test_reported_values_are_those_of_the_paper():
    table1 = reported_values("dynafed", "table1")
    assert len(table1) == 3 * 3 * 9
    key = ["dataset", "level", "method"]
    value = table1.set_index(key).loc[("cifar10", 0.16, "scaffold")]
    assert (value["mean"], value["std"]) == (68.57, 0.91)
    assert table1["mean"].between(10, 100).all()


@pytest.mark.parametrize(("paper", "item"), [("dynafeed", "table1"), ("dynafed", "table9")])
def test_an_unknown_table_lists_the_known_ones(paper, item):
    with pytest.raises(ConfigError, match=r"did you mean.*(dynafed|table)"):
        reported_values(paper, item)
