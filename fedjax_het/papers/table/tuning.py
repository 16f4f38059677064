"""Rows whose methods are tuned, all by one rule, beside those that are not.

A method's main number (`TableDeclaration.tuned_hyperparameters`) has five values from a tenth of its untuned value to
ten times it. Each is tried in one run with a seed that no table averages, for every column of the
table; the row then has the value that the table's own measure finds best. Controls are not tuned:
they are shown once more with the value that was best for the row they are of.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.analysis.comparison import (
    TableCell,
    add_row_setting,
    compare_with_reported,
    parse_row,
)
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.utils.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

TUNING_SEED = 1000
TUNING_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


class TuningTrials(NamedTuple):
    """What is tried for the cell at a place."""

    cell_index: int
    hyperparameter: str  # of the number
    cells: list[TableCell]  # of one run each


def make_tuning_trials(
    experiment: TableDeclaration, cells: Sequence[TableCell]
) -> list[TuningTrials]:
    """List the trial runs of all cells whose method is tuned.

    Args:
      experiment: declaration with `tuned_hyperparameters`.
      cells: cells of the table.

    Returns:
      One entry per tuned cell. Values outside the range of the hyper-parameter are left out.
    """
    all_trials = []
    for cell_index, cell in enumerate(cells):
        hyperparameter = experiment.tuned_hyperparameters.get(parse_row(cell.method)[0])
        if hyperparameter is None or not cell.runs or cell.method in experiment.control_rows:
            continue
        untuned_value = cell.runs[0].resolved().hp[hyperparameter]
        trial_cells = [
            _set_cell_value(cell, hyperparameter, factor * untuned_value, (TUNING_SEED,))
            for factor in TUNING_FACTORS
        ]
        all_trials.append(
            TuningTrials(
                cell_index,
                hyperparameter,
                [trial_cell for trial_cell in trial_cells if _is_valid(trial_cell.runs[0])],
            )
        )
    return all_trials


def add_tuned_cells(
    experiment: TableDeclaration,
    cells: Sequence[TableCell],
    results: "pd.DataFrame",
    reported: "pd.DataFrame",
) -> list[TableCell]:
    """Insert a tuned cell after each cell whose trials are complete.

    Args:
      experiment: declaration with `tuned_hyperparameters` and `control_rows`.
      cells: cells of the table.
      results: as `load_results` returns it.
      reported: as `load_reported_values` returns it; its metric selects the best value.

    Returns:
      All cells in order.
    """
    tuned_cells = {}
    for cell_index, hyperparameter, trial_cells in make_tuning_trials(experiment, cells):
        table = compare_with_reported(trial_cells, results, reported)
        is_complete = table["seeds"] + table["diverged"] == table["planned"]
        if is_complete.all() and table["mean"].notna().any():
            value = trial_cells[int(table["mean"].argmax())].runs[0].hp[hyperparameter]
            tuned_cells[cell_index] = _set_value_for_all_seeds(
                cells[cell_index], hyperparameter, value
            )
            for other_index, other_cell in enumerate(cells):
                if experiment.control_rows.get(other_cell.method) == cells[cell_index].method and (
                    other_cell.column_key == cells[cell_index].column_key
                ):
                    tuned_cells[other_index] = _set_value_for_all_seeds(
                        other_cell, hyperparameter, value
                    )
    return [
        each
        for cell_index, cell in enumerate(cells)
        for each in ([cell, tuned_cells[cell_index]] if cell_index in tuned_cells else [cell])
    ]


def describe_tuning(
    experiment: TableDeclaration, cells: Sequence[TableCell], results: "pd.DataFrame"
) -> str:
    """Describe the rule of tuning, the number of trials and their hours.

    Args:
      experiment: declaration with `tuned_hyperparameters`.
      cells: cells of the table.
      results: as `load_results` returns it.
    """
    all_trials = make_tuning_trials(experiment, cells)
    trial_digests = {
        run.digest() for trial in all_trials for cell in trial.cells for run in cell.runs
    }
    trial_results = results[results["settings"].isin(trial_digests)] if len(results) else results
    hours = trial_results["wall_seconds"].sum() / 3600 if len(trial_results) else 0.0
    hyperparameters = {trial.hyperparameter for trial in all_trials}
    values = ", ".join(f"{factor:g}" for factor in TUNING_FACTORS)
    return (
        f"Rows with {' or '.join(sorted(hyperparameters))} stated are tuned: its value times {values}, the "
        f"best of one run each by this table's measure, with seed {TUNING_SEED}, which no row averages, "
        f"for each column. {len(trial_results)} of {len(trial_digests)} such runs are made, {hours:.1f} hours."
    )


def _set_value_for_all_seeds(cell: TableCell, hyperparameter: str, value: float) -> TableCell:
    return _set_cell_value(cell, hyperparameter, value, tuple(run.seed for run in cell.runs))


def _set_cell_value(
    cell: TableCell, hyperparameter: str, value: float, seeds: Sequence[int]
) -> TableCell:
    value = float(f"{value:.3g}")
    base_spec = cell.runs[0]
    runs = tuple(
        replace(base_spec, seed=seed, hp={**base_spec.hp, hyperparameter: value}) for seed in seeds
    )
    return replace(cell, method=add_row_setting(cell.method, hyperparameter, value), runs=runs)


def _is_valid(run: RunSpec) -> bool:
    try:
        run.resolved()
    except ConfigError:
        return False
    return True
