"""A paper's table: what was measured beside what was reported."""

import itertools
import math
from ast import literal_eval
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedjax_het.common.errors import ConfigError
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report.grouping import describe_settings, diverged, is_missing, setting_text
from fedjax_het.report.learning_curves import (
    SMOOTHED_ROUNDS,
    Curve,
    draw_curves,
    values_by_round,
)
from fedjax_het.report.measures import values_of
from fedjax_het.report.ranks import add_ranks
from fedjax_het.report.render import (
    MISSING,
    Section,
    TextTable,
    best_of,
    number_text,
    plus_minus,
)
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
# Of the learning curves: the measure, over how many rounds it is smoothed, what the table's is.
_CURVES = {
    "final_accuracy": ("test_accuracy", SMOOTHED_ROUNDS, "final"),
    "best_accuracy": ("test_accuracy", 1, "best"),
    "window_accuracy": ("test_accuracy", WINDOW, "final"),
    "bmta": ("mean_client_accuracy", 1, "best"),
}
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
AVERAGE = "average"


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table: its place, and the runs (one per seed) that fill it."""

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
        found = (self.domain, self.classes, self.alpha)
        return next((level for level in found if level is not None), None)

    @property
    def group(self) -> str:
        place = {name: getattr(self, name) for name in _LABELS}
        return describe_settings(place) + (f", {self.domain}" if self.domain else "")


def parse_row(row: str) -> tuple[str, dict[str, Any]]:
    """A row's method, and the settings that make it a variant of the method.

    `parse_row("fedaf(ipc=10)")` is `("fedaf", {"ipc": 10})`. ConfigError for what reads otherwise.
    """
    method, bracket, inside = row.partition("(")
    pairs = inside.removesuffix(")").split(",") if bracket else []
    try:
        named = dict(pair.split("=") for pair in pairs)
        return method, {name.strip(): literal_eval(value.strip()) for name, value in named.items()}
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"methods = {row!r}: expected a method, or one with settings: 'fedaf(ipc=10)'"
        ) from error


def measure_of(reported: "pd.DataFrame") -> str:
    """The summary's key that stands beside these reported values, `ROUNDS` apart.

    ValueError if none does.
    """
    (metric,) = set(reported["metric"]) - {*ROUNDS}
    if metric not in MEASURES:
        raise ValueError(f"no measure of a run is the paper's {metric}")
    return MEASURES[metric]


def caption(table: "pd.DataFrame") -> str:
    """What the columns of a comparison are."""
    if "domain" in table:
        return _DOMAINS_CAPTION
    own = _CAPTIONS[_measure_in(table)]
    return f"{own} {_ROUNDS_CAPTION}" if "rounds" in table else own


def _measure_in(table: "pd.DataFrame") -> str:
    """Of a comparison that is not of domains, told by what it holds besides."""
    return next(measure for measure, besides in _BESIDES.items() if {*besides} <= {*table})


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
        made = _made(cell, results)
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
                **_reported(cell, reported),
                **(_in_rounds(made, cell, reported, *in_rounds) if in_rounds else {}),
            }
        )
    table = pd.DataFrame(rows)
    table["difference"] = table["mean"] - table["reported_mean"]
    if in_rounds:
        table["rounds_difference"] = table["rounds"] - table["reported_rounds"]
    return add_ranks(table) if measure == "bmta" else table


def _made(cell: Cell, results: "pd.DataFrame") -> "pd.DataFrame":
    if not len(results):
        return results
    return results[results["settings"].isin([run.digest() for run in cell.runs])]


def _scores_own_models(cell: Cell) -> bool:
    """Whether accuracies are those of the clients' own models, in place of the global one's."""
    if not cell.runs:
        return False
    run = cell.runs[0].resolved()
    return run.tests_clients and run.scored_model != "global"


def _measured(made: "pd.DataFrame", cell: Cell, measure: str) -> dict[str, float]:
    besides, own = _BESIDES[measure], _scores_own_models(cell)
    if own and measure == "best_accuracy":
        measure, besides = "bmta", {"final_mean": "final_client_accuracy"}
    if cell.domain is not None:
        average, one = ("bmta", "client_accuracy") if own else ("best_domains_accuracy", "accuracy")
        measure = average if cell.domain == AVERAGE else f"{one}_{cell.domain}"
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
        "reported_rounds": _reported(cell, reported, [metric])["reported_mean"],
    }


def _reported(
    cell: Cell, reported: "pd.DataFrame", metrics: Iterable[str] = MEASURES
) -> dict[str, float]:
    def is_of(name: str, value: float | str | None) -> "pd.Series":
        """What the paper does not say (a network, a level) holds for any."""
        return reported[name].isna() | (reported[name] == value)

    found = reported[
        reported["metric"].isin(metrics)
        & (reported["dataset"] == cell.dataset)
        & (reported["method"] == cell.method)
        & is_of("model", cell.model)
        & is_of("level", cell.level)
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} reported values for {cell.method}, {cell.group}")
    if not len(found):
        return {"reported_mean": math.nan, "reported_std": math.nan}
    return {"reported_mean": found["mean"].iloc[0], "reported_std": found["std"].iloc[0]}


def comparison_table(table: "pd.DataFrame", *, title: str, notes: Sequence[str] = ()) -> TextTable:
    """A comparison as people read it: a section per data set, network and level with a row per
    method; or, of domains, a section per data set and network with a column per domain."""
    renamed = table.rename(columns={"mean": "mean_", "std": "std_"})  # tuples have methods too
    rows = list(renamed.itertuples(index=False))
    if "domain" in table:
        return _domain_table(rows, title, notes)
    measure = _measure_in(table)
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
                best=frozenset((place, "Measured") for place in best),
            )
        )
    _, *values = sections[0].rows[0]
    return TextTable(title, ("Method",), tuple(values), tuple(sections), tuple(notes))


def _place(row: Any) -> dict[str, Any]:
    """What the rows of a section share; nothing is said of a level where there is none."""
    place = {name: getattr(row, name, None) for name in _LABELS}
    return {name: value for name, value in place.items() if not is_missing(value)}


def _texts(row: Any, measure: str) -> dict[str, str]:
    besides, ranked = {}, {}
    if measure == "bmta":
        besides["Worst decile"] = number_text(row.worst_decile)
        besides["Round"] = number_text(row.best_round, "g")
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
    seeds = str(row.seeds) if row.seeds == row.planned else f"{row.seeds} of {row.planned}"
    return {
        "Seeds": seeds if row.planned else MISSING,
        "Time": MISSING if math.isnan(row.seconds) else f"{row.seconds:.1f} s",
    }


def _domain_table(rows: Sequence[Any], title: str, notes: Sequence[str]) -> TextTable:
    """Each method has a line of measured values, and below it those of the paper, if any."""
    domains = list(dict.fromkeys(row.domain for row in rows))
    sections = []
    for place, members in itertools.groupby(rows, lambda row: (row.dataset, row.model)):
        by_method: dict[str, list[Any]] = {}
        for row in members:
            by_method.setdefault(row.method, []).append(row)
        lines: list[dict[str, str]] = []
        at: dict[str, int] = {}  # the line of a method's measured values
        for method, own in by_method.items():
            at[method] = len(lines)
            forms = {
                "measured": lambda row: plus_minus(row.mean_, row.std_, diverged=bool(row.diverged))
            }
            if not all(math.isnan(row.reported_mean) for row in own):
                forms["reported"] = lambda row: plus_minus(row.reported_mean, row.reported_std)
                forms["difference"] = lambda row: number_text(row.difference, "+.2f")
            for name, form in forms.items():
                runs = _runs_texts(own[0])
                if name != "measured":
                    runs = dict.fromkeys(runs, "")
                texts = {row.domain: form(row) for row in own}
                first = method if name == "measured" else ""
                lines.append({"Method": first, "Value": name, **texts, **runs})
        best = set()
        for domain in domains:
            column = {m: row for m, own in by_method.items() for row in own if row.domain == domain}
            values = [math.nan if row.diverged else row.mean_ for row in column.values()]
            best |= {(at[list(column)[place]], domain) for place in best_of(values)}
        dataset, model = place
        sections.append(
            Section(
                rows=tuple(lines),
                title=f"{dataset}, {model}",
                labels={"Data": dataset, "Network": model},
                best=frozenset(best),
            )
        )
    values = (*domains, "Seeds", "Time")
    return TextTable(title, ("Method", "Value"), values, tuple(sections), tuple(notes))


def diverged_runs(cells: Sequence[Cell], results: "pd.DataFrame") -> list[str]:
    """The runs of these cells that diverged, named for a note under the table."""
    if not len(results):
        return []
    lost = set(results["settings"][diverged(results)])
    return [
        f"{cell.method}, {cell.group}, seed {run.seed}"
        for cell in cells
        for run in cell.runs
        if run.digest() in lost
    ]


def plot_curves(
    cells: Sequence[Cell],
    results: "pd.DataFrame",
    curves: "pd.DataFrame",
    reported: "pd.DataFrame",
) -> "Figure":
    """The measure against round: a row of panels per data set and network, a column per alpha or
    number of labels, or a panel per domain, or of a table without any a panel per data set and
    network.

    Lines are means over seeds, with a band of one standard deviation over seeds; where the table
    holds means of the last rounds, of a running mean over as many (so a line ends at the table's
    value). A dashed tick right of the last round is the reported value. Runs that diverged are
    left out; a panel without runs says so.
    """
    measure, window, kind = _CURVES[measure_of(reported)]
    several_models = len({cell.model for cell in cells}) > 1
    levels = {cell.level for cell in cells}

    def title(cell: Cell) -> str:
        place = [cell.dataset, *([cell.model] if several_models else [])]
        if cell.level is not None:
            place.append(cell.domain or _level_text(cell))
        return ", ".join(place)

    lines = []
    for cell in cells:
        made = _made(cell, results)
        own = measure
        if personal := _scores_own_models(cell):
            own = _CURVES["bmta"][0]
        if cell.domain == AVERAGE:
            own += "" if personal else "_domains"
        elif cell.domain is not None:
            own = f"{'client_accuracy' if personal else measure}_{cell.domain}"
        lines.append(
            Curve(
                panel=title(cell),
                method=parse_row(cell.method)[0],
                label=cell.method,
                runs=values_by_round(made, curves, own, window=window),
                diverged=bool(len(made) and diverged(made).any()),
                reported=_reported(cell, reported)["reported_mean"],
            )
        )
    panels = list(dict.fromkeys(map(title, cells)))
    divided = levels != {None}
    return draw_curves(
        lines,
        panels,
        columns=len(levels) if divided else len(panels),
        measure=measure,
        sharey="row" if divided else "none",
        window=window,
        reported=kind,
    )


def _level_text(cell: Cell) -> str:
    return f"alpha = {cell.alpha:g}" if cell.classes is None else f"{cell.classes} classes"
