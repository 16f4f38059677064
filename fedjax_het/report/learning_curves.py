"""Learning curves: one measure against the round, with bands over seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require_name
from fedjax_het.common.records import Count
from fedjax_het.report.curves import Curve, draw_curves
from fedjax_het.report.grouping import (
    chosen_settings,
    diverged,
    figure_lines,
    group_runs,
    is_shared,
)
from fedjax_het.report.measures import measure_label, scale_of
from fedjax_het.report.style import Sharing
from fedjax_het.running.store import newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SMOOTHED_ROUNDS = 5


@door
def plot_learning_curves(
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    measure: str = "test_accuracy",
    window: Count = SMOOTHED_ROUNDS,
    focus: Sequence[str] = (),
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
    results = newest(results)
    by = chosen_settings(results, by)
    for name in focus:
        require_name("focus", name, results["algorithm"].unique())
    panels = chosen_settings(results, panels) if panels else list(filter(is_shared, by))
    if not len(curves):
        raise ConfigError("curves = none: expected those of `load_curves`")
    require_name("measure", measure, [n for n in curves.columns if n not in ("digest", "round")])
    lines = [
        Curve(
            line.panel,
            line.method,
            line.label,
            runs=values_by_round(line.runs, curves, measure),
            diverged=bool(diverged(line.runs).any()),
        )
        for line in figure_lines(results, by, panels)
    ]
    titles = list(dict.fromkeys(line.panel for line in lines))
    sharey: Sharing = "row" if "dataset" in panels else "all"
    return draw_curves(
        lines,
        titles,
        columns=columns_of(results, panels),
        measure=measure,
        sharey=sharey,
        window=window,
        focus=focus,
    )


def columns_of(results: "pd.DataFrame", panels: Sequence[str]) -> int:
    """As many panels beside each other as the last of these settings has values; where their
    number differs between data sets, the most of one."""
    groups = group_runs(results, [name for name in panels if name == "dataset"])
    return max(len(group_runs(runs, panels[-1:])) for _, runs in groups)


@door
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
    results = newest(results)
    names = [*chosen_settings(results, panels), *(chosen_settings(results, by) if by else ())]
    lines = []
    for method, measure in (("fsl", "server_gap"), ("fedavg", "client_gap")):
        require_name("measure", measure, list(curves.columns))
        for line in figure_lines(results, names, panels):
            values = values_by_round(line.runs, curves, measure)
            label = measure_label(measure) + (f", {line.label}" if by else "")
            lines.append(Curve(line.panel, method, label, values, bool(diverged(line.runs).any())))
    return draw_curves(
        lines,
        list(dict.fromkeys(line.panel for line in lines)),
        columns=columns_of(results, panels),
        measure="gradient_gap",
        sharey="row" if "dataset" in panels else "all",
        log=True,
    )


def values_by_round(
    runs: "pd.DataFrame", curves: "pd.DataFrame", measure: str = "test_accuracy"
) -> "pd.DataFrame":
    """A row per measured round, a column per run, but for those that diverged. Accuracies are in
    percent."""
    import pandas as pd

    if not len(curves) or not len(runs) or measure not in curves:
        return pd.DataFrame()
    wanted = runs["digest"][~diverged(runs)]
    own = curves[curves["digest"].isin(wanted)].dropna(subset=measure)
    return scale_of(measure) * own.pivot(index="round", columns="digest", values=measure)
