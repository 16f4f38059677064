"""Whether a table's rows differ from the one that the paper is about: paired tests of runs."""

import math
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.comparison import (
    TableCell,
    get_compared_metric,
    is_personal_evaluation,
    parse_row,
)
from fedjax_het.analysis.grouping import is_diverged
from fedjax_het.metrics.personal import wilcoxon
from fedjax_het.papers.table.table_run import TableRun

if TYPE_CHECKING:
    import pandas as pd

NUM_BLOCKS = 10
_BLOCK_PAIRING = (
    f"paired by seed and by tenth of the second half of the rounds ({NUM_BLOCKS} a run). Those of one "
    "run are not independent, so that p is rather too small"
)
_CLIENT_PAIRING = "paired by client, in the round of each run's best mean"


def compute_p_values(table_run: TableRun) -> "pd.Series":
    """Compute Wilcoxon's two-sided p-value of each cell's difference from the main method's cell.

    Tables of clients' best mean accuracy pair clients; other tables pair blocks of rounds of the
    runs' curves. Only seeds count that both cells have without divergence.

    Args:
      table_run: the table with its runs.

    Returns:
      One value per cell; NaN for the main method itself, and if there is nothing to compare.
    """
    import pandas as pd

    paired_values = [_collect_paired_values(table_run, cell) for cell in table_run.cells]
    main_cell_indices: dict[tuple, int] = {}
    for index, cell in enumerate(table_run.cells):
        if _is_main_method(table_run, cell):
            main_cell_indices.setdefault(cell.column_key, index)
    cell_p_values = []
    for index, cell in enumerate(table_run.cells):
        main_index = main_cell_indices.get(cell.column_key)
        cell_p_values.append(
            math.nan
            if main_index in (None, index)
            else _compute_p_value(paired_values[index], paired_values[main_index])
        )
    return pd.Series(cell_p_values, dtype=float)


def describe_p_values(table_run: TableRun) -> str:
    """Describe the column of p-values: the test, the main method's row and the pairing."""
    pairing = _CLIENT_PAIRING if _is_client_metric(table_run) else _BLOCK_PAIRING
    row = next(cell.method for cell in table_run.cells if _is_main_method(table_run, cell))
    return f"p: Wilcoxon's signed-rank test, two-sided, of the difference from {row}, {pairing}."


def _is_main_method(table_run: TableRun, cell: TableCell) -> bool:
    return (
        bool(table_run.experiment.main_method)
        and parse_row(cell.method)[0] == table_run.experiment.main_method
    )


def _is_client_metric(table_run: TableRun) -> bool:
    return get_compared_metric(table_run.reported) == "bmta"


def _compute_p_value(
    values_by_seed: dict[int, np.ndarray], main_values_by_seed: dict[int, np.ndarray]
) -> float:
    seeds = [
        seed
        for seed in values_by_seed
        if seed in main_values_by_seed
        and len(values_by_seed[seed]) == len(main_values_by_seed[seed])
    ]
    if not seeds:
        return math.nan
    cell_values, main_values = (
        np.concatenate([values[seed] for seed in seeds])
        for values in (values_by_seed, main_values_by_seed)
    )
    return wilcoxon(cell_values, main_values).p_value


def _collect_paired_values(table_run: TableRun, cell: TableCell) -> dict[int, np.ndarray]:
    """By seed, what is paired of a cell's runs."""
    if not len(table_run.results):
        return {}
    is_client_metric = _is_client_metric(table_run)
    converged_runs = table_run.results[~is_diverged(table_run.results)]
    rows = converged_runs.drop_duplicates("settings").set_index("settings")
    values_by_seed = {}
    for run in cell.runs:
        if run.digest() not in rows.index:
            continue
        run_digest = rows.loc[run.digest(), "digest"]
        values = (
            table_run.load_client_accuracies(run)
            if is_client_metric
            else _compute_block_means(table_run, cell, run_digest)
        )
        if values is not None and np.isfinite(values).all():
            values_by_seed[run.seed] = values
    return values_by_seed


def _compute_block_means(
    table_run: TableRun, cell: TableCell, run_digest: str
) -> np.ndarray | None:
    """The means of `BLOCKS` stretches of the second half of a run's measured rounds."""
    metric = "mean_client_accuracy" if is_personal_evaluation(cell) else "test_accuracy"
    run_curve = table_run.curves[table_run.curves["digest"] == run_digest].sort_values("round")
    curve = run_curve[metric].dropna().to_numpy(float) if metric in run_curve else np.zeros(0)
    second_half = curve[len(curve) // 2 :]
    blocks = np.array_split(second_half, min(NUM_BLOCKS, len(second_half)))
    return np.array([block.mean() for block in blocks]) if len(second_half) else None
