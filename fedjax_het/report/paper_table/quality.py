"""How good the data are that a method made: DynaFed's matching loss, beside accuracy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.report.cell import TableCell
from fedjax_het.report.comparison import select_cell_runs
from fedjax_het.report.grouping import is_diverged
from fedjax_het.report.render import format_number

if TYPE_CHECKING:
    import pandas as pd

_LOSS_BY_START_PREFIX = "matching_loss_by_start."


def compute_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> "pd.Series":
    """J of the last fifth of the iterations, mean over a cell's runs; NaN of other methods."""
    import pandas as pd

    return pd.Series(
        [
            _mean_of_column(cell_results, "matching_loss")
            for cell_results in _select_converged_runs(cells, results)
        ],
        dtype=float,
    )


def describe_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> str:
    """What the column is, and J of the segments that start from the first, the middle and the last
    round."""
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
