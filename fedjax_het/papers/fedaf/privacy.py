"""Accuracy against epsilon: FedDM and FedAF with differential privacy for every example.

python experiments/fedaf/privacy.py                  the embedded digits, minutes on 2 cores
python experiments/fedaf/privacy.py --preset cpu     Fashion-MNIST, MLP: an hour

The papers have no values for this table. Runs are made without privacy and with increasing noise.
epsilon at delta 1e-5 is the privacy loss of one example of a client over all rounds. Noise falls
with the number of examples in a mean, and epsilon grows with the steps. Clients therefore take few
steps and read all examples of a class in each. The control (`image_lr=0`) sends the initial noise
images, which spends nothing. `privacy.png` shows the values of `privacy.md`.
"""

from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.figures.style import (
    add_legend,
    assign_method_colors,
    label_outer_axes,
    make_panels,
    mark_empty_panel,
    style_axes,
)
from fedjax_het.analysis.overview import get_metric_label, get_metric_values, is_diverged
from fedjax_het.papers.fedaf.settings import ALPHAS, condensing_method_settings
from fedjax_het.papers.table import Preset, TableDeclaration, make_figure_writer, make_table_program

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


NOISE_MULTIPLIERS = (2, 4, 8, 12, 24, 48)
METHODS = ("feddm", "fedaf")
GROUPING = ("dataset", "algorithm", "options.private", "hp.dp_noise", "hp.image_lr")


ROWS = tuple(
    row
    for method in METHODS
    for row in (
        f"{method}(init='noise')",
        f"{method}(init='noise', image_lr=0, steps=1)",
        *(f"{method}(init='noise', private=True, dp_noise={n})" for n in NOISE_MULTIPLIERS),
    )
)


def make_preset(dataset: str, seeds: tuple[int, ...], **condensation_options: int) -> Preset:
    """Make a preset of Fashion-MNIST or the digits.

    Args:
      dataset: name of the data set.
      seeds: seeds of the runs.
      **condensation_options: options of the methods.

    Returns:
      The preset.
    """
    is_large = dataset == "fashion_mnist"
    return Preset(
        datasets=(dataset,),
        models=("mlp",),
        alphas=ALPHAS[-1:] if is_large else (1.0,),
        seeds=seeds,
        rows=ROWS,
        settings={"num_clients": 10 if is_large else 5, "rounds": 5},
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


_METRIC = "best_accuracy"


def plot_privacy(results: "pd.DataFrame", curves: "pd.DataFrame") -> "Figure":
    """Plot the best round's accuracy against epsilon, a panel per data set.

    A line is the mean over seeds of a method, with their range. Lines across the panel are runs
    without privacy (dashed), and with images that stay as initialized (`image_lr` 0; dotted). A run
    whose epsilon is not finite has none in its summary.

    Args:
      results: as `load_results` returns it.
      curves: not used.

    Returns:
      The figure.
    """
    converged = results[~is_diverged(results)]
    datasets = list(dict.fromkeys(converged["dataset"]))
    figure, panels = make_panels(datasets, columns=len(datasets), size=(4.8, 3.4), sharey="none")
    colors = assign_method_colors(converged["algorithm"])
    label_outer_axes(panels.values(), y=get_metric_label(_METRIC))
    for dataset, panel in panels.items():
        style_axes(panel)
        own = converged[converged["dataset"] == dataset]
        if "epsilon" not in own or own["epsilon"].isna().all():
            mark_empty_panel(panel, "no private run")
            panel.set_ylabel("")
            continue
        for method, runs in own.groupby("algorithm", sort=False):
            accuracy, color = get_metric_values(runs, _METRIC), colors[method]
            is_private = runs["epsilon"].notna()
            epsilons = runs["epsilon"][is_private]
            values = accuracy[is_private].groupby(epsilons).agg(["mean", "min", "max"])
            panel.plot(values.index, values["mean"], color=color, marker="o", ms=4, label=method)
            band: Any = {"color": color, "alpha": 0.15, "lw": 0}
            panel.fill_between(values.index, values["min"], values["max"], **band)
            is_fixed = runs["hp.image_lr"] == 0 if "hp.image_lr" in runs else ~is_private & False
            for is_shown, style in ((~is_private & ~is_fixed, "--"), (is_fixed, ":")):
                if is_shown.any():
                    panel.axhline(accuracy[is_shown].mean(), color=color, ls=style, lw=1)
        panel.set_xscale("log")
        panel.set_xlabel("epsilon", fontsize=10)
    lines = next(iter(panels.values())).lines
    add_legend(figure, [line for line in lines if line.get_marker() == "o"])
    return figure


main = make_table_program(
    PRIVACY, make_figure_writer("privacy", plot_privacy, by=GROUPING, metric="best_accuracy")
)
