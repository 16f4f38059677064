"""How well each client is served: the distribution of clients' accuracies, and paired tests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.pictures import plain_axes
from fedjax_het.measures.personal import wilcoxon
from fedjax_het.report.style import (
    GREYS,
    empty_panel,
    is_leftmost,
    make_panels,
    method_colours,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPREAD = 0.3  # of the points of a method, to either side


@door
def plot_client_accuracies(
    panels: Mapping[str, Mapping[str, np.ndarray]], *, focus: Sequence[str] = ()
) -> "Figure":
    """A panel for each mapping of methods to accuracies [K], shares: a box and a point per client.

    Methods stand in the order given. Boxes hold the middle half of the clients with the median as a
    line, whiskers go to the most distant client within 1.5 times their height, diamonds are means.
    NaN is what was not measured. Points are spread sideways evenly, in the order of the clients.
    focus: methods that are in colour, the others being grey; default: all are.
    """
    require(len(panels) > 0, "panels", "none", "at least one")
    most = max(len(methods) for methods in panels.values())
    width = max(3.6, 1.0 + 0.42 * most)
    columns = max(1, int(14 / width))
    figure, axes = make_panels(list(panels), columns=columns, size=(width, 3.6), sharey="none")
    named = dict.fromkeys(name for methods in panels.values() for name in methods)
    shown = [name for name in named if name in focus] or list(named)
    colours = dict.fromkeys(named, GREYS[1]) | method_colours(shown)
    for title, methods in panels.items():
        _draw(axes[title], methods, colours)
        if is_leftmost(axes[title]):
            axes[title].set_ylabel("Test accuracy of a client (%)", fontsize=10)
    return figure


def _draw(panel: "Axes", methods: Mapping[str, np.ndarray], colours: dict[str, str]) -> None:
    plain_axes(panel)
    if not methods:
        return empty_panel(panel, "not run")
    panel.grid(visible=False, axis="x")
    for place, (method, accuracies) in enumerate(methods.items()):
        values = 100 * np.asarray(accuracies, np.float64)
        values = values[~np.isnan(values)]
        if not len(values):
            continue
        colour = colours[method]
        panel.boxplot(
            values,
            positions=[place],
            widths=0.7,
            showfliers=False,
            showmeans=True,
            manage_ticks=False,
            medianprops={"color": colour, "lw": 1.6},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
            meanprops={
                "marker": "D",
                "markersize": 4,
                "markerfacecolor": "white",
                "markeredgecolor": colour,
                "zorder": 4,
            },
        )
        x = place + np.linspace(-_SPREAD, _SPREAD, len(values))
        panel.scatter(x, values, s=9, color=colour, alpha=0.45, linewidth=0)
    panel.set_xticks(range(len(methods)), list(methods), rotation=45, ha="right", fontsize=9)
    panel.set_xlim(-0.6, len(methods) - 0.4)


@door
def paired_tests(accuracies: Mapping[str, np.ndarray], methods: Sequence[str]) -> "pd.DataFrame":
    """Wilcoxon's signed-rank test of each of `methods` against every other method.

    accuracies: by method [K], shares, of the same clients in the same order.
    Returns one row per pair: `method`, `against`, `clients`, `ties`, `mean_difference` and
    `median_difference` over clients in points, `p_value` (two-sided, see `personal.wilcoxon`).
    """
    import pandas as pd

    rows = []
    for method in methods:
        require_name("methods", method, accuracies)
        for against, theirs in accuracies.items():
            if against == method:
                continue
            test = wilcoxon(accuracies[method], theirs)
            difference = np.asarray(accuracies[method]) - np.asarray(theirs)
            rows.append(
                {
                    "method": method,
                    "against": against,
                    "clients": test.num_pairs,
                    "ties": test.num_ties,
                    "mean_difference": 100 * float(np.nanmean(difference)),
                    "median_difference": 100 * test.median_difference,
                    "p_value": test.p_value,
                }
            )
    return pd.DataFrame(rows)
