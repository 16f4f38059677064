"""Any folder of results: what varies is found, means are over seeds, nothing is out of sight."""

import io
import math
import warnings

import numpy as np
import pandas as pd
import pytest

from fedjax_het import MetricInfo, analysis, register_metric
from fedjax_het.analysis.overview import choose_default_metric, find_derived_settings
from fedjax_het.analysis.report import write_report
from fedjax_het.cli import main
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.metrics.registry import METRICS, get_metric_info
from fedjax_het.runtime.result_builder import summarize_metrics
from fedjax_het.runtime.result_store import load_results
from fedjax_het.runtime.results import Result
from fedjax_het.utils.errors import ConfigError

ACCURACY = {  # by method, prox_mu and alpha: of each seed; None diverged
    ("fedavg", None, 0.1): [0.50, 0.56, 0.53],
    ("fedavg", None, 1.0): [0.80, 0.82, 0.90],
    ("fedprox", 0.01, 0.1): [0.60, None, 0.64],
    ("fedprox", 0.01, 1.0): [None, None, None],
    ("fedprox", 0.5, 0.1): [0.61],
}


def row(number, method, mu, alpha, seed, accuracy, **settings):
    return {
        "digest": f"file-{number}",
        "settings": f"settings-{number}",
        "finished": f"2026-01-01T00:00:{number % 60:02}+00:00",
        "fedjax_het": "0.1.0",
        "jax": "0.10.2",
        "device": "cpu",
        "final_accuracy": accuracy,
        "best_accuracy": 0.99 if accuracy is None else accuracy + 0.05,  # before it diverged
        "diverged": accuracy is None,
        "wall_seconds": 10.0 + seed,
        "client_samples_per_second": 1000.0 * (1 + seed),
        "bytes_up": 20_000 * (1 + seed),
        "lanes": "one",
        "algorithm": method,
        "dataset": "digits",
        "model": "mlp",
        "width": None,
        "alpha": alpha,
        "rounds": 20,
        "seed": seed,
        "partition_seed": seed,
        "options.option": "II" if method == "scaffold" else None,
        "hp.local_lr": 0.001,
        "hp.prox_mu": mu,
        **settings,
    }


@pytest.fixture
def results():
    """As `load_results` gives it: a column is there for all runs if one of them has it."""
    rows = []
    for (method, mu, alpha), values in reversed(ACCURACY.items()):
        for seed, accuracy in enumerate(values):
            rows.append(row(len(rows), method, mu, alpha, seed, accuracy))
    return pd.DataFrame(rows)


def test_find_varying_settings(results):
    assert analysis.find_varying_settings(results) == ["alpha", "algorithm", "hp.prox_mu"]
    one_mu = results[results["hp.prox_mu"] != 0.5]  # which one method has
    assert analysis.find_varying_settings(one_mu) == ["alpha", "algorithm"]
    assert analysis.find_varying_settings(one_mu[one_mu["alpha"] == 1.0]) == ["algorithm"]
    results.loc[results["algorithm"] == "fedavg", "rounds"] = 40
    results.loc[results["seed"] == 1, "width"] = 32
    varying = analysis.find_varying_settings(results)
    assert varying == ["alpha", "width", "rounds", "algorithm", "hp.prox_mu"]


def test_network_and_optimizer_options_vary(results):
    first = results["seed"] == 0
    for name in ("network_options.hidden", "optimizer_options.nesterov"):
        results[name] = np.where(first, 1.0, np.nan)
    varying = analysis.find_varying_settings(results)
    assert varying[1:3] == ["network_options.hidden", "optimizer_options.nesterov"]
    results["lr_schedule"] = np.where(first, "step", "cosine")
    results["hp.lr_every"] = np.where(first, 5.0, np.nan)
    varying = analysis.find_varying_settings(results)
    assert "lr_schedule" in varying and "hp.lr_every" not in varying


