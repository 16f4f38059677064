"""A paper's table as curves: what was measured in every round, and what was reported."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from fedjax_het.analysis.comparison import (
    AVERAGE,
    TableCell,
    format_row,
    get_compared_metric,
    get_reported_value,
    is_personal_evaluation,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.curves import Curve, plot_curve_panels, plot_small_multiples
from fedjax_het.analysis.figures.learning_curves import SMOOTHING_WINDOW, pivot_curves_by_round
from fedjax_het.analysis.grouping import is_diverged
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.text import format_classes_per_client

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Of the learning curves: the measure, over how many rounds it is smoothed, what the table's is.
_CURVE_METRICS = {
    "final_accuracy": ("test_accuracy", SMOOTHING_WINDOW, "final"),
    "best_accuracy": ("test_accuracy", 1, "best"),
    "window_accuracy": ("test_accuracy", WINDOW, "final"),
    "bmta": ("mean_client_accuracy", 1, "best"),
}


@validate_arguments
def plot_table_curves(
    cells: Sequence[TableCell],
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    reported: "pd.DataFrame",
    *,
    highlight: Sequence[str] = (),
    separate_panels: bool = False,
    display_names: Mapping[str, str] = MappingProxyType({}),
) -> "Figure":
    """Plot the metric of a paper's table against the round.

    There is a row of panels per data set and network, and a column per alpha, number of labels or
    domain. Lines are means over seeds. If the table has means of the last rounds, lines are
    running means over as many rounds, so that a line ends at the table's value unless a run has
    fewer than twice as many rounds. A triangle at the right edge is the reported value. Diverged
    runs are left out.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      reported: as `load_reported_values` returns it.
      highlight: methods in color, the others being gray; default: all.
      separate_panels: whether each line has a small panel with the others in gray.
      display_names: names of rows in place of their settings.
    """
    metric, window, reported_kind = _CURVE_METRICS[get_compared_metric(reported)]
    has_several_models = len({cell.model for cell in cells}) > 1
    levels = {cell.level for cell in cells}

    def make_panel_title(cell: TableCell) -> str:
        title_parts = [cell.dataset, *([cell.model] if has_several_models else [])]
        if cell.level is not None:
            title_parts.append(cell.domain or _format_level(cell))
        return ", ".join(title_parts)

    settings = [parse_row(cell.method)[1] for cell in cells]
    shared_settings = {
        name: value
        for name, value in (settings[0] if cells else {}).items()
        if all(row_settings.get(name) == value for row_settings in settings)
    }
    lines = []
    for cell in cells:
        cell_results = select_cell_runs(cell, results)
        lines.append(
            Curve(
                panel=make_panel_title(cell),
                method=parse_row(cell.method)[0],
                label=display_names.get(cell.method)
                or format_row(cell.method, omit=shared_settings),
                runs=pivot_curves_by_round(cell_results, curves, _get_curve_metric(cell, metric)),
                diverged=bool(len(cell_results) and is_diverged(cell_results).any()),
                reported=get_reported_value(cell, reported)["reported_mean"],
            )
        )
    panels = list(dict.fromkeys(map(make_panel_title, cells)))
    if separate_panels:
        return plot_small_multiples(
            lines, panels, metric=metric, window=window, reported_kind=reported_kind
        )
    has_levels = levels != {None}
    return plot_curve_panels(
        lines,
        panels,
        columns=len(levels) if has_levels else len(panels),
        metric=metric,
        sharey="row" if has_levels else "none",
        window=window,
        reported_kind=reported_kind,
        highlight=highlight,
    )


def _get_curve_metric(cell: TableCell, metric: str) -> str:
    """The metric behind a cell's line; `measure` is that of a global model on all tests."""
    is_personal = is_personal_evaluation(cell)
    if cell.domain not in (None, AVERAGE):
        return f"{'client_accuracy' if is_personal else metric}_{cell.domain}"
    if is_personal:
        return _CURVE_METRICS["bmta"][0]
    return metric if cell.domain is None else f"{metric}_domains"


def _format_level(cell: TableCell) -> str:
    return (
        f"alpha = {cell.alpha:g}"
        if cell.classes is None
        else format_classes_per_client(cell.classes)
    )
