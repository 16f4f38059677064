"""Cells of a paper's table; measured beside reported values, with ranks, as numbers and texts."""

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.overview import (
    BASELINE,
    describe_settings,
    format_setting_value,
    get_method_title,
    get_metric_values,
    is_diverged,
    is_missing,
)
from fedjax_het.analysis.render import (
    TableSection,
    TextTable,
    add_equal_note,
    equals_baseline,
    find_best_indices,
    format_mean_std,
    format_number,
    format_p_value,
    format_seed_count,
)
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import rename_former_settings
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime.result_store import compute_settings_digest, is_partial_run
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import ConfigError, make_value_error, require, require_columns
from fedjax_het.utils.text import EQUAL, MISSING

if TYPE_CHECKING:
    import pandas as pd

AVERAGE = "average"
# Settings of runs that place a cell in addition to its row and its domain, with their headings.
_COLUMN_SETTINGS = {"dataset": "Data", "model": "Network", "alpha": "alpha", "classes": "Classes"}


@dataclass(frozen=True)
class TableCell:
    """One cell of a paper's table: its row and column, and the runs (one per seed) that fill it.

    Example:
      >>> from fedjax_het.analysis import TableCell
      >>> TableCell("digits", "mlp", 0.1, "fedavg").column_label
      'digits, mlp, alpha 0.1'
    """

    dataset: str
    """Name of the data set."""
    model: str
    """Name of the network."""
    alpha: float | None
    """Concentration of the Dirichlet partition; None for other partitions."""
    method: str
    """The row: a method, or a variant as `parse_row` reads it."""
    runs: tuple[RunSpec, ...] = ()
    """Empty if the method has no implementation."""
    domain: str | None = None
    """Domain whose test images count, in a table of domains; `AVERAGE`: the mean over domains."""
    classes: int | None = None
    """Number of labels per client, in a table of clients with few labels each."""

    @property
    def level(self) -> float | str | None:
        """Alpha, labels per client or domain of the column; None in a table without any."""
        levels = (self.domain, self.classes, self.alpha)
        return next((level for level in levels if level is not None), None)

    @property
    def column_key(self) -> tuple:
        """Key that the cell shares with the other rows of its column."""
        return self.dataset, self.model, self.level

    @property
    def column_label(self) -> str:
        """Description of the column."""
        settings = {name: getattr(self, name) for name in _COLUMN_SETTINGS}
        return describe_settings(settings) + (f", {self.domain}" if self.domain else "")


# Rows


def add_row_settings(row: str, **settings: Any) -> str:
    """Return a row with further settings, or with other values of settings that it has.

    Args:
      row: a row as `parse_row` reads it.
      **settings: literals of Python by name.

    Returns:
      The row.

    Example:
      >>> from fedjax_het.analysis.comparison import add_row_settings
      >>> add_row_settings("fedaf(ipc=10)", server_lr=0.1)
      'fedaf(ipc=10, server_lr=0.1)'
    """
    method, variant = parse_row(row)
    pairs = (f"{name}={value!r}" for name, value in {**variant, **settings}.items())
    return f"{method}({', '.join(pairs)})"