def test_derived_setting_is_noted(results):
    results.loc[results["algorithm"] == "fedavg", "hp.local_lr"] = 0.1
    assert "hp.local_lr" not in analysis.find_varying_settings(results)
    assert find_derived_settings(results) == {"hp.local_lr": [("FedAvg", 0.1), ("FedProx", 0.001)]}
    notes = " ".join(analysis.make_overview_table(results).notes)
    assert "learning_rate follows from the method: 0.1 (FedAvg), 0.001 (FedProx)." in notes
    results.loc[results["alpha"] == 1.0, "hp.local_lr"] = 0.2  # tuned per alpha: it varies
    assert "hp.local_lr" in analysis.find_varying_settings(results)
    assert find_derived_settings(results) == {}


def test_preset_determines_options():
    names = ("options.preset", "options.augment", "options.target_counts", "hp.image_lr")
    presets = [("paper", "none", [1], 1.0), ("code", "crop", [2, 3], 0.05)]
    rows = [
        row(number, "dynafed", None, 0.1, 0, 0.5, **dict(zip(names, values, strict=True)))
        for number, values in enumerate(presets)
    ]
    expected = ["algorithm", "options.preset"]
    assert analysis.find_varying_settings(pd.DataFrame(rows)) == expected
    rows.append(dict(rows[-1], settings="other", **{"options.target_counts": [4]}))
    expected.append("options.target_counts")
    assert analysis.find_varying_settings(pd.DataFrame(rows)) == expected


def keyed(summary):
    return {
        (r["algorithm"], None if math.isnan(r["hp.prox_mu"]) else r["hp.prox_mu"], r["alpha"]): r
        for r in summary.to_dict("records")
    }


def test_summary_of_converged_seeds(results):
    rows = keyed(analysis.summarize_runs(results))
    assert set(rows) == set(ACCURACY)
    for key, accuracies in ACCURACY.items():
        good = 100 * np.array([value for value in accuracies if value is not None])
        mean = good.mean() if len(good) else math.nan
        std = np.std(good, ddof=1) if len(good) > 1 else math.nan
        actual = [rows[key][name] for name in ("mean", "best_accuracy", "std")]
        np.testing.assert_allclose(actual, [mean, mean + 5, std])
        assert rows[key]["seeds"] == len(good)
        assert rows[key]["diverged"] == len(accuracies) - len(good)
        seeds = np.arange(len(accuracies))
        assert rows[key]["wall_seconds"] == pytest.approx(10 + seeds.mean())
        assert rows[key]["client_samples_per_second"] == pytest.approx(1000 * (1 + seeds.mean()))


def test_summary_is_sorted_and_newest_run_counts(results):
    summary = analysis.summarize_runs(results)
    assert list(summary["alpha"]) == [0.1, 0.1, 0.1, 1.0, 1.0]
    assert list(summary["algorithm"]) == ["fedavg", "fedprox", "fedprox", "fedavg", "fedprox"]
    assert list(summary["hp.prox_mu"][1:3]) == [0.01, 0.5]
    again = results.iloc[[0]].assign(digest="other", finished="2027", final_accuracy=0.99)
    summary = analysis.summarize_runs(pd.concat([again, results]))
    assert summary["seeds"].sum() == analysis.summarize_runs(results)["seeds"].sum()
    assert keyed(summary)["fedprox", 0.5, 0.1]["mean"] == pytest.approx(99)


def test_overview_of_bytes(results):
    rows = keyed(analysis.summarize_runs(results, metric="bytes_up"))
    assert rows["fedavg", None, 0.1]["mean"] == pytest.approx(40_000)
    assert rows["fedprox", 0.01, 0.1]["mean"] == pytest.approx(40_000)  # seeds 0 and 2
    table = analysis.make_overview_table(results, metric="bytes_up")
    first = table.sections[0].rows[0]
    assert first["Bytes sent by clients"] == "40,000 ± 20,000"
    assert table.sections[0].best_cells == {(2, "Bytes sent by clients")}  # lower is better


def test_overview_with_missing_metric(results):
    results["matching_loss"] = np.where(results["algorithm"] == "fedprox", 0.25, np.nan)
    rows = analysis.make_overview_table(results, metric="matching_loss").sections[0].rows
    assert [row["Matching loss"] for row in rows] == ["—", "0.25 ± 0 †", "0.25"]
    assert [row["Seeds"] for row in rows] == ["0", "2", "1"]


