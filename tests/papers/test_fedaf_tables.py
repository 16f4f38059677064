"""FedAF's tables and figures: they are the paper's, and no run of theirs is made twice."""

import math
import re

import jax
import numpy as np
import pandas as pd
import pytest
from support.tables import list_cells, list_digests, list_specs

from fedjax_het import RunSpec, load_dataset
from fedjax_het.analysis import AVERAGE, plot_table_curves
from fedjax_het.papers.fedaf import domains as DOMAINS
from fedjax_het.papers.fedaf import fig5 as FIG5
from fedjax_het.papers.fedaf import fig9, tables
from fedjax_het.papers.fedaf import table7 as TABLE7
from fedjax_het.papers.fedaf.ablations import ABLATIONS
from fedjax_het.papers.programs import load_program
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import (
    TableArguments,
    TableRun,
    list_protocol_deviations,
    make_cells,
)
from fedjax_het.papers.table.writer import write_comparison_table
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.result_store import load_curves, load_results
from fedjax_het.runtime.results import Result

PROGRAMS = {n: load_program(f"fedaf.table{n}") for n in range(1, 7)}
TABLES = {n: getattr(tables, f"TABLE{n}") for n in PROGRAMS}
BASELINES = ("fedavg", "fedprox", "fedbn", "moon", "feddyn", "fedgen")
OWN_NORMS = "fedbn(client_test_model='personal')"  # a row that the paper's Table 1 does not have
OF_FEDAF = ("fedaf(image_lr=0, steps=1)", "fedaf(init='real', image_lr=0, steps=1)")
CONTROLS = {*OF_FEDAF, *(row.replace("fedaf", "feddm") for row in OF_FEDAF)}


@pytest.mark.parametrize("number", TABLES)
def test_paper_preset_matches_reported_cells(number):
    experiment = TABLES[number]
    cells = list_cells(experiment)
    reported = load_reported_values("fedaf", f"table{number}")
    ours = [(cell.dataset, cell.model, cell.level, cell.method) for cell in cells]
    theirs = reported[["dataset", "model", "level", "method"]].itertuples(index=False, name=None)
    more = {OWN_NORMS, *CONTROLS, "fedaf(gamma=0.0)", "fedaf(gamma=0.0, lambda_loc=0)"}
    assert sorted(place for place in ours if place[3] not in more) == sorted(theirs)
    controls = {place[3] for place in ours if place[3] in CONTROLS}
    assert controls == (CONTROLS if number == 1 else set(OF_FEDAF))
    assert sum(place[3] == OWN_NORMS for place in ours) == (9 if number == 1 else 0)
    assert all(len(cell.runs) == 3 for cell in cells)
    assert list_protocol_deviations(experiment, cells) == []


@pytest.mark.parametrize("number", [1, 2, 6])
def test_rows_have_paper_order(number):
    reported = tuple(dict.fromkeys(load_reported_values("fedaf", f"table{number}")["method"]))
    assert reported == (*BASELINES, "feddm", "fedaf")
    for preset in TABLES[number].presets:
        cells = list_cells(TABLES[number], preset)
        rows = dict.fromkeys(cell.method for cell in cells)
        more = {OWN_NORMS, *CONTROLS}
        few = (number, preset) == (6, "quick")  # the others are made where they are asked for
        shown = ("fedavg", "fedaf") if few else reported
        assert tuple(row for row in rows if row not in more) == shown
        assert {*TABLES[number].list_rows(preset)} >= {*reported}
        assert all(cell.runs for cell in cells)
        assert (OWN_NORMS in rows) == (number == 1)


def test_paper_preset_settings():
    by_method = {}
    for cell in list_cells(TABLES[1], datasets=("cifar100",)):
        for run in cell.runs:
            by_method[cell.method] = run.resolved()
    for spec in by_method.values():
        assert (spec.num_clients, spec.participation, spec.rounds) == (10, 1.0, 20)
        assert (spec.partition, spec.model, spec.norm) == ("dirichlet_capped", "convnet", "batch")
        assert spec.alpha in (0.02, 0.05, 0.1)
    fedprox, fedaf = by_method["fedprox"], by_method["fedaf"]
    assert (fedprox.local_epochs, fedprox.batch_size, fedprox.hyperparameters["local_lr"]) == (
        10,
        64,
        0.01,
    )
    assert fedprox.hyperparameters["prox_mu"] == 0.001
    assert [fedaf.options[name] for name in ("ipc", "steps", "threshold")] == [50, 1000, 50]
    names = ("image_lr", "lambda_loc", "lambda_glob", "gamma")
    assert [fedaf.hyperparameters[name] for name in names] == [0.1, 1e-4, 0.01, 0.9]
    assert {spec.rounds for spec in list_specs(TABLES[5])} == {10}
    assert {spec.stem for spec in list_specs(TABLES[6])} == {"imagenet"}


