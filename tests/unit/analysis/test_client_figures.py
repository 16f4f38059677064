"""Figures of clients: accuracies, paired tests, mean ranks, and collaboration weights."""

import io

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedjax_het import ConfigError, analysis
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.figures.client_accuracies import (
    compute_mean_ranks,
    plot_critical_difference,
)
from fedjax_het.analysis.figures.style import GRAYS
from fedjax_het.analysis.overview import get_method_title


def test_run_paired_tests():
    base = np.array([0.80, 0.75, 0.90, 0.60, 0.85, 0.70])
    better = base + np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    mixed = base + np.array([0.01, 0.02, 0.03, -0.04, 0.05, 0.06])
    accuracies = {"fedavg": base, "fedamp": better, "heurfedamp": mixed}
    pairs = analysis.run_paired_tests(accuracies, ["fedamp", "heurfedamp"])
    actual = pairs.set_index(["method", "against"])
    assert list(actual.index) == [
        ("fedamp", "fedavg"),
        ("fedamp", "heurfedamp"),
        ("heurfedamp", "fedavg"),
        ("heurfedamp", "fedamp"),
    ]
    assert actual.loc[("fedamp", "fedavg"), "p_value"] == pytest.approx(2 / 64)
    assert actual.loc[("heurfedamp", "fedavg"), "p_value"] == pytest.approx(14 / 64)  # by all signs
    assert actual.loc[("fedamp", "fedavg"), "mean_difference"] == pytest.approx(3.5)
    assert actual.loc[("fedamp", "heurfedamp"), "ties"] == 5
    assert (pairs["clients"] == 6).all()
    with pytest.raises(ConfigError, match="methods = 'fedap' is unknown: did you mean 'fedamp'"):
        analysis.run_paired_tests(accuracies, ["fedap"])


def test_client_accuracies_figure():
    accuracies = {"fedavg": np.array([0.5, np.nan, 0.7]), "fedamp": np.array([0.6, 0.8, 0.9])}
    figure = analysis.plot_client_accuracies({"digits": accuracies, "mnist": {}})
    digits, mnist = figure.axes
    drawn = [points.get_offsets()[:, 1].tolist() for points in digits.collections]
    assert drawn == [pytest.approx([50, 70]), pytest.approx([60, 80, 90])]
    assert [text.get_text() for text in digits.get_xticklabels()] == [
        *map(get_method_title, accuracies)
    ]
    medians = [line.get_ydata()[0] for line in digits.lines if line.get_linewidth() == 1.6]
    assert medians == pytest.approx([60, 80])
    assert [text.get_text() for text in mnist.texts] == ["not run"]
    saved(figure)


def test_client_accuracies_highlight():
    accuracies = {"fedavg": np.array([0.5, 0.7]), "fedamp": np.array([0.6, 0.8])}

    def colors(**how):
        (panel,) = analysis.plot_client_accuracies({"digits": accuracies}, **how).axes
        return [to_hex(points.get_facecolor()[0]).upper() for points in panel.collections]

    assert colors(highlight=["fedamp"]) == [GRAYS[1], METHODS["fedamp"].color.upper()]
    assert not {*colors()} & {*GRAYS}


def saved(figure):
    """A layout that does not fit would warn."""
    figure.savefig(io.BytesIO(), format="png")


def test_collaboration_masks_own_model():
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


def test_collaboration_scales():
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


def test_collaboration_orders_clients():
    random = np.random.default_rng(0)
    clusters = random.permutation(np.repeat([0, 1, 2], 4))
    weights = (clusters[:, None] == clusters) + 0.01 * random.random((12, 12))
    figure = analysis.plot_collaboration(weights)
    ticks = [int(text.get_text()) for text in figure.axes[0].get_xticklabels()]
    assert sorted(ticks) == list(range(12))
    actual = clusters[ticks]
    assert (actual[1:] != actual[:-1]).sum() == 2
    expected = weights[np.ix_(ticks, ticks)] * (1 - np.eye(12))
    np.testing.assert_array_equal(image_of(figure), expected)
    saved(figure)


