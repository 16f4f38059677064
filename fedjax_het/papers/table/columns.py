"""Further columns of a table: significance, matching losses and gains, with their descriptions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.comparison import (
    TableCell,
    get_compared_metric,
    is_personal_evaluation,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.overview import is_diverged
from fedjax_het.analysis.render import format_number
from fedjax_het.metrics.personal import wilcoxon
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.papers.table.table_run import TableRun

if TYPE_CHECKING:
    import pandas as pd

NUM_BLOCKS = 10
_BLOCK_PAIRING = (
    f"paired by seed and by tenth of the second half of the rounds ({NUM_BLOCKS} a run). The "
    "tenths of one run are not independent, so that p is rather too small"
)
_CLIENT_PAIRING = "paired by client, in the round of each run's best mean"
_LOSS_BY_START_PREFIX = "matching_loss_by_start."


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

    values = [_collect_paired_values(table_run, cell) for cell in table_run.cells]
    main_values: dict[tuple, dict[int, np.ndarray]] = {}
    for cell, cell_values in zip(table_run.cells, values, strict=True):
        if _is_main_method(table_run, cell):
            main_values.setdefault(cell.column_key, cell_values)
    pairs = [
        (cell_values, main_values.get(cell.column_key, cell_values))
        for cell, cell_values in zip(table_run.cells, values, strict=True)
    ]
    return pd.Series([_compute_p_value(*pair) for pair in pairs], dtype=float)


def describe_p_values(table_run: TableRun) -> str:
    """Describe the column of p-values: the test, the main method's row and the pairing."""
    pairing = _CLIENT_PAIRING if _is_client_metric(table_run) else _BLOCK_PAIRING
    row = next(cell.method for cell in table_run.cells if _is_main_method(table_run, cell))
    return f"p: Wilcoxon's signed-rank test, two-sided, of the difference from {row}, {pairing}."


def _is_main_method(table_run: TableRun, cell: TableCell) -> bool:
    main_method = table_run.experiment.main_method
    return bool(main_method) and parse_row(cell.method)[0] == main_method


def _is_client_metric(table_run: TableRun) -> bool:
    return get_compared_metric(table_run.reported) == "bmta"


def _compute_p_value(values: dict[int, np.ndarray], main_values: dict[int, np.ndarray]) -> float:
    seeds = [
        seed for seed in values if len(values[seed]) == len(main_values.get(seed, np.zeros(0)))
    ]
    if not seeds or values is main_values:
        return math.nan
    own, main = (np.concatenate([v[seed] for seed in seeds]) for v in (values, main_values))
    return wilcoxon(own, main).p_value


def _collect_paired_values(table_run: TableRun, cell: TableCell) -> dict[int, np.ndarray]:
    """Return the paired values of a cell's runs by seed."""
    if not len(table_run.results):
        return {}
    converged_runs = table_run.results[~is_diverged(table_run.results)]
    digests = converged_runs.drop_duplicates("settings").set_index("settings")["digest"]
    values_by_seed = {}
    for run in cell.runs:
        if run.digest() in digests.index:
            if _is_client_metric(table_run):
                values = table_run.load_client_accuracies(run)
            else:
                values = _compute_block_means(table_run, cell, digests[run.digest()])
            if values is not None and np.isfinite(values).all():
                values_by_seed[run.seed] = values
    return values_by_seed