def test_baseline_settings():
    for preset in ("paper", "cpu", "quick"):
        cells = list_cells(TABLES[1], preset)
        by_method = {cell.method: cell.runs[0].resolved() for cell in cells}
        for name in (*BASELINES, OWN_NORMS):
            spec = by_method[name]
            assert (spec.local_optimizer, spec.optimizer_state) == ("momentum", "reset")
            assert [spec.hyperparameters[name] for name in ("local_lr", "local_momentum")] == [
                0.01,
                0.9,
            ]
            assert spec.batch_size == 64
            assert (spec.norm, spec.averaging) == ("batch", "weighted")
        assert by_method["fedprox"].hyperparameters["prox_mu"] == 0.001
        moon, feddyn, fedgen = (by_method[name] for name in ("moon", "feddyn", "fedgen"))
        assert (moon.hyperparameters["moon_mu"], moon.hyperparameters["moon_tau"]) == (1.0, 0.5)
        assert moon.options["projection"] == 0
        assert feddyn.hyperparameters["feddyn_alpha"] == 0.01
        sizes = [fedgen.options[f"generator_{name}"] for name in ("hidden", "noise")]
        assert sizes == [512, 64]  # its authors' for CIFAR
        assert not by_method["fedbn"].has_client_tests
        own = by_method[OWN_NORMS]
        assert own.has_client_tests
        assert (own.evaluated_model, own.test_per_client) == ("personal", "all")
    for preset in ("paper", "quick"):
        for cell in list_cells(TABLES[2], preset):
            spec = cell.runs[0].resolved()
            assert spec.has_client_tests == (cell.method == "fedbn")
            assert not spec.has_client_tests or spec.evaluated_model == "personal"


@pytest.mark.parametrize(
    ("number", "row", "kind", "name", "value"),
    [
        (3, "fedaf(ipc=80)", "options", "ipc", 80),
        (3, "fedaf(ipc=80)", "options", "threshold", 80),
        (4, "fedaf(lambda_loc=0)", "hp", "lambda_loc", 0.0),
        (4, "fedaf(lambda_glob=0)", "hp", "lambda_glob", 0.0),
        (5, "fedaf(gamma=0.5)", "hp", "gamma", 0.5),
    ],
)
def test_variant_settings_reach_runs(number, row, kind, name, value):
    (cell, *_) = list_cells(TABLES[number], methods=(row,))
    assert cell.method == row
    assert getattr(cell.runs[0].resolved(), kind)[name] == value


def test_method_filter_selects_variants():
    def rows(number, *methods):
        cells = list_cells(TABLES[number], methods=methods, alphas=(0.1,))
        return [cell.method for cell in cells]

    ipcs = [f"fedaf(ipc={n})" for n in (10, 20, 50, 80, 100)]
    assert rows(3, "fedaf") == [*ipcs, *OF_FEDAF]
    assert rows(4, "fedaf") == ["fedaf"]
    assert {*rows(1, "fedbn(scored = 'personal')")} == {OWN_NORMS}  # a former name
    assert rows(4, "feddm", "fedaf(lambda_loc=0)") == ["fedaf(lambda_loc=0)", "feddm"]


@pytest.mark.slow
def test_tables_share_runs():
    table1 = list_digests(TABLES[1], datasets=("cifar10",), methods=("fedaf",))
    assert table1 == list_digests(TABLES[3], methods=("fedaf(ipc=50)",))
    assert table1 == list_digests(TABLES[4], methods=("fedaf",))
    assert list_digests(TABLES[4], methods=("feddm",)) <= list_digests(TABLES[1])
    assert list_digests(tables.FIG3) == list_digests(TABLES[1])
    assert list_digests(FIG5.FIG5) <= list_digests(TABLES[3]) | list_digests(TABLES[1])
    assert list_digests(FIG5.FIG5, "quick") <= list_digests(TABLES[3], "quick") | list_digests(
        TABLES[1], "quick"
    )
    shared = {TABLES[n].results_folder for n in (1, 3, 4, 5, 6)} | {
        tables.FIG3.results_folder,
        FIG5.FIG5.results_folder,
    }
    assert shared == {"fedaf"}