def test_overview_by_chosen_settings(results):
    summary = analysis.summarize_runs(results, by=["algorithm"])
    good = [v for (m, *_), values in ACCURACY.items() if m == "fedprox" for v in values if v]
    mean = summary.set_index("algorithm").loc["fedprox", "mean"]
    assert mean == pytest.approx(100 * np.mean(good))
    (section,) = analysis.make_overview_table(results, by=["algorithm"]).sections
    assert [row["Method"] for row in section.rows] == ["FedAvg", "FedProx"]
    notes = analysis.make_overview_table(results, by=["algorithm"]).notes
    assert "over runs that differ in alpha (0.1, 1), prox_mu (0.01, 0.5, —), and seeds" in notes[0]
    assert "differ" not in analysis.make_overview_table(results).notes[0]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"metric": "final_acuracy"}, "'final_acuracy' .* did you mean 'final_accuracy'"),
        ({"metric": "lanes"}, "metric = 'lanes' is unknown"),
        ({"metric": "diverged"}, "metric = 'diverged' is unknown"),
        ({"metric": "rounds"}, "metric = 'rounds' is unknown"),
        ({"by": ["alpa"]}, "by = 'alpa' is unknown: did you mean 'alpha'"),
        ({"by": ["prox_mu"]}, "by = 'prox_mu' is unknown: did you mean 'hp.prox_mu'"),
    ],
)
def test_overview_rejects_unknown_names(results, choice, message):
    for name in ("summarize_runs", "make_overview_table", "make_pivot_table"):
        with pytest.raises(ConfigError, match=message):
            getattr(analysis, name)(results, **choice)
    with pytest.raises(ConfigError, match="results"):
        analysis.summarize_runs(pd.DataFrame())


def test_runs_without_a_value_are_not_best(results):
    runs = results[results["diverged"] == 0].assign(rounds_to_half=10.0)
    first, *others = runs.index[runs["algorithm"] == "fedavg"]
    runs.loc[first, "rounds_to_half"] = 1.0
    runs.loc[others, "rounds_to_half"] = math.nan  # these runs did not reach 50 %
    table = analysis.make_overview_table(runs, by=["algorithm"], metric="rounds_to_half")
    (section,) = table.sections
    texts = [(row["Method"], row["Rounds to 50 %"]) for row in section.rows]
    assert texts[0] == ("FedAvg", "1 †") and texts[1][1].startswith("10")
    assert section.best_cells == frozenset()
    (note,) = (note for note in table.notes if "Without a value" in note)
    assert note.startswith("† Without a value, and left out of the mean: FedAvg (seed ")


def test_overview_sections(results):
    table = analysis.make_overview_table(results, title="T")
    assert table.label_columns == ("Method", "prox_mu")
    assert [section.title for section in table.sections] == ["alpha 0.1", "alpha 1"]
    assert [section.labels for section in table.sections] == [{"alpha": "0.1"}, {"alpha": "1"}]
    low, high = (
        [(row["Method"], row["prox_mu"], row["Test accuracy (%)"]) for row in section.rows]
        for section in table.sections
    )
    assert low == [
        ("FedAvg", "—", "53.00 ± 3.00"),
        ("FedProx", "0.01", "62.00 ± 2.83 †"),
        ("FedProx", "0.5", "61.00"),
    ]
    assert high == [("FedAvg", "—", "84.00 ± 5.29"), ("FedProx", "0.01", "diverged †")]
    # The highest of those without a lost run; alone, nothing is the best.
    assert table.sections[0].best_cells == {(2, "Test accuracy (%)")}
    assert table.sections[1].best_cells == frozenset()
    notes = " ".join(table.notes)
    assert "left out of the mean: alpha 0.1, FedProx, prox_mu 0.01 (seed 1); " in notes
    assert "All runs: digits, mlp, rounds 20, learning_rate 0.001." in notes
    assert "Made with fedjax_het 0.1.0; jax 0.10.2; device cpu." in notes

    row = table.sections[0].rows[1]  # seeds 0 and 2, seed 1 diverged
    others = ["Best (%)", "Seeds", "Diverged", "Time (s)", "Samples/s"]
    assert [row[name] for name in others] == ["67.00", "2", "1", "11", "2,000"]


