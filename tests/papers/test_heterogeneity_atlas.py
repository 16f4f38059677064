"""The atlas of heterogeneity: rows, paired changes, correlations of measures, and the program."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedjax_het.papers.heterogeneity.atlas import (
    ATLAS,
    KINDS,
    MEASURES,
    METHOD_ROWS,
    collect_scores,
    compute_changes,
    correlate_measures,
    list_conditions,
    main,
    plot_changes,
)
from fedjax_het.papers.table import TableArguments, TableRun, make_cells
from fedjax_het.skews import PARTITION_SKEWS, SKEWS, Color

SEEDS = range(3)
CONDITIONS = list_conditions(20)
SKEW_CONDITIONS = [c for c in CONDITIONS if c.kind.setting == "skew"]


def _make_scores(losses, measures, method="fedavg"):
    """Return runs of three seeds, whose losses differ by one point around each condition's."""
    records = []
    for seed in SEEDS:
        base = {"method": method, "condition": "", "seed": seed, "accuracy": 80.0 + 10 * seed}
        records.append(base | dict.fromkeys(MEASURES, 0.0))
        for text, loss in losses.items():
            accuracy = base["accuracy"] - loss + (seed - 1)
            record = base | {"condition": text, "accuracy": accuracy}
            records.append(record | dict.fromkeys(MEASURES, 1.0) | measures.get(text, {}))
    return pd.DataFrame(records)


def test_kinds_are_the_skews_of_gray_images():
    names = {kind.name for kind in KINDS if kind.setting == "skew"}
    kinds = {name for name, entry in SKEWS.items() if entry.make is not Color}
    assert names == kinds | {"label", "label_quantity"} <= kinds | set(PARTITION_SKEWS)


@pytest.mark.parametrize("preset", ATLAS.presets)
def test_rows_differ_in_their_condition_only(preset):
    cells = make_cells(ATLAS, TableArguments(preset, methods=("all",), seeds=(0,)))
    assert len(cells) == len(METHOD_ROWS) * (1 + len(CONDITIONS))
    settings = [cell.runs[0].resolved().to_dict() for cell in cells if "ditto" in cell.method]
    names = set().union(*settings)
    varied = {name for name in names if len({str(values.get(name)) for values in settings}) > 1}
    assert varied <= {"skew", "system", "partition", "partition_options", "alpha", "classes"}
    assert len({str(values) for values in settings}) == len(settings)
    assert settings[0]["partition"] == "iid"
    drifts = [f"{kind.name}.rounds" for kind in KINDS if kind.group == "Drift"]
    rounds = [values.get("skew", {}).get(name) for values in settings for name in drifts]
    assert {number for number in rounds if number} == {settings[0]["rounds"]}


def test_changes_are_paired_over_seeds():
    condition = CONDITIONS[0]
    scores = _make_scores({condition.text: 5.0}, {})
    base, changed = compute_changes(scores, CONDITIONS).to_dict("records")
    assert base["condition"] == "" and math.isnan(base["change"])
    assert base["accuracy"] == pytest.approx(90) and base["std"] == pytest.approx(10)
    assert changed["change"] == pytest.approx(-5)
    # t distribution with 2 degrees of freedom: 97.5 % quantile 4.303; differences -6, -5, -4.
    assert changed["half_width"] == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_correlation_is_spearmans_over_skews_with_an_interval_over_kinds():
    rng = np.random.default_rng(0)
    losses = {c.text: float(loss) for c, loss in zip(CONDITIONS, rng.normal(size=60), strict=True)}
    measures = {text: {MEASURES[0]: math.exp(loss)} for text, loss in losses.items()}
    for text in measures:
        measures[text][MEASURES[1]] = -losses[text] + rng.normal()
    scores = _make_scores(losses, measures)
    first, second, constant, *_ = correlate_measures(scores, CONDITIONS).to_dict("records")
    assert first["rho"] == pytest.approx(1) and first["low"] == pytest.approx(1)
    texts = [c.text for c in SKEW_CONDITIONS]
    pairs = np.array([[measures[text][MEASURES[1]], losses[text]] for text in texts])
    assert second["rho"] == pytest.approx(stats.spearmanr(pairs).statistic)
    assert second["low"] < second["rho"] < second["high"] and second["conditions"] == len(texts)
    is_image = np.array([c.kind.group == "Images" for c in SKEW_CONDITIONS])
    assert second["Images"] == pytest.approx(stats.spearmanr(pairs[is_image]).statistic)
    assert math.isnan(constant["rho"]) and math.isnan(constant["low"])


def test_figure_has_the_strengths_of_a_kind_beside_each_other():
    losses = {c.text: 10.0 * index for index, c in enumerate(CONDITIONS[3:9])}
    changes = compute_changes(_make_scores(losses, {}), CONDITIONS)
    panel, _ = plot_changes(changes, CONDITIONS).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        CONDITIONS[3].kind.name,
        CONDITIONS[6].kind.name,
    ]
    values = panel.images[0].get_array()
    np.testing.assert_allclose(values, -np.arange(0, 60, 10).reshape(2, 3), atol=1e-9)


@pytest.mark.slow
def test_program_prints_changes_and_reads_measures(tmp_path, capsys):
    rows = ("fedavg", "fedavg(skew='noise:std=2')")
    arguments = ["--methods", *rows, "--rounds", "1", "--seeds", "0"]
    assert main([*arguments, "--output-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "std 2" in text and "Accuracy without heterogeneity" in text
    assert (tmp_path / "atlas.png").exists()
    cells = make_cells(ATLAS, TableArguments("quick", methods=rows, seeds=(0,), rounds=1))
    scores = collect_scores(TableRun.from_directory(ATLAS, "quick", cells, tmp_path))
    base, noisy = scores.to_dict("records")
    assert all(math.isfinite(base[name]) for name in MEASURES)
    assert noisy["feature_distance"] > base["feature_distance"]
    assert noisy["label_hellinger"] == base["label_hellinger"]
