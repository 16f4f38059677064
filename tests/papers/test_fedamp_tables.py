"""FedAMP's tables and figures: they are the paper's, and the figures come from Table 3's runs."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.tables import list_cells, list_digests

from fedjax_het.analysis.comparison import format_row
from fedjax_het.data import get_client_groups, load_dataset
from fedjax_het.metrics.personal import compute_group_contrast, compute_group_weights
from fedjax_het.papers.fedamp import fig2 as FIG2
from fedjax_het.papers.fedamp import fig3 as FIG3
from fedjax_het.papers.fedamp import tables
from fedjax_het.papers.programs import load_program
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import list_protocol_deviations
from fedjax_het.runtime.data_assignment import build_partition
from fedjax_het.runtime.results import Result

PARTITIONS = {1: "iid", 2: "pathological", 3: "grouped"}
ADDED = ("ditto", "pfedme", "per_fedavg")  # rows that the paper does not have


PROGRAMS = {n: load_program(f"fedamp.table{n}") for n in PARTITIONS}
TABLES = {n: getattr(tables, f"TABLE{n}") for n in PARTITIONS}


@pytest.mark.parametrize("number", TABLES)
def test_paper_preset_matches_reported_cells(number):
    cells = list_cells(TABLES[number])
    reported = load_reported_values("fedamp", f"table{number}")
    assert set(reported["partition"]) == {PARTITIONS[number]} and len(reported) == 36
    ours = [(cell.dataset, cell.method) for cell in cells if cell.method not in ADDED]
    assert ours[:9] == [("mnist", name) for name in reported["method"].unique()]
    assert sorted(ours) == sorted(zip(reported["dataset"], reported["method"], strict=True))
    assert all(cell.level is None for cell in cells)
    assert list_protocol_deviations(TABLES[number], cells) == []


@pytest.mark.parametrize("preset", ["quick", "short", "cpu", "paper"])
@pytest.mark.parametrize("number", TABLES)
def test_runs_test_clients_of_partition(number, preset):
    cells = list_cells(TABLES[number], preset)
    specs = [run.resolved() for cell in cells for run in cell.runs]
    assert len(specs) >= 8
    assert {spec.partition for spec in specs} == {PARTITIONS[number]}
    assert all(spec.has_client_tests and spec.participation == 1 for spec in specs)
    assert {spec.evaluated_model for spec in specs if spec.algorithm == "scaffold"} == {"client"}
    clients = {(spec.dataset, spec.num_clients) for spec in specs}
    assert (
        clients
        == {
            "quick": {("digits", 15)},
            "short": {("fashion_mnist", 25)} | ({("mnist", 25)} if number == 3 else set()),
            "cpu": {("fashion_mnist", 100), ("mnist", 100)},
            "paper": {
                *(("mnist", 50), ("fashion_mnist", 50)),
                *(("emnist_byclass", 62), ("cifar100", 40)),
            },
        }[preset]
    )


def test_figures_share_runs_of_table3():
    for preset in ("quick", "short", "cpu", "paper"):
        assert list_digests(FIG2.FIG2, preset) == list_digests(TABLES[3], preset)
        methods = ("fedamp", "heurfedamp")
        assert list_digests(FIG3.FIG3, preset) == list_digests(TABLES[3], preset, methods=methods)
    everything = [*TABLES.values(), FIG2.FIG2, FIG3.FIG3]
    assert {experiment.results_folder for experiment in everything} == {"fedamp"}


# The quick presets, for real: a few rows, as every method is compiled anew for each partition

METHODS = {
    1: ("separate",),
    2: ("separate", "fedavg"),
    3: ("separate", "fedavg", "fedamp", "heurfedamp"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all three tables: two rounds of two seeds."""
    folder = tmp_path_factory.mktemp("fedamp")
    for number, program in PROGRAMS.items():
        assert program(command(folder, number)) == 0
    return folder


def command(folder, number=3):
    return ["--methods", *METHODS[number], "--rounds", "2", "--output-dir", str(folder)]


