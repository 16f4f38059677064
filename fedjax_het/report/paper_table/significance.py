"""Whether a table's rows differ from the one that the paper is about: paired tests of runs."""

import math
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.measures.personal import wilcoxon
from fedjax_het.report.cell import Cell, parse_row
from fedjax_het.report.comparison import measure_of, scores_own_models
from fedjax_het.report.grouping import diverged
from fedjax_het.report.paper_table.outcome import Outcome

if TYPE_CHECKING:
    import pandas as pd

BLOCKS = 10
_BLOCKS = (
    f"paired by seed and by tenth of the second half of the rounds ({BLOCKS} a run). Those of one "
    "run are not independent, so that p is rather too small"
)
_CLIENTS = "paired by client, in the round of each run's best mean"


def p_values(outcome: Outcome) -> "pd.Series":
    """Of each of the outcome's cells: Wilcoxon's p, two-sided, of its difference from the cell of
    the same place whose row is about the experiment's `focus`; NaN where there is none to test.

    Tables of clients' best mean accuracy compare the same clients, others stretches of the runs'
    curves. Only runs that both have made, and neither lost, count.
    """
    import pandas as pd

    values = [_values(outcome, cell) for cell in outcome.cells]
    focus: dict[tuple, int] = {}
    for place, cell in enumerate(outcome.cells):
        if _is_about(outcome, cell):
            focus.setdefault(cell.place, place)
    found = []
    for place, cell in enumerate(outcome.cells):
        other = focus.get(cell.place)
        found.append(math.nan if other in (None, place) else _p(values[place], values[other]))
    return pd.Series(found, dtype=float)


def significance_note(outcome: Outcome) -> str:
    """What the column of p-values is."""
    how = _CLIENTS if _is_of_clients(outcome) else _BLOCKS
    row = next(cell.method for cell in outcome.cells if _is_about(outcome, cell))
    return f"p: Wilcoxon's signed-rank test, two-sided, of the difference from {row}, {how}."


def _is_about(outcome: Outcome, cell: Cell) -> bool:
    return bool(outcome.experiment.focus) and parse_row(cell.method)[0] == outcome.experiment.focus


def _is_of_clients(outcome: Outcome) -> bool:
    return measure_of(outcome.reported) == "bmta"


def _p(here: dict[int, np.ndarray], there: dict[int, np.ndarray]) -> float:
    seeds = [seed for seed in here if seed in there and len(here[seed]) == len(there[seed])]
    if not seeds:
        return math.nan
    own, other = (np.concatenate([values[seed] for seed in seeds]) for values in (here, there))
    return wilcoxon(own, other).p_value


def _values(outcome: Outcome, cell: Cell) -> dict[int, np.ndarray]:
    """By seed, what is paired of a cell's runs."""
    if not len(outcome.results):
        return {}
    of_clients = _is_of_clients(outcome)
    good = outcome.results[~diverged(outcome.results)]
    rows = good.drop_duplicates("settings").set_index("settings")
    found = {}
    for run in cell.runs:
        if run.digest() not in rows.index:
            continue
        name = rows.loc[run.digest(), "digest"]
        values = outcome.client_accuracies(run) if of_clients else _of_blocks(outcome, cell, name)
        if values is not None and np.isfinite(values).all():
            found[run.seed] = values
    return found


def _of_blocks(outcome: Outcome, cell: Cell, name: str) -> np.ndarray | None:
    """The means of `BLOCKS` stretches of the second half of a run's measured rounds."""
    metric = "mean_client_accuracy" if scores_own_models(cell) else "test_accuracy"
    own = outcome.curves[outcome.curves["digest"] == name].sort_values("round")
    curve = own[metric].dropna().to_numpy(float) if metric in own else np.zeros(0)
    half = curve[len(curve) // 2 :]
    blocks = np.array_split(half, min(BLOCKS, len(half)))
    return np.array([block.mean() for block in blocks]) if len(half) else None
