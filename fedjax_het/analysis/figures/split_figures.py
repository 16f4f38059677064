"""Plots of measures of a split: for each client, and against a metric of runs."""

from typing import TYPE_CHECKING

import numpy as np

from fedjax_het.analysis.figures.style import (
    PALETTE,
    add_legend,
    assign_method_colors,
    label_outer_axes,
    make_panels,
    set_integer_ticks,
    style_axes,
)
from fedjax_het.analysis.overview import (
    get_method_title,
    get_metric_label,
    get_metric_values,
    group_runs,
    is_diverged,
    list_tasks,
    require_result_metric,
)
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.runtime.split_measures import SplitMeasures
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.fonts import choose_fonts
from fedjax_het.utils.text import escape_mathtext

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_LABELS = {
    "examples": "Examples",
    "label_total_variation": "Total variation of labels",
    "effective_classes": "Effective classes",
    "feature_distance": "Feature distance",
    "gradient_norm": "Norm of the gradient",
    "gradient_distance": "Distance from the mean gradient",
}


@validate_arguments
def plot_client_measures(measures: SplitMeasures) -> "Figure":
    """Plot the measures of each client: a panel per measure, a bar per client.

    Args:
      measures: result of `measure_split`. A client without examples has no bar.

    Returns:
      The figure.

    Example:
      >>> from fedjax_het import RunSpec, measure_split
      >>> from fedjax_het.analysis import plot_client_measures
      >>> spec = RunSpec(dataset="digits", num_clients=4)
      >>> figure = plot_client_measures(measure_split(spec, metrics=["feature_distance"]))
      >>> [panel.get_title() for panel in figure.axes]
      ['Examples', 'Total variation of labels', 'Effective classes', 'Feature distance']
    """
    frame = measures.to_pandas()
    titles = {name: _LABELS.get(name, name) for name in frame}
    figure, panels = make_panels(list(titles.values()), columns=3, size=(3.6, 2.6), sharey="none")
    for name, title in titles.items():
        panels[title].bar(frame.index, frame[name].to_numpy(), color=PALETTE[0], width=0.8)
        style_axes(panels[title])
        set_integer_ticks(panels[title])
    label_outer_axes(panels.values(), x="Client")
    return choose_fonts(figure)


@validate_arguments
def plot_metric_vs_measure(
    results: "pd.DataFrame", *, measure: str, metric: str = "final_accuracy"
) -> "Figure":
    """Plot a metric of runs against a measure of their split, with rank correlations.

    Each point is a run, each color a method, each panel a data set. The legend has Spearman's rank
    correlation over all runs of a method, and their number. Diverged runs are left out.

    Args:
      results: as `load_results` returns it.
      measure: numeric column, for example "split.label_hellinger" or "split.feature_distance".
      metric: numeric column of the vertical axis.

    Returns:
      The figure.

    Raises:
      ConfigError: if the runs have no such column.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import plot_metric_vs_measure
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": "fedavg", "seed": 0,
      ...     "settings": ["a", "b"], "finished": "2026", "diverged": False,
      ...     "split.label_hellinger": [0.2, 0.8], "final_accuracy": [0.9, 0.6]})
      >>> figure = plot_metric_vs_measure(results, measure="split.label_hellinger")
      >>> [text.get_text() for text in figure.legends[0].get_texts()]
      ['FedAvg: rank correlation −1.00 of 2 runs']
    """
    results = select_newest(results)
    for column in (measure, metric):
        require_result_metric(results, column)
    results = results[~is_diverged(results)]
    colors = assign_method_colors(results["algorithm"].unique())
    by_dataset = group_runs(results, ["dataset"])
    titles = [str(keys["dataset"]) for keys, _ in by_dataset]
    figure, panels = make_panels(titles, columns=3, size=(4.2, 3.4), sharey="none")
    for title, (_, runs) in zip(titles, by_dataset, strict=True):
        style_axes(panels[title])
        for keys, own in group_runs(runs, ["algorithm"]):
            x, y = (get_metric_values(own, column) for column in (measure, metric))
            panels[title].scatter(x, y, s=18, alpha=0.7, color=colors[keys["algorithm"]], lw=0)
    x_label, y_label = (get_metric_label(name, list_tasks(results)) for name in (measure, metric))
    label_outer_axes(panels.values(), x=x_label, y=y_label)
    handles = []
    for keys, own in group_runs(results, ["algorithm"]):
        x, y = (get_metric_values(own, column) for column in (measure, metric))
        label = f"{get_method_title(keys['algorithm'])}: {_describe_correlation(x, y)}"
        color = colors[keys["algorithm"]]
        (panel, *_) = panels.values()
        handles += [panel.scatter([], [], s=18, color=color, label=escape_mathtext(label))]
    add_legend(figure, handles)
    return choose_fonts(figure)


def _describe_correlation(x: "pd.Series", y: "pd.Series") -> str:
    """Return Spearman's rank correlation of two columns and the number of runs as text."""
    is_measured = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_measured], y[is_measured]
    text = "undefined"  # of equal values
    if x.nunique() > 1 and y.nunique() > 1:
        text = f"{x.rank().corr(y.rank()):.2f}".replace("-", "\N{MINUS SIGN}")
    return f"rank correlation {text} of {len(x)} runs"
