"""One measure over two settings, as colours and numbers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.figure_style import is_bottom_panel, is_leftmost_panel, make_panels
from fedjax_het.analysis.grouping import (
    describe_settings,
    find_varying_settings,
    format_setting_name,
    format_setting_value,
    get_display_scale,
    get_metric_label,
    group_runs,
    is_numeric,
    list_setting_columns,
    require_result_metric,
    resolve_group_settings,
)
from fedjax_het.analysis.overview import summarize_runs
from fedjax_het.analysis.render import choose_number_format, format_number
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.text import DIVERGED, MISSING, escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MISSING_COLOR = "#EEEEEE"


@validate_arguments
def plot_heat_map(
    results: "pd.DataFrame",
    *,
    x: str,
    y: str,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
) -> "Figure":
    """Plot means over seeds against two settings, a panel per method and other varying setting.

    Each cell shows its value, `†` if runs diverged and are left out, or a dash if there is no run.
    All panels share one color scale. A method without both settings has no panel.

    Args:
      results: as `load_results` returns it.
      x: setting on the horizontal axis, for example "alpha".
      y: setting on the vertical axis, for example "hp.local_lr".
      by: settings with panels; default: all that vary, except seeds.
      metric: a numeric column of `results`.

    Raises:
      ConfigError: if the runs do not have a setting or the metric.
    """
    results = select_newest(results)
    for argument, name in (("x", x), ("y", y)):
        require_name(argument, name, list_setting_columns(results))
    require(x != y, "y", y, "another setting than x")
    panel_settings = [name for name in resolve_group_settings(results, by) if name not in (x, y)]
    require_result_metric(results, metric)
    results = results[results[x].notna() & results[y].notna()]
    if not len(results):
        raise ConfigError(f"x = {x!r}, y = {y!r}: expected runs that have both settings")
    summary = summarize_runs(results, by=[*panel_settings, x, y], metric=metric)
    xs = [settings[x] for settings, _ in group_runs(summary, [x])]
    ys = [settings[y] for settings, _ in group_runs(summary, [y])]
    if not is_numeric(summary[y]):
        ys.reverse()  # texts from top to bottom, numbers from bottom to top
    groups = {describe_settings(keys): rows for keys, rows in group_runs(summary, panel_settings)}
    known_means = summary["mean"].dropna()
    format_spec = ".1f" if get_display_scale(metric) == 100 else choose_number_format(known_means)
    limits = (known_means.min(), known_means.max()) if len(known_means) else (0.0, 1.0)

    longest = max([5, *(len(format_number(value, format_spec)) + 2 for value in known_means)])
    size = (1.0 + max(0.085 * longest * len(xs), 1.6), 0.8 + max(0.34 * len(ys), 1.1))
    max_columns = max(1, int(14 / size[0]))
    num_innermost_panels = len(group_runs(summary, panel_settings[-1:]))
    has_whole_rows = (
        1 < num_innermost_panels <= max_columns and len(groups) % num_innermost_panels == 0
    )
    columns = (
        num_innermost_panels
        if has_whole_rows
        else -(-len(groups) // -(-len(groups) // max_columns))
    )
    figure, panels = make_panels(list(groups), columns=columns, size=size, sharey="none")
    width, height = figure.get_size_inches()
    label = get_metric_label(metric)
    figure.set_size_inches(width + 1.0, max(height, 0.6 + 0.085 * len(label)))
    for title, panel in panels.items():
        image = _draw_panel(panel, groups[title], (x, xs), (y, ys), limits, format_spec)
        if is_leftmost_panel(panel):
            panel.set_ylabel(escape_mathtext(format_setting_name(y)), fontsize=10)
        if is_bottom_panel(panel, panels.values()):
            panel.set_xlabel(escape_mathtext(format_setting_name(x)), fontsize=10)
    color_bar = figure.colorbar(image, ax=list(panels.values()), label=label)
    color_bar.outline.set_visible(False)
    return figure


def find_numeric_pair(results: "pd.DataFrame", by: Sequence[str] | None = None) -> list[str]:
    """The first two numeric settings of `by` that vary together within a method, alpha first.

    Empty where there are none: then a heat map has nothing to show.
    """
    names = [
        name
        for name in resolve_group_settings(results, by)
        if name in find_varying_settings(results) and is_numeric(results[name])
    ]
    names.sort(key=lambda name: name != "alpha")
    methods = [runs for _, runs in group_runs(results, ["algorithm"])]
    for index, x in enumerate(names):
        for y in names[index + 1 :]:
            for runs in methods:
                runs_with_both = runs[runs[x].notna() & runs[y].notna()]
                if runs_with_both[x].nunique() > 1 and runs_with_both[y].nunique() > 1:
                    return [x, y]
    return []


def _draw_panel(
    panel: "Axes",
    rows: "pd.DataFrame",
    x: tuple[str, list],
    y: tuple[str, list],
    limits: tuple[float, float],
    format_spec: str,
):
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    values = np.full((len(y[1]), len(x[1])), math.nan)
    texts = np.full(values.shape, MISSING, dtype=object)
    for row in rows.to_dict("records"):
        cell_index = y[1].index(row[y[0]]), x[1].index(row[x[0]])
        values[cell_index] = row["mean"]
        mark = f" {DIVERGED}" if row["diverged"] else ""
        texts[cell_index] = (
            DIVERGED
            if math.isnan(row["mean"]) and mark
            else (format_number(row["mean"], format_spec) + mark)
        )
    color_map = colormaps["cividis"].with_extremes(bad=_MISSING_COLOR)
    normalize = Normalize(*limits)
    image = panel.imshow(values, cmap=color_map, norm=normalize, aspect="auto", origin="lower")
    for (row, column), text in np.ndenumerate(texts):
        value = values[row, column]
        dark = not math.isnan(value) and normalize(value) < 0.5
        panel.text(
            column,
            row,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color="white" if dark else "black",
        )
    panel.set_xticks(
        range(len(x[1])), [escape_mathtext(format_setting_value(value)) for value in x[1]]
    )
    panel.set_yticks(
        range(len(y[1])), [escape_mathtext(format_setting_value(value)) for value in y[1]]
    )
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image
