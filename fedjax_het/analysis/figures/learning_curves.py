"""Learning curves: one measure against the round, with bands over seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.analysis.curves import Curve, plot_curve_panels
from fedjax_het.analysis.figure_style import AxisSharing
from fedjax_het.analysis.grouping import (
    get_display_scale,
    get_metric_label,
    group_figure_lines,
    group_runs,
    is_diverged,
    is_shared_setting,
    resolve_group_settings,
)
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import ConfigError, require_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SMOOTHING_WINDOW = 5


@validate_arguments
def plot_learning_curves(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    metric: str = "test_accuracy",
    window: PositiveInt = SMOOTHING_WINDOW,
    highlight: Sequence[str] = (),
) -> "Figure":
    """Plot a metric against the round: a line per method and hyper-parameters, panels for the rest.

    A line is the mean over seeds of a running mean over `window` measured rounds, from the first
    round with that many. It shows the measured values if a run has fewer than twice as many. The
    band is one standard deviation over seeds. Diverged runs are left out and named below the
    panel. More than eight methods have a small panel each, with the other lines in gray.

    Args:
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      by: settings that distinguish lines; default: all that vary, except seeds.
      panels: settings with panels, the last one with a column per value; default: those of `by`
        that runs of every method have.
      metric: a column of `curves`.
      window: rounds of the running mean. With 5, an accuracy's line ends at the value in overviews.
      highlight: methods in color, the others being gray; default: all.

    Raises:
      ConfigError: if the runs do not have a setting, the metric or a method.
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    for name in highlight:
        require_name("focus", name, results["algorithm"].unique())
    panels = (
        resolve_group_settings(results, panels) if panels else list(filter(is_shared_setting, by))
    )
    if not len(curves):
        raise ConfigError("curves = none: expected those of `load_curves`")
    require_name("metric", metric, [n for n in curves.columns if n not in ("digest", "round")])
    lines = [
        Curve(
            line.panel,
            line.method,
            line.label,
            runs=pivot_curves_by_round(line.runs, curves, metric),
            diverged=bool(is_diverged(line.runs).any()),
        )
        for line in group_figure_lines(results, by, panels)
    ]
    titles = list(dict.fromkeys(line.panel for line in lines))
    sharey: AxisSharing = "row" if "dataset" in panels else "all"
    return plot_curve_panels(
        lines,
        titles,
        columns=count_panel_columns(results, panels),
        metric=metric,
        sharey=sharey,
        window=window,
        highlight=highlight,
    )


def count_panel_columns(results: "pd.DataFrame", panels: Sequence[str]) -> int:
    """As many panels beside each other as the last of these settings has values; where their
    number differs between data sets, the most of one."""
    groups = group_runs(results, [name for name in panels if name == "dataset"])
    return max(len(group_runs(runs, panels[-1:])) for _, runs in groups)


@validate_arguments
def plot_gradient_gaps(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] = (),
    panels: Sequence[str] = ("dataset", "classes"),
) -> "Figure":
    """Plot the distance of the server's and of the clients' gradients from that of all data (FSL, Fig. 9).

    The two lines `server_gap` and `client_gap` are squared Euclidean distances on a logarithmic
    axis against the round. Means over seeds and bands are those of the logarithms.

    Args:
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.
      by: settings that distinguish lines of a panel.
      panels: settings with panels.

    Raises:
      ConfigError: if the runs do not have a setting or the gaps.
    """
    results = select_newest(results)
    names = [
        *resolve_group_settings(results, panels),
        *(resolve_group_settings(results, by) if by else ()),
    ]
    lines = []
    for method, metric in (("fsl", "server_gap"), ("fedavg", "client_gap")):
        require_name("metric", metric, list(curves.columns))
        for line in group_figure_lines(results, names, panels):
            values = pivot_curves_by_round(line.runs, curves, metric)
            label = get_metric_label(metric) + (f", {line.label}" if by else "")
            lines.append(
                Curve(line.panel, method, label, values, bool(is_diverged(line.runs).any()))
            )
    return plot_curve_panels(
        lines,
        list(dict.fromkeys(line.panel for line in lines)),
        columns=count_panel_columns(results, panels),
        metric="gradient_gap",
        sharey="row" if "dataset" in panels else "all",
        is_log=True,
    )


def pivot_curves_by_round(
    runs: "pd.DataFrame", curves: "pd.DataFrame", metric: str = "test_accuracy"
) -> "pd.DataFrame":
    """A row per measured round, a column per run, but for those that diverged. Accuracies are in
    percent."""
    import pandas as pd

    if not len(curves) or not len(runs) or metric not in curves:
        return pd.DataFrame()
    converged_digests = runs["digest"][~is_diverged(runs)]
    run_curves = curves[curves["digest"].isin(converged_digests)].dropna(subset=metric)
    return get_display_scale(metric) * run_curves.pivot(
        index="round", columns="digest", values=metric
    )
