"""Accuracy against epsilon: FedDM and FedAF with differential privacy for every example.

python experiments/fedaf/privacy.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/privacy.py --preset cpu     Fashion-MNIST, MLP: an hour

Not a table of the papers, which give no values of it. The same runs without privacy, and with more
and more noise; epsilon at delta 1e-5 is of one example of a client, over all rounds. Steps read a
class whole, and are few: noise falls with the examples that a mean is of, and epsilon grows with
the steps. The control (`image_lr=0`) sends the noise that images begin as, which spends nothing.
`privacy.png` draws what `privacy.md` lists.
"""

from typing import TYPE_CHECKING

from fedjax_het.analysis.figure_style import (
    add_legend,
    assign_method_colors,
    is_leftmost_panel,
    make_panels,
    mark_empty_panel,
)
from fedjax_het.analysis.figures.output import style_axes
from fedjax_het.analysis.grouping import get_metric_label, get_metric_values, is_diverged
from fedjax_het.papers.fedaf.settings import ALPHAS, condensing_method_settings
from fedjax_het.papers.table import Preset, TableDeclaration, make_figure_writer, make_table_program

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


NOISE_MULTIPLIERS = (2, 4, 8, 12, 24, 48)
METHODS = ("feddm", "fedaf")
GROUPING = ("dataset", "algorithm", "options.private", "hp.dp_noise", "hp.image_lr")


def make_rows() -> tuple[str, ...]:
    return tuple(
        row
        for method in METHODS
        for row in (
            f"{method}(init='noise')",
            f"{method}(init='noise', image_lr=0, steps=1)",
            *(f"{method}(init='noise', private=True, dp_noise={n})" for n in NOISE_MULTIPLIERS),
        )
    )


def make_preset(dataset: str, seeds: tuple[int, ...], **condensation_options: int) -> Preset:
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=ALPHAS[-1:] if dataset == "fashion_mnist" else (1.0,),
        seeds=seeds,
        rows=make_rows(),
        settings={"num_clients": 10 if dataset == "fashion_mnist" else 5, "rounds": 5},
        method_settings=condensing_method_settings(
            batch_size=2048,
            options={"ipc": 10, "server_epochs": 100, **condensation_options},
            hp={"image_lr": 5.0, "server_lr": 0.01},
        ),
    )


PRIVACY = TableDeclaration(
    name="fedaf-privacy",
    paper="fedaf",
    item="table1",
    title="FedDM and FedAF with differential privacy.",
    has_reported_values=False,
    presets={
        "quick": make_preset("digits", (0,), steps=20, threshold=20),
        "cpu": make_preset("fashion_mnist", (0, 1), steps=20, threshold=100),
    },
)


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


main = make_table_program(
    PRIVACY, make_figure_writer("privacy", plot_privacy, by=GROUPING, metric="best_accuracy")
)