@pytest.mark.parametrize("number", TABLES)
def test_quick_preset_rows(number):
    rows = {cell.method.split("(")[0] for cell in list_cells(TABLES[number], "quick")}
    assert rows >= ({"fedaf"} if number in (3, 5, 6) else {"feddm", "fedaf"})
    assert number not in (1, 2) or rows == {*BASELINES, "feddm", "fedaf"}
    assert number != 6 or rows == {"fedavg", "fedaf"}


def test_domain_columns_share_runs():
    cells = list_cells(TABLES[2], "quick", methods=("fedaf",))
    assert [cell.domain for cell in cells] == [*DOMAINS.DOMAINS, AVERAGE]
    assert all(cell.runs == cells[0].runs for cell in cells)
    spec = cells[0].runs[0].resolved()
    assert (spec.partition, spec.num_clients, spec.alpha) == ("by_domain", 6, None)


def test_table_and_figure_share_runs(tmp_path, capsys, request):
    command = ["--methods", "fedavg", "--alphas", "0.1", "--seeds", "0", "--rounds", "2"]
    command += ["--models", "mlp", "--output-dir", str(tmp_path)]
    assert PROGRAMS[1](command) == 0
    text = capsys.readouterr().out
    assert "Last five" in text and "of the round where it is highest" in text
    assert "num_clients 5 instead of 10" in text
    assert "best value" not in text
    names = {"table1.md", "table1.tex", "table1.csv", "table1_curves.png"}
    assert names <= {path.name for path in tmp_path.iterdir()}
    request.getfixturevalue("forbid_runs")
    assert load_program("fedaf.fig3")(command) == 0
    assert (tmp_path / "fig3.png").read_bytes().startswith(b"\x89PNG")


def filled(number, folder, *command):
    """The table's rows and their runs, of one seed and three rounds of a small network."""
    command = [*command, "--seeds", "0", "--rounds", "3", "--width", "4"]
    assert PROGRAMS[number]([*command, "--output-dir", str(folder)]) == 0
    stem = f"table{number}" if TABLES[number].results_folder else "table"
    table = pd.read_csv(folder / f"{stem}.csv")
    results = {run.spec.client_test_model: run for run in map(Result.load, folder.glob("*.json"))}
    return table, results


@pytest.mark.slow
def test_fedbn_domain_cell_is_client_accuracy(tmp_path):
    table, results = filled(2, tmp_path, "--methods", "fedbn")
    (run,) = results.values()
    accuracy = 100 * run.metrics["client_accuracy"]
    best = accuracy.mean(1).argmax()
    cells = dict(zip(table["domain"], table["mean"], strict=True))
    assert list(cells) == [*DOMAINS.DOMAINS, AVERAGE]
    expected = [*accuracy[best], accuracy[best].mean()]
    np.testing.assert_allclose(list(cells.values()), expected, atol=1e-3)
    shared = [100 * run.metrics[f"test_accuracy_{name}"][best] for name in DOMAINS.DOMAINS]
    assert np.abs(accuracy[best] - shared).max() > 1  # not those of the global model
    figure = plot_table_curves(
        list_cells(tables.FIG4, "quick", methods=("fedbn",), seeds=(0,), rounds=3, width=4),
        load_results(tmp_path),
        load_curves(tmp_path),
        load_reported_values("fedaf", "table2"),
    )
    drawn = [panel.lines[0].get_ydata() for panel in figure.axes]
    np.testing.assert_allclose(np.stack(drawn[:-1], 1), accuracy, atol=1e-3)
    np.testing.assert_allclose(drawn[-1], accuracy.mean(1), atol=1e-3)


@pytest.mark.slow
def test_fedbn_rows_under_label_skew(tmp_path):
    table, results = filled(1, tmp_path, "--methods", "fedbn", OWN_NORMS, "--alphas", "0.1")
    shared, own = results[None], results["personal"]
    for name in ("train_loss", "test_accuracy"):
        np.testing.assert_allclose(shared.metrics[name], own.metrics[name], atol=1e-6)
    of_clients = own.metrics["client_accuracy"].mean(1)
    cells = dict(zip(table["method"], table["mean"], strict=True))
    assert cells["fedbn"] == pytest.approx(100 * shared.metrics["test_accuracy"].max(), abs=1e-3)
    assert cells[OWN_NORMS] == pytest.approx(100 * of_clients.max(), abs=1e-3)
    (last,) = table["final_mean"][table["method"] == OWN_NORMS]
    assert last == pytest.approx(100 * of_clients.mean(), abs=1e-3)
    assert abs(cells["fedbn"] - cells[OWN_NORMS]) > 1