def _compute_block_means(table_run: TableRun, cell: TableCell, digest: str) -> np.ndarray | None:
    """Return the means of `NUM_BLOCKS` blocks in the second half of a run's measured rounds."""
    metric = "mean_client_accuracy" if is_personal_evaluation(cell) else "test_accuracy"
    run_curve = table_run.curves[table_run.curves["digest"] == digest].sort_values("round")
    curve = run_curve[metric].dropna().to_numpy(float) if metric in run_curve else np.zeros(0)
    second_half = curve[len(curve) // 2 :]
    blocks = np.array_split(second_half, min(NUM_BLOCKS, len(second_half)) or 1)
    return np.array([block.mean() for block in blocks]) if len(second_half) else None


def compute_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> "pd.Series":
    """Average DynaFed's matching loss J in the last fifth of the iterations over a cell's runs.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      One value per cell; NaN for methods without J.
    """
    import pandas as pd

    cell_results = _select_converged_runs(cells, results)
    return pd.Series([_average_column(runs, "matching_loss") for runs in cell_results], dtype=float)


def describe_matching_losses(cells: Sequence[TableCell], results: "pd.DataFrame") -> str:
    """Describe the column J, with J by the round from which a segment starts.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      Sentences with J of segments from the first, the middle and the last round.
    """
    texts = []
    columns = [name for name in results if name.startswith(_LOSS_BY_START_PREFIX)]
    starts = sorted(int(name.removeprefix(_LOSS_BY_START_PREFIX)) for name in columns)
    for cell, runs in zip(cells, _select_converged_runs(cells, results), strict=True):
        losses = {
            start: _average_column(runs, f"{_LOSS_BY_START_PREFIX}{start}") for start in starts
        }
        known = [start for start, loss in losses.items() if np.isfinite(loss)]
        if known:
            shown = dict.fromkeys((known[0], known[len(known) // 2], known[-1]))
            text = ", ".join(f"{start}: {format_number(losses[start])}" for start in shown)
            texts.append(f"{cell.method}, {cell.column_label}: {text}")
    return (
        "J: DynaFed's matching loss in the last fifth of the iterations, 1 where training on the "
        "synthetic data does not move the network. By the round that a segment starts from: "
        f"{'; '.join(texts)}."
    )


def _select_converged_runs(
    cells: Sequence[TableCell], results: "pd.DataFrame"
) -> "list[pd.DataFrame]":
    cell_results = [select_cell_runs(cell, results) for cell in cells]
    return [runs[~is_diverged(runs)] if len(runs) else runs for runs in cell_results]


def _average_column(runs: "pd.DataFrame", column: str) -> float:
    return float(runs[column].mean()) if column in runs and len(runs) else math.nan


def compute_gains_over_real(
    table: "pd.DataFrame", cells: Sequence[TableCell], experiment: TableDeclaration
) -> "pd.Series":
    """Compute the gain of each row over the row with equally many random real images.

    Args:
      table: comparison of the cells.
      cells: cells of the table.
      experiment: declaration with `real_data_rows`.

    Returns:
      Percentage points, one per cell; NaN for other methods and for the row of real images itself.
    """
    import pandas as pd

    rows, gains = _index_rows_by_column(table, cells), []
    for (column, method), row in rows.items():
        real_row = experiment.real_data_rows.get(parse_row(method)[0], "")
        baseline = {} if method == real_row else rows.get((column, real_row), {})
        gains.append(row["mean"] - baseline.get("mean", math.nan))
    return pd.Series(gains, dtype=float)


def describe_gains_column(experiment: TableDeclaration) -> str:
    """Describe the column of gains over real images."""
    rows = ", ".join(dict.fromkeys(experiment.real_data_rows.values()))
    return (
        "Over real: points above the row that has equally many random real images in place of the "
        f"synthetic images ({rows})."
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
    rows, texts = _index_rows_by_column(table, cells), []
    for cell in cells:
        baseline = rows.get((cell.column_key, experiment.baseline_row))
        if cell.method != experiment.main_method or baseline is None:
            continue
        row, gain_texts = rows[cell.column_key, cell.method], []
        for name, column in (("measured", "mean"), ("reported", "reported_mean")):
            gain = 100 * (row[column] / baseline[column] - 1)
            if not math.isnan(gain):
                gain_texts.append(f"{format_number(gain, '+.1f')} % {name}")
        if gain_texts:
            texts.append(f"{cell.column_label}: {', '.join(gain_texts)}")
    heading = f"Relative gain of {experiment.main_method} over {experiment.baseline_row}"
    return f"{heading}: {'; '.join(texts)}." if texts else ""


def _index_rows_by_column(
    table: "pd.DataFrame", cells: Sequence[TableCell]
) -> dict[tuple[tuple, str], dict]:
    """Return the rows of a comparison by column and method."""
    records = table.to_dict("records")
    return {(c.column_key, c.method): row for c, row in zip(cells, records, strict=True)}