def test_time_excludes_compilation(results):
    """The first runs of a group carry the compilation of all of them."""
    compile_seconds = 100.0 * (results["algorithm"] == "fedavg")
    wall_seconds = results["wall_seconds"] + compile_seconds
    slow = results.assign(wall_seconds=wall_seconds, compile_seconds=compile_seconds)
    tables = [analysis.make_overview_table(runs) for runs in (results, slow)]
    first, second = ([row["Time (s)"] for row in t.sections[0].rows] for t in tables)
    assert first == second
    # Version 0.6 gave each of two runs in lockstep the compilation of both.
    both = {"compile_seconds": 20.0, "made_together": 2, "fedjax_het": "0.6.0"}
    old = analysis.make_overview_table(
        results.assign(wall_seconds=results["wall_seconds"] + 10.0, **both)
    )
    assert [row["Time (s)"] for row in old.sections[0].rows] == first
    assert "Time: wall-clock per run, without compilation" in " ".join(tables[0].notes)


def test_tables_of_one_seed_mention_no_deviation(results):
    runs = results[results["seed"] == 0]
    for make_table in (analysis.make_overview_table, analysis.make_pivot_table):
        assert "deviation over" in make_table(results).notes[0]
        assert make_table(runs).notes[0].endswith(": one run, hence no deviation.")


def test_notes_name_hyperparameters_that_all_runs_of_a_method_share(results):
    runs = results[results["hp.prox_mu"] != 0.5].assign(**{"hp.local_momentum": 0.9})
    runs.loc[runs["alpha"] == 1.0, "hp.local_lr"] = 0.1
    table = analysis.make_overview_table(runs)
    assert "All runs: digits, mlp, rounds 20, momentum 0.9." in table.notes
    assert "FedProx: prox_mu 0.01." in table.notes
    assert "learning_rate" in [*table.label_columns, *(table.sections[0].labels or ())]


def test_methods_equal_to_fedavg_are_marked(results):
    results.loc[results["hp.prox_mu"] == 0.5, "final_accuracy"] = 0.53005
    for table in (analysis.make_overview_table(results), analysis.make_pivot_table(results)):
        texts = [text for row in table.sections[0].rows for text in row.values() if "≈" in text]
        assert [text.split()[0] for text in texts] in (["53.01"], ["53.00"])
        assert table.notes[-1].startswith("≈ The mean is FedAvg's within 0.01 points")


def test_methods_are_compared_with_fedavg_of_equal_settings():
    accuracies = {"fedavg": (0.5, 0.3), "fedprox": (0.5, 0.4)}
    runs = [
        {"algorithm": name, "hp.local_lr": lr, "final_accuracy": accuracy}
        for name, values in accuracies.items()
        for lr, accuracy in zip((0.1, 0.01), values, strict=True)
    ]
    shared = {"dataset": "digits", "seed": 0, "finished": "2026", "diverged": False}
    results = pd.DataFrame([run | shared | {"settings": str(run)} for run in runs])
    (section,) = analysis.make_overview_table(results).sections
    texts = [row["Test accuracy (%)"] for row in section.rows]
    assert texts == ["30.00", "50.00", "40.00", "50.00 ≈"]


def test_overview_of_one_method_or_alpha(results):
    table = analysis.make_overview_table(results[results["algorithm"] == "fedavg"])
    (section,) = table.sections
    assert section.title == "" and table.label_columns == ("alpha", "Method")
    assert [row["alpha"] for row in section.rows] == ["0.1", "1"]
    assert not section.best_cells  # accuracies at different alphas do not compete
    (section,) = analysis.make_overview_table(results[results["alpha"] == 0.1]).sections
    assert section.title == "" and section.best_cells == {(2, "Test accuracy (%)")}


