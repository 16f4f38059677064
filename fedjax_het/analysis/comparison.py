"""Cells of a paper's table, comparison of measured with reported values, and ranks of methods."""

import math
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.grouping import describe_settings, get_metric_values, is_diverged
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.runtime.result_store import compute_settings_digest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, require, require_columns

if TYPE_CHECKING:
    import pandas as pd

AVERAGE = "average"
# What places a cell besides its row and its domain: settings of its runs.
COLUMN_SETTINGS = ("dataset", "model", "alpha", "classes")


@dataclass(frozen=True)
class TableCell:
    """One cell of a paper's table: its row and column, and the runs (one per seed) that fill it."""

    dataset: str
    model: str
    alpha: float | None
    method: str
    """The row: a method, or a variant as `parse_row` reads it."""
    runs: tuple[RunSpec, ...] = ()
    """Empty where the method has no implementation."""
    domain: str | None = None
    """In a table of domains: whose test images count; `AVERAGE`: the mean over domains."""
    classes: int | None = None
    """In a table of clients with few labels each: how many."""

    @property
    def level(self) -> float | str | None:
        """The column: alpha, labels per client or the domain; None of a table without any."""
        levels = (self.domain, self.classes, self.alpha)
        return next((level for level in levels if level is not None), None)

    @property
    def column_key(self) -> tuple:
        """What it shares with the other rows of its column."""
        return self.dataset, self.model, self.level

    @property
    def column_label(self) -> str:
        """Its place in words, but for the row."""
        column_settings = {name: getattr(self, name) for name in COLUMN_SETTINGS}
        return describe_settings(column_settings) + (f", {self.domain}" if self.domain else "")


def add_row_setting(row: str, name: str, value: Any) -> str:
    """Return a row with one more setting, or with another value of a setting that it has.

    Args:
      row: a row as `parse_row` reads it.
      name: name of the setting.
      value: its value, a literal of Python.

    Example:
      >>> add_row_setting("fedaf(ipc=10)", "server_lr", 0.1)
      'fedaf(ipc=10, server_lr=0.1)'
    """
    method, variant = parse_row(row)
    settings = {**variant, name: value}
    return f"{method}({', '.join(f'{key}={setting_value!r}' for key, setting_value in settings.items())})"


def parse_row(row: str) -> tuple[str, dict[str, Any]]:
    """Split a row of a table into its method and the settings of its variant.

    Args:
      row: a method's name, optionally with settings as keyword arguments.

    Returns:
      The method's name, and the settings by name.

    Raises:
      ConfigError: if the text is neither a name nor a name with settings.

    Example:
      >>> parse_row("fedaf(ipc=10)")
      ('fedaf', {'ipc': 10})
    """
    method, separator, arguments_text = row.partition("(")
    pairs = arguments_text.removesuffix(")").split(",") if separator else []
    try:
        value_texts = dict(pair.split("=") for pair in pairs)
        return method, {
            name.strip(): literal_eval(value.strip()) for name, value in value_texts.items()
        }
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"methods = {row!r}: expected a method, or one with settings: 'fedaf(ipc=10)'"
        ) from error


def format_row(row: str, *, omit: Mapping[str, Any] | None = None) -> str:
    """Format a row in a few words, for figures.

    Args:
      row: a row as `parse_row` reads it.
      omit: settings that are left out if they have the given value.

    Example:
      >>> format_row("dynafed(synthetic='real')")
      'dynafed, real'
    """
    method, settings = parse_row(row)
    parts = [
        value if isinstance(value, str) else name if value is True else f"{name} {value}"
        for name, value in settings.items()
        if (omit or {}).get(name) != value
    ]
    return ", ".join([method, *parts])


_NUM_DECIMALS = 2  # of the values as printed
_MIN_METHODS = 3  # methods; of two a correlation is 1 or -1


class RankCorrelation(NamedTuple):
    """rho: Spearman's, of measured and reported values of `num_methods` methods."""

    section: str
    rho: float
    num_methods: int


def compute_ranks(values: Sequence[float]) -> list[float]:
    """Rank percentages rounded to two decimals, as printed.

    Args:
      values: percentages; NaN for a missing value.

    Returns:
      Ranks; 1 is the highest value. Equal values share the better rank, NaN has rank NaN.
    """
    import pandas as pd

    rounded = pd.Series([round(value, _NUM_DECIMALS) for value in values], dtype=float)
    return rounded.rank(method="min", ascending=False).tolist()


@validate_arguments
def add_ranks(table: "pd.DataFrame") -> "pd.DataFrame":
    """Add the columns `rank` and `reported_rank` to a comparison.

    Ranks are within a data set, network and alpha. Both columns rank the same rows: those with a
    measured and a reported value. If nothing is reported in a section, `rank` ranks all measured
    rows. A row with diverged runs has rank NaN.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Returns:
      A copy with the two columns.
    """
    table = table.assign(rank=math.nan, reported_rank=math.nan)
    for _, section_rows in _group_by_section(table):
        ranked_rows = section_rows[_is_comparable(section_rows)]
        if section_rows["reported_mean"].isna().all():
            ranked_rows = section_rows[section_rows["diverged"] == 0]
        else:
            table.loc[ranked_rows.index, "reported_rank"] = compute_ranks(
                ranked_rows["reported_mean"]
            )
        table.loc[ranked_rows.index, "rank"] = compute_ranks(ranked_rows["mean"])
    return table


