"""What was measured of a paper's table beside what was reported, as numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.doors import validate_arguments
from fedjax_het.common.errors import ConfigError, require, require_columns
from fedjax_het.report.cell import AVERAGE, TableCell
from fedjax_het.report.grouping import is_diverged
from fedjax_het.report.measures import get_metric_values
from fedjax_het.report.ranks import add_ranks
from fedjax_het.running.store import compute_settings_digest

if TYPE_CHECKING:
    import pandas as pd

# What a table compares: the measure behind each metric of `reported`.
REPORTED_METRICS = {
    "test_accuracy_last5_mean": "final_accuracy",
    "test_accuracy_best": "best_accuracy",
    "test_accuracy_final_window20": "window_accuracy",
    "bmta": "bmta",
}
# Metrics that a table may have besides: how many rounds it takes.
ROUND_METRICS = {"rounds_to_accuracy_0.5": "rounds_to_half"}
# What a comparison holds besides: its columns, and the measures in them.
_COMPANION_METRICS = {
    "final_accuracy": {"within_std": "final_accuracy_std"},
    "best_accuracy": {"final_mean": "final_accuracy"},
    "window_accuracy": {"rise_time": "rise_time"},
    "bmta": {"worst_decile": "bmta_worst_decile", "best_round": "bmta_round"},
}


def get_compared_metric(reported: "pd.DataFrame") -> str:
    """The summary's key that stands beside these reported values, `ROUNDS` apart.

    ConfigError if none does.
    """
    require_columns("reported", reported, ("metric",))
    metrics = sorted(map(str, set(reported["metric"]) - {*ROUND_METRICS}))
    is_supported = len(metrics) == 1 and metrics[0] in REPORTED_METRICS
    require(is_supported, "metric of reported", metrics, f"one of {', '.join(REPORTED_METRICS)}")
    return REPORTED_METRICS[metrics[0]]


def infer_compared_metric(table: "pd.DataFrame") -> str:
    """The measure of a comparison that is not of domains: its other columns give it away."""
    matching_metrics = (
        metric for metric, companions in _COMPANION_METRICS.items() if {*companions} <= {*table}
    )
    metric = next(matching_metrics, None)
    if metric is None:
        raise ConfigError("table: expected a comparison, as `compare` makes it")
    return metric


@validate_arguments
def compare_with_reported(
    cells: Sequence[TableCell], results: "pd.DataFrame", reported: "pd.DataFrame"
) -> "pd.DataFrame":
    """One row per cell, in the order of `cells`: the measured value beside the reported one.

    Args:
      results: as `load_results` gives it. Only the cells' own runs count, found by their digests.
      reported: as `load_reported_values` gives it, at most one row per cell and metric, accuracies in
        percent. Its metric says which measure of a run counts, see `MEASURES`; one of `ROUNDS` may
        be there besides. Where runs score clients' own models (`RunSpec.scored`), the best accuracy
        is that of the mean over clients (`bmta`), and a domain's that of its client.
    Returns:
      `dataset`, `model`, `alpha`, `domain` and `classes` (where the cells have one), `method`;
      `mean` and `std`
      over seeds (n − 1; NaN for one seed) of the measure; for the mean over the last five rounds
      `within_std`, the deviation over these of a run, averaged over seeds; for the best round
      `final_mean`, the mean over the last five rounds instead; for BMTA `worst_decile` and
      `best_round`, and `rank` and `reported_rank` as `add_ranks` has them; for the mean over 20
      rounds `rise_time`; for a metric of `ROUNDS` `rounds` and `rounds_std` (NaN unless every run
      reached it), `reached`, the number of runs that did, `reported_rounds` and
      `rounds_difference`; `reported_mean`,
      `reported_std`; `difference` of the means; `seeds`, the number of runs in the mean;
      `diverged`, those left out of it; `planned`; `seconds` of wall-clock per run. What is not
      there is NaN.
    Errors:
      ValueError if `reported` has several values for one cell, or other than accuracies.
    """
    import pandas as pd

    metric = get_compared_metric(reported)
    has_domains = any(cell.domain is not None for cell in cells)
    has_class_counts = any(cell.classes is not None for cell in cells)
    round_metrics = [name for name in ROUND_METRICS if name in set(reported["metric"])]
    rows = []
    for cell in cells:
        cell_results = select_cell_runs(cell, results)
        rows.append(
            {
                "dataset": cell.dataset,
                "model": cell.model,
                "alpha": cell.alpha,
                **({"domain": cell.domain} if has_domains else {}),
                **({"classes": cell.classes} if has_class_counts else {}),
                "method": cell.method,
                **_summarize_measured(cell_results, cell, metric),
                "planned": len(cell.runs),
                **get_reported_value(cell, reported),
                **(
                    _summarize_rounds(cell_results, cell, reported, *round_metrics)
                    if round_metrics
                    else {}
                ),
            }
        )
    table = pd.DataFrame(rows)
    table["difference"] = table["mean"] - table["reported_mean"]
    if round_metrics:
        table["rounds_difference"] = table["rounds"] - table["reported_rounds"]
    return add_ranks(table) if metric == "bmta" else table


def select_cell_runs(cell: TableCell, results: "pd.DataFrame") -> "pd.DataFrame":
    """The rows of `results` that are a cell's runs."""
    if not len(results):
        return results
    require_columns("results", results, ("settings",))
    return results[results["settings"].isin([compute_settings_digest(run) for run in cell.runs])]


