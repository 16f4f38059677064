"""Rows with hyperparameters that `tune` chose, with equal budgets for all rows.

The file `tuned.json` beside a table has the chosen values and the trials of every row. A row that
it contains is not tuned again, so that a further row joins a finished table.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.comparison import TableCell
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.tuning.tuner import CHOSEN_FILE, TUNING_SEED, Budget, tune
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
    return [_replace_runs(cell, chosen.get(cell.runs[0].digest())) for cell in cells]


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


def describe_search(budget: Budget, rounds: int) -> str:
    """Describe the rule of the search in a sentence.

    Args:
      budget: trials and rounds of each row.
      rounds: rounds of a run.

    Returns:
      The sentence.
    """
    rungs = ", ".join(f"{n} for {r} rounds" for n, r in budget.list_rungs(rounds))
    return (
        f"Every row is tuned by one rule (`fedjax_het.tune`): trials {rungs}, by validation accuracy, "
        f"with seed {TUNING_SEED}, which no row averages."
    )


def _replace_runs(cell: TableCell, chosen: dict[str, Any] | None) -> TableCell:
    """Return a cell whose runs have the chosen hyperparameters."""
    if chosen is None:
        return cell

    def set_values(run: RunSpec) -> RunSpec:
        values = {n: v for n, v in chosen["hp"].items() if n not in run.hyperparameters}
        return replace(run, hp={**run.hp, **values})

    return replace(cell, runs=tuple(map(set_values, cell.runs)))