@validate_arguments
def compute_rank_correlations(table: "pd.DataFrame") -> list[RankCorrelation]:
    """Compute Spearman's rank correlation of measured and reported values.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Returns:
      One entry for each section (data set, network, alpha) with at least three methods that have
      both values, unless all measured or all reported values are equal.
    """
    from scipy import stats

    correlations = []
    for section_settings, section_rows in _group_by_section(table):
        comparable_rows = section_rows[_is_comparable(section_rows)]
        measured, reported = (
            comparable_rows[name].round(_NUM_DECIMALS) for name in ("mean", "reported_mean")
        )
        if (
            len(comparable_rows) >= _MIN_METHODS
            and measured.nunique() > 1
            and reported.nunique() > 1
        ):
            rho = float(stats.spearmanr(measured, reported).statistic)
            correlations.append(
                RankCorrelation(describe_settings(section_settings), rho, len(comparable_rows))
            )
    return correlations


def _group_by_section(table: "pd.DataFrame") -> list[tuple[dict, "pd.DataFrame"]]:
    names = ["dataset", "model", "alpha"]
    require_columns("table", table, (*names, "mean", "reported_mean", "diverged"))
    groups = table.groupby(names, sort=False, dropna=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]


def _is_comparable(section: "pd.DataFrame") -> "pd.Series":
    has_both_values = section["mean"].notna() & section["reported_mean"].notna()
    return has_both_values & (section["diverged"] == 0)


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
    """Return the key of a result's summary that corresponds to the reported values.

    Args:
      reported: as `load_reported_values` returns it; metrics of `ROUND_METRICS` are ignored.

    Raises:
      ConfigError: if the reported values have no such key, or several.
    """
    require_columns("reported", reported, ("metric",))
    metrics = sorted(map(str, set(reported["metric"]) - {*ROUND_METRICS}))
    is_supported = len(metrics) == 1 and metrics[0] in REPORTED_METRICS
    require(is_supported, "metric of reported", metrics, f"one of {', '.join(REPORTED_METRICS)}")
    return REPORTED_METRICS[metrics[0]]


def infer_compared_metric(table: "pd.DataFrame") -> str:
    """Return the metric of a comparison without domains, inferred from its other columns.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Raises:
      ConfigError: if the columns are not those of a comparison.
    """
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
    """Compare measured with reported values, one row per cell in the order of `cells`.

    Args:
      cells: cells of the table. Only their runs count, which are found by their digests.
      results: as `load_results` returns it.
      reported: as `load_reported_values` returns it, at most one row per cell and metric,
        accuracies in percent. Its metric determines the compared metric of a run, see
        `REPORTED_METRICS`; one of `ROUND_METRICS` may be present as well. If runs evaluate the
        clients' own models (`RunSpec.scored`), the best accuracy is that of the mean over clients
        (`bmta`), and a domain's accuracy is that of its client.

    Returns:
      A frame with these columns; missing values are NaN:

      * `dataset`, `model`, `alpha`, `method`; `domain` and `classes` if the cells have them.
      * `mean` and `std` over seeds (n − 1; NaN for one seed) of the metric.
      * Mean of the last five rounds: `within_std`, the deviation over these rounds of a run,
        averaged over seeds. Best round: `final_mean`, the mean of the last five rounds. BMTA:
        `worst_decile`, `best_round`, `rank` and `reported_rank`. Mean of 20 rounds: `rise_time`.
      * With a metric of `ROUND_METRICS`: `rounds` and `rounds_std` (NaN unless every run reached
        the target), `reached` (number of runs that did), `reported_rounds`, `rounds_difference`.
      * `reported_mean`, `reported_std`, and `difference` of the means.
      * `seeds`, the number of runs in the mean; `diverged`, the number of runs left out of it;
        `planned`; `seconds`, the wall-clock time per run.

    Raises:
      ValueError: if `reported` has several values for one cell.
      ConfigError: if `reported` has metrics other than accuracies.
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
    """Select the rows of `results` that are runs of a cell.

    Args:
      cell: the cell.
      results: as `load_results` returns it.
    """
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
    """Return `reported_mean` and `reported_std` of a cell; NaN if the paper has no value.

    Args:
      cell: the cell.
      reported: as `load_reported_values` returns it. An empty network or level matches any.
      metrics: metrics that count.

    Raises:
      ValueError: if there are several values.
    """

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
    """Name the diverged runs of some cells, for a note under the table.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      One text per diverged run: method, column and seed.
    """
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