def parse_row(row: str) -> tuple[str, dict[str, Any]]:
    """Split a row of a table into its method and the settings of its variant.

    Args:
      row: a method's name, optionally with settings as keyword arguments.

    Returns:
      The method's name, and the settings by their present names.

    Raises:
      ConfigError: if the text is neither a name nor a name with settings, each once.

    Example:
      >>> from fedjax_het.analysis import parse_row
      >>> parse_row("fedaf(ipc=10)")
      ('fedaf', {'ipc': 10})
    """
    method, separator, arguments = row.partition("(")
    if not separator:
        return row, {}
    try:
        call = ast.parse(f"_({arguments}", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ValueError
        settings = {entry.arg or "": ast.literal_eval(entry.value) for entry in call.keywords}
        if not settings or "" in settings or len(settings) < len(call.keywords):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        expected = "a method, or one with settings: 'fedaf(ipc=10)'"
        raise make_value_error("methods", row, expected) from error
    return method, rename_former_settings(settings)


def format_row(row: str, *, omit: Mapping[str, Any] | None = None) -> str:
    """Format a row in a few words, for tables and figures.

    Args:
      row: a row as `parse_row` reads it.
      omit: settings that are left out if they have the given value.

    Returns:
      The text.

    Example:
      >>> from fedjax_het.analysis.comparison import format_row
      >>> format_row("my_method(synthetic='real')")
      'my_method (real)'
    """
    method, settings = parse_row(row)
    parts = [
        value if isinstance(value, str) else name if value is True else f"{name} {value}"
        for name, value in settings.items()
        if (omit or {}).get(name) != value
    ]
    return get_method_title(method) + (f" ({', '.join(parts)})" if parts else "")


# Ranks

_NUM_DECIMALS = 2  # of the values as printed
_MIN_METHODS = 3  # methods; with two methods a correlation is 1 or -1


class RankCorrelation(NamedTuple):
    """Rank correlation of measured and reported values in one section of a table.

    Example:
      >>> from fedjax_het.analysis import RankCorrelation
      >>> RankCorrelation("digits, mlp, alpha 0.1", 0.9, 4).rho
      0.9
    """

    section: str
    """Title of the section."""
    rho: float
    """Spearman's coefficient."""
    num_methods: int
    """Number of methods with a measured and a reported value."""


@validate_arguments
def add_ranks(table: "pd.DataFrame") -> "pd.DataFrame":
    """Add the columns `rank` and `reported_rank` to a comparison; 1 is the highest value.

    Ranks are of values rounded to two decimals within a data set, network and alpha; equal values
    share the better rank. Both columns rank the same rows: rows with a measured and a reported
    value. If nothing is reported in a section, `rank` ranks all measured rows. A row with diverged
    runs has rank NaN.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Returns:
      A copy with the two columns.

    Raises:
      ConfigError: if the table has not the columns of a comparison.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import add_ranks
      >>> table = pd.DataFrame({"dataset": "digits", "model": "mlp", "alpha": 0.1,
      ...     "mean": [70.0, 80.0], "reported_mean": [75.0, 72.0], "diverged": 0})
      >>> add_ranks(table)[["rank", "reported_rank"]].to_numpy().tolist()
      [[2.0, 1.0], [1.0, 2.0]]
    """
    table = table.assign(rank=math.nan, reported_rank=math.nan)
    for _, section in _group_by_section(table):
        rows = section[_is_comparable(section)]
        if section["reported_mean"].isna().all():
            rows = section[section["diverged"] == 0]
        for column, values in (("reported_rank", "reported_mean"), ("rank", "mean")):
            rounded = rows[values].map(lambda value: round(value, _NUM_DECIMALS)).astype(float)
            table.loc[rows.index, column] = rounded.rank(method="min", ascending=False)
    return table


@validate_arguments
def compute_rank_correlations(table: "pd.DataFrame") -> list[RankCorrelation]:
    """Compute Spearman's rank correlation of measured and reported values.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Returns:
      One entry for each section (data set, network, alpha) with at least three methods that have
      both values. Sections whose measured or reported values are all equal have no entry.

    Raises:
      ConfigError: if the table has not the columns of a comparison.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import compute_rank_correlations
      >>> table = pd.DataFrame({"dataset": "digits", "model": "mlp", "alpha": 0.1,
      ...     "mean": [70.0, 80.0, 90.0], "reported_mean": [60.0, 65.0, 72.0], "diverged": 0})
      >>> round(compute_rank_correlations(table)[0].rho, 3)
      1.0
    """
    from scipy import stats

    correlations = []
    for settings, section in _group_by_section(table):
        rows = section[_is_comparable(section)]
        values = rows[["mean", "reported_mean"]].round(_NUM_DECIMALS)
        if len(rows) >= _MIN_METHODS and (values.nunique() > 1).all():
            rho = float(stats.spearmanr(values["mean"], values["reported_mean"]).statistic)
            correlations.append(RankCorrelation(describe_settings(settings), rho, len(rows)))
    return correlations


def _group_by_section(table: "pd.DataFrame") -> list[tuple[dict, "pd.DataFrame"]]:
    names = ["dataset", "model", "alpha"]
    require_columns("table", table, (*names, "mean", "reported_mean", "diverged"))
    groups = table.groupby(names, sort=False, dropna=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]


def _is_comparable(section: "pd.DataFrame") -> "pd.Series":
    return section[["mean", "reported_mean"]].notna().all(axis=1) & (section["diverged"] == 0)


# Measured and reported values

# Metric of a run's summary behind each metric of reported values.
REPORTED_METRICS = {
    "test_accuracy_last5_mean": "final_accuracy",
    "test_accuracy_best": "best_accuracy",
    "test_accuracy_final_window20": "window_accuracy",
    "bmta": "bmta",
}
# Further metrics of reported values that a table may have: numbers of rounds.
ROUND_METRICS = {"rounds_to_accuracy_0.5": "rounds_to_half"}
# Further columns of a comparison, and the metrics in them.
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
        `REPORTED_METRICS`; one of `ROUND_METRICS` may be present as well. Runs may evaluate the
        clients' own models (`RunSpec.client_test_model`): their best accuracy is the mean over
        clients (`bmta`), and a domain's accuracy is its client's accuracy.

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
        `planned`; `seconds`, the wall-clock time per run. If runs ended early: `partial`, their
        number, which `diverged` includes.

    Raises:
      ValueError: if `reported` has several values for one cell.
      ConfigError: if `reported` has metrics other than accuracies.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import TableCell, compare_with_reported
      >>> reported = pd.DataFrame({"metric": "bmta", "dataset": "digits", "model": "mlp",
      ...     "level": [0.1], "method": "fedavg", "mean": 81.5, "std": 1.5})
      >>> cells = [TableCell("digits", "mlp", 0.1, "fedavg")]
      >>> table = compare_with_reported(cells, pd.DataFrame(), reported)
      >>> table[["method", "seeds", "reported_mean"]].to_numpy().tolist()
      [['fedavg', 0, 81.5]]
    """
    import pandas as pd

    metric = get_compared_metric(reported)
    round_metrics = [name for name in ROUND_METRICS if name in set(reported["metric"])]
    columns = [
        name
        for name in ("domain", "classes")
        if any(getattr(cell, name) is not None for cell in cells)
    ]
    rows = []
    for cell in cells:
        cell_results = select_cell_runs(cell, results)
        row = {name: getattr(cell, name) for name in ("dataset", "model", "alpha", *columns)}
        row |= {"method": cell.method, **_summarize_measured(cell_results, cell, metric)}
        row |= {"planned": len(cell.runs), **get_reported_value(cell, reported)}
        for name in round_metrics:
            row |= _summarize_rounds(cell_results, cell, reported, name)
        rows.append(row)
    table = pd.DataFrame(rows)
    if not table["partial"].any():
        table = table.drop(columns="partial")
    table["difference"] = table["mean"] - table["reported_mean"]
    if round_metrics:
        table["rounds_difference"] = table["rounds"] - table["reported_rounds"]
    return add_ranks(table) if metric == "bmta" else table


def select_cell_runs(cell: TableCell, results: "pd.DataFrame") -> "pd.DataFrame":
    """Select the rows of `results` that are runs of a cell.

    Args:
      cell: the cell.
      results: as `load_results` returns it.

    Returns:
      The rows.
    """
    if not len(results):
        return results
    require_columns("results", results, ("settings",))
    return results[results["settings"].isin([compute_settings_digest(run) for run in cell.runs])]


def is_personal_evaluation(cell: TableCell) -> bool:
    """Return whether accuracies are of the clients' own models instead of the global model."""
    if not cell.runs:
        return False
    run = cell.runs[0]
    try:
        resolved = run.resolved()
    except ConfigError:  # the method is not registered in this process: its setting counts
        return run.client_test_model not in (None, "global")
    return resolved.has_client_tests and resolved.evaluated_model != "global"


def get_cell_metric(cell: TableCell, metric: str) -> str:
    """Return the metric of a cell's runs: of clients' own models where a run evaluates them.

    Args:
      cell: the cell.
      metric: compared metric of the table.

    Returns:
      A key of a run's summary.
    """
    is_personal = is_personal_evaluation(cell)
    if cell.domain == AVERAGE:
        return "bmta" if is_personal else "best_domains_accuracy"
    if cell.domain is not None:
        return f"{'client_accuracy' if is_personal else 'accuracy'}_{cell.domain}"
    return "bmta" if is_personal and metric == "best_accuracy" else metric


def _summarize_measured(
    cell_results: "pd.DataFrame", cell: TableCell, metric: str
) -> dict[str, float]:
    cell_metric = get_cell_metric(cell, metric)
    if cell.domain is not None:
        companions = {}
    elif cell_metric != metric:  # clients' own models
        companions = {"final_mean": "final_client_accuracy"}
    else:
        companions = _COMPANION_METRICS[metric]
    has_diverged = is_diverged(cell_results)
    accuracy = get_metric_values(cell_results[~has_diverged], cell_metric)
    means = {
        name: get_metric_values(cell_results[~has_diverged], key).mean()
        for name, key in companions.items()
    }
    return {
        "mean": accuracy.mean(),
        "std": accuracy.std(),  # n - 1: NaN for one run
        **means,
        "seconds": get_metric_values(cell_results, "wall_seconds").mean(),
        "seeds": len(accuracy),
        "diverged": int(has_diverged.sum()),
        "partial": int(is_partial_run(cell_results).sum()),
    }


def _summarize_rounds(
    cell_results: "pd.DataFrame", cell: TableCell, reported: "pd.DataFrame", metric: str
) -> dict[str, float]:
    rounds = get_metric_values(cell_results[~is_diverged(cell_results)], ROUND_METRICS[metric])
    # A mean of the runs that are fast enough would flatter a method.
    all_reached = len(rounds) > 0 and rounds.notna().all()
    return {
        "rounds": rounds.mean() if all_reached else math.nan,
        "rounds_std": rounds.std() if all_reached else math.nan,
        "reached": int(rounds.notna().sum()),
        "reported_rounds": get_reported_value(cell, reported, [metric])["reported_mean"],
    }


def get_reported_value(
    cell: TableCell, reported: "pd.DataFrame", metrics: Iterable[str] = REPORTED_METRICS
) -> dict[str, float]:
    """Return the value that a paper reports for a cell.

    Args:
      cell: the cell.
      reported: as `load_reported_values` returns it. An empty network or level matches any.
      metrics: metrics that count.

    Returns:
      `reported_mean` and `reported_std`; NaN if the paper has no value.

    Raises:
      ValueError: if there are several values.
    """
    is_match = reported["metric"].isin(metrics) & (reported["method"] == cell.method)
    is_match &= reported["dataset"] == cell.dataset
    for name in ("model", "level"):
        is_match &= reported[name].isna() | (reported[name] == getattr(cell, name))
    rows = reported[is_match]
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} reported values for {cell.method}, {cell.column_label}")
    return {f"reported_{n}": rows[n].iloc[0] if len(rows) else math.nan for n in ("mean", "std")}


