"""A comparison as people read it: a table of texts, and what its columns are."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.comparison import COLUMN_SETTINGS, infer_compared_metric
from fedjax_het.analysis.grouping import describe_settings, format_setting_value, is_missing
from fedjax_het.analysis.render import (
    MISSING,
    TableSection,
    TextTable,
    find_best_indices,
    format_mean_std,
    format_number,
    format_p_value,
    format_seed_count,
)
from fedjax_het.utils.config import validate_arguments

if TYPE_CHECKING:
    import pandas as pd

_SETTING_LABELS = {"dataset": "Data", "model": "Network", "alpha": "alpha", "classes": "Classes"}
_SEEDS_CAPTION = "Measured: mean ± standard deviation over seeds."
_DIFFERENCE_CAPTION = (
    "Difference: measured − reported, in points. Time: wall-clock per run, compilation included."
)
_CAPTIONS = {
    "final_accuracy": f"Test accuracy in percent, mean of the last five rounds. {_SEEDS_CAPTION} Within "
    f"run: standard deviation over the last five rounds, averaged over seeds. {_DIFFERENCE_CAPTION}",
    "best_accuracy": "Test accuracy in percent, of the round where it is highest, as the paper "
    f"selects it (on the test images). {_SEEDS_CAPTION} Last five: mean of the last five rounds instead. "
    f"{_DIFFERENCE_CAPTION}",
    "window_accuracy": "Test accuracy in percent, mean of the last 20 measured rounds. "
    f"{_SEEDS_CAPTION} Rise time: the first round at which the running mean over 20 reaches 90 % of that. "
    f"{_DIFFERENCE_CAPTION}",
    "bmta": "Best mean test accuracy (BMTA) in percent: the mean over clients, each on tests like "
    "its own data, in the round where it is highest, as the paper selects it (on those tests). "
    f"{_SEEDS_CAPTION} Worst decile: mean over the worst tenth of clients in that round. Round: the first "
    "that reached the BMTA. Rank: by the BMTA measured / reported, 1 is the highest, among methods "
    "that have both values; without reported values, among those measured. "
    f"{_DIFFERENCE_CAPTION}",
}
_DOMAINS_CAPTION = (
    "Test accuracy in percent on the test images of each domain, in the round where their "
    "unweighted mean is highest, as the paper selects it (on the test images); average: that "
    "mean. Measured: mean ± standard deviation over seeds. Difference: measured − reported, in "
    "points. Time: wall-clock per run, compilation included."
)
_ROUNDS_CAPTION = (
    "Rounds to 50 %: the first round at which the running mean over 20 reaches it, mean over seeds "
    "where all of them do, with the reported one and the difference in rounds."
)


@validate_arguments
def make_comparison_caption(table: "pd.DataFrame") -> str:
    """Describe the columns of a comparison in sentences.

    Args:
      table: a comparison, as `compare_with_reported` returns it.
    """
    if "domain" in table:
        return _DOMAINS_CAPTION
    metric_caption = _CAPTIONS[infer_compared_metric(table)]
    return f"{metric_caption} {_ROUNDS_CAPTION}" if "rounds" in table else metric_caption


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
      A section per data set, network and level with one row per method; for domains, a section
      per data set and network with one column per domain.
    """
    renamed_table = table.rename(
        columns={"mean": "mean_", "std": "std_"}
    )  # tuples have methods too
    rows = list(renamed_table.itertuples(index=False))
    if "domain" in table:
        return _format_domain_table(rows, title, notes)
    metric = infer_compared_metric(table)
    sections = []
    for _, group_rows in itertools.groupby(
        rows, lambda row: describe_settings(_get_section_settings(row))
    ):
        section_rows = list(group_rows)
        section_settings = _get_section_settings(section_rows[0])
        best_indices = find_best_indices(
            [math.nan if row.diverged else row.mean_ for row in section_rows]
        )
        sections.append(
            TableSection(
                rows=tuple(_format_row(row, metric) for row in section_rows),
                title=describe_settings(section_settings),
                labels={
                    _SETTING_LABELS[name]: format_setting_value(value)
                    for name, value in section_settings.items()
                },
                best_cells=frozenset((row_index, "Measured") for row_index in best_indices),
            )
        )
    _, *values = sections[0].rows[0]
    return TextTable(title, ("Method",), tuple(values), tuple(sections), tuple(notes))


def _get_section_settings(row: Any) -> dict[str, Any]:
    """The settings that all rows of a section share; no level without such settings."""
    section_settings = {name: getattr(row, name, None) for name in COLUMN_SETTINGS}
    return {name: value for name, value in section_settings.items() if not is_missing(value)}


