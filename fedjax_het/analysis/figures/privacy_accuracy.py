"""What differential privacy costs: accuracy against epsilon."""

from typing import TYPE_CHECKING

from fedjax_het.analysis.figure_style import (
    add_legend,
    assign_method_colors,
    is_leftmost_panel,
    make_panels,
    mark_empty_panel,
)
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.grouping import is_diverged
from fedjax_het.analysis.result_metrics import get_metric_label, get_metric_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MEASURE = "best_accuracy"


def plot_privacy(results: "pd.DataFrame", curves: "pd.DataFrame") -> "Figure":
    """A panel for each data set: the best round's accuracy against epsilon, of the runs whose
    summary has one, a line for each method with the range over seeds; across the panel, the same
    without privacy (dashed), and of images that stay what they begin as (`image_lr` 0; dotted). A
    run of which epsilon is not finite has none."""
    good = results[~is_diverged(results)]
    datasets = list(dict.fromkeys(good["dataset"]))
    figure, panels = make_panels(datasets, columns=len(datasets), size=(4.8, 3.4), sharey="none")
    colours = assign_method_colors(good["algorithm"])
    for dataset, panel in panels.items():
        style_axes(panel)
        own = good[good["dataset"] == dataset]
        if "epsilon" not in own or own["epsilon"].isna().all():
            mark_empty_panel(panel, "no private run")
            continue
        for method, runs in own.groupby("algorithm", sort=False):
            accuracy, colour = get_metric_values(runs, _MEASURE), colours[method]
            private = runs["epsilon"].notna()
            at = accuracy[private].groupby(runs["epsilon"][private]).agg(["mean", "min", "max"])
            panel.plot(at.index, at["mean"], color=colour, marker="o", ms=4, label=method)
            panel.fill_between(at.index, at["min"], at["max"], color=colour, alpha=0.15, lw=0)
            still = runs["hp.image_lr"] == 0 if "hp.image_lr" in runs else ~private & False
            for shown, style in ((~private & ~still, "--"), (still, ":")):
                if shown.any():
                    panel.axhline(accuracy[shown].mean(), color=colour, ls=style, lw=1)
        panel.set_xscale("log")
        panel.set_xlabel("epsilon", fontsize=10)
        if is_leftmost_panel(panel):
            panel.set_ylabel(get_metric_label(_MEASURE), fontsize=10)
    lines = next(iter(panels.values())).lines
    add_legend(figure, [line for line in lines if line.get_marker() == "o"])
    return figure