def test_notes_on_machines_and_datasets(results):
    results.loc[3, "device"], results.loc[4, "fedjax_het"] = "TPU v4", "0.2.0"
    results["dataset_note"] = np.where(results["seed"] == 0, "", "made from JPEG")
    notes = analysis.make_overview_table(results).notes
    assert "digits: made from JPEG" in notes and "device cpu, TPU v4" in " ".join(notes)
    assert "fedjax_het 0.1.0, 0.2.0" in " ".join(notes)
    results["dataset_note"] = ""
    assert "digits:" not in " ".join(analysis.make_overview_table(results).notes)
    is_first = results["seed"] == 0
    results["dataset_digest"] = np.where(is_first, "0a", "1b")
    results["dataset_source"] = np.where(is_first, "idx files in raw", "tensorflow-datasets")
    note = "digits: the runs have different data under this name"
    assert f"{note}." in analysis.make_overview_table(results).notes
    results["dataset_order"] = np.where(is_first, "files", "tensorflow-datasets")
    (text,) = [n for n in analysis.make_overview_table(results).notes if n.startswith(note)]
    assert "idx files in raw in the order 'files'" in text


def test_note_on_stops_by_test_accuracy(results):
    results["stopped_early.why"] = None
    assert "test split" not in " ".join(analysis.make_overview_table(results).notes)
    results.loc[[0, 1, 2], "stopped_early.why"] = ["target", "plateau", "callback"]
    note = f"of {len(results)} runs stopped on the test split, pass validation=0.1."
    assert f"2 {note}" in analysis.make_overview_table(results).notes
    results["validation"] = np.where(results.index == 0, 0.1, np.nan)
    assert f"1 {note}" in analysis.make_overview_table(results).notes


def test_pivot_table(results):
    table = analysis.make_pivot_table(results)
    assert table.label_columns == ("Method", "prox_mu")
    assert table.value_columns == ("alpha 0.1", "alpha 1")
    (section,) = table.sections
    assert [tuple(row.values()) for row in section.rows] == [
        ("FedAvg", "—", "53.00 ± 3.00", "84.00 ± 5.29"),
        ("FedProx", "0.01", "62.00 ± 2.83 †", "diverged †"),
        ("FedProx", "0.5", "61.00", "—"),  # not run
    ]
    assert section.best_cells == {(2, "alpha 0.1")}


def test_pivot_table_of_other_setting(results):
    other = results.assign(dataset="mnist", settings=lambda r: r["settings"] + "m")
    table = analysis.make_pivot_table(pd.concat([results, other]), columns="hp.prox_mu")
    assert table.value_columns == ("prox_mu 0.01", "prox_mu 0.5", "—")
    titles = ["digits, alpha 0.1", "digits, alpha 1", "mnist, alpha 0.1", "mnist, alpha 1"]
    assert [section.title for section in table.sections] == titles
    for name in ("model", "learning_rate"):  # which do not vary
        with pytest.raises(ConfigError, match=f"columns = '{name}'"):
            analysis.make_pivot_table(results, columns=name)
    rates = results.assign(**{"hp.local_lr": np.where(results["alpha"] == 1.0, 0.1, 0.01)})
    table = analysis.make_pivot_table(rates, columns="learning_rate")
    assert table.value_columns == ("learning_rate 0.01", "learning_rate 0.1")


def test_summary_csv_round_trip(results):
    results["alpha"] = results["alpha"].replace(1.0, 1.25e-5)
    summary = analysis.summarize_runs(results)
    again = pd.read_csv(io.StringIO(analysis.to_csv(summary)))
    assert list(again.columns) == list(summary.columns)
    assert list(again["algorithm"]) == list(summary["algorithm"])
    for name in summary.columns.drop("algorithm"):
        np.testing.assert_allclose(again[name], summary[name].astype(float), rtol=1e-11)


# A folder of results, as `Result.save` leaves it.


def save_run(directory, method, alpha, seed, accuracy, *, device="cpu", **settings):
    spec = RunSpec(method, "digits", model="mlp", alpha=alpha, rounds=6, seed=seed, **settings)
    curve = np.linspace(accuracy / 2, accuracy, 6)
    loss = np.full(6, math.nan if accuracy > 1 else 0.5)
    return save_result(directory, spec, {"test_accuracy": curve, "train_loss": loss}, device)


