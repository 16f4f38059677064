"""Any folder of results as a table: means over seeds, grouped by the settings that vary."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.grouping import (
    describe_settings,
    find_constant_settings,
    find_derived_settings,
    find_varying_settings,
    format_setting_name,
    format_setting_value,
    get_companion_metric,
    get_display_scale,
    get_metric_label,
    get_metric_values,
    group_runs,
    is_diverged,
    is_higher_better,
    is_shared_setting,
    require_result_metric,
    resolve_group_settings,
)
from fedjax_het.analysis.render import (
    DIVERGED,
    MISSING,
    TableSection,
    TextTable,
    choose_number_format,
    find_best_indices,
    format_mean_std,
    format_number,
)
from fedjax_het.runtime.provenance import IDENTITY_FIELDS
from fedjax_het.runtime.result_store import select_newest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require_name

if TYPE_CHECKING:
    import pandas as pd

_REQUIRED_VERSIONS = ("fedjax_het", "jax", "device")


@validate_arguments
def summarize_runs(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
) -> "pd.DataFrame":
    """Average a metric over the runs that share settings, one row per combination.

    Args:
      results: as `load_results` returns it; of runs with equal settings the newest counts.
      by: settings that distinguish rows; default: `find_varying_settings`. Runs that differ in
        other settings are averaged together.
      metric: a numeric column of `results`.

    Returns:
      A frame sorted by `by`; missing values are NaN, accuracies in percent:

      * the settings of `by`;
      * `mean` and `std` of the metric (n − 1; NaN for one run);
      * `best_accuracy`, the mean of the runs' best rounds; for BMTA instead `bmta_worst_decile`, and
        for the mean of 20 rounds `rise_time`;
      * `seeds`, the number of runs in the mean, and `diverged`, the number left out;
      * `wall_seconds` and `client_samples_per_second` of a run, diverged or not.

    Raises:
      ConfigError: if the runs do not have a setting or the metric, or if there is no run.
    """
    import pandas as pd

    results = select_newest(results)
    by = resolve_group_settings(results, by)
    require_result_metric(results, metric)
    companion_metric, *_ = get_companion_metric(metric)
    rows = []
    for settings, runs in group_runs(results, by):
        has_diverged = is_diverged(runs)
        values = get_metric_values(runs[~has_diverged], metric)
        rows.append(
            {
                **settings,
                "mean": values.mean(),
                "std": values.std(),  # n - 1: NaN for one run
                companion_metric: get_metric_values(runs[~has_diverged], companion_metric).mean(),
                "seeds": int(values.count()),
                "diverged": int(has_diverged.sum()),
                "wall_seconds": get_metric_values(runs, "wall_seconds").mean(),
                "client_samples_per_second": get_metric_values(
                    runs, "client_samples_per_second"
                ).mean(),
            }
        )
    return pd.DataFrame(rows)


@validate_arguments
def make_overview_table(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
    title: str = "Overview",
) -> TextTable:
    """Format `summarize_runs` as a table of texts, with the common settings of all runs as notes.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish rows; default: `find_varying_settings`.
      metric: a numeric column of `results`.
      title: title of the table.
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    summary = summarize_runs(results, by=by, metric=metric)
    format_spec = _choose_format(summary, metric)
    seconds_format = choose_number_format(summary["wall_seconds"])
    value_column = get_metric_label(metric)
    companion_metric, companion_heading, companion_note = get_companion_metric(metric)
    formatters = {
        value_column: lambda row: format_mean_std(
            row["mean"], row["std"], diverged=row["diverged"], format_spec=format_spec
        ),
        companion_heading: lambda row: format_number(row[companion_metric]),
        "Seeds": lambda row: str(row["seeds"]),
        "Diverged": lambda row: str(row["diverged"]),
        "Time (s)": lambda row: format_number(row["wall_seconds"], seconds_format),
        "Samples/s": lambda row: format_number(row["client_samples_per_second"], ",.0f"),
    }
    rows = [
        (
            settings,
            {name: formatter(row) for name, formatter in formatters.items()},
            {value_column: _get_rankable_mean(row)},
        )
        for settings, row in _list_summary_rows(summary, by)
    ]
    names, sections = _make_sections(rows, by, is_higher_better(metric))
    notes = [
        *_make_metric_notes(results, by, metric),
        f"{companion_note}. Time: wall-clock per run. Samples/s: client samples per second of "
        "training.",
        *_make_settings_notes(results, by),
    ]
    return TextTable(f"{title}.", names, tuple(formatters), sections, tuple(notes))


