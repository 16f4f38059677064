"""Texts and figures of runs of a regression: none has the words of a classification."""

import re

import numpy as np
import pytest

from fedjax_het import (
    RunSpec,
    analysis,
    dataset_from_arrays,
    grid,
    load_curves,
    load_results,
    make_partition,
    simulate,
    sweep,
)
from fedjax_het.analysis.figures.run_figures import plot_run_curve
from fedjax_het.analysis.render import to_markdown
from fedjax_het.runtime.progress import format_progress

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(60, 4)).astype(np.float32)
DATA = dataset_from_arrays(
    FEATURES[:40], FEATURES[:40, :2], FEATURES[40:], FEATURES[40:, :2], task="regression"
)
SETTINGS = {"model": "mlp", "partition": "iid", "num_clients": 4, "rounds": 3, "local_epochs": 1}
WORDS = re.compile(r"accurac|\bclass|nats", re.IGNORECASE)


@pytest.mark.slow
def test_texts_of_a_regression_name_its_score(tmp_path, caplog):
    lines = []
    specs = grid(**SETTINGS, learning_rate=[0.01, 0.1], client_tests=True)
    (result, _) = sweep(specs, tmp_path, dataset=DATA, progress=lines.append).results
    report = analysis.write_report(tmp_path, columns=["split.size_gini"])
    texts = [*map(to_markdown, report.tables), repr(result), result._repr_html_(), *lines]
    assert "Best mean R2 of clients (%)" in texts[0] and "R2 by round" in result._repr_html_()
    settings = {"validation": 0.25, "patience": 1, "client_tests": True}
    states = []
    texts += [repr(simulate(RunSpec(**SETTINGS, **settings), dataset=DATA, progress=states.append))]
    lines += map(format_progress, states)
    frame, curves = load_results(tmp_path), load_curves(tmp_path)
    partition = make_partition("iid", np.zeros(40, int), 1, num_clients=4, seed=0)
    figures = {
        "curves": analysis.plot_learning_curves(frame, curves),
        "setting": analysis.plot_metric_vs_setting(frame, x="learning_rate"),
        "measure": analysis.plot_metric_vs_measure(frame, measure="split.size_gini"),
        "run": plot_run_curve(result),
        "partition": analysis.plot_partition(partition, np.zeros(40, int), 1),
        "score": result.plot().figure,
        "loss": result.plot("test_loss").figure,
    }
    for name, figure in figures.items():
        labels = [text for axes in figure.axes for text in (axes.get_ylabel(), axes.get_xlabel())]
        labels += [axes.get_title() for axes in figure.axes]
        texts += [f"{name}: {label}" for label in labels]
    texts += caplog.messages + lines
    assert not [text for text in texts if WORDS.search(text)]
    assert figures["run"].axes[0].get_ylabel() == "Test R2 (%)"
    assert figures["loss"].axes[0].get_ylabel() == "Test loss"


def test_tables_of_several_tasks_have_scores(tmp_path):
    labels = np.arange(40) % 2
    classes = dataset_from_arrays(FEATURES[:40], labels, FEATURES[:40], labels, name="classes")
    for data in (DATA, classes):
        simulate(RunSpec(**SETTINGS), dataset=data, output_dir=tmp_path)
    (table,) = analysis.write_report(tmp_path).tables
    assert "Test score (%)" in to_markdown(table)
    only = load_results(tmp_path).query("task == 'classification'")
    assert "Test accuracy (%)" in to_markdown(analysis.make_overview_table(only))