def _format_row(row: Any, metric: str) -> dict[str, str]:
    companion_texts, rank_texts = {}, {}
    if metric == "bmta":
        companion_texts["Worst decile"] = format_number(row.worst_decile)
        companion_texts["Round"] = format_number(row.best_round, ".3g")
        reported_rank_text = "" if math.isnan(row.reported_rank) else f" / {row.reported_rank:g}"
        rank_texts["Rank"] = format_number(row.rank, "g") + reported_rank_text
    elif metric == "window_accuracy":
        companion_texts["Rise time"] = format_number(row.rise_time, ".0f")
    elif metric == "best_accuracy":
        companion_texts["Last five"] = format_number(row.final_mean)
    else:
        companion_texts["Within run"] = format_number(row.within_std)
    return {
        "Method": row.method,
        "Measured": format_mean_std(row.mean_, row.std_, diverged=bool(row.diverged)),
        **companion_texts,
        "Reported": format_mean_std(row.reported_mean, row.reported_std),
        "Difference": format_number(row.difference, "+.2f"),
        **({"p": format_p_value(row.p_value)} if hasattr(row, "p_value") else {}),
        **({"J": format_number(row.matching_loss, ".3f")} if hasattr(row, "matching_loss") else {}),
        **(
            {"Over real": format_number(row.over_real, "+.2f")} if hasattr(row, "over_real") else {}
        ),
        **rank_texts,
        **(_format_rounds(row) if hasattr(row, "rounds") else {}),
        **_format_runs(row),
    }


def _format_rounds(row: Any) -> dict[str, str]:
    measured_text = format_mean_std(row.rounds, row.rounds_std, format_spec=".0f")
    if row.seeds and row.reached < row.seeds:
        measured_text = (
            f"{row.reached} of {row.seeds} runs reach it" if row.reached else "not reached"
        )
    return {
        "Rounds to 50 %": measured_text,
        "Reported rounds": format_number(row.reported_rounds, ".0f"),
        "Difference in rounds": format_number(row.rounds_difference, "+.0f"),
    }


def _format_runs(row: Any) -> dict[str, str]:
    return {
        "Seeds": format_seed_count(row.seeds, row.planned),
        "Time": MISSING if math.isnan(row.seconds) else f"{row.seconds:.1f} s",
    }


def _format_domain_table(rows: Sequence[Any], title: str, notes: Sequence[str]) -> TextTable:
    """Each method has a line of measured values, and below it those of the paper, if any."""
    domains = list(dict.fromkeys(row.domain for row in rows))
    sections = [
        _make_domain_section(dataset, model, list(section_rows), domains)
        for (dataset, model), section_rows in itertools.groupby(
            rows, lambda r: (r.dataset, r.model)
        )
    ]
    values = (*domains, "Seeds", "Time")
    return TextTable(title, ("Method", "Value"), values, tuple(sections), tuple(notes))


def _make_domain_section(
    dataset: str, model: str, rows: Sequence[Any], domains: Sequence[str]
) -> TableSection:
    rows_by_method: dict[str, list[Any]] = {}
    for row in rows:
        rows_by_method.setdefault(row.method, []).append(row)
    lines: list[dict[str, str]] = []
    measured_line_indices: dict[str, int] = {}  # by method, where its measured values are
    for method, cells in rows_by_method.items():
        measured_line_indices[method] = len(lines)
        lines += _format_domain_lines(method, cells)
    best_cells = set()
    for domain in domains:
        column = [row for row in rows if row.domain == domain]
        values = [math.nan if row.diverged else row.mean_ for row in column]
        best_cells |= {
            (measured_line_indices[column[row_index].method], domain)
            for row_index in find_best_indices(values)
        }
    return TableSection(
        rows=tuple(lines),
        title=f"{dataset}, {model}",
        labels={"Data": dataset, "Network": model},
        best_cells=frozenset(best_cells),
    )


def _format_domain_lines(method: str, cells: Sequence[Any]) -> list[dict[str, str]]:
    """The lines of a method, from its cells of all domains."""
    runs = _format_runs(cells[0])
    measured_texts = {
        c.domain: format_mean_std(c.mean_, c.std_, diverged=bool(c.diverged)) for c in cells
    }
    lines = [{"Method": method, "Value": "measured", **measured_texts, **runs}]
    if all(math.isnan(cell.reported_mean) for cell in cells):
        return lines
    reported_lines = {
        "reported": {c.domain: format_mean_std(c.reported_mean, c.reported_std) for c in cells},
        "difference": {c.domain: format_number(c.difference, "+.2f") for c in cells},
    }
    empty = dict.fromkeys(runs, "")
    return [*lines, *({"Method": "", "Value": n, **t, **empty} for n, t in reported_lines.items())]