@validate_arguments
def list_diverged_runs(cells: Sequence[TableCell], results: "pd.DataFrame") -> list[str]:
    """Name the diverged runs of some cells, for a note under the table.

    Args:
      cells: cells of the table.
      results: as `load_results` returns it.

    Returns:
      One text per run that diverged or ended early: method, column and seed, and whether it ended
      early.

    Raises:
      ConfigError: if the results have not the columns of `load_results`.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.analysis import TableCell, list_diverged_runs
      >>> run = RunSpec("fedavg", "digits", model="mlp", alpha=0.1)
      >>> results = pd.DataFrame({"settings": [run.digest()], "diverged": [True],
      ...     "final_accuracy": [0.1]})
      >>> list_diverged_runs([TableCell("digits", "mlp", 0.1, "fedavg", (run,))], results)
      ['FedAvg, digits, mlp, alpha 0.1, seed 0']
    """
    if not len(results):
        return []
    require_columns("results", results, ("settings", "diverged", "final_accuracy"))
    reasons = {
        **dict.fromkeys(results["settings"][is_diverged(results)], ""),
        **dict.fromkeys(results["settings"][is_partial_run(results)], " (ended early)"),
    }
    return [
        f"{format_row(cell.method)}, {cell.column_label}, seed {run.seed}{reasons[digest]}"
        for cell in cells
        for run in cell.runs
        if (digest := compute_settings_digest(run)) in reasons
    ]


