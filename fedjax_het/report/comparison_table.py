"""A comparison as people read it: a table of texts, and what its columns are."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedjax_het.common.doors import door
from fedjax_het.report.cell import PLACE
from fedjax_het.report.comparison import compared_measure
from fedjax_het.report.grouping import describe_settings, is_missing, setting_text
from fedjax_het.report.render import (
    MISSING,
    Section,
    TextTable,
    best_of,
    number_text,
    p_text,
    plus_minus,
    seeds_text,
)

if TYPE_CHECKING:
    import pandas as pd

_LABELS = {"dataset": "Data", "model": "Network", "alpha": "alpha", "classes": "Classes"}
_SEEDS = "Measured: mean ± standard deviation over seeds."
_REST = (
    "Difference: measured − reported, in points. Time: wall-clock per run, compilation included."
)
_CAPTIONS = {
    "final_accuracy": f"Test accuracy in percent, mean of the last five rounds. {_SEEDS} Within "
    f"run: standard deviation over the last five rounds, averaged over seeds. {_REST}",
    "best_accuracy": "Test accuracy in percent, of the round where it is highest, as the paper "
    f"selects it (on the test images). {_SEEDS} Last five: mean of the last five rounds instead. "
    f"{_REST}",
    "window_accuracy": "Test accuracy in percent, mean of the last 20 measured rounds. "
    f"{_SEEDS} Rise time: the first round at which the running mean over 20 reaches 90 % of that. "
    f"{_REST}",
    "bmta": "Best mean test accuracy (BMTA) in percent: the mean over clients, each on tests like "
    "its own data, in the round where it is highest, as the paper selects it (on those tests). "
    f"{_SEEDS} Worst decile: mean over the worst tenth of clients in that round. Round: the first "
    "that reached the BMTA. Rank: by the BMTA measured / reported, 1 is the highest, among methods "
    "that have both values; without reported values, among those measured. "
    f"{_REST}",
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


@door
def caption(table: "pd.DataFrame") -> str:
    """What the columns of a comparison are."""
    if "domain" in table:
        return _DOMAINS_CAPTION
    own = _CAPTIONS[compared_measure(table)]
    return f"{own} {_ROUNDS_CAPTION}" if "rounds" in table else own


@door
def comparison_table(table: "pd.DataFrame", *, title: str, notes: Sequence[str] = ()) -> TextTable:
    """A comparison as people read it: a section per data set, network and level with a row per
    method; or, of domains, a section per data set and network with a column per domain."""
    renamed = table.rename(columns={"mean": "mean_", "std": "std_"})  # tuples have methods too
    rows = list(renamed.itertuples(index=False))
    if "domain" in table:
        return _domain_table(rows, title, notes)
    measure = compared_measure(table)
    sections = []
    for _, members in itertools.groupby(rows, lambda row: describe_settings(_place(row))):
        own = list(members)
        place = _place(own[0])
        best = best_of([math.nan if row.diverged else row.mean_ for row in own])
        sections.append(
            Section(
                rows=tuple(_texts(row, measure) for row in own),
                title=describe_settings(place),
                labels={_LABELS[name]: setting_text(value) for name, value in place.items()},
                best=frozenset((number, "Measured") for number in best),
            )
        )
    _, *values = sections[0].rows[0]
    return TextTable(title, ("Method",), tuple(values), tuple(sections), tuple(notes))


def _place(row: Any) -> dict[str, Any]:
    """What the rows of a section share; no level where there is none."""
    place = {name: getattr(row, name, None) for name in PLACE}
    return {name: value for name, value in place.items() if not is_missing(value)}


def _texts(row: Any, measure: str) -> dict[str, str]:
    besides, ranked = {}, {}
    if measure == "bmta":
        besides["Worst decile"] = number_text(row.worst_decile)
        besides["Round"] = number_text(row.best_round, ".3g")
        theirs = "" if math.isnan(row.reported_rank) else f" / {row.reported_rank:g}"
        ranked["Rank"] = number_text(row.rank, "g") + theirs
    elif measure == "window_accuracy":
        besides["Rise time"] = number_text(row.rise_time, ".0f")
    elif measure == "best_accuracy":
        besides["Last five"] = number_text(row.final_mean)
    else:
        besides["Within run"] = number_text(row.within_std)
    return {
        "Method": row.method,
        "Measured": plus_minus(row.mean_, row.std_, diverged=bool(row.diverged)),
        **besides,
        "Reported": plus_minus(row.reported_mean, row.reported_std),
        "Difference": number_text(row.difference, "+.2f"),
        **({"p": p_text(row.p_value)} if hasattr(row, "p_value") else {}),
        **({"J": number_text(row.matching_loss, ".3f")} if hasattr(row, "matching_loss") else {}),
        **({"Over real": number_text(row.over_real, "+.2f")} if hasattr(row, "over_real") else {}),
        **ranked,
        **(_rounds_texts(row) if hasattr(row, "rounds") else {}),
        **_runs_texts(row),
    }


def _rounds_texts(row: Any) -> dict[str, str]:
    measured = plus_minus(row.rounds, row.rounds_std, form=".0f")
    if row.seeds and row.reached < row.seeds:
        measured = f"{row.reached} of {row.seeds} runs reach it" if row.reached else "not reached"
    return {
        "Rounds to 50 %": measured,
        "Reported rounds": number_text(row.reported_rounds, ".0f"),
        "Difference in rounds": number_text(row.rounds_difference, "+.0f"),
    }


def _runs_texts(row: Any) -> dict[str, str]:
    return {
        "Seeds": seeds_text(row.seeds, row.planned),
        "Time": MISSING if math.isnan(row.seconds) else f"{row.seconds:.1f} s",
    }


def _domain_table(rows: Sequence[Any], title: str, notes: Sequence[str]) -> TextTable:
    """Each method has a line of measured values, and below it those of the paper, if any."""
    domains = list(dict.fromkeys(row.domain for row in rows))
    sections = [
        _domain_section(dataset, model, list(members), domains)
        for (dataset, model), members in itertools.groupby(rows, lambda r: (r.dataset, r.model))
    ]
    values = (*domains, "Seeds", "Time")
    return TextTable(title, ("Method", "Value"), values, tuple(sections), tuple(notes))


def _domain_section(
    dataset: str, model: str, rows: Sequence[Any], domains: Sequence[str]
) -> Section:
    by_method: dict[str, list[Any]] = {}
    for row in rows:
        by_method.setdefault(row.method, []).append(row)
    lines: list[dict[str, str]] = []
    measured_line: dict[str, int] = {}  # by method, where its measured values are
    for method, cells in by_method.items():
        measured_line[method] = len(lines)
        lines += _domain_lines(method, cells)
    best = set()
    for domain in domains:
        column = [row for row in rows if row.domain == domain]
        values = [math.nan if row.diverged else row.mean_ for row in column]
        best |= {(measured_line[column[place].method], domain) for place in best_of(values)}
    return Section(
        rows=tuple(lines),
        title=f"{dataset}, {model}",
        labels={"Data": dataset, "Network": model},
        best=frozenset(best),
    )


def _domain_lines(method: str, cells: Sequence[Any]) -> list[dict[str, str]]:
    """The lines of a method, from its cells of all domains."""
    runs = _runs_texts(cells[0])
    values = {c.domain: plus_minus(c.mean_, c.std_, diverged=bool(c.diverged)) for c in cells}
    lines = [{"Method": method, "Value": "measured", **values, **runs}]
    if all(math.isnan(cell.reported_mean) for cell in cells):
        return lines
    besides = {
        "reported": {c.domain: plus_minus(c.reported_mean, c.reported_std) for c in cells},
        "difference": {c.domain: number_text(c.difference, "+.2f") for c in cells},
    }
    empty = dict.fromkeys(runs, "")
    return [*lines, *({"Method": "", "Value": n, **t, **empty} for n, t in besides.items())]
