"""What a setting of a method gains over another method (FedAF's Figure 5d)."""

from typing import TYPE_CHECKING

from fedjax_het.common.errors import require
from fedjax_het.common.pictures import plain_axes
from fedjax_het.report.cell import parse_row
from fedjax_het.report.style import add_legend, empty_panel, is_leftmost, make_panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def plot_gain(table: "pd.DataFrame", *, base: str) -> "Figure":
    """Mean accuracy of a method's variants minus that of row `base`, against the one setting in
    which they differ: a panel per data set and network, a line per alpha, from dark to light.

    table: as `compare` gives it; the first variant with one setting says which, and rows of others
    (controls) are left out. Measured gains are solid, reported ones dashed. ConfigError without
    that row or without a variant.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    rows = list(dict.fromkeys(table["method"]))
    expected = f"{base!r} and at least one variant of another method"
    require(base in rows and len(rows) > 1, "methods", rows, expected)
    places = list(dict.fromkeys(zip(table["dataset"], table["model"], strict=True)))
    figure, panels = make_panels(
        [f"{dataset}, {model}" for dataset, model in places],
        columns=len(places),
        size=(4.6, 3.2),
        sharey="none",
    )
    alphas = sorted(table["alpha"].unique())
    shades = colormaps["viridis"]([0.8 * n / max(1, len(alphas) - 1) for n in range(len(alphas))])
    reported = False
    for (dataset, model), panel in zip(places, panels.values(), strict=True):
        own = table[(table["dataset"] == dataset) & (table["model"] == model)]
        for alpha, shade in zip(alphas, shades, strict=True):
            at = own[own["alpha"] == alpha].set_index("method")
            settings = {row: parse_row(row)[1] for row in at.index if row != base}
            setting = next(next(iter(own)) for own in settings.values() if len(own) == 1)
            # Rows of other settings, controls among them, are no point of this line.
            variants = at.loc[[row for row, own in settings.items() if [*own] == [setting]]]
            x = [settings[row][setting] for row in variants.index]
            for column, line in (("mean", "-"), ("reported_mean", "--")):
                gain = variants[column] - at[column].get(base)
                if gain.notna().any():
                    reported |= line == "--"
                    label = f"alpha = {alpha:g}" if line == "-" else f"_{alpha:g}"
                    panel.plot(x, gain, color=shade, linestyle=line, marker="o", ms=4, label=label)
        plain_axes(panel)
        if not panel.lines:
            empty_panel(panel, "not run")
            continue
        panel.set_xticks(x)
        panel.set_xlabel(setting, fontsize=10)
        panel.axhline(0, color="#444444", lw=0.8, label="_zero")
        if is_leftmost(panel):
            panel.set_ylabel(f"Gain over {base} (points)", fontsize=10)
    handles = [
        Line2D([], [], color=shade, lw=2, label=f"alpha = {alpha:g}")
        for alpha, shade in zip(alphas, shades, strict=True)
    ]
    if reported:
        handles.append(Line2D([], [], color="#444444", linestyle="--", label="reported"))
    add_legend(figure, handles)
    return figure
