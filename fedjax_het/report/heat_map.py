"""One measure over two settings, as colours and numbers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.common.text import DIVERGED, MISSING, figure_text
from fedjax_het.report.grouping import (
    chosen_settings,
    describe_settings,
    group_runs,
    is_numeric,
    setting_columns,
    setting_name,
    setting_text,
    varying_settings,
)
from fedjax_het.report.measures import measure_label, require_measure, scale_of
from fedjax_het.report.overview import summarise_runs
from fedjax_het.report.render import number_form, number_text
from fedjax_het.report.style import is_leftmost, is_lowest, make_panels
from fedjax_het.running.store import newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTHING = "#EEEEEE"


@door
def plot_heat_map(
    results: "pd.DataFrame",
    *,
    x: str,
    y: str,
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
) -> "Figure":
    """Means over seeds over two settings, a panel per method (and other setting that varies).

    Each cell has its value; `†` where runs diverged and are not in it, a dash where none was made.
    All panels share one scale of colours. A method that does not have both settings has no panel.

    Args:
      results: as `load_results` gives it.
      x, y: names of settings, e.g. "alpha" and "hp.local_lr".
      by: names of settings that have panels; default: those that vary, apart from the seeds.
      measure: a column of `results` that holds numbers.
    Errors:
      ConfigError for a setting or measure that these runs do not have.
    """
    results = newest(results)
    for argument, name in (("x", x), ("y", y)):
        require_name(argument, name, setting_columns(results))
    require(x != y, "y", y, "another setting than x")
    others = [name for name in chosen_settings(results, by) if name not in (x, y)]
    require_measure(results, measure)
    results = results[results[x].notna() & results[y].notna()]
    if not len(results):
        raise ConfigError(f"x = {x!r}, y = {y!r}: expected runs that have both settings")
    summary = summarise_runs(results, by=[*others, x, y], measure=measure)
    xs = [settings[x] for settings, _ in group_runs(summary, [x])]
    ys = [settings[y] for settings, _ in group_runs(summary, [y])]
    if not is_numeric(summary[y]):
        ys.reverse()  # texts from top to bottom, numbers from bottom to top
    groups = {describe_settings(keys): rows for keys, rows in group_runs(summary, others)}
    known = summary["mean"].dropna()
    form = ".1f" if scale_of(measure) == 100 else number_form(known)
    limits = (known.min(), known.max()) if len(known) else (0.0, 1.0)

    longest = max([5, *(len(number_text(value, form)) + 2 for value in known)])
    size = (1.0 + max(0.085 * longest * len(xs), 1.6), 0.8 + max(0.34 * len(ys), 1.1))
    fit = max(1, int(14 / size[0]))
    innermost = len(group_runs(summary, others[-1:]))
    whole_rows = 1 < innermost <= fit and len(groups) % innermost == 0
    columns = innermost if whole_rows else -(-len(groups) // -(-len(groups) // fit))
    figure, panels = make_panels(list(groups), columns=columns, size=size, sharey="none")
    width, height = figure.get_size_inches()
    label = measure_label(measure)
    figure.set_size_inches(width + 1.0, max(height, 0.6 + 0.085 * len(label)))
    for title, panel in panels.items():
        image = _draw(panel, groups[title], (x, xs), (y, ys), limits, form)
        if is_leftmost(panel):
            panel.set_ylabel(figure_text(setting_name(y)), fontsize=10)
        if is_lowest(panel, panels.values()):
            panel.set_xlabel(figure_text(setting_name(x)), fontsize=10)
    bar = figure.colorbar(image, ax=list(panels.values()), label=label)
    bar.outline.set_visible(False)
    return figure


def numeric_pair(results: "pd.DataFrame", by: Sequence[str] | None = None) -> list[str]:
    """The first two numeric settings of `by` that vary together within a method, alpha first.

    Empty where there are none: then a heat map has nothing to show.
    """
    names = [
        name
        for name in chosen_settings(results, by)
        if name in varying_settings(results) and is_numeric(results[name])
    ]
    names.sort(key=lambda name: name != "alpha")
    methods = [runs for _, runs in group_runs(results, ["algorithm"])]
    for place, x in enumerate(names):
        for y in names[place + 1 :]:
            for runs in methods:
                both = runs[runs[x].notna() & runs[y].notna()]
                if both[x].nunique() > 1 and both[y].nunique() > 1:
                    return [x, y]
    return []


def _draw(
    panel: "Axes",
    rows: "pd.DataFrame",
    x: tuple[str, list],
    y: tuple[str, list],
    limits: tuple[float, float],
    form: str,
):
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    values = np.full((len(y[1]), len(x[1])), math.nan)
    texts = np.full(values.shape, MISSING, dtype=object)
    for row in rows.to_dict("records"):
        place = y[1].index(row[y[0]]), x[1].index(row[x[0]])
        values[place] = row["mean"]
        mark = f" {DIVERGED}" if row["diverged"] else ""
        texts[place] = (
            DIVERGED
            if math.isnan(row["mean"]) and mark
            else (number_text(row["mean"], form) + mark)
        )
    colours = colormaps["cividis"].with_extremes(bad=_NOTHING)
    scale = Normalize(*limits)
    image = panel.imshow(values, cmap=colours, norm=scale, aspect="auto", origin="lower")
    for (row, column), text in np.ndenumerate(texts):
        value = values[row, column]
        dark = not math.isnan(value) and scale(value) < 0.5
        panel.text(
            column,
            row,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color="white" if dark else "black",
        )
    panel.set_xticks(range(len(x[1])), [figure_text(setting_text(value)) for value in x[1]])
    panel.set_yticks(range(len(y[1])), [figure_text(setting_text(value)) for value in y[1]])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image
