"""Rows with hyperparameters that `tune` chose, with equal budgets for all rows.

The file `tuned.json` beside a table has the chosen values and the trials of every row. A row that
it contains is not tuned again, so that a further row joins a finished table.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.comparison import TableCell, add_row_settings
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.tuning.tuner import (
    CHOSEN_FILE,
    DEFAULT_BUDGET,
    TUNING_SEED,
    Budget,
    tune,
)
from fedjax_het.utils.io import read_stored_file, write_atomically

if TYPE_CHECKING:
    from fedjax_het.data import Dataset

_TRIALS_FOLDER = "tuning"


def choose_hyperparameters(
    cells: Sequence[TableCell],
    directory: Path,
    budget: Budget,
    *,
    space: Mapping[str, Any] | None = None,
    dataset: "Dataset | None" = None,
    runs_trials: bool = True,
) -> list[TableCell]:
    """Return the cells with the hyperparameters that the search chose.

    Args:
      cells: cells of a table.
      directory: folder of the table.
      budget: trials and rounds of each cell.
      space: ranges of hyperparameters, see `tune`.
      dataset: data set of the runs, if it has no name.
      runs_trials: whether cells that are not tuned yet are tuned; otherwise they stay unchanged.

    Returns:
      The cells, whose runs have the chosen values.
    """
    chosen = load_chosen(directory)
    specs = {spec.digest(): spec for cell in cells if (spec := cell.runs[0])}
    missing = {digest: spec for digest, spec in specs.items() if digest not in chosen}
    if missing and runs_trials:
        result = tune(
            list(missing.values()),
            directory / _TRIALS_FOLDER,
            trials=budget.num_trials,
            rungs=budget.num_rungs,
            reduction=budget.reduction,
            space=space,
            dataset=dataset,
        )
        for index, digest in enumerate(missing):
            own_trials = result.trials[result.trials["spec"] == index].dropna(axis=1, how="all")
            chosen[digest] = {
                "method": result.chosen[index].algorithm,
                "hp": result.chosen[index].hyperparameters,
                "trials": json.loads(own_trials.drop(columns="spec").to_json(orient="records")),
            }
        content = json.dumps(chosen, indent=1).encode()
        write_atomically(directory / CHOSEN_FILE, lambda file: file.write(content))
    values = [chosen.get(cell.runs[0].digest(), {}).get("hp", {}) for cell in cells]
    return [_set_hyperparameters(*pair) for pair in zip(cells, values, strict=True)]


def add_tuned_cells(
    cells: Sequence[TableCell],
    directory: Path,
    control_rows: Mapping[str, str],
    *,
    dataset: "Dataset | None" = None,
    runs_trials: bool = True,
) -> list[TableCell]:
    """Insert after each cell the cell with the hyperparameters that the search chose.

    Args:
      cells: cells of a table.
      directory: folder of the table.
      control_rows: main row by control row. A control is not tuned: it has the values of its main
        row.
      dataset: data set of the runs, if it has no name.
      runs_trials: whether cells that are not tuned yet are tuned.

    Returns:
      All cells in order. A cell whose default values are the best has no further cell.
    """
    main_cells = [cell for cell in cells if cell.method not in control_rows]
    tuned_cells = choose_hyperparameters(
        *(main_cells, directory, DEFAULT_BUDGET), dataset=dataset, runs_trials=runs_trials
    )
    chosen = {(c.column_key, c.method): c.runs[0].hyperparameters for c in tuned_cells}
    all_cells = []
    for cell in cells:
        all_cells.append(cell)
        main_row = control_rows.get(cell.method, cell.method)
        tuned = _set_hyperparameters(cell, chosen.get((cell.column_key, main_row), {}))
        if changes := _list_changes(cell, tuned):
            all_cells.append(replace(tuned, method=add_row_settings(cell.method, **changes)))
    return all_cells


def load_chosen(directory: Path) -> dict[str, dict[str, Any]]:
    """Load the chosen values and the trials of a table.

    Args:
      directory: folder of the table.

    Returns:
      By digest of a row's first run before the search: `method`, `hp` and `trials`.
    """
    try:
        return json.loads(read_stored_file(directory / CHOSEN_FILE))
    except FileNotFoundError:
        return {}


def describe_search(budget: Budget, rounds: int, rows: str = "Every row is") -> str:
    """Describe the rule of the search in a sentence.

    Args:
      budget: trials and rounds of each row.
      rounds: rounds of a run.
      rows: beginning of the sentence, which names the rows.

    Returns:
      The sentence.
    """
    rungs = ", ".join(f"{n} up to round {r}" for n, r in budget.list_rungs(rounds))
    return (
        f"{rows} tuned by one rule (`fedjax_het.tune`): trials {rungs}, by validation accuracy, "
        f"with seed {TUNING_SEED}, which no row averages."
    )


def _list_changes(cell: TableCell, tuned: TableCell) -> dict[str, Any]:
    """Return the hyperparameters that differ between the runs of two cells, by name."""
    before = cell.runs[0].resolved().hyperparameters
    after = tuned.runs[0].resolved().hyperparameters
    return {name: value for name, value in after.items() if value != before[name]}


def _set_hyperparameters(cell: TableCell, values: Mapping[str, Any]) -> TableCell:
    """Return a cell whose runs have hyperparameters that the cell's own settings leave open."""

    def set_values(run: RunSpec) -> RunSpec:
        added = {name: value for name, value in values.items() if name not in run.hyperparameters}
        return replace(run, hp={**run.hp, **added})

    return replace(cell, runs=tuple(map(set_values, cell.runs)))
