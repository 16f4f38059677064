"""Mean ranks over blocks, and their diagram."""

import numpy as np
import pytest

from fedjax_het import ConfigError
from fedjax_het.analysis.figures.client_accuracies import (
    compute_mean_ranks,
    find_cliques,
    plot_critical_difference,
)

SCORES = np.array([[0.9, 0.8, 0.8, 0.1], [0.9, 0.5, 0.6, 0.2], [0.7, 0.6, 0.5, 0.4]])


def test_ranks_statistic_and_difference_by_hand():
    found = compute_mean_ranks(SCORES)
    ranks = np.array([[1, 2.5, 2.5, 4], [1, 3, 2, 4], [1, 2, 3, 4]])
    assert found.ranks.tolist() == ranks.mean(0).tolist() and found.num_blocks == 3
    # Friedman's with ties: the sum of squares of ranks' sums over that within blocks.
    sums = ranks.sum(0) - 3 * 2.5
    assert found.statistic == pytest.approx(3 * (sums**2).sum() / ((ranks - 2.5) ** 2).sum())
    # Nemenyi's q of four methods at 5 % is 2.569 (Demsar, Table 5a).
    assert found.critical_difference == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 3)), rel=1e-3)


def test_blocks_with_gaps_are_left_out():
    gap = np.vstack([SCORES, [0.1, np.nan, 0.9, 0.8]])
    assert compute_mean_ranks(gap).ranks.tolist() == compute_mean_ranks(SCORES).ranks.tolist()
    with pytest.raises(ConfigError, match="expected two or more"):
        compute_mean_ranks(gap[2:])


@pytest.mark.parametrize(
    "difference, expected",
    [(0.5, []), (1, [(0, 1), (2, 3)]), (2.5, [(0, 2), (1, 3)]), (9, [(0, 3)])],
)
def test_cliques_are_the_largest(difference, expected):
    assert find_cliques([1, 2, 3.5, 4.5], difference) == expected


def test_the_diagram_has_every_method():
    figure = plot_critical_difference(["fedavg", "fsl", "moon", "ditto"], SCORES, "Global")
    (panel,) = figure.axes
    texts = " ".join(text.get_text() for text in panel.texts)
    assert all(name in texts for name in ("fedavg", "fsl", "moon", "ditto"))
    assert "3 blocks" in figure.get_suptitle()