def results(folder, partition):
    actual = [Result.load(path) for path in folder.glob("*.json")]
    return {
        (result.spec.algorithm, result.spec.seed): result
        for result in actual
        if result.spec.partition == partition
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", TABLES)
def test_table_has_best_means_of_runs(number, folder):
    table = pd.read_csv(folder / f"table{number}.csv").set_index("method")
    own = results(folder, PARTITIONS[number])
    assert list(table.index) == list(METHODS[number])
    for method in METHODS[number]:
        best = []
        for seed in (0, 1):
            means = own[method, seed].metrics["client_accuracy"].mean(1)
            assert len(means) == 2
            best.append(100 * means.max())
        assert table.loc[method, "mean"] == pytest.approx(np.mean(best), abs=1e-4)
        assert table.loc[method, "std"] == pytest.approx(np.std(best, ddof=1), abs=1e-4)
    ranks = stats.rankdata(-table["mean"].round(2), method="min")
    assert table["rank"].tolist() == ranks.tolist()
    assert not table["diverged"].any()


def test_missing_values_are_not_printed(folder, capsys):
    for number, program in PROGRAMS.items():
        assert program([*command(folder, number), "--show"]) == 0
    out = capsys.readouterr().out
    texts = [out, *(path.read_text() for path in folder.glob("table?.md"))]
    texts += [path.read_text() for path in folder.glob("table?.tex")]
    assert len(texts) == 7
    for text in texts:
        assert not re.search(r"\bnan\b|None\b|\balpha\b|diverged †", text)
        assert "compare ranks, not values" in text.replace("\n", " ")
    out = " ".join(out.split())
    assert (
        out.count("Settings that differ from protocol fedamp: num_clients 15 instead of 10;") == 3
    )
    assert out.count("rounds 2 instead of 100;") == 3
    assert out.count("group_sizes [90, 63, 36, 90, 63];") == 1
    assert "self_weight 0.0666667 instead of 0.1 (HeurFedAMP)." in " ".join(
        (folder / "table3.md").read_text().split()
    )
    for number in TABLES:
        assert (folder / f"table{number}_curves.png").read_bytes().startswith(b"\x89PNG")


def test_figure2_tests_clients_of_best_round(folder, capsys, forbid_runs):
    assert FIG2.main(command(folder)) == 0
    out = capsys.readouterr().out
    assert "Left out" not in out and not re.search(r"\bnan\b", out)
    assert (folder / "fig2.png").read_bytes().startswith(b"\x89PNG")
    own = results(folder, "grouped")

    def clients(method):
        of_seeds = [own[method, seed].metrics["client_accuracy"] for seed in (0, 1)]
        return np.concatenate([values[values.mean(1).argmax()] for values in of_seeds])

    pairs = pd.read_csv(folder / "fig2.csv")
    assert len(pairs) == 2 * 3
    for row in pairs.itertuples():
        difference = (clients(row.method) - clients(row.against)).round(6)
        assert row.clients == 30 and row.ties == (difference == 0).sum()
        p_value = 1.0 if row.ties == 30 else stats.wilcoxon(difference).pvalue
        assert row.p_value == pytest.approx(p_value)
        assert row.mean_difference == pytest.approx(100 * difference.mean(), abs=1e-3)
        assert (
            f"| {format_row(row.method)} | {format_row(row.against)} | 30 | {row.ties} |"
            in (folder / "fig2.md").read_text()
        )


def test_figure2_omits_methods_with_missing_seed(folder, capsys):
    more = [*command(folder), "--seeds", "0", "1", "7", "--show"]
    assert FIG2.main(more) == 0
    assert "Left out, as runs are missing: Separate, FedAvg," in (
        capsys.readouterr().out.replace("\n", " ")
    )


def test_figure2_reported_tests():
    assert {
        *("separate", "fedavg", "fedprox", "fedavg_ft", "fedprox_ft", "scaffold", "apfl")
    } == FIG2.REPORTED_BASELINES
    rows = [
        {"place": f"{dataset}, cnn", "method": "fedamp", "against": against}
        for dataset in ("mnist", "fashion_mnist")
        for against in ("separate", "heurfedamp", "ditto")
    ]
    numbers = {"clients": 50, "ties": 0, "mean_difference": 1, "median_difference": 1, "p_value": 1}
    table = FIG2.make_text_table(pd.DataFrame(rows).assign(**numbers), "T", [])
    entries = [[row["Reported"] for row in section.rows] for section in table.sections]
    assert entries == [["—", "—", "—"], ["< 1e-4", "—", "—"]]


def test_figure3_weight_contrasts(folder, capsys, forbid_runs):
    assert FIG3.main(["--rounds", "2", "--output-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Inside / between" in out and not re.search(r"\bnan\b", out)
    assert (folder / "fig3_digits.png").read_bytes().startswith(b"\x89PNG")
    own = results(folder, "grouped")
    table = pd.read_csv(folder / "fig3.csv")
    assert len(table) == 4
    for row in table.itertuples():
        result = own[row.method, row.seed]
        split = build_partition(result.spec.resolved(), load_dataset("digits"))
        groups = get_client_groups(split)
        assert groups.tolist() == np.repeat(range(5), 3).tolist()
        weights = result.artifacts["collaboration"]
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
        expected = compute_group_contrast(weights, groups)
        for name, value in expected._asdict().items():
            assert getattr(row, name) == pytest.approx(value)
        ratios = compute_group_weights(weights, groups).ratios
        np.testing.assert_allclose([float(r) for r in row.ratios.split()], ratios, rtol=6e-3)
        assert row.shown == (ratios >= 2).sum()
        assert 2 * row.inside + 12 * row.between + row.own == pytest.approx(1)


def test_figure2_without_runs(tmp_path):
    assert FIG2.main(["--show", "--output-dir", str(tmp_path)]) == 0
