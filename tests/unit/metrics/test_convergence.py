"""Rise times and running means, by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from fedjax_het.analysis.overview import get_metric_label
from fedjax_het.metrics.convergence import rise_time, rolling_mean, rounds_to_reach
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime.result_builder import summarize_metrics

NAN = math.nan


def test_rolling_mean_skips_nan():
    actual = rolling_mean(np.array([NAN, 1.0, NAN, NAN, 3.0, 8.0]), 2)
    np.testing.assert_array_equal(actual, [NAN, 1.0, NAN, NAN, 2.0, 5.5])


def test_rolling_mean_matches_pandas():
    curve = np.random.default_rng(0).random(90)
    curve[5:9] = NAN
    drawn = pd.Series(curve[np.isfinite(curve)]).rolling(20, min_periods=1).mean()
    np.testing.assert_allclose(rolling_mean(curve)[np.isfinite(curve)], drawn)


def test_rise_time():
    # Running means over 2: .1 .2 .4 .55 .6; 90 % of the last is .54, half of it .3.
    curve = np.array([0.1, 0.3, 0.5, 0.6, 0.6])
    assert rise_time(curve, 2) == 4
    assert rise_time(curve, 2, fraction=0.5) == 3
    assert rise_time(curve, 1) == 4
    assert rise_time(np.full(3, 0.25)) == 1
    assert rise_time(np.full(3, NAN)) is None
    assert rise_time(np.array([NAN, 0.1, NAN, 0.5]), 1) == 4


def test_rounds_to_reach():
    curve = np.array([0.1, 0.9, 0.1, 0.6, 0.9])
    assert rounds_to_reach(curve, 0.5, 1) == 2
    assert rounds_to_reach(curve, 0.5, 2) == 2  # (.1 + .9) / 2: reached is at least
    assert rounds_to_reach(curve, 0.52, 2) == 5
    assert rounds_to_reach(curve, 0.91, 1) is None
    assert rounds_to_reach(np.full(4, NAN), 0.5) is None


def metrics(accuracy):
    return {"test_accuracy": np.array(accuracy), "train_loss": np.ones(len(accuracy))}


@pytest.mark.parametrize("hits", [8800, 7000, 4500])
def test_rounds_to_reach_exact_value(hits):
    curve = np.float32([hits - 1, hits, hits + 1]) / np.float32(10_000)
    assert rounds_to_reach(curve, hits / 10_000, window=1) == 2


def test_summary_has_convergence():
    accuracy = [0.2] * 20 + [0.8] * 20
    summary = summarize_metrics(metrics(accuracy))
    assert summary["window_accuracy"] == pytest.approx(0.8)
    assert summary["rise_time"] == 38  # .2 + .03 n reaches .72 at n = 18, after rounding
    assert summary["rounds_to_half"] == 30
    assert summarize_metrics(metrics([0.1] * 30))["rounds_to_half"] is None
    assert all(type(summary[name]) is int for name in ("rise_time", "rounds_to_half"))


@pytest.mark.parametrize("last", [NAN, math.inf])
def test_summary_of_diverged_run(last):
    summary = summarize_metrics(metrics([0.6, 0.7, last]))
    assert summary["diverged"]
    for name in ("window_accuracy", "rise_time", "rounds_to_half"):
        assert summary[name] is None


def test_display_of_convergence():
    assert get_metric_info("window_accuracy")[2:4] == (True, True)
    for name in ("rise_time", "rounds_to_half"):
        assert get_metric_info(name).scale == 1
        assert "ounds" in get_metric_label(name)