def save_result(directory, spec, metrics, device="cpu"):
    summary = {
        **summarize_metrics(metrics, has_diverged=np.isnan(metrics["train_loss"]).any()),
        **{"wall_seconds": 2.0, "client_samples_per_second": 1e4, "bytes_up": 1e6},
        **{"finished": f"2026-01-01T00:00:{spec.seed:02}+00:00", "fedjax_het": "0.1.0"},
        **{"device": device, "dataset_note": ""},
    }
    return Result(spec.resolved(), metrics, summary).save(directory)


@pytest.fixture
def folder(tmp_path):
    for alpha in (0.1, 0.5):
        for seed in (0, 1):
            save_run(tmp_path, "fedavg", alpha, seed, 0.5 + alpha / 10 + seed / 100)
            for mu in (0.01, 0.1):
                accuracy = 0.6 + alpha / 10 - mu + seed / 100
                save_run(tmp_path, "fedprox", alpha, seed, accuracy, hp={"prox_mu": mu})
    return tmp_path


def test_write_report(folder, capsys):
    written = write_report(folder)
    assert capsys.readouterr().out == ""
    figures = ["learning_curves.png", "accuracy_against_alpha.png", "heat_map.png"]
    names = [path.name for path in written.paths]
    assert names == ["overview.md", "overview.tex", "overview.csv", *figures]
    assert all(path.parent == folder for path in written.paths)
    for path in written.paths[3:]:
        assert path.read_bytes().startswith(b"\x89PNG")
    accuracy = 100 * np.mean(compute_last_means([0.55, 0.56]))
    text = (folder / "overview.md").read_text()
    assert f"| FedAvg | — | {100 * np.mean(compute_last_means([0.51, 0.52])):.2f} ± " in text
    rows = pd.read_csv(folder / "overview.csv").to_dict("records")
    (mean,) = [r["mean"] for r in rows if (r["algorithm"], r["alpha"]) == ("fedavg", 0.5)]
    assert mean == pytest.approx(accuracy)
    text = (folder / "overview.tex").read_text()
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 2
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*"))
    assert len(list(folder.glob("*.json"))) == 12


def compute_last_means(ends):
    """The final accuracy of `save_run`'s curves: the mean of the last five of six rounds."""
    return [np.linspace(end / 2, end, 6)[1:].mean() for end in ends]


@pytest.mark.parametrize(
    ("metric", "values", "best", "texts"),
    [
        ("final_accuracy_variance", (0.01, 0.02), "FedAvg", ["0.01", "0.02"]),
        ("final_accuracy_gini", (0.3, 0.2), "FedProx", ["0.3", "0.2"]),
        ("final_worst_decile", (0.3, 0.2), "FedAvg", ["30.00", "20.00"]),
        ("final_calibration_error", (0.05, 0.04), "FedProx", ["0.05", "0.04"]),
        ("final_macro_f1", (0.5, 0.6), "FedProx", ["0.5", "0.6"]),
        ("bytes_up", (1e6, 2e6), "FedAvg", ["1,000,000", "2,000,000"]),
        ("client_samples_per_second", (10.0, 20.0), "FedProx", ["10", "20"]),
        ("final_drift_cosine", (0.5, 0.6), None, ["0.5", "0.6"]),
        ("gain_of_user", (0.5, 0.6), None, ["0.5", "0.6"]),
        ("gain", (0.5, 0.4), "FedProx", ["50.00", "40.00"]),
    ],
)
def test_best_values_follow_declaration(metric, values, best, texts, results):
    info = MetricInfo("Gain", "", higher_is_better=False, is_fraction=True)
    register_metric("gain", len, len, infos={"gain": info})
    results = (
        results[results["seed"] == 0]
        .iloc[:2]
        .assign(algorithm=["fedavg", "fedprox"], alpha=0.1, diverged=False, final_accuracy=0.5)
    )
    results["hp.prox_mu"] = None
    results[metric] = values
    table = analysis.make_overview_table(results, metric=metric)
    (section,) = table.sections
    heading = table.columns[1]
    assert [row[heading] for row in section.rows] == texts
    bold = [section.rows[index]["Method"] for index, column in section.best_cells]
    assert bold == ([] if best is None else [best])
    latex = analysis.to_latex(table)
    assert latex.count("textbf") == len(bold)
    lower = get_metric_info(metric).higher_is_better is False
    assert ("; lower is better." in table.notes[0]) == lower
    summary = analysis.summarize_runs(results, metric=metric)
    scale = 100 if "." in texts[0] and texts[0].endswith("0.00") else 1
    np.testing.assert_allclose(summary["mean"], scale * np.array(values))
    METRICS.reset()


