"""The experiment on system heterogeneity: rows, paired comparisons, and the program."""

import numpy as np
import pandas as pd
import pytest

from fedjax_het.papers.heterogeneity.systems import (
    SYSTEMS,
    Comparison,
    compare_rows,
    list_comparisons,
    main,
    make_text,
)
from fedjax_het.papers.table import TableArguments, make_cells

ROWS = [Comparison("Time", "A", "fedavg"), Comparison("Time", "B", "fedbuff", "fedavg")]


@pytest.mark.parametrize("preset", SYSTEMS.presets)
def test_references_are_rows_of_the_table(preset):
    cells = make_cells(SYSTEMS, TableArguments(preset))
    rows = {cell.method for cell in cells}
    comparisons = list_comparisons(cells[0].runs[0].rounds)
    assert {c.row for c in comparisons} == rows
    assert {c.reference for c in comparisons} - {None} <= rows
    runs = {cell.method: cell.runs[0].resolved() for cell in cells}
    times = [c for c in comparisons if c.section == "Time"]
    # A round of FedBuff has half of the updates of a synchronous round.
    updates = [runs[c.row].rounds * (0.5 if c.name == "FedBuff" else 1) for c in times]
    assert len(set(updates)) == 1


def test_comparison_is_paired_over_seeds():
    levels = np.array([60.0, 70.0, 80.0, 85.0])
    gains, factors = np.array([1.0, 2.0, 1.0, 2.0]), np.array([2.0, 4.0, 2.0, 4.0])
    scores = pd.DataFrame(
        {
            "row": ["fedavg"] * 4 + ["fedbuff"] * 4,
            "seed": [*range(4)] * 2,
            "accuracy": [*levels, *(levels + gains)],
            "seconds": [*(10 * levels), *(10 * levels / factors)],
        }
    )
    _, other = compare_rows(scores, ROWS).to_dict("records")
    assert other["difference"] == pytest.approx(1.5)
    # t distribution with 3 degrees of freedom: 97.5 % quantile 3.182.
    assert other["half_width"] == pytest.approx(3.182 * gains.std(ddof=1) / 2, rel=1e-3)
    assert other["speedup"] == pytest.approx(8**0.5)
    assert other["speedup_low"] < 8**0.5 < other["speedup_high"]


def test_program_prints_the_effects(tmp_path, capsys):
    rows = [c.row for c in list_comparisons(10)][:2]
    arguments = ["--methods", *rows, "--rounds", "2", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "FedNova, equal steps" in text and "+0.0 ± 0.0" in text


def test_table_has_the_times_of_the_last_section():
    rows = [
        {"section": "Stragglers", "name": "A", "seeds": 3, "seconds": np.nan, "num_reached": 0},
        {"section": "Time", "name": "B", "seeds": 3, "seconds": 120.0, "num_reached": 2},
    ]
    table = pd.DataFrame(rows).assign(accuracy=80.0, accuracy_std=1.0, speedup=[np.nan, 2.5])
    text = make_text(table, "Effects.", 0.7)
    assert text.columns[-2:] == ("Time to target (s)", "Times faster")
    cells = [section.rows[0]["Time to target (s)"] for section in text.sections]
    assert cells == ["—", "120 (2 of 3)"]
    assert text.sections[1].rows[0]["Times faster"] == "2.5"
