"""A paper's table as curves: what was measured in every round, and what was reported."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.doors import door
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report.cell import AVERAGE, Cell, parse_row
from fedjax_het.report.comparison import measure_of, reported_value, runs_made, scores_own_models
from fedjax_het.report.grouping import diverged
from fedjax_het.report.learning_curves import (
    SMOOTHED_ROUNDS,
    Curve,
    draw_curves,
    values_by_round,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Of the learning curves: the measure, over how many rounds it is smoothed, what the table's is.
_CURVES = {
    "final_accuracy": ("test_accuracy", SMOOTHED_ROUNDS, "final"),
    "best_accuracy": ("test_accuracy", 1, "best"),
    "window_accuracy": ("test_accuracy", WINDOW, "final"),
    "bmta": ("mean_client_accuracy", 1, "best"),
}


@door
def plot_curves(
    cells: Sequence[Cell],
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    reported: "pd.DataFrame",
) -> "Figure":
    """The measure against round: a row of panels per data set and network, a column per alpha or
    number of labels, or a panel per domain, or of a table without any a panel per data set and
    network.

    Lines are means over seeds, with a band of one standard deviation over seeds; where the table
    holds means of the last rounds, of a running mean over as many (so a line ends at the table's
    value). A dashed tick right of the last round is the reported value. Runs that diverged are
    left out; a panel without runs says so.
    """
    measure, window, kind = _CURVES[measure_of(reported)]
    several_models = len({cell.model for cell in cells}) > 1
    levels = {cell.level for cell in cells}

    def title(cell: Cell) -> str:
        place = [cell.dataset, *([cell.model] if several_models else [])]
        if cell.level is not None:
            place.append(cell.domain or _level_text(cell))
        return ", ".join(place)

    lines = []
    for cell in cells:
        made = runs_made(cell, results)
        runs = values_by_round(made, curves, _metric(cell, measure), window=window)
        lines.append(
            Curve(
                panel=title(cell),
                method=parse_row(cell.method)[0],
                label=cell.method,
                runs=runs,
                diverged=bool(len(made) and diverged(made).any()),
                reported=reported_value(cell, reported)["reported_mean"],
            )
        )
    panels = list(dict.fromkeys(map(title, cells)))
    divided = levels != {None}
    return draw_curves(
        lines,
        panels,
        columns=len(levels) if divided else len(panels),
        measure=measure,
        sharey="row" if divided else "none",
        window=window,
        reported=kind,
    )


def _metric(cell: Cell, measure: str) -> str:
    """The metric behind a cell's line; `measure` is that of a global model on all tests."""
    personal = scores_own_models(cell)
    if cell.domain not in (None, AVERAGE):
        return f"{'client_accuracy' if personal else measure}_{cell.domain}"
    if personal:
        return _CURVES["bmta"][0]
    return measure if cell.domain is None else f"{measure}_domains"


def _level_text(cell: Cell) -> str:
    return f"alpha = {cell.alpha:g}" if cell.classes is None else f"{cell.classes} classes"
