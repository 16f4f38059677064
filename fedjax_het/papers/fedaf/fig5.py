"""FedAF's Figure 5: the learning curves of Table 3, and (d) what every IPC gains over FedAvg.

python experiments/fedaf/fig5.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/fig5.py --preset paper   CIFAR-10: a GPU's work

Makes the runs of Table 3 and FedAvg's of Table 1 that are missing, in the folder that they share;
`--show` draws those that are there. `fig5.png` holds panels a to c, `fig5d.png` the gains.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from fedjax_het import analysis
from fedjax_het.analysis.comparison import parse_row
from fedjax_het.analysis.figure_style import (
    add_legend,
    is_leftmost_panel,
    make_panels,
    mark_empty_panel,
)
from fedjax_het.analysis.figures.output import style_axes, write_figure
from fedjax_het.papers.fedaf.table3 import TABLE3
from fedjax_het.papers.reported import load_reported_values
from fedjax_het.papers.table import TableRun, make_table_program
from fedjax_het.utils.errors import require

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


FIG5 = replace(
    TABLE3,
    title="FedAF, Figure 5: learning curves by condensed images per class, and gain over FedAvg.",
    presets={
        name: replace(preset, rows=(*TABLE3.list_rows(name), "fedavg"))
        for name, preset in TABLE3.presets.items()
    },
)


def write_figures(table_run: TableRun) -> list[str]:
    fedavg_values = load_reported_values("fedaf", "table1").query("method == 'fedavg'")
    reported = pd.concat([table_run.reported, fedavg_values])
    table = analysis.compare_with_reported(table_run.cells, table_run.results, reported)
    figures = {
        "fig5.png": analysis.plot_table_curves(
            table_run.cells,
            table_run.results,
            table_run.curves,
            reported,
            display_names=FIG5.row_display_names,
        ),
        "fig5d.png": plot_accuracy_gain(table, baseline="fedavg"),
    }
    for name, figure in figures.items():
        write_figure(table_run.directory / name, figure)
    return list(figures)


def plot_accuracy_gain(table: "pd.DataFrame", *, baseline: str) -> "Figure":
    """Mean accuracy of a method's variants minus that of row `base`, against the one setting in
    which they differ: a panel per data set and network, a line per alpha, from dark to light.

    table: as `compare` gives it; the first variant with one setting says which, and rows of others
    (controls) are left out. Measured gains are solid, reported ones dashed. ConfigError without
    that row or without a variant.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    rows = list(dict.fromkeys(table["method"]))
    expected = f"{baseline!r} and at least one variant of another method"
    require(baseline in rows and len(rows) > 1, "methods", rows, expected)
    dataset_models = list(dict.fromkeys(zip(table["dataset"], table["model"], strict=True)))
    figure, panels = make_panels(
        [f"{dataset}, {model}" for dataset, model in dataset_models],
        columns=len(dataset_models),
        size=(4.6, 3.2),
        sharey="none",
    )
    alphas = sorted(table["alpha"].unique())
    alpha_colors = colormaps["viridis"](
        [0.8 * n / max(1, len(alphas) - 1) for n in range(len(alphas))]
    )
    has_reported = False
    for (dataset, model), panel in zip(dataset_models, panels.values(), strict=True):
        panel_rows = table[(table["dataset"] == dataset) & (table["model"] == model)]
        for alpha, color in zip(alphas, alpha_colors, strict=True):
            rows_at_alpha = panel_rows[panel_rows["alpha"] == alpha].set_index("method")
            settings = {row: parse_row(row)[1] for row in rows_at_alpha.index if row != baseline}
            setting = next(
                next(iter(row_settings))
                for row_settings in settings.values()
                if len(row_settings) == 1
            )
            # Rows of other settings, controls among them, are no point of this line.
            variants = rows_at_alpha.loc[
                [row for row, row_settings in settings.items() if [*row_settings] == [setting]]
            ]
            x = [settings[row][setting] for row in variants.index]
            for column, line_style in (("mean", "-"), ("reported_mean", "--")):
                gain = variants[column] - rows_at_alpha[column].get(baseline)
                if gain.notna().any():
                    has_reported |= line_style == "--"
                    label = f"alpha = {alpha:g}" if line_style == "-" else f"_{alpha:g}"
                    panel.plot(
                        x, gain, color=color, linestyle=line_style, marker="o", ms=4, label=label
                    )
        style_axes(panel)
        if not panel.lines:
            mark_empty_panel(panel, "not run")
            continue
        panel.set_xticks(x)
        panel.set_xlabel(setting, fontsize=10)
        panel.axhline(0, color="#444444", lw=0.8, label="_zero")
        if is_leftmost_panel(panel):
            panel.set_ylabel(f"Gain over {baseline} (points)", fontsize=10)
    handles = [
        Line2D([], [], color=shade, lw=2, label=f"alpha = {alpha:g}")
        for alpha, shade in zip(alphas, alpha_colors, strict=True)
    ]
    if has_reported:
        handles.append(Line2D([], [], color="#444444", linestyle="--", label="reported"))
    add_legend(figure, handles)
    return figure


main = make_table_program(FIG5, write_figures)
