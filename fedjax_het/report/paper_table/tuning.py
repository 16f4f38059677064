"""Rows whose methods are tuned, all by one rule, beside those that are not.

A method's main number (`Experiment.tuning`) has five values from a tenth of its untuned value to
ten times it. Each is tried in one run with a seed that no table averages, for every column of the
table; the row then has the value that the table's own measure finds best. Controls are not tuned:
they are shown once more with the value that was best for the row they are of.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fedjax_het.common.errors import ConfigError
from fedjax_het.report.cell import Cell, parse_row, with_setting
from fedjax_het.report.comparison import compare
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

SEED = 1000
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


class Trials(NamedTuple):
    """What is tried for the cell at a place."""

    place: int
    name: str  # of the number
    cells: list[Cell]  # of one run each


def trials(experiment: Experiment, cells: Sequence[Cell]) -> list[Trials]:
    """Of each cell whose method is tuned. Values outside a number's range are left out."""
    found = []
    for place, cell in enumerate(cells):
        name = experiment.tuning.get(parse_row(cell.method)[0])
        if name is None or not cell.runs or cell.method in experiment.controls:
            continue
        usual = cell.runs[0].resolved().hp[name]
        tried = [_with_value(cell, name, factor * usual, (SEED,)) for factor in FACTORS]
        found.append(Trials(place, name, [each for each in tried if _is_valid(each.runs[0])]))
    return found


def tuned(
    experiment: Experiment,
    cells: Sequence[Cell],
    results: "pd.DataFrame",
    reported: "pd.DataFrame",
) -> list[Cell]:
    """The cells, each that is tuned followed by its tuned one, where all its trials are made."""
    best = {}
    for place, name, tried in trials(experiment, cells):
        table = compare(tried, results, reported)
        made = table["seeds"] + table["diverged"] == table["planned"]
        if made.all() and table["mean"].notna().any():
            value = tried[int(table["mean"].argmax())].runs[0].hp[name]
            best[place] = _for_its_seeds(cells[place], name, value)
            for other, cell in enumerate(cells):
                if experiment.controls.get(cell.method) == cells[place].method and (
                    cell.place == cells[place].place
                ):
                    best[other] = _for_its_seeds(cell, name, value)
    return [
        each
        for place, cell in enumerate(cells)
        for each in ([cell, best[place]] if place in best else [cell])
    ]


def tuning_note(experiment: Experiment, cells: Sequence[Cell], results: "pd.DataFrame") -> str:
    """The rule, and what it cost."""
    tried = trials(experiment, cells)
    runs = {run.digest() for trial in tried for cell in trial.cells for run in cell.runs}
    made = results[results["settings"].isin(runs)] if len(results) else results
    hours = made["wall_seconds"].sum() / 3600 if len(made) else 0.0
    numbers = {trial.name for trial in tried}
    values = ", ".join(f"{factor:g}" for factor in FACTORS)
    return (
        f"Rows with {' or '.join(sorted(numbers))} stated are tuned: its value times {values}, the "
        f"best of one run each by this table's measure, with seed {SEED}, which no row averages, "
        f"for each column. {len(made)} of {len(runs)} such runs are made, {hours:.1f} hours."
    )


def _for_its_seeds(cell: Cell, name: str, value: float) -> Cell:
    return _with_value(cell, name, value, tuple(run.seed for run in cell.runs))


def _with_value(cell: Cell, name: str, value: float, seeds: Sequence[int]) -> Cell:
    value = float(f"{value:.3g}")
    first = cell.runs[0]
    runs = tuple(replace(first, seed=seed, hp={**first.hp, name: value}) for seed in seeds)
    return replace(cell, method=with_setting(cell.method, name, value), runs=runs)


def _is_valid(run: RunSpec) -> bool:
    try:
        run.resolved()
    except ConfigError:
        return False
    return True
