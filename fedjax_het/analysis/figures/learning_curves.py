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
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require_name
from fedjax_het.utils.validation import validate_arguments

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
    """A line per method and hyper-parameters, a panel for each of the other settings.

    Lines are means over seeds of a running mean over `window` measured rounds (five: an accuracy's
    line ends at the value of the overview), from the first round that has as many; of the measured
    values where a run has fewer than twice as many. Each has its name at its end and a band of one
    standard deviation over seeds. Runs that diverged are left out, and named below. More than eight
    methods have a small panel each, with the others' lines behind in grey.

    Args:
      results, curves: as `load_results` and `load_curves` give them.
      by: names of settings; default: those that vary, apart from the seeds.
      panels: those that have panels, the last a column per value; default: those of `by` that runs
        of every method have.
      measure: a column of `curves`.
      focus: methods that are in colour, the others being grey; default: all are.
    Errors:
      ConfigError for a setting, measure or method that these runs do not have.
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
    """How far the server's gradient, and the clients', are from that of all clients' data (FSL's
    Figure 9): `server_gap` and `client_gap` against the round, on one logarithmic axis.

    Both are squared Euclidean distances of the rounds that were measured; means over seeds, and
    their bands, are those of the logarithms.
    Arguments and errors are those of `plot_learning_curves`; `by`: what tells lines of a panel
    apart.
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