# Table 7


def test_upload_bytes_by_hand():
    counts = np.array([[60, 50, 49], [0, 200, 0]])  # 2 and 1 classes of at least 50
    image, tables = 2 * 3 * 1, 2 * 3 * 3 * 4
    for ipc, size, values in ((50, 1, 1.5 * 50), (50, 4, 1.5 * 200), (49, 1, 2 * 49)):
        upload = TABLE7.mean_upload_bytes(counts, (2, 3, 1), ipc, bytes_per_value=size)
        assert upload == values * image + tables


@pytest.mark.parametrize("bits", [8, 32])
def test_upload_bytes_match_run(bits):
    spec = RunSpec(
        "fedaf",
        "digits",
        model="mlp",
        alpha=0.1,
        num_clients=4,
        rounds=1,
        batch_size=8,
        options={"ipc": 20, "steps": 1, "server_epochs": 0, "upload_bits": bits},
    )
    group = prepare_group([spec])
    algorithm, (federation,) = group.program.algorithm, group.prepared_runs
    key, hp = jax.random.key(0), federation.spec.hyperparameters
    model = group.program.signature.training.task.model
    state = jax.eval_shape(lambda: algorithm.init(hp, key, model.init(key), 4))
    traffic, work = algorithm.traffic(hp, state), federation.scheduler.work_counts
    sent = work.participants[0] * traffic.up + work.pairs[0] * traffic.up_per_class

    labels = group.prepared_runs[0].dataset.train_labels
    counts = federation.partition.label_counts(labels, 10)
    upload = TABLE7.mean_upload_bytes(counts, (8, 8, 1), 20, bytes_per_value=bits // 8)
    assert sent == pytest.approx(4 * upload)


@pytest.mark.slow
def test_table7_matches_reported_cells(tmp_path, capsys):
    rows = TABLE7.make_rows(TABLE7.Arguments(partitions=12))
    reported = load_reported_values("fedaf", "table7")
    keys = ["dataset", "alpha", "method", "model", "reported"]
    theirs = reported[["dataset", "level", "method", "model", "mean"]]
    assert [tuple(row[key] for key in keys) for row in rows] == [
        *theirs.itertuples(index=False, name=None)
    ]
    fedaf = [row for row in rows if row["method"] == "fedaf"]
    assert len(fedaf) == 9
    for row in fedaf:
        assert abs(row["difference_percent"]) < 15
        assert abs(row["deviations"]) < 3
    assert sum(abs(row["difference_percent"]) < 10 for row in fedaf) >= 8
    for row in rows:
        if row["method"] == "fedavg":
            assert row["counted"] == pytest.approx(row["reported"], abs=0.0051)
    resnet = 4 * (11_181_642 + 2 * 4_800) / 2**20  # and running means and variances
    true = {(row["model"], row["dataset"]): row["true"] for row in rows}
    assert true["resnet18", "cifar10"] == pytest.approx(resnet)
    assert true["convnet", "cifar10"] == pytest.approx(4 * (320_010 + 2 * 3 * 128) / 2**20)

    command = ["--partitions", "2", "--seeds", "0", "--output-dir", str(tmp_path)]
    assert TABLE7.main(command) == 0
    assert "fashion_mnist" in capsys.readouterr().out
    assert (tmp_path / "table.csv").read_text().count("\n") == 28
    assert TABLE7.main(["--ipc", "0"]) == 2
    assert "ipc = 0" in capsys.readouterr().err


@pytest.mark.slow
def test_balanced_labels_match_datasets(prepared_data):
    for name in ("fashion_mnist", "cifar10"):
        source, dataset = (
            TABLE7.DATASET_SHAPES[name],
            load_dataset(name, data_dir=prepared_data),
        )
        assert dataset.input_shape == source.image_shape
        np.testing.assert_array_equal(
            np.bincount(dataset.train_labels), [source.images_per_class] * source.num_classes
        )


# The made-up domains, and the figures


def test_digit_domains_are_balanced():
    dataset, again = DOMAINS.make_digit_domains(), DOMAINS.make_digit_domains()
    assert dataset.digest() == again.digest()
    digits = load_dataset("digits")
    np.testing.assert_array_equal(dataset.train_labels, digits.train_labels)
    for domains, labels in (
        (dataset.train_domains, dataset.train_labels),
        (dataset.test_domains, dataset.test_labels),
    ):
        counts = np.zeros((6, 10), int)
        np.add.at(counts, (domains, labels), 1)
        assert counts.max(0).max() - counts.min(0).min() <= 4
        assert (counts.max(0) - counts.min(0) <= 1).all()
    plain = dataset.train_domains == 0
    np.testing.assert_array_equal(dataset.train_inputs[plain], digits.train_inputs[plain])
    inverted = dataset.train_domains == 1
    np.testing.assert_array_equal(
        dataset.train_inputs[inverted], 255 - digits.train_inputs[inverted]
    )


def test_domains_have_their_skews():
    dataset, digits = DOMAINS.make_digit_domains(), load_dataset("digits")
    own, plain = (
        {
            name: images[dataset.train_domains == i].astype(float)
            for i, name in enumerate(dataset.domain_names)
        }
        for images in (dataset.train_inputs, digits.train_inputs)
    )
    np.testing.assert_array_equal(own["inverted"], 255 - plain["inverted"])
    np.testing.assert_array_equal(own["rotated"], np.rot90(plain["rotated"], axes=(1, 2)))
    assert (own["coarse"][:, ::2, ::2] == own["coarse"][:, 1::2, 1::2]).all()
    noise = (own["noisy"] - plain["noisy"])[(plain["noisy"] > 100) & (plain["noisy"] < 150)]
    assert noise.std() == pytest.approx(62, abs=4)  # 64, of which clipping takes some
    variation = {k: np.abs(np.diff(v["blurred"], axis=1)).mean() for k, v in
                 {"own": own, "plain": plain}.items()}  # fmt: skip
    assert variation["own"] < 0.7 * variation["plain"]


@pytest.mark.parametrize("name", ["fig6", "fig8"])
def test_partition_figures(name, tmp_path, capsys):
    draw = load_program(f"fedaf.{name}")
    assert draw(["--list", "--output-dir", str(tmp_path / "x")]) == 0
    assert not (tmp_path / "x").exists()
    assert draw(["--output-dir", str(tmp_path / "x")]) == 0
    names = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert names == [f"{name}_alpha{alpha}.png" for alpha in ("0.02", "0.05", "0.1")]


@pytest.mark.slow
def test_feature_figure_states_network(tmp_path, monkeypatch, capsys):
    titles = []
    monkeypatch.setattr(
        fig9,
        "plot_embedding",
        lambda *args, draw=fig9.plot_embedding: titles.append(args[-1]) or draw(*args),
    )
    command = ["--epochs", "1", "--images", "120", "--output-dir", str(tmp_path)]
    assert fig9.main(command) == 0
    assert "not of the paper's ResNet50" in titles[0]
    assert re.search(r"accuracy \d+\.\d %", titles[0])
    assert (tmp_path / "fig9.png").read_bytes().startswith(b"\x89PNG")
    assert fig9.main(["--preset", "papr"]) == 2
    assert "did you mean 'paper'" in capsys.readouterr().err


def test_accuracy_gains():
    from fedjax_het.papers.fedaf.fig5 import plot_accuracy_gain

    rows = [
        ("fedaf(ipc=2)", 0.1, 60.0, 50.0),
        ("fedaf(ipc=9)", 0.1, 66.0, math.nan),
        ("fedaf(image_lr=0, steps=1)", 0.1, 1.0, math.nan),  # a control, no point of the line
        ("fedavg", 0.1, 40.0, 45.0),
        ("fedaf(ipc=2)", 0.5, math.nan, math.nan),
        ("fedaf(ipc=9)", 0.5, 70.0, math.nan),
        ("fedavg", 0.5, 71.0, math.nan),
    ]
    table = pd.DataFrame(rows, columns=["method", "alpha", "mean", "reported_mean"])
    figure = plot_accuracy_gain(table.assign(dataset="digits", model="mlp"), baseline="fedavg")
    (panel,) = figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]
    assert lines[0] == ([2, 9], [20.0, 26.0])
    assert lines[1][1][0] == 5.0  # reported
    assert lines[2][1][1] == -1.0


def test_table_without_reported_values_is_written(tmp_path, capsys):
    """Its metric is that of the paper's tables: the best round."""
    cells = make_cells(ABLATIONS, TableArguments("quick"))
    table_run = TableRun.from_directory(ABLATIONS, "quick", cells, tmp_path)
    assert "ablations.md" in write_comparison_table(table_run)
    assert "of the round where it is highest" in capsys.readouterr().out.replace("\n", " ")