def test_report_omits_empty_figures(tmp_path):
    def figures(**options):
        return [path.name for path in write_report(tmp_path, **options).paths[3:]]

    save_run(tmp_path, "fedavg", 0.1, 0, 0.5)
    assert figures() == figures(by=["algorithm", "alpha"]) == ["learning_curves.png"]
    save_run(tmp_path, "fedavg", 0.2, 0, 0.5)
    expected = ["learning_curves.png", "bytes_up_against_alpha.png"]
    assert figures(metric="bytes_up") == expected
    assert figures(by=["algorithm"]) == ["learning_curves.png"]


def test_report_of_diverged_runs(tmp_path):
    for alpha in (0.1, 0.2):
        save_run(tmp_path, "fedavg", alpha, 0, 2.0)
    write_report(tmp_path)
    assert "diverged †" in (tmp_path / "overview.md").read_text()


def test_report_of_merged_folder_with_damaged_file(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save_run(elsewhere, "fedavg", 0.1, 0, 0.9, device="TPU v4")
    save_run(elsewhere, "scaffold", 0.1, 0, 0.8, device="TPU v4")
    for path in elsewhere.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    broken = save_run(folder, "fedprox", 0.5, 1, 0.5, hp={"prox_mu": 0.1})
    broken.with_suffix(".npz").write_bytes(b"not a zip file")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables, _ = write_report(folder)
    assert caught and all(str(broken) in str(warning.message) for warning in caught)
    assert tables[-1].title.startswith("Test accuracy of 3 methods on digits, 12 runs")
    text = (folder / "overview.md").read_text()
    assert "TPU v4" in text and "SCAFFOLD" in text
    seeds = pd.read_csv(folder / "overview.csv")["seeds"]
    assert seeds.sum() == 12  # 12 and 2, of which one is made again and one is broken


def test_report_command(folder, capsys):
    assert main(["report", str(folder), "--by", "algorithm", "alpha"]) == 0
    out = capsys.readouterr().out
    assert "by alpha." in out and "FedProx" in out and "overview.tex" in out
    assert "heat_map.png" not in out  # prox_mu is not chosen
    assert main(["report", str(folder), "--metric", "byts_up"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("fedjax-het: --metric = 'byts_up' is unknown: did you mean 'bytes_up'")


def test_report_command_rejects_empty_folder(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and all("directory" in line for line in lines)
    assert not list(tmp_path.iterdir())


# Personalized methods: accuracies of clients on their own tests, and maybe no global model


def save_personal(directory, method, seed, clients, *, test=math.nan, loss=0.5, **settings):
    """A run of three rounds; `clients` are their accuracies in the second, less in the others."""
    spec = RunSpec(method, "digits", rounds=3, seed=seed, protocol="fedamp", **settings)
    accuracies = np.stack([np.asarray(clients) - shift for shift in (0.3, 0.0, 0.1)])
    metrics = {
        "test_accuracy": np.full(3, test),
        "train_loss": np.array([0.7, 0.6, loss]),
        "client_accuracy": accuracies,
        "mean_client_accuracy": accuracies.mean(1),
    }
    return save_result(directory, spec, metrics)


@pytest.fixture
def personal(tmp_path):
    for seed in (0, 1):
        up = 0.02 * seed
        save_personal(tmp_path, "separate", seed, [0.6 + up, 0.8 + up])
        save_personal(tmp_path, "fedavg", seed, [0.5 + up, 0.7 + up], test=0.65)
        save_personal(tmp_path, "scaffold", seed, [0.7 + up, 0.9 + up], test=0.3)
    save_personal(tmp_path, "fedamp", 0, [0.9, 0.9], loss=math.nan)
    return tmp_path


def test_report_of_personalized_methods(personal):
    (table,) = write_report(personal).tables
    (section,) = table.sections  # what a method says of itself by default divides nothing
    heading = "Best mean accuracy of clients (%)"
    rows = {row["Method"]: row for row in section.rows}
    texts = {name: (row[heading], row["Worst decile (%)"]) for name, row in rows.items()}
    assert texts == {
        "FedAvg": ("61.00 ± 1.41", "51.00"),
        "SCAFFOLD": ("81.00 ± 1.41", "71.00"),
        "Separate": ("71.00 ± 1.41", "61.00"),
        "FedAMP": ("diverged †", "—"),
    }
    assert [rows[name]["Diverged"] for name in texts] == ["—", "—", "—", "1"]
    notes = " ".join(table.notes)
    assert "Diverged, and left out of the mean: FedAMP (seed 0)." in notes
    assert "in the round where it is highest: mean ±" in notes
    assert "Worst decile: mean over the worst tenth of clients" in notes
    assert "client_test_model follows from the method: client (SCAFFOLD)." in notes
    assert (personal / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    (table,) = write_report(personal, metric="final_accuracy").tables
    texts = {row["Method"]: row["Test accuracy (%)"] for row in table.sections[0].rows}
    assert texts["FedAvg"] == "65.00 ± 0.00"
    assert texts["Separate"] == "—"  # it has none, and did not diverge


@pytest.mark.parametrize(
    ("global_models", "metric"), [(0, "bmta"), (2, "evaluated_accuracy"), (3, "evaluated_accuracy")]
)
def test_default_metric(tmp_path, global_models, metric):
    for seed in range(2):
        save_personal(tmp_path, "separate", seed, [0.5, 0.6])
    for seed in range(global_models):
        save_run(tmp_path, "fedavg", 0.1, seed, 0.5)
    assert choose_default_metric(load_results(tmp_path)) == metric


def test_personalized_method_shows_its_own_accuracy(tmp_path):
    """A row has the accuracy of the model that its method evaluates, and a note names it."""
    for seed in range(2):
        save_personal(tmp_path, "ditto", seed, [0.5, 0.77], test=0.33)
        save_run(tmp_path, "fedavg", 0.1, seed, 0.5)
    (table,) = write_report(tmp_path, by=["algorithm"]).tables
    rows = {row["Method"]: row for row in table.sections[0].rows}
    heading = "Accuracy of the evaluated model (%)"
    assert rows["FedAvg"][heading] == "40.00 ± 0.00"
    assert rows["Ditto"][heading] == "50.17 ± 0.00"
    assert "Rows measure different things. Ditto: the clients' own models" in table.notes[1]
    assert "FedAvg: the global model on all test examples." in table.notes[1]
    assert "textbf" not in analysis.to_latex(table)  # rows measure different things


def test_evaluation_and_partition_settings_vary(tmp_path):
    for model in ("client", "received"):
        save_personal(tmp_path, "fedamp", 0, [0.5, 0.6], client_test_model=model)
    for sizes in ([50] * 5, [60] * 5):
        save_personal(tmp_path, "separate", 0, [0.5, 0.6], partition_options={"group_sizes": sizes})
    save_personal(tmp_path, "separate", 0, [0.5, 0.6], partition="iid")
    results = load_results(tmp_path)
    expected = ["partition", "partition_options.group_sizes", "algorithm", "client_test_model"]
    assert analysis.find_varying_settings(results) == expected
    assert (analysis.summarize_runs(results, metric="bmta")["seeds"] == 1).all()
    split = results[results["partition_options.group_sizes"].astype(str) != str([60] * 5)]
    again = split[split["partition_options.group_sizes"].notna() | (split["partition"] == "iid")]
    # The sizes follow from the partition: only groups have them.
    assert analysis.find_varying_settings(again) == ["partition", "algorithm"]