# Texts

_SEEDS_CAPTION = "Measured: mean ± standard deviation over seeds."
_DIFFERENCE_CAPTION = (
    "Difference: measured − reported, in points. Time: wall-clock per run, compilation included."
)
_CAPTIONS = {
    "final_accuracy": f"Test accuracy in percent, mean of the last five rounds. {_SEEDS_CAPTION} Within "
    f"run: standard deviation over the last five rounds, averaged over seeds. {_DIFFERENCE_CAPTION}",
    "best_accuracy": "Test accuracy in percent, of the round where it is highest. The paper "
    f"selects the round on the test images, too. {_SEEDS_CAPTION} Last five: mean of the last five "
    f"rounds instead. {_DIFFERENCE_CAPTION}",
    "window_accuracy": "Test accuracy in percent, mean of the last 20 measured rounds. "
    f"{_SEEDS_CAPTION} Rise time: the first round at which the running mean over 20 reaches 90 % "
    f"of that mean. {_DIFFERENCE_CAPTION}",
    "bmta": "Best mean test accuracy (BMTA) in percent: the mean over clients, each on tests "
    "distributed like its training data, in the round where it is highest. The paper selects the "
    f"round on these tests, too. {_SEEDS_CAPTION} Worst decile: mean over the worst tenth of "
    "clients in that round. Round: the first round that reached the BMTA. Rank: by the BMTA "
    "measured / reported, 1 is the highest, among methods that have both values; without reported "
    f"values, among all measured methods. {_DIFFERENCE_CAPTION}",
}
_DOMAINS_CAPTION = (
    "Test accuracy in percent on the test images of each domain, in the round where their "
    "unweighted mean is highest. The paper selects the round on the test images, too. Average: the "
    f"unweighted mean. {_SEEDS_CAPTION} {_DIFFERENCE_CAPTION}"
)
_ROUNDS_CAPTION = (
    "Rounds to 50 %: the first round at which the running mean over 20 reaches 50 %, mean over "
    "seeds if all seeds reach it. The reported value and the difference follow, in rounds."
)


