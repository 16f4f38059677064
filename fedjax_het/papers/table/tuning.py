"""Rows with tuned methods, all by one rule, in addition to the rows with default values.

The main hyperparameter of a method (`TableDeclaration.tuned_hyperparameters`) has five values,
from a tenth of its untuned value to ten times it. Each value is tried in one run for every column
of the table, with a seed that no table averages. The tuned row has the value with the best
validation accuracy. Without validation examples, the table's metric on the test split decides.
Control rows are not tuned; they are repeated with the best value of their main row.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.comparison import (
    TableCell,
    add_row_settings,
    compare_with_reported,
    is_personal_evaluation,
    parse_row,
    select_cell_runs,
)
from fedjax_het.config.settings import SETTINGS_BY_HYPERPARAMETER
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.tuning.tuner import TUNING_SEED
from fedjax_het.utils.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

TUNING_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


class TuningTrials(NamedTuple):
    """The trial runs of one cell."""

    cell_index: int
    hyperparameter: str
    cells: list[TableCell]
    """One cell with one run for each value."""


def make_tuning_trials(
    experiment: TableDeclaration, cells: Sequence[TableCell]
) -> list[TuningTrials]:
    """List the trial runs of all cells whose method is tuned.

    Args:
      experiment: declaration with `tuned_hyperparameters`.
      cells: cells of the table.

    Returns:
      One entry per tuned cell. Values outside the range of the hyperparameter are left out.
    """
    trials = []
    for index, cell in enumerate(cells):
        name = experiment.tuned_hyperparameters.get(parse_row(cell.method)[0])
        if name is not None and cell.method not in experiment.control_rows:
            untuned_value = cell.runs[0].resolved().hyperparameters[name]
            trial_cells = []
            for factor in TUNING_FACTORS:
                with contextlib.suppress(ConfigError):  # a value outside of its range
                    trial = _set_value(cell, name, factor * untuned_value, (TUNING_SEED,))
                    trial_cells.append(trial)
            trials.append(TuningTrials(index, name, trial_cells))
    return trials


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
      reported: as `load_reported_values` returns it; its metric selects the best value where runs
        have no validation examples.

    Returns:
      All cells in order.
    """
    tuned_cells = {}
    for index, name, trial_cells in make_tuning_trials(experiment, cells):
        table = compare_with_reported(trial_cells, results, reported)
        num_ended = table["seeds"] + table["diverged"] - table.get("partial", 0)
        is_complete = num_ended == table["planned"]
        scores = table["mean"]
        if trial_cells[0].runs[0].validation is not None:
            scores = scores.where(scores.isna(), _get_validation_accuracies(trial_cells, results))
        if is_complete.all() and scores.notna().any():
            value = trial_cells[int(scores.argmax())].runs[0].hyperparameters[name]
            for other_index, other in enumerate(cells):
                is_control = experiment.control_rows.get(other.method) == cells[index].method
                is_same_column = other.column_key == cells[index].column_key
                if other_index == index or (is_control and is_same_column):
                    seeds = [run.seed for run in other.runs]
                    tuned_cells[other_index] = _set_value(other, name, value, seeds)
    return [
        each
        for index, cell in enumerate(cells)
        for each in (cell, tuned_cells.get(index))
        if each is not None
    ]


def describe_tuning(
    experiment: TableDeclaration, cells: Sequence[TableCell], results: "pd.DataFrame"
) -> str:
    """Describe the rule of tuning, the number of trials and their hours.

    Args:
      experiment: declaration with `tuned_hyperparameters`.
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      Sentences for a note.
    """
    trials = make_tuning_trials(experiment, cells)
    digests = {run.digest() for trial in trials for cell in trial.cells for run in cell.runs}
    trial_results = results[results["settings"].isin(digests)] if len(results) else results
    hours = trial_results["wall_seconds"].sum() / 3600 if len(trial_results) else 0.0
    names = " or ".join(sorted({trial.hyperparameter for trial in trials}))
    values = ", ".join(f"{factor:g}" for factor in TUNING_FACTORS)
    has_validation = any(cell.runs[0].validation is not None for cell in cells if cell.runs)
    metric = "validation accuracy" if has_validation else "this table's metric on the test split"
    return (
        f"Rows with a value of {names} are tuned for each column: its value times {values}, the "
        f"best of one run each by {metric}. The runs have seed {TUNING_SEED}, which no "
        f"row averages. {len(trial_results)} of {len(digests)} tuning runs are made, {hours:.1f} "
        "hours."
    )


def _get_validation_accuracies(cells: Sequence[TableCell], results: "pd.DataFrame") -> "pd.Series":
    """Return the best validation accuracy of each cell's run, of the models that are tested."""
    import pandas as pd

    accuracies = []
    for cell in cells:
        kind = "client_validation" if is_personal_evaluation(cell) else "validation"
        runs = select_cell_runs(cell, results)
        accuracies.append(pd.to_numeric(runs[f"best_{kind}_accuracy"]).mean())
    return pd.Series(accuracies)


def _set_value(cell: TableCell, name: str, value: float, seeds: Sequence[int]) -> TableCell:
    value, run = float(f"{value:.3g}"), cell.runs[0]
    changes: dict[str, Any] = {"hp": {**run.hp, name: value}}
    if (setting := SETTINGS_BY_HYPERPARAMETER.get(name)) is not None:
        changes = {setting: value}
    runs = tuple(replace(run, seed=seed, **changes) for seed in seeds)
    return replace(cell, method=add_row_settings(cell.method, **{name: value}), runs=runs)
