"""The table of DynaFed's settings: paired differences, and shares of the gain of real images."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from fedjax_het.papers.dynafed.ablation import (
    ABLATION,
    BASELINE,
    CHANGES,
    IMPROVED,
    REAL,
    ROWS,
    main,
    make_text_table,
    summarize_cells,
)
from fedjax_het.papers.table import TableArguments, make_cells

MOMENTUM = ROWS["Momentum 0.9"]
# Accuracies of the second half of the rounds, by row and seed.
ACCURACIES = {
    BASELINE: [50, 52, 54, 56, 58],
    IMPROVED: [70, 71, 72, 73, 79],
    REAL: [75, 77, 79, 81, 83],
    MOMENTUM: [69, 68, 70, 72, 71],
}


def make_table_run():
    arguments = TableArguments("settings", methods=tuple(ACCURACIES))
    cells = make_cells(ABLATION, arguments)

    def load(run):
        row = next(cell.method for cell in cells if run in cell.runs)
        late = ACCURACIES[row][run.seed - 1] / 100
        curve = np.repeat([0.1, 0.5, 0.6, late], [20, 40, 40, 100])
        summary = {"wall_seconds": 100.0 + run.seed}
        if row not in (BASELINE, REAL):
            summary |= {"matching_loss": 0.9, "synthesis_step_size": 0.8}
        return SimpleNamespace(metrics={"test_accuracy": curve}, summary=summary)

    return SimpleNamespace(cells=cells, load_run_result=load)


def test_differences_and_shares():
    table = summarize_cells(make_table_run()).set_index("row")
    late = {row: np.array(values) for row, values in ACCURACIES.items()}
    assert table.loc[IMPROVED, "late"] == pytest.approx(73)
    assert table.loc[MOMENTUM, "early"] == pytest.approx(50)
    assert table.loc[MOMENTUM, "difference"] == pytest.approx(-3)
    p_values = {row: stats.ttest_rel(late[row], late[IMPROVED]).pvalue for row in late}
    smallest = min((row for row in late if row != IMPROVED), key=lambda row: p_values[row])
    assert table.loc[smallest, "p"] == pytest.approx(3 * p_values[smallest])
    gains = {row: (late[row] - late[BASELINE]).mean() for row in late}
    assert table.loc[IMPROVED, "share"] == pytest.approx(gains[IMPROVED] / gains[REAL])
    assert table.loc[REAL, "share"] == 1 and table.loc[BASELINE, "share"] == 0
    assert np.isnan(table.loc[IMPROVED, "difference"]) and np.isnan(table.loc[REAL, "J"])
    text = make_text_table(table.reset_index(), "Title.")
    assert [row["Setting"] for row in text.sections[0].rows][1] == "Preset improved"


def test_each_change_changes_run():
    arguments = TableArguments("settings", seeds=(1,))
    digests = {cell.method: cell.runs[0].digest() for cell in make_cells(ABLATION, arguments)}
    assert len(set(digests.values())) == len(ROWS) == 6 + len(CHANGES)


@pytest.mark.slow
def test_program(tmp_path, capsys):
    arguments = ["--methods", BASELINE, IMPROVED, "--seeds", "0", "--rounds", "22"]
    assert main([*arguments, "--output-dir", str(tmp_path)]) == 0
    assert {"ablation.md", "ablation.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert "Preset improved" in capsys.readouterr().out
