"""Further columns of a table: significance, matching losses and gains, with their descriptions."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_het.analysis.comparison import (
    TableCell,
    format_row,
    get_cell_metric,
    get_compared_metric,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.overview import get_metric_values, is_diverged
from fedjax_het.analysis.render import format_number
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.papers.table.table_run import TableRun
from fedjax_het.runtime.result_store import compute_settings_digest

if TYPE_CHECKING:
    import pandas as pd

MIN_PAIRS = 5  # seeds; the spread of fewer seeds says too little for a test
_MIN_SPREAD = 1e-6  # percentage points, more than the rounding of differences
_LOSS_BY_START_PREFIX = "matching_loss_by_start."


def compute_p_values(table_run: TableRun) -> "pd.Series":
    """Compute the p-value of each cell's difference from the main method's cell.

    The test is a two-sided paired t-test over seeds that both cells have without divergence. Holm's
    correction is over the cells of a column.

    Args:
      table_run: the table with its runs.

    Returns:
      One value per cell; NaN for the main method itself, and with fewer than `MIN_PAIRS` seeds.
    """
    import pandas as pd

    metric = get_compared_metric(table_run.reported)
    cells = table_run.cells
    p_values = pd.Series(math.nan, index=range(len(cells)))
    main_cells: dict[tuple, TableCell] = {}
    for cell in cells:
        if _is_main_method(table_run, cell):
            main_cells.setdefault(cell.column_key, cell)
    for column_key, main in main_cells.items():
        column = [k for k, cell in enumerate(cells) if cell.column_key == column_key]
        main_values = _get_values_by_seed(table_run, main, metric)
        for index in column:
            if cells[index] is not main:
                values = _get_values_by_seed(table_run, cells[index], metric)
                p_values[index] = run_paired_test(values, main_values).p_value
        p_values[column] = correct_p_values(p_values[column].to_numpy())
    return p_values


def describe_p_values(table_run: TableRun) -> str:
    """Describe the column of p-values: the test, and the main method's row."""
    row = next(cell.method for cell in table_run.cells if _is_main_method(table_run, cell))
    return (
        f"p: paired t-test over seeds of the difference from {format_row(row)}, two-sided, with Holm's "
        f"correction over the rows of a section; from {MIN_PAIRS} seeds."
    )


def correct_p_values(p_values: np.ndarray) -> np.ndarray:
    """Correct p-values of several tests by Holm's method, which bounds the family-wise error.

    Args:
      p_values: float `[n]`; NaN for a missing test.

    Returns:
      Corrected values, float `[n]`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.papers.table.columns import correct_p_values
      >>> correct_p_values(np.array([0.04, 0.01, np.nan])).tolist()
      [0.04, 0.02, nan]
    """
    order = np.argsort(p_values)  # NaN is last
    num_tests = np.isfinite(p_values).sum()
    factors = np.maximum(num_tests - np.arange(len(p_values)), 1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1.0)
    return corrected


def _is_main_method(table_run: TableRun, cell: TableCell) -> bool:
    main_method = table_run.experiment.main_method
    return bool(main_method) and parse_row(cell.method)[0] == main_method


def _get_values_by_seed(table_run: TableRun, cell: TableCell, metric: str) -> "pd.Series":
    """Return the cell's metric in percent of the runs that did not diverge, by seed."""
    runs = select_cell_runs(cell, table_run.results)
    runs = runs[~is_diverged(runs)] if len(runs) else runs
    values = get_metric_values(runs, get_cell_metric(cell, metric))
    seeds = {compute_settings_digest(run): run.seed for run in cell.runs}
    return values.set_axis(runs["settings"].map(seeds)).dropna() if len(runs) else values


class PairedTest(NamedTuple):
    """Differences of two rows over the seeds that both have."""

    mean: float
    "Mean over seeds; NaN without seeds."
    std: float
    "Standard deviation over seeds; NaN with fewer than two seeds."
    half_width: float
    "Half the width of the 95 % confidence interval of the mean; NaN where `p_value` is."
    p_value: float
    "Two-sided paired t-test; NaN with too few seeds."


def run_paired_test(
    values: "pd.Series", other_values: "pd.Series", min_pairs: int = MIN_PAIRS
) -> PairedTest:
    """Run a two-sided paired t-test of two rows.

    Args:
      values: values of a row by seed.
      other_values: values of the other row by seed.
      min_pairs: number of seeds that a test needs, at least 2.

    Returns:
      The test over the seeds that both rows have. Equal values have a p-value of 1, and constant
      differences have none.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.papers.table.columns import run_paired_test
      >>> others = pd.Series([1.0, 2.0, 3.0, 4.0, 6.0])
      >>> test = run_paired_test(others + [1.0, 2.0, 1.0, 2.0, 2.0], others)
      >>> print(f"{test.mean:.1f} ± {test.half_width:.1f}, p = {test.p_value:.3f}")
      1.6 ± 0.7, p = 0.003
    """
    from scipy import stats

    differences = (values - other_values).dropna()
    mean, std = float(differences.mean()), float(differences.std())
    half_width = p_value = math.nan
    if len(differences) >= min_pairs:
        if np.ptp(differences) >= _MIN_SPREAD:
            test = stats.ttest_1samp(differences, 0.0)
            p_value, interval = float(test.pvalue), test.confidence_interval()
            half_width = float(interval.high - interval.low) / 2
        elif abs(mean) < _MIN_SPREAD:
            half_width, p_value = 0.0, 1.0
    return PairedTest(mean, std, half_width, p_value)


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
            texts.append(f"{format_row(cell.method)}, {cell.column_label}: {text}")
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
    rows = ", ".join(map(format_row, dict.fromkeys(experiment.real_data_rows.values())))
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
    names = format_row(experiment.main_method), format_row(experiment.baseline_row)
    return f"Relative gain of {names[0]} over {names[1]}: {'; '.join(texts)}." if texts else ""


def _index_rows_by_column(
    table: "pd.DataFrame", cells: Sequence[TableCell]
) -> dict[tuple[tuple, str], dict]:
    """Return the rows of a comparison by column and method."""
    records = table.to_dict("records")
    return {(c.column_key, c.method): row for c, row in zip(cells, records, strict=True)}
