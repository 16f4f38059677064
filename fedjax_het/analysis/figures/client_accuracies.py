"""How well each client is served: the distribution of clients' accuracies, and paired tests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.figure_style import (
    GRAYS,
    assign_method_colors,
    is_leftmost_panel,
    make_panels,
    mark_empty_panel,
)
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.metrics.personal import wilcoxon
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require, require_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINT_SPREAD = 0.3  # of the points of a method, to either side


@validate_arguments
def plot_client_accuracies(
    panels: Mapping[str, Mapping[str, np.ndarray]], *, highlight: Sequence[str] = ()
) -> "Figure":
    """Plot the distribution of the clients' accuracies: a panel per mapping, a box per method.

    A box is the middle half of the clients with the median as a line. Whiskers end at the most
    distant client within 1.5 times the box, the diamond is the mean, and each client is a point.
    Points are spread sideways evenly in the order of the clients.

    Args:
      panels: by title, the accuracies by method: fractions `[K]`, NaN for a client without a value.
        Methods keep their order.
      highlight: methods in color, the others being gray; default: all.
    """
    require(len(panels) > 0, "panels", "none", "at least one")
    max_methods = max(len(methods) for methods in panels.values())
    width = max(3.6, 1.0 + 0.42 * max_methods)
    columns = max(1, int(14 / width))
    figure, axes = make_panels(list(panels), columns=columns, size=(width, 3.6), sharey="none")
    methods_in_order = dict.fromkeys(name for methods in panels.values() for name in methods)
    highlighted_methods = [name for name in methods_in_order if name in highlight] or list(
        methods_in_order
    )
    colors = dict.fromkeys(methods_in_order, GRAYS[1]) | assign_method_colors(highlighted_methods)
    for title, methods in panels.items():
        _draw_boxes(axes[title], methods, colors)
        if is_leftmost_panel(axes[title]):
            axes[title].set_ylabel("Test accuracy of a client (%)", fontsize=10)
    return figure


def _draw_boxes(panel: "Axes", methods: Mapping[str, np.ndarray], colors: dict[str, str]) -> None:
    style_axes(panel)
    if not methods:
        return mark_empty_panel(panel, "not run")
    panel.grid(visible=False, axis="x")
    for position, (method, accuracies) in enumerate(methods.items()):
        values = 100 * np.asarray(accuracies, np.float64)
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        color = colors[method]
        panel.boxplot(
            values,
            positions=[position],
            widths=0.7,
            showfliers=False,
            showmeans=True,
            manage_ticks=False,
            medianprops={"color": color, "lw": 1.6},
            boxprops={"color": color},
            whiskerprops={"color": color},
            capprops={"color": color},
            meanprops={
                "marker": "D",
                "markersize": 4,
                "markerfacecolor": "white",
                "markeredgecolor": color,
                "zorder": 4,
            },
        )
        x = position + np.linspace(-_POINT_SPREAD, _POINT_SPREAD, len(values))
        panel.scatter(x, values, s=9, color=color, alpha=0.45, linewidth=0)
    panel.set_xticks(range(len(methods)), list(methods), rotation=45, ha="right", fontsize=9)
    panel.set_xlim(-0.6, len(methods) - 0.4)


@validate_arguments
def run_paired_tests(
    accuracies: Mapping[str, np.ndarray], methods: Sequence[str]
) -> "pd.DataFrame":
    """Run Wilcoxon's signed-rank test of each of `methods` against every other method.

    Args:
      accuracies: by method, fractions `[K]` of the same clients in the same order.
      methods: methods that are compared with the others.

    Returns:
      One row per pair: `method`, `against`, `clients`, `ties`, `mean_difference` and
      `median_difference` over clients in percentage points, and `p_value` (two-sided).
    """
    import pandas as pd

    rows = []
    for method in methods:
        require_name("methods", method, accuracies)
        for baseline, baseline_accuracies in accuracies.items():
            if baseline == method:
                continue
            test_result = wilcoxon(accuracies[method], baseline_accuracies)
            difference = np.asarray(accuracies[method]) - np.asarray(baseline_accuracies)
            rows.append(
                {
                    "method": method,
                    "against": baseline,
                    "clients": test_result.num_pairs,
                    "ties": test_result.num_ties,
                    "mean_difference": 100 * float(np.nanmean(difference)),
                    "median_difference": 100 * test_result.median_difference,
                    "p_value": test_result.p_value,
                }
            )
    return pd.DataFrame(rows)