@validate_arguments
def make_pivot_table(
    results: "pd.DataFrame",
    *,
    columns: str = "alpha",
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
    title: str = "Overview",
) -> TextTable:
    """Format means over seeds with methods as rows and the values of one setting as columns.

    Args:
      results: as `load_results` returns it.
      columns: the setting whose values are columns. A combination without runs is a dash.
      by: settings that distinguish rows; default: `find_varying_settings`.
      metric: a numeric column of `results`.
      title: title of the table.
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    require_name("columns", columns, by)
    summary = summarize_runs(results, by=by, metric=metric)
    format_spec = _choose_format(summary, metric)
    column_values = [setting[columns] for setting, _ in group_runs(results, [columns])]
    column_titles = {
        value: describe_settings({columns: value}) or MISSING for value in column_values
    }
    others = [name for name in by if name != columns]
    rows = []
    for settings, group_rows in group_runs(summary, others):
        row_texts, means = dict.fromkeys(column_titles.values(), MISSING), {}
        for row_settings, row in _list_summary_rows(group_rows, by):
            column_title = column_titles[row_settings[columns]]
            row_texts[column_title] = format_mean_std(
                row["mean"], row["std"], diverged=row["diverged"], format_spec=format_spec
            )
            means[column_title] = _get_rankable_mean(row)
        rows.append((settings, row_texts, means))
    names, sections = _make_sections(rows, others, is_higher_better(metric))
    notes = tuple(_make_metric_notes(results, by, metric))
    return TextTable(
        f"{title}, by {format_setting_name(columns)}.",
        names,
        tuple(column_titles.values()),
        sections,
        notes,
    )


def _list_summary_rows(summary: "pd.DataFrame", by: Sequence[str]) -> list[tuple[dict, dict]]:
    return [
        (settings, row)
        for settings, group_rows in group_runs(summary, by)
        for row in group_rows.to_dict("records")
    ]


def _choose_format(summary: "pd.DataFrame", metric: str) -> str:
    return ".2f" if get_display_scale(metric) == 100 else choose_number_format(summary["mean"])


def _get_rankable_mean(row: dict[str, Any]) -> float:
    """What a row competes with for the bold type: nothing if it lost runs."""
    return math.nan if row["diverged"] else row["mean"]


def _make_sections(
    rows: Sequence[tuple[dict[str, Any], dict[str, str], dict[str, float]]],
    by: Sequence[str],
    mark_best: bool,
) -> tuple[tuple[str, ...], tuple[TableSection, ...]]:
    """Rows (settings, texts, numbers to compare) under titles of the settings they share.

    Not divided where every section would hold one row: then every setting is a column, and there
    is nothing to compare.
    """
    section_settings = [name for name in by if is_shared_setting(name)]
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[0][name] for name in section_settings), []).append(row)
    if section_settings and all(len(group) == 1 for group in groups.values()):
        section_settings, groups, mark_best = [], {(): list(rows)}, False
    row_settings = [name for name in by if name not in section_settings]
    sections = []
    for group in groups.values():
        first_settings = group[0][0]
        best_cells = {
            (number, column)
            for column in group[0][1]
            for number in find_best_indices(
                [numbers.get(column, math.nan) for _, _, numbers in group]
            )
        }
        sections.append(
            TableSection(
                rows=tuple(
                    {
                        **{
                            format_setting_name(n): format_setting_value(settings[n])
                            for n in row_settings
                        },
                        **texts,
                    }
                    for settings, texts, _ in group
                ),
                title=describe_settings({name: first_settings[name] for name in section_settings}),
                labels={
                    format_setting_name(name): format_setting_value(first_settings[name])
                    for name in section_settings
                },
                best_cells=frozenset(best_cells) if mark_best else frozenset(),
            )
        )
    return tuple(map(format_setting_name, row_settings)), tuple(sections)


def _make_metric_notes(results: "pd.DataFrame", by: Sequence[str], metric: str) -> list[str]:
    metric_text = get_metric_label(metric)
    if metric == "final_accuracy":
        metric_text += ", mean of the last five rounds"
    if metric == "rounds_to_half":
        metric_text += ", of the runs that reach it (Seeds: their number)"
    if metric == "bmta":
        metric_text += " on tests like their own data, in the round where it is highest"
    averaged_settings = [
        f"{format_setting_name(name)} ({', '.join(format_setting_value(s[name]) for s, _ in groups)})"
        for name in find_varying_settings(results)
        if name not in by
        for groups in [group_runs(results, [name])]
        if any(len(group_runs(runs, [name])) > 1 for _, runs in group_runs(results, by))
    ]
    averaging_text = (
        f"runs that differ in {', '.join(averaged_settings)}, and seeds"
        if averaged_settings
        else "seeds"
    )
    return [
        f"{metric_text}: mean ± standard deviation over {averaging_text}.",
        *_make_divergence_notes(results, by),
    ]


def _make_divergence_notes(results: "pd.DataFrame", by: Sequence[str]) -> list[str]:
    diverged_rows = results[is_diverged(results)]
    if not len(diverged_rows):
        return []
    run_texts = [
        f"{describe_settings(settings) or 'runs'} (seed {', '.join(map(str, runs['seed']))})"
        for settings, runs in group_runs(diverged_rows, by)
    ]
    return [f"{DIVERGED} Diverged, and left out of the mean: {'; '.join(run_texts)}."]


def _make_settings_notes(results: "pd.DataFrame", by: Sequence[str]) -> list[str]:
    """What all runs have in common, and what else differs between them."""
    notes = []
    if constant_text := describe_settings(find_constant_settings(results)):
        notes.append(f"All runs: {constant_text}.")
    for name, derived_values in find_derived_settings(results).items():
        texts = [f"{format_setting_value(value)} ({cause})" for cause, value in derived_values]
        notes.append(f"{format_setting_name(name)} follows from the method: {', '.join(texts)}.")
    if "dataset_note" in results:
        for settings, _ in group_runs(results, ["dataset", "dataset_note"]):
            if settings["dataset_note"]:
                notes.append(f"{settings['dataset']}: {settings['dataset_note']}")
    version_texts = [
        f"{name} {', '.join(map(str, results[name].dropna().unique()))}"
        for name in dict.fromkeys([*_REQUIRED_VERSIONS, *IDENTITY_FIELDS])
        if name in results and (name in _REQUIRED_VERSIONS or results[name].nunique() > 1)
    ]
    if version_texts:
        notes.append(f"Made with {'; '.join(version_texts)}.")
    return notes
