"""Any folder of results as a table: means over seeds, grouped by the settings that vary."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.common.doors import door
from fedjax_het.common.environment import IDENTITY
from fedjax_het.common.errors import require_name
from fedjax_het.report.grouping import (
    chosen_settings,
    constant_settings,
    describe_settings,
    diverged,
    following_settings,
    group_runs,
    is_shared,
    setting_name,
    setting_text,
    varying_settings,
)
from fedjax_het.report.measures import (
    beside_of,
    higher_is_better,
    measure_label,
    require_measure,
    scale_of,
    values_of,
)
from fedjax_het.report.render import (
    DIVERGED,
    MISSING,
    Section,
    TextTable,
    best_of,
    number_form,
    number_text,
    plus_minus,
)
from fedjax_het.running.store import newest

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS_NAMED = ("fedjax_het", "jax", "device")


@door
def summarise_runs(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
) -> "pd.DataFrame":
    """One row per combination of settings: the mean of a measure over the runs that share it.

    Args:
      results: as `load_results` gives it; of runs with the same settings the newest counts.
      by: names of settings; default: `varying_settings`. Runs that differ in a setting left out
        of it are averaged together.
      measure: a column of `results` that holds numbers. Accuracies are in percent.
    Returns:
      The settings of `by`; `mean` and `std` of the measure (n − 1; NaN for one run);
      `best_accuracy`, the mean of the runs' best rounds, or where the measure is BMTA
      `bmta_worst_decile`, where it is the mean over 20 rounds `rise_time`; `seeds`, the number of
      runs in the mean; `diverged`, those left out of it; `wall_seconds` and
      `client_samples_per_second` of a run, diverged or not. What is not there is NaN. Sorted by
      `by`.
    Errors:
      ConfigError for a setting or measure that these runs do not have, and for no run at all.
    """
    import pandas as pd

    results = newest(results)
    by = chosen_settings(results, by)
    require_measure(results, measure)
    beside, *_ = beside_of(measure)
    rows = []
    for settings, runs in group_runs(results, by):
        lost = diverged(runs)
        values = values_of(runs[~lost], measure)
        rows.append(
            {
                **settings,
                "mean": values.mean(),
                "std": values.std(),  # n - 1: NaN for one run
                beside: values_of(runs[~lost], beside).mean(),
                "seeds": int(values.count()),
                "diverged": int(lost.sum()),
                "wall_seconds": values_of(runs, "wall_seconds").mean(),
                "client_samples_per_second": values_of(runs, "client_samples_per_second").mean(),
            }
        )
    return pd.DataFrame(rows)


@door
def overview_table(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
    title: str = "Overview",
) -> TextTable:
    """`summarise_runs` as people read it, with what all runs have in common as notes."""
    results = newest(results)
    by = chosen_settings(results, by)
    summary = summarise_runs(results, by=by, measure=measure)
    form = _form(summary, measure)
    seconds = number_form(summary["wall_seconds"])
    value = measure_label(measure)
    beside, beside_heading, beside_note = beside_of(measure)
    values = {
        value: lambda row: plus_minus(row["mean"], row["std"], diverged=row["diverged"], form=form),
        beside_heading: lambda row: number_text(row[beside]),
        "Seeds": lambda row: str(row["seeds"]),
        "Diverged": lambda row: str(row["diverged"]),
        "Time (s)": lambda row: number_text(row["wall_seconds"], seconds),
        "Samples/s": lambda row: number_text(row["client_samples_per_second"], ",.0f"),
    }
    rows = [
        (settings, {name: text(row) for name, text in values.items()}, {value: _rankable(row)})
        for settings, row in _rows(summary, by)
    ]
    names, sections = _sections(rows, by, higher_is_better(measure))
    notes = [
        *_measure_notes(results, by, measure),
        f"{beside_note}. Time: wall-clock per run. Samples/s: client samples per second of "
        "training.",
        *_notes(results, by),
    ]
    return TextTable(f"{title}.", names, tuple(values), sections, tuple(notes))


@door
def pivot_table(
    results: "pd.DataFrame",
    *,
    columns: str = "alpha",
    by: Sequence[str] | None = None,
    measure: str = "final_accuracy",
    title: str = "Overview",
) -> TextTable:
    """The same means in the form of papers: methods as rows, the values of one setting as columns.

    A combination without any run is a dash.
    """
    results = newest(results)
    by = chosen_settings(results, by)
    require_name("columns", columns, by)
    summary = summarise_runs(results, by=by, measure=measure)
    form = _form(summary, measure)
    heads = [setting[columns] for setting, _ in group_runs(results, [columns])]
    texts = {value: describe_settings({columns: value}) or MISSING for value in heads}
    others = [name for name in by if name != columns]
    rows = []
    for settings, members in group_runs(summary, others):
        row_texts, means = dict.fromkeys(texts.values(), MISSING), {}
        for own, row in _rows(members, by):
            text = texts[own[columns]]
            row_texts[text] = plus_minus(
                row["mean"], row["std"], diverged=row["diverged"], form=form
            )
            means[text] = _rankable(row)
        rows.append((settings, row_texts, means))
    names, sections = _sections(rows, others, higher_is_better(measure))
    notes = tuple(_measure_notes(results, by, measure))
    return TextTable(
        f"{title}, by {setting_name(columns)}.", names, tuple(texts.values()), sections, notes
    )


def _rows(summary: "pd.DataFrame", by: Sequence[str]) -> list[tuple[dict, dict]]:
    return [
        (settings, row)
        for settings, members in group_runs(summary, by)
        for row in members.to_dict("records")
    ]


def _form(summary: "pd.DataFrame", measure: str) -> str:
    return ".2f" if scale_of(measure) == 100 else number_form(summary["mean"])


def _rankable(row: dict[str, Any]) -> float:
    """What a row competes with for the bold type: nothing if it lost runs."""
    return math.nan if row["diverged"] else row["mean"]


def _sections(
    rows: Sequence[tuple[dict[str, Any], dict[str, str], dict[str, float]]],
    by: Sequence[str],
    mark_best: bool,
) -> tuple[tuple[str, ...], tuple[Section, ...]]:
    """Rows (settings, texts, numbers to compare) under titles of the settings they share.

    Not divided where every section would hold one row: then every setting is a column, and there
    is nothing to compare.
    """
    shared = [name for name in by if is_shared(name)]
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[0][name] for name in shared), []).append(row)
    if shared and all(len(group) == 1 for group in groups.values()):
        shared, groups, mark_best = [], {(): list(rows)}, False
    own = [name for name in by if name not in shared]
    sections = []
    for group in groups.values():
        first = group[0][0]
        best = {
            (number, column)
            for column in group[0][1]
            for number in best_of([numbers.get(column, math.nan) for _, _, numbers in group])
        }
        sections.append(
            Section(
                rows=tuple(
                    {**{setting_name(n): setting_text(settings[n]) for n in own}, **texts}
                    for settings, texts, _ in group
                ),
                title=describe_settings({name: first[name] for name in shared}),
                labels={setting_name(name): setting_text(first[name]) for name in shared},
                best=frozenset(best) if mark_best else frozenset(),
            )
        )
    return tuple(map(setting_name, own)), tuple(sections)


def _measure_notes(results: "pd.DataFrame", by: Sequence[str], measure: str) -> list[str]:
    what = measure_label(measure)
    if measure == "final_accuracy":
        what += ", mean of the last five rounds"
    if measure == "rounds_to_half":
        what += ", of the runs that reach it (Seeds: their number)"
    if measure == "bmta":
        what += " on tests like their own data, in the round where it is highest"
    blended = [
        f"{setting_name(name)} ({', '.join(setting_text(s[name]) for s, _ in groups)})"
        for name in varying_settings(results)
        if name not in by
        for groups in [group_runs(results, [name])]
        if any(len(group_runs(runs, [name])) > 1 for _, runs in group_runs(results, by))
    ]
    over = f"runs that differ in {', '.join(blended)}, and seeds" if blended else "seeds"
    return [f"{what}: mean ± standard deviation over {over}.", *_diverged_notes(results, by)]


def _diverged_notes(results: "pd.DataFrame", by: Sequence[str]) -> list[str]:
    lost = results[diverged(results)]
    if not len(lost):
        return []
    named = [
        f"{describe_settings(settings) or 'runs'} (seed {', '.join(map(str, runs['seed']))})"
        for settings, runs in group_runs(lost, by)
    ]
    return [f"{DIVERGED} Diverged, and left out of the mean: {'; '.join(named)}."]


def _notes(results: "pd.DataFrame", by: Sequence[str]) -> list[str]:
    """What all runs have in common, and what else differs between them."""
    notes = []
    if constant := describe_settings(constant_settings(results)):
        notes.append(f"All runs: {constant}.")
    for name, found in following_settings(results).items():
        texts = [f"{setting_text(value)} ({cause})" for cause, value in found]
        notes.append(f"{setting_name(name)} follows from the method: {', '.join(texts)}.")
    if "dataset_note" in results:
        for settings, _ in group_runs(results, ["dataset", "dataset_note"]):
            if settings["dataset_note"]:
                notes.append(f"{settings['dataset']}: {settings['dataset_note']}")
    made_in = [
        f"{name} {', '.join(map(str, results[name].dropna().unique()))}"
        for name in dict.fromkeys([*_ALWAYS_NAMED, *IDENTITY])
        if name in results and (name in _ALWAYS_NAMED or results[name].nunique() > 1)
    ]
    if made_in:
        notes.append(f"Made with {'; '.join(made_in)}.")
    return notes