@validate_arguments
def make_comparison_caption(table: "pd.DataFrame") -> str:
    """Describe the columns of a comparison in sentences.

    Args:
      table: a comparison, as `compare_with_reported` returns it.

    Raises:
      ConfigError: if the table has not the columns of a comparison.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import make_comparison_caption
      >>> make_comparison_caption(pd.DataFrame({"final_mean": [71.2]}))[:58]
      'Test accuracy in percent, of the round where it is highest'
    """
    if "domain" in table:
        return _DOMAINS_CAPTION
    caption = _CAPTIONS[_infer_compared_metric(table)]
    if "seeds" in table and table["seeds"].max() == 1:
        caption = caption.replace(_SEEDS_CAPTION, "Measured: one seed.")
        caption = caption.replace(", averaged over seeds", "")
    return f"{caption} {_ROUNDS_CAPTION}" if "rounds" in table else caption


def _infer_compared_metric(table: "pd.DataFrame") -> str:
    """Return the metric of a comparison without domains, inferred from its other columns."""
    for metric, companions in _COMPANION_METRICS.items():
        if {*companions} <= {*table}:
            return metric
    raise ConfigError("table: expected a comparison, as `compare_with_reported` returns it")


@validate_arguments
def format_comparison_table(
    table: "pd.DataFrame", *, title: str, notes: Sequence[str] = ()
) -> TextTable:
    """Format a comparison as a table of texts.

    Args:
      table: a comparison, as `compare_with_reported` returns it.
      title: title of the table.
      notes: sentences below the table.

    Returns:
      A section per data set, network and level with one row per method. For domains, a section per
      data set and network with one column per domain.

    Raises:
      ConfigError: if the table has not the columns of a comparison.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import TableCell, compare_with_reported, format_comparison_table
      >>> reported = pd.DataFrame({"metric": "bmta", "dataset": "digits", "model": "mlp",
      ...     "level": [0.1], "method": "fedavg", "mean": 81.5, "std": 1.5})
      >>> cells = [TableCell("digits", "mlp", 0.1, "fedavg")]
      >>> table = compare_with_reported(cells, pd.DataFrame(), reported)
      >>> format_comparison_table(table, title="Table.").sections[0].rows[0]["Reported"]
      '81.50 ± 1.50'
    """
    rows = table.to_dict("records")
    if "domain" in table:
        return _format_domain_table(rows, title, notes)
    metric = _infer_compared_metric(table)
    sections = []
    for settings, group in itertools.groupby(rows, _get_section_settings):
        section = _mark_equal_rows(list(group))
        labels = {_COLUMN_SETTINGS[n]: format_setting_value(v) for n, v in settings.items()}
        best_cells = frozenset((index, "Measured") for index in _find_best(section, metric))
        texts = [_format_row(row) for row in section]
        sections.append(TableSection(texts, describe_settings(settings), labels, best_cells))
    return TextTable(title, ["Method"], sections, add_equal_note(notes, sections), _MINOR_COLUMNS)