def test_collaboration_orders_groups():
    near = np.array([[5, 0, 4, 0], [0, 5, 0, 1], [4, 0, 5, 0], [0, 1, 0, 5]])
    groups = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    weights = near[np.ix_(groups, groups)].astype(float)
    figure = analysis.plot_collaboration(weights, groups)
    names = [int(text.get_text()) for text in figure.axes[0].get_xticklabels()]
    assert sorted(names) == [0, 1, 2, 3] and abs(names.index(0) - names.index(2)) == 1
    order = [k for name in names for k in np.flatnonzero(groups == name)]
    np.testing.assert_array_equal(image_of(figure), weights[np.ix_(order, order)] * (1 - np.eye(8)))
    ordered_figure = analysis.plot_collaboration(weights, groups, order="given")
    np.testing.assert_array_equal(image_of(ordered_figure), weights * (1 - np.eye(8)))
    chosen = analysis.plot_collaboration(weights, order=np.arange(8)[::-1], scale=9.0)
    np.testing.assert_array_equal(image_of(chosen), weights[::-1, ::-1] * (1 - np.eye(8)))
    assert chosen.axes[0].images[0].get_clim() == (0, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [np.eye(3), np.eye(2)]}, r"shape of weights = \(2, 2\)"),
        ({"weights": np.eye(3), "order": "random"}, "order = 'random' is unknown"),
        ({"weights": np.eye(3), "order": [0, 1, 1]}, r"order = .*expected 'similar'"),
        ({"weights": np.eye(3), "order": [[1], [1, 2]]}, r"order: .*expected 'similar'"),
        ({"weights": np.ones((2, 3))}, r"shape of weights = \(2, 3\)"),
        ({"weights": []}, "weights = 'none'"),
        ({"weights": np.eye(3), "groups": [0, 1]}, r"shape of groups = \(2,\)"),
        ({"weights": np.eye(3), "titles": ["a", "b"]}, "titles = .*expected one title per matrix"),
        ({"weights": np.eye(3), "scale": "log"}, "scale = 'log' is unknown"),
    ],
)
def test_collaboration_rejects_bad_input(arguments, message):
    with pytest.raises(ConfigError, match=message):
        analysis.plot_collaboration(**arguments)


# Mean ranks over blocks

SCORES = np.array([[0.9, 0.8, 0.8, 0.1], [0.9, 0.5, 0.6, 0.2], [0.7, 0.6, 0.5, 0.4]])


def test_friedman_test_by_hand():
    actual = compute_mean_ranks(SCORES)
    ranks = np.array([[1, 2.5, 2.5, 4], [1, 3, 2, 4], [1, 2, 3, 4]])
    assert actual.ranks.tolist() == ranks.mean(0).tolist() and actual.num_blocks == 3
    # Friedman's with ties: the sum of squares of ranks' sums over that within blocks.
    sums = ranks.sum(0) - 3 * 2.5
    assert actual.statistic == pytest.approx(3 * (sums**2).sum() / ((ranks - 2.5) ** 2).sum())
    # Nemenyi's q of four methods at 5 % is 2.569 (Demsar, Table 5a).
    assert actual.critical_difference == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 3)), rel=1e-3)


def test_blocks_with_gaps_are_left_out():
    gap = np.vstack([SCORES, [0.1, np.nan, 0.9, 0.8]])
    assert compute_mean_ranks(gap).ranks.tolist() == compute_mean_ranks(SCORES).ranks.tolist()
    with pytest.raises(ConfigError, match="expected two or more"):
        compute_mean_ranks(gap[2:])


def test_critical_difference_intervals():
    names = ["fedavg", "fsl", "moon", "ditto"]
    figure = plot_critical_difference(names, SCORES, "Global")
    (panel,) = figure.axes
    actual = compute_mean_ranks(SCORES)
    labels = [text.get_text() for text in panel.get_yticklabels()]
    assert labels == [names[index] for index in np.argsort(actual.ranks, kind="stable")]
    for row, name in enumerate(labels):
        (segment,) = panel.collections[row].get_segments()
        rank = actual.ranks[names.index(name)]
        assert segment[:, 1].tolist() == [row, row]
        assert segment[:, 0].mean() == pytest.approx(rank)
        assert np.ptp(segment[:, 0]) == pytest.approx(actual.critical_difference)
    assert "3 blocks" in figure.get_suptitle()
