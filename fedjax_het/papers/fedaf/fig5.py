"""FedAF's Figure 5: the learning curves of Table 3, and (d) the gain of every IPC over FedAvg.

python experiments/fedaf/fig5.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/fig5.py --preset paper   CIFAR-10: a GPU's work

Makes the missing runs of Table 3, and FedAvg's of Table 1, in the folder that they share; `--show`
draws the available ones. `fig5.png` holds panels a to c, `fig5d.png` the gains.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.comparison import parse_row
from fedjax_het.analysis.figures.style import (
    add_legend,
    label_outer_axes,
    make_panels,
    mark_empty_panel,
    style_axes,
)
from fedjax_het.papers.fedaf.tables import TABLE3
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.utils.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FIG5 = replace(
    TABLE3,
    title="FedAF, Figure 5: learning curves by condensed images per class, and gain over FedAvg.",
    presets={
        name: replace(preset, rows=(*TABLE3.list_rows(name), "fedavg"))
        for name, preset in TABLE3.presets.items()
    },
)


def _write_figures(table_run: TableRun) -> list[str]:
    fedavg_values = load_reported_values("fedaf", "table1").query("method == 'fedavg'")
    reported = pd.concat([table_run.reported, fedavg_values])
    data, names = (table_run.cells, table_run.results), FIG5.row_display_names
    curves = analysis.plot_table_curves(*data, table_run.curves, reported, display_names=names)
    table = analysis.compare_with_reported(*data, reported)
    gains = plot_accuracy_gain(table, baseline="fedavg")
    return table_run.write_figures({"fig5.png": curves, "fig5d.png": gains})


def plot_accuracy_gain(table: pd.DataFrame, *, baseline: str) -> "Figure":
    """Plot the accuracy of a method's variants minus a baseline's accuracy, against a setting.

    Measured gains are solid lines, reported ones dashed. Lines go from dark to light by alpha.

    Args:
      table: comparison, as `compare_with_reported` returns it. The first variant with one setting
        determines the setting; rows of others, for example controls, are left out.
      baseline: row of the baseline.

    Returns:
      A figure with a panel per data set and network, and a line per alpha.

    Raises:
      ConfigError: if the table has no row of the baseline or no variant.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    settings = {row: parse_row(row)[1] for row in dict.fromkeys(table["method"])}
    single = [row for row, own in settings.items() if row != baseline and len(own) == 1]
    expected = f"{baseline!r} and at least one variant of another method"
    require(baseline in settings and len(single) > 0, "methods", [*settings], expected)
    (setting,) = settings[single[0]]
    groups = table.groupby(["dataset", "model"], sort=False)
    titles = [f"{dataset}, {model}" for (dataset, model), _ in groups]
    figure, panels = make_panels(titles, columns=len(titles), size=(4.6, 3.2), sharey="none")
    alphas = sorted(table["alpha"].unique())
    shades = [0.8 * n / max(1, len(alphas) - 1) for n in range(len(alphas))]
    colors = dict(zip(alphas, colormaps["viridis"](shades), strict=True))
    label_outer_axes(panels.values(), y=f"Gain over {baseline} (points)")
    has_reported = False
    for (_, rows), panel in zip(groups, panels.values(), strict=True):
        for alpha, color in colors.items():
            accuracies = rows[rows["alpha"] == alpha].set_index("method")
            variants = [n for n in accuracies.index if n in single and setting in settings[n]]
            x = [settings[row][setting] for row in variants]
            for column, line_style in (("mean", "-"), ("reported_mean", "--")):
                gain = accuracies.loc[variants, column] - accuracies[column].get(baseline)
                if gain.notna().any():
                    has_reported |= line_style == "--"
                    panel.plot(x, gain, color=color, linestyle=line_style, marker="o", ms=4)
        style_axes(panel)
        if not panel.lines:
            mark_empty_panel(panel, "not run")
            panel.set_ylabel("")
            continue
        panel.set_xticks(x)
        panel.set_xlabel(setting, fontsize=10)
        panel.axhline(0, color="#444444", lw=0.8)
    handles = [
        Line2D([], [], color=color, lw=2, label=f"alpha = {alpha:g}")
        for alpha, color in colors.items()
    ]
    if has_reported:
        handles.append(Line2D([], [], color="#444444", linestyle="--", label="reported"))
    add_legend(figure, handles)
    return figure


main = make_table_program(FIG5, _write_figures)
