"""Plots of measures of a split, and measures as columns and order of tables."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het import ConfigError
from fedjax_het.analysis import (
    make_overview_table,
    plot_client_measures,
    plot_metric_vs_measure,
    summarize_runs,
)
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime.split_measures import SplitMeasures

RESULTS = pd.DataFrame(
    {
        "dataset": "digits",
        "algorithm": ["fedavg"] * 4 + ["fedprox"] * 2,
        "skew.noise.std": [0.1, 0.1, 0.3, 0.2, 0.1, 0.3],
        "seed": [0, 1, 0, 0, 0, 0],
        "settings": list("abcdef"),
        "finished": "2026",
        "diverged": [False, False, False, True, False, False],
        "final_accuracy": [0.9, 0.8, 0.5, np.nan, 0.7, 0.8],
        "split.feature_distance": [0.1, 0.3, 0.9, 0.5, 0.1, 0.9],
    }
)
MEASURE = "split.feature_distance"


def test_columns_and_order_of_a_summary():
    summary = summarize_runs(RESULTS, columns=[MEASURE], sort="final_accuracy")
    assert summary[MEASURE].tolist() == pytest.approx([0.9, 0.1, 0.9, 0.2, 0.5])
    assert summary["mean"].tolist()[:4] == pytest.approx([50, 70, 80, 85])
    table = make_overview_table(RESULTS, columns=[MEASURE], sort=MEASURE)
    sections = [section.title for section in table.sections]
    assert sections == ["noise.std 0.1", "noise.std 0.2", "noise.std 0.3"]
    texts = [row["Feature distance of clients"] for row in table.sections[0].rows]
    assert [float(text) for text in texts] == [0.1, 0.2]


@pytest.mark.parametrize("argument", ["columns", "sort"])
def test_unknown_column_is_one_line(argument):
    value = ["split.none"] if argument == "columns" else "split.none"
    with pytest.raises(ConfigError, match=f"{argument} = 'split.none'") as caught:
        summarize_runs(RESULTS, **{argument: value})
    assert "\n" not in str(caught.value)


def test_points_and_rank_correlations():
    figure = plot_metric_vs_measure(RESULTS, measure=MEASURE)
    (panel,) = figure.axes
    points = np.concatenate([c.get_offsets() for c in panel.collections if len(c.get_offsets())])
    shown = RESULTS[~RESULTS["diverged"]]
    np.testing.assert_allclose(points[:, 0], shown[MEASURE])
    np.testing.assert_allclose(points[:, 1], 100 * shown["final_accuracy"])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [
        "FedAvg: rank correlation \N{MINUS SIGN}1.00 of 3 runs",
        "FedProx: rank correlation 1.00 of 2 runs",
    ]
    assert panel.get_xlabel() == "Feature distance of clients"
    equal = plot_metric_vs_measure(RESULTS.assign(**{MEASURE: 0.5}), measure=MEASURE)
    assert "undefined" in equal.legends[0].get_texts()[0].get_text()


def test_bars_of_clients():
    partition = partition_from_clients([[0, 1], [], [2]])
    summary = partition.summarize(np.array([0, 1, 1]), 2)
    values = np.array([0.5, np.nan, 0.25])
    measures = SplitMeasures(summary, partition.sizes, {}, {"feature_distance": values})
    sizes, distances = plot_client_measures(measures).axes
    assert [bar.get_height() for bar in sizes.patches] == [2, 0, 1]
    np.testing.assert_array_equal([bar.get_height() for bar in distances.patches], values)
