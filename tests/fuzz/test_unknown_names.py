"""Results of entries that only another process has registered keep their stored names."""

import json

import numpy as np
import pytest
from support.stored_results import write_result

from fedjax_het import ConfigError, RunSpec, analysis, load_results
from fedjax_het.analysis import TableCell
from fedjax_het.cli import main
from fedjax_het.config.run_spec import hash_settings
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.runtime.result_store import load_curves

# Names, by setting, that this process has not registered.
NAMES = {"algorithm": "mymethod", "model": "mynet", "dataset": "mydata", "partition": "mysplit"}
ROUNDS = 6


def save(folder, spec, renamed, level):
    """Write a result whose settings have other names, as another process does."""
    path = write_result(folder, spec, np.linspace(level / 2, level, ROUNDS), renamed=renamed)
    return RunSpec.from_dict(json.loads(path.read_text())["spec"])


@pytest.fixture
def folder(tmp_path):
    """Return a folder with FedAvg, and four runs with one unknown name each."""
    spec = RunSpec("fedavg", model="mlp", alpha=0.1, rounds=ROUNDS)
    save(tmp_path, spec, {}, 0.5)
    for seed, (setting, name) in enumerate(NAMES.items(), 1):
        known = RunSpec("fedavg", model="mlp", alpha=0.1, rounds=ROUNDS, seed=seed)
        save(tmp_path, known, {setting: name}, 0.5 + seed / 10)
    return tmp_path


def test_hash_settings_equals_digest():
    spec = RunSpec("fedaf", alpha=0.02).resolved()
    assert hash_settings(spec) == spec.digest() == RunSpec("fedaf", alpha=0.02).digest()


def test_load_results_keeps_unknown_names(folder):
    with pytest.raises(ConfigError):
        RunSpec("mymethod").digest()
    results = load_results(folder)
    assert len(results) == 5 and results["settings"].is_unique
    for setting, name in NAMES.items():
        assert set(results[setting]) > {name}
    assert set(load_curves(folder)["digest"]) == set(results["digest"])
    assert {f"{digest}.json" for digest in results["digest"]} == {
        path.name for path in folder.glob("*.json")
    }


@pytest.mark.parametrize("setting", NAMES)
def test_report_shows_unknown_names(setting, folder, capsys):
    assert main(["report", str(folder), "--by", "algorithm", setting]) == 0
    out = capsys.readouterr().out
    assert NAMES[setting] in out
    rows = (folder / "overview.csv").read_text().splitlines()
    assert sum(NAMES[setting] in row for row in rows) == 1
    assert (folder / "learning_curves.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_methods_have_colors(folder):
    results, curves = load_results(folder), load_curves(folder)
    figure = analysis.plot_learning_curves(results, curves, by=["algorithm"])
    labels = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert {"FedAvg", "mymethod"} <= set(labels) and labels["FedAvg"] != labels["mymethod"]


def test_comparison_with_unknown_names(tmp_path):
    spec = RunSpec("fedavg", model="mlp", dataset="fashion_mnist", alpha=0.01, rounds=ROUNDS)
    stored = save(tmp_path, spec, {"algorithm": "mymethod"}, 0.8)
    other = RunSpec("fedavg", "fashion_mnist", model="mlp", alpha=0.01, rounds=ROUNDS, seed=1)
    save(tmp_path, other, {}, 0.5)
    cells = [
        TableCell("fashion_mnist", "mlp", 0.01, "fedavg", (other,)),
        TableCell("fashion_mnist", "mlp", 0.01, "mymethod", (stored,)),
    ]
    results, reported = load_results(tmp_path), load_reported_values("dynafed", "table5")
    table = analysis.compare_with_reported(cells, results, reported).set_index("method")
    measured = results.set_index("algorithm")["final_accuracy"]
    assert table.loc["mymethod", "mean"] == pytest.approx(100 * measured["mymethod"])
    assert table.loc["fedavg", "mean"] == pytest.approx(100 * measured["fedavg"])
    text = analysis.format_comparison_table(table.reset_index(), title="T")
    assert [row["Method"] for row in text.sections[0].rows] == ["FedAvg", "mymethod"]
    assert analysis.list_diverged_runs(cells, results) == []
    figure = analysis.plot_table_curves(cells, results, load_curves(tmp_path), reported)
    assert {"FedAvg", "mymethod"} <= {line.get_label() for line in figure.axes[0].lines}
