"""A paper's table as curves: what was measured in every round, and what was reported."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fedjax_het.common.doors import door
from fedjax_het.common.text import classes_text
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report.cell import AVERAGE, Cell, parse_row, row_text
from fedjax_het.report.comparison import measure_of, reported_value, runs_made, scores_own_models
from fedjax_het.report.curves import Curve, draw_curves
from fedjax_het.report.grouping import diverged
from fedjax_het.report.learning_curves import SMOOTHED_ROUNDS, values_by_round
from fedjax_het.report.small_multiples import draw_apart

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
    *,
    focus: Sequence[str] = (),
    apart: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
) -> "Figure":
    """The measure against round: a row of panels per data set and network, a column per alpha or
    number of labels, or a panel per domain, or of a table without any a panel per data set and
    network.

    Lines are means over seeds; where the table holds means of the last rounds, of a running mean
    over as many (so a line ends at the table's value, but where runs are shorter than twice that).
    A triangle at the right edge is the reported value. Runs that diverged are left out; a panel
    without runs says so.

    focus: methods whose lines are in colour, the others being grey; default: all are.
    apart: a small panel for each line, with the others behind it.
    names: what rows are called instead of their settings.
    """
    measure, window, kind = _CURVES[measure_of(reported)]
    several_models = len({cell.model for cell in cells}) > 1
    levels = {cell.level for cell in cells}

    def title(cell: Cell) -> str:
        place = [cell.dataset, *([cell.model] if several_models else [])]
        if cell.level is not None:
            place.append(cell.domain or _level_text(cell))
        return ", ".join(place)

    settings = [parse_row(cell.method)[1] for cell in cells]
    shared = {
        name: value
        for name, value in (settings[0] if cells else {}).items()
        if all(own.get(name) == value for own in settings)
    }
    lines = []
    for cell in cells:
        made = runs_made(cell, results)
        lines.append(
            Curve(
                panel=title(cell),
                method=parse_row(cell.method)[0],
                label=names.get(cell.method) or row_text(cell.method, without=shared),
                runs=values_by_round(made, curves, _metric(cell, measure)),
                diverged=bool(len(made) and diverged(made).any()),
                reported=reported_value(cell, reported)["reported_mean"],
            )
        )
    panels = list(dict.fromkeys(map(title, cells)))
    if apart:
        return draw_apart(lines, panels, measure=measure, window=window, reported=kind)
    divided = levels != {None}
    return draw_curves(
        lines,
        panels,
        columns=len(levels) if divided else len(panels),
        measure=measure,
        sharey="row" if divided else "none",
        window=window,
        reported=kind,
        focus=focus,
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
    return f"alpha = {cell.alpha:g}" if cell.classes is None else classes_text(cell.classes)
