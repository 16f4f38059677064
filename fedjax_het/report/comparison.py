"""What was measured of a paper's table beside what was reported, as numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require, require_columns
from fedjax_het.report.cell import AVERAGE, Cell
from fedjax_het.report.grouping import diverged
from fedjax_het.report.measures import values_of
from fedjax_het.report.ranks import add_ranks
from fedjax_het.running.store import settings_digest

if TYPE_CHECKING:
    import pandas as pd

# What a table compares: the measure behind each metric of `reported`.
MEASURES = {
    "test_accuracy_last5_mean": "final_accuracy",
    "test_accuracy_best": "best_accuracy",
    "test_accuracy_final_window20": "window_accuracy",
    "bmta": "bmta",
}
# Metrics that a table may have besides: how many rounds it takes.
ROUNDS = {"rounds_to_accuracy_0.5": "rounds_to_half"}
# What a comparison holds besides: its columns, and the measures in them.
_BESIDES = {
    "final_accuracy": {"within_std": "final_accuracy_std"},
    "best_accuracy": {"final_mean": "final_accuracy"},
    "window_accuracy": {"rise_time": "rise_time"},
    "bmta": {"worst_decile": "bmta_worst_decile", "best_round": "bmta_round"},
}


def measure_of(reported: "pd.DataFrame") -> str:
    """The summary's key that stands beside these reported values, `ROUNDS` apart.

    ConfigError if none does.
    """
    require_columns("reported", reported, ("metric",))
    metrics = sorted(map(str, set(reported["metric"]) - {*ROUNDS}))
    ok = len(metrics) == 1 and metrics[0] in MEASURES
    require(ok, "metric of reported", metrics, f"one of {', '.join(MEASURES)}")
    return MEASURES[metrics[0]]


def compared_measure(table: "pd.DataFrame") -> str:
    """The measure of a comparison that is not of domains: its other columns give it away."""
    known = (measure for measure, besides in _BESIDES.items() if {*besides} <= {*table})
    measure = next(known, None)
    if measure is None:
        raise ConfigError("table: expected a comparison, as `compare` makes it")
    return measure


@door
def compare(
    cells: Sequence[Cell], results: "pd.DataFrame", reported: "pd.DataFrame"
) -> "pd.DataFrame":
    """One row per cell, in the order of `cells`: the measured value beside the reported one.

    Args:
      results: as `load_results` gives it. Only the cells' own runs count, found by their digests.
      reported: as `reported_values` gives it, at most one row per cell and metric, accuracies in
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

    measure = measure_of(reported)
    by_domain = any(cell.domain is not None for cell in cells)
    by_classes = any(cell.classes is not None for cell in cells)
    in_rounds = [name for name in ROUNDS if name in set(reported["metric"])]
    rows = []
    for cell in cells:
        made = runs_made(cell, results)
        rows.append(
            {
                "dataset": cell.dataset,
                "model": cell.model,
                "alpha": cell.alpha,
                **({"domain": cell.domain} if by_domain else {}),
                **({"classes": cell.classes} if by_classes else {}),
                "method": cell.method,
                **_measured(made, cell, measure),
                "planned": len(cell.runs),
                **reported_value(cell, reported),
                **(_in_rounds(made, cell, reported, *in_rounds) if in_rounds else {}),
            }
        )
    table = pd.DataFrame(rows)
    table["difference"] = table["mean"] - table["reported_mean"]
    if in_rounds:
        table["rounds_difference"] = table["rounds"] - table["reported_rounds"]
    return add_ranks(table) if measure == "bmta" else table


def runs_made(cell: Cell, results: "pd.DataFrame") -> "pd.DataFrame":
    """The rows of `results` that are a cell's runs."""
    if not len(results):
        return results
    require_columns("results", results, ("settings",))
    return results[results["settings"].isin([settings_digest(run) for run in cell.runs])]


def scores_own_models(cell: Cell) -> bool:
    """Whether accuracies are those of the clients' own models, in place of the global one's."""
    if not cell.runs:
        return False
    run = cell.runs[0]
    try:
        resolved = run.resolved()
    except ConfigError:  # its method is not registered in this process: what it states counts
        return run.scored not in (None, "global")
    return resolved.tests_clients and resolved.scored_model != "global"


def _measured(made: "pd.DataFrame", cell: Cell, measure: str) -> dict[str, float]:
    besides, own = _BESIDES[measure], scores_own_models(cell)
    if own and measure == "best_accuracy":
        measure, besides = "bmta", {"final_mean": "final_client_accuracy"}
    if cell.domain is not None:
        average, single = "best_domains_accuracy", f"accuracy_{cell.domain}"
        if own:
            average, single = "bmta", f"client_accuracy_{cell.domain}"
        measure = average if cell.domain == AVERAGE else single
        besides = {}
    if not len(made):
        nothing = dict.fromkeys(("mean", "std", *besides, "seconds"), math.nan)
        return {**nothing, "seeds": 0, "diverged": 0}
    lost = diverged(made)
    good = made[~lost]
    accuracy = values_of(good, measure)
    return {
        "mean": accuracy.mean(),
        "std": accuracy.std(),  # n - 1: NaN for one run
        **{name: values_of(good, key).mean() for name, key in besides.items()},
        "seconds": made["wall_seconds"].mean(),
        "seeds": len(good),
        "diverged": int(lost.sum()),
    }


def _in_rounds(
    made: "pd.DataFrame", cell: Cell, reported: "pd.DataFrame", metric: str
) -> dict[str, float]:
    """A mean of those runs alone that are fast enough would flatter a method."""
    good = made[~diverged(made)] if len(made) else made
    rounds = values_of(good, ROUNDS[metric])
    all_reached = len(good) and rounds.notna().all()
    return {
        "rounds": rounds.mean() if all_reached else math.nan,
        "rounds_std": rounds.std() if all_reached else math.nan,
        "reached": int(rounds.notna().sum()),
        "reported_rounds": reported_value(cell, reported, [metric])["reported_mean"],
    }


def reported_value(
    cell: Cell, reported: "pd.DataFrame", metrics: Iterable[str] = MEASURES
) -> dict[str, float]:
    """`reported_mean` and `reported_std` of a cell; NaN where the paper has none."""

    def matches(name: str, value: float | str | None) -> "pd.Series":
        """What the paper leaves open (a network, a level) holds for any."""
        return reported[name].isna() | (reported[name] == value)

    rows = reported[
        reported["metric"].isin(metrics)
        & (reported["dataset"] == cell.dataset)
        & (reported["method"] == cell.method)
        & matches("model", cell.model)
        & matches("level", cell.level)
    ]
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} reported values for {cell.method}, {cell.group}")
    if not len(rows):
        return {"reported_mean": math.nan, "reported_std": math.nan}
    return {"reported_mean": rows["mean"].iloc[0], "reported_std": rows["std"].iloc[0]}


@door
def diverged_runs(cells: Sequence[Cell], results: "pd.DataFrame") -> list[str]:
    """The runs of these cells that diverged, named for a note under the table."""
    if not len(results):
        return []
    require_columns("results", results, ("settings", "diverged", "final_accuracy"))
    lost = set(results["settings"][diverged(results)])
    return [
        f"{cell.method}, {cell.group}, seed {run.seed}"
        for cell in cells
        for run in cell.runs
        if settings_digest(run) in lost
    ]