def is_personal_evaluation(cell: TableCell) -> bool:
    """Whether accuracies are those of the clients' own models, in place of the global one's."""
    if not cell.runs:
        return False
    run = cell.runs[0]
    try:
        resolved = run.resolved()
    except ConfigError:  # its method is not registered in this process: what it states counts
        return run.scored not in (None, "global")
    return resolved.has_client_tests and resolved.evaluated_model != "global"


def _summarize_measured(
    cell_results: "pd.DataFrame", cell: TableCell, metric: str
) -> dict[str, float]:
    companions, is_personal = _COMPANION_METRICS[metric], is_personal_evaluation(cell)
    if is_personal and metric == "best_accuracy":
        metric, companions = "bmta", {"final_mean": "final_client_accuracy"}
    if cell.domain is not None:
        average_metric, domain_metric = "best_domains_accuracy", f"accuracy_{cell.domain}"
        if is_personal:
            average_metric, domain_metric = "bmta", f"client_accuracy_{cell.domain}"
        metric = average_metric if cell.domain == AVERAGE else domain_metric
        companions = {}
    if not len(cell_results):
        empty_values = dict.fromkeys(("mean", "std", *companions, "seconds"), math.nan)
        return {**empty_values, "seeds": 0, "diverged": 0}
    has_diverged = is_diverged(cell_results)
    converged_runs = cell_results[~has_diverged]
    accuracy = get_metric_values(converged_runs, metric)
    return {
        "mean": accuracy.mean(),
        "std": accuracy.std(),  # n - 1: NaN for one run
        **{name: get_metric_values(converged_runs, key).mean() for name, key in companions.items()},
        "seconds": cell_results["wall_seconds"].mean(),
        "seeds": len(converged_runs),
        "diverged": int(has_diverged.sum()),
    }


def _summarize_rounds(
    cell_results: "pd.DataFrame", cell: TableCell, reported: "pd.DataFrame", metric: str
) -> dict[str, float]:
    """A mean of those runs alone that are fast enough would flatter a method."""
    converged_runs = cell_results[~is_diverged(cell_results)] if len(cell_results) else cell_results
    rounds = get_metric_values(converged_runs, ROUND_METRICS[metric])
    all_reached = len(converged_runs) and rounds.notna().all()
    return {
        "rounds": rounds.mean() if all_reached else math.nan,
        "rounds_std": rounds.std() if all_reached else math.nan,
        "reached": int(rounds.notna().sum()),
        "reported_rounds": get_reported_value(cell, reported, [metric])["reported_mean"],
    }


def get_reported_value(
    cell: TableCell, reported: "pd.DataFrame", metrics: Iterable[str] = REPORTED_METRICS
) -> dict[str, float]:
    """`reported_mean` and `reported_std` of a cell; NaN where the paper has none."""

    def is_match(name: str, value: float | str | None) -> "pd.Series":
        """What the paper leaves open (a network, a level) holds for any."""
        return reported[name].isna() | (reported[name] == value)

    rows = reported[
        reported["metric"].isin(metrics)
        & (reported["dataset"] == cell.dataset)
        & (reported["method"] == cell.method)
        & is_match("model", cell.model)
        & is_match("level", cell.level)
    ]
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} reported values for {cell.method}, {cell.column_label}")
    if not len(rows):
        return {"reported_mean": math.nan, "reported_std": math.nan}
    return {"reported_mean": rows["mean"].iloc[0], "reported_std": rows["std"].iloc[0]}


@validate_arguments
def list_diverged_runs(cells: Sequence[TableCell], results: "pd.DataFrame") -> list[str]:
    """The runs of these cells that diverged, named for a note under the table."""
    if not len(results):
        return []
    require_columns("results", results, ("settings", "diverged", "final_accuracy"))
    diverged_digests = set(results["settings"][is_diverged(results)])
    return [
        f"{cell.method}, {cell.column_label}, seed {run.seed}"
        for cell in cells
        for run in cell.runs
        if compute_settings_digest(run) in diverged_digests
    ]