def _mark_equal_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `equals_baseline` to the rows of one column: whether the mean is FedAvg's."""
    baseline = next((row for row in rows if row["method"] == BASELINE and not row["diverged"]), {})
    return [
        {
            **row,
            "equals_baseline": row["method"] != BASELINE
            and not row["diverged"]
            and equals_baseline(row["mean"], baseline.get("mean", math.nan)),
        }
        for row in rows
    ]


def _get_section_settings(row: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that all rows of a section share."""
    return {n: row[n] for n in _COLUMN_SETTINGS if n in row and not is_missing(row[n])}


def _find_best(rows: Sequence[dict[str, Any]], metric: str) -> list[int]:
    values = [math.nan if row["diverged"] else row["mean"] for row in rows]
    return find_best_indices(values, higher_is_better=get_metric_info(metric).higher_is_better)


def _format_measured(row: dict[str, Any]) -> str:
    num_partial = row.get("partial", 0)
    reasons = {"diverged": row["diverged"] > num_partial, "ended_early": num_partial > 0}
    text = format_mean_std(row["mean"], row["std"], **reasons)
    return f"{text} {EQUAL}" if row.get("equals_baseline") else text


def _format_reported(row: dict[str, Any]) -> str:
    return format_mean_std(row["reported_mean"], row["reported_std"])


def _format_rank(row: dict[str, Any]) -> str:
    rank, reported_rank = row["rank"], row["reported_rank"]
    return format_number(rank, "g") + ("" if math.isnan(reported_rank) else f" / {reported_rank:g}")


def _format_rounds(row: dict[str, Any]) -> str:
    if row["seeds"] and row["reached"] < row["seeds"]:
        reached = f"{row['reached']} of {row['seeds']} runs reach it"
        return reached if row["reached"] else "not reached"
    return format_mean_std(row["rounds"], row["rounds_std"], format_spec=".0f")


def _format_time(row: dict[str, Any]) -> str:
    return MISSING if math.isnan(row["seconds"]) else f"{row['seconds']:.1f} s"


# Columns of a table in their order: by column of the comparison, the heading, and the format of its
# number or a function of the row.
_COLUMNS: dict[str, tuple[str, str | Callable[[dict[str, Any]], str]]] = {
    "method": ("Method", lambda row: format_row(row["method"])),
    "mean": ("Measured", _format_measured),
    "within_std": ("Within run", ".2f"),
    "final_mean": ("Last five", ".2f"),
    "rise_time": ("Rise time", ".0f"),
    "worst_decile": ("Worst decile", ".2f"),
    "best_round": ("Round", ".3g"),
    "reported_mean": ("Reported", _format_reported),
    "difference": ("Difference", "+.2f"),
    "p_value": ("p", lambda row: format_p_value(row["p_value"])),
    "matching_loss": ("J", ".3f"),
    "over_real": ("Over real", "+.2f"),
    "rank": ("Rank", _format_rank),
    "rounds": ("Rounds to 50 %", _format_rounds),
    "reported_rounds": ("Reported rounds", ".0f"),
    "rounds_difference": ("Difference in rounds", "+.0f"),
    "seeds": ("Seeds", lambda row: format_seed_count(row["seeds"], row["planned"])),
    "seconds": ("Time", _format_time),
}


# Columns that a narrow terminal leaves out, the least important column first.
_MINOR_COLUMNS = (
    *("Time", "Round", "Within run", "Last five", "Rise time", "J", "Worst decile"),
    *("Difference in rounds", "Reported rounds", "Seeds", "Over real", "p"),
)


def _format_row(row: dict[str, Any], names: Iterable[str] = _COLUMNS) -> dict[str, str]:
    texts = {}
    for name in names:
        if name in row:
            heading, style = _COLUMNS[name]
            texts[heading] = style(row) if callable(style) else format_number(row[name], style)
    return texts


def _format_domain_table(
    rows: Sequence[dict[str, Any]], title: str, notes: Sequence[str]
) -> TextTable:
    """Format a line of measured values per method, and below it the paper's values, if any."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    sections = []
    for place, group in itertools.groupby(rows, lambda row: (row["dataset"], row["model"])):
        cells_by_method: dict[str, list[dict[str, Any]]] = {}
        for row in group:
            cells_by_method.setdefault(row["method"], []).append(row)
        columns_of_cells = zip(*cells_by_method.values(), strict=True)
        marked_columns = [_mark_equal_rows(column) for column in columns_of_cells]
        best = [_find_best(column, "best_domains_accuracy") for column in marked_columns]
        lines: list[dict[str, str]] = []
        best_cells = set()
        rows_of_cells = zip(*marked_columns, strict=True)
        for index, (method, cells) in enumerate(zip(cells_by_method, rows_of_cells, strict=True)):
            columns = zip(domains, best, strict=True)
            best_cells |= {(len(lines), domain) for domain, indices in columns if index in indices}
            lines += _format_domain_lines(method, cells)
        labels = dict(zip(("Data", "Network"), place, strict=True))
        sections.append(TableSection(lines, ", ".join(place), labels, frozenset(best_cells)))
    notes = add_equal_note(notes, sections)
    return TextTable(title, ["Method", "Value"], sections, notes, _MINOR_COLUMNS)


def _format_domain_lines(method: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Format the lines of a method, from its cells of all domains."""
    runs = _format_row(cells[0], ("seeds", "seconds"))
    measured = {cell["domain"]: _format_measured(cell) for cell in cells}
    lines = [{"Method": format_row(method), "Value": "measured", **measured, **runs}]
    if all(math.isnan(cell["reported_mean"]) for cell in cells):
        return lines
    reported = {cell["domain"]: _format_reported(cell) for cell in cells}
    differences = {cell["domain"]: format_number(cell["difference"], "+.2f") for cell in cells}
    empty = dict.fromkeys(runs, "")
    lines.append({"Method": "", "Value": "reported", **reported, **empty})
    lines.append({"Method": "", "Value": "difference", **differences, **empty})
    return lines
