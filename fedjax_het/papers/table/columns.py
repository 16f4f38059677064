"""How good the data are that a method made: DynaFed's matching loss, beside accuracy.

What rows gain over others: over random real images, and over the baseline that a paper names.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.comparison import TableCell, parse_row, select_cell_runs
from fedjax_het.analysis.grouping import is_diverged
from fedjax_het.analysis.render import format_number
from fedjax_het.papers.table.declaration import TableDeclaration

if TYPE_CHECKING:
    import pandas as pd

_LOSS_BY_START_PREFIX = "matching_loss_by_start."


def compute_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> "pd.Series":
    """Average DynaFed's matching loss J in the last fifth of the iterations over a cell's runs.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      One value per cell; NaN for methods without J.
    """
    import pandas as pd

    return pd.Series(
        [
            _mean_of_column(cell_results, "matching_loss")
            for cell_results in _select_converged_runs(cells, results)
        ],
        dtype=float,
    )


def describe_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> str:
    """Describe the column J, with J by the round from which a segment starts.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      Sentences with J of segments from the first, the middle and the last round.
    """
    texts = []
    for cell, cell_results in zip(cells, _select_converged_runs(cells, results), strict=True):
        starts = sorted(
            int(n.removeprefix(_LOSS_BY_START_PREFIX))
            for n in cell_results
            if n.startswith(_LOSS_BY_START_PREFIX)
        )
        by_start = {
            start: _mean_of_column(cell_results, f"{_LOSS_BY_START_PREFIX}{start}")
            for start in starts
        }
        if finite_losses := {start: j for start, j in by_start.items() if np.isfinite(j)}:
            starts_with_loss = list(finite_losses)
            displayed_starts = dict.fromkeys(
                (
                    starts_with_loss[0],
                    starts_with_loss[len(starts_with_loss) // 2],
                    starts_with_loss[-1],
                )
            )
            losses_text = ", ".join(
                f"{start}: {format_number(finite_losses[start], '.2f')}"
                for start in displayed_starts
            )
            texts.append(f"{cell.method}, {cell.column_label}: {losses_text}")
    return (
        "J: DynaFed's matching loss in the last fifth of the iterations, 1 where training on the "
        "synthetic data does not move the network. By the round that a segment starts from: "
        f"{'; '.join(texts)}."
    )


def _select_converged_runs(
    cells: Sequence[TableCell], results: "pd.DataFrame"
) -> "list[pd.DataFrame]":
    results_by_cell = [select_cell_runs(cell, results) for cell in cells]
    return [runs[~is_diverged(runs)] if len(runs) else runs for runs in results_by_cell]


def _mean_of_column(cell_results: "pd.DataFrame", column: str) -> float:
    return (
        float(cell_results[column].mean())
        if column in cell_results and len(cell_results)
        else float("nan")
    )


def compute_gains_over_real(
    table: "pd.DataFrame", cells: Sequence[TableCell], experiment: TableDeclaration
) -> "pd.Series":
    """Compute the gain of each row over the row with as many random real images.

    Args:
      table: comparison of the cells.
      cells: cells of the table.
      experiment: declaration with `real_data_rows`.

    Returns:
      Percentage points, one per cell; NaN for other methods and for the row of real images itself.
    """
    import pandas as pd

    rows, no_row = _index_rows_by_column(table, cells), {"mean": math.nan}
    gains = []
    for (column_key, method), row in rows.items():
        real_row = experiment.real_data_rows.get(parse_row(method)[0], "")
        baseline = no_row if method == real_row else rows.get((column_key, real_row), no_row)
        gains.append(row["mean"] - baseline["mean"])
    return pd.Series(gains, dtype=float)


def describe_gains_column(experiment: TableDeclaration) -> str:
    """Describe the column of gains over real images."""
    rows = ", ".join(dict.fromkeys(experiment.real_data_rows.values()))
    return (
        "Over real: points above the row that has as many random real images in place of the made "
        f"ones ({rows})."
    )


def describe_relative_gains(
    table: "pd.DataFrame", cells: Sequence[TableCell], experiment: TableDeclaration
) -> str:
    """Describe the paper's method relative to the baseline, measured and reported, per column.

    Args:
      table: comparison of the cells.
      cells: cells of the table.
      experiment: declaration with `main_method` and `baseline_row`.

    Returns:
      A sentence; empty if neither gain is known.
    """
    rows = _index_rows_by_column(table, cells)
    texts = []
    for cell in cells:
        baseline_values = rows.get((cell.column_key, experiment.baseline_row))
        if cell.method != experiment.main_method or baseline_values is None:
            continue
        row = rows[cell.column_key, cell.method]
        gains = {
            what: row[column] / baseline_values[column] - 1
            for what, column in (("measured", "mean"), ("reported", "reported_mean"))
        }
        gain_texts = [f"{format_number(100 * g, '+.1f')} % {w}" for w, g in gains.items() if g == g]
        if gain_texts:
            texts.append(f"{cell.column_label}: {', '.join(gain_texts)}")
    heading = f"Relative gain of {experiment.main_method} over {experiment.baseline_row}"
    return f"{heading}: {'; '.join(texts)}." if texts else ""


def _index_rows_by_column(
    table: "pd.DataFrame", cells: Sequence[TableCell]
) -> dict[tuple[tuple, str], dict]:
    """The rows of a comparison of these cells."""
    records = table.to_dict("records")
    return {(c.column_key, c.method): row for c, row in zip(cells, records, strict=True)}
