"""A paper's table: what was measured beside what was reported."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedjax_het.report.grouping import diverged
from fedjax_het.report.learning_curves import Curve, draw_curves, values_by_round
from fedjax_het.report.render import (
    MISSING,
    Section,
    TextTable,
    best_of,
    number_text,
    plus_minus,
)
from fedjax_het.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CAPTION = (
    "Test accuracy in percent, mean of the last five rounds. Measured: mean ± standard deviation "
    "over seeds. Within run: standard deviation over the last five rounds, averaged over seeds. "
    "Difference: measured − reported, in points. Time: wall-clock per run, compilation included."
)


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table: its place, and the runs (one per seed) that fill it."""

    dataset: str
    model: str
    alpha: float
    method: str
    runs: tuple[RunSpec, ...] = ()
    """Empty where the method has no implementation."""

    @property
    def group(self) -> str:
        return f"{self.dataset}, {self.model}, alpha {self.alpha:g}"


def compare(
    cells: Sequence[Cell], results: "pd.DataFrame", reported: "pd.DataFrame"
) -> "pd.DataFrame":
    """One row per cell, in the order of `cells`: the measured value beside the reported one.

    Args:
      results: as `load_results` gives it. Only the cells' own runs count, found by their digests.
      reported: as `reported_values` gives it, at most one row per cell, in percent.
    Returns:
      `dataset`, `model`, `alpha`, `method`; `mean` and `std` over seeds (n − 1; NaN for one seed)
      of the mean over the last five rounds; `within_std`, the deviation over the last five rounds
      of a run, averaged over seeds; `reported_mean`, `reported_std`; `difference` of the means;
      `seeds`, the number of runs in the mean; `diverged`, those left out of it; `planned`;
      `seconds` of wall-clock per run. What is not there is NaN.
    Errors:
      ValueError if `reported` has several values for one cell.
    """
    import pandas as pd

    rows = []
    for cell in cells:
        made = _made(cell, results)
        rows.append(
            {
                "dataset": cell.dataset,
                "model": cell.model,
                "alpha": cell.alpha,
                "method": cell.method,
                **_measured(made),
                "planned": len(cell.runs),
                **_reported(cell, reported),
            }
        )
    table = pd.DataFrame(rows)
    table["difference"] = table["mean"] - table["reported_mean"]
    return table


def _made(cell: Cell, results: "pd.DataFrame") -> "pd.DataFrame":
    if not len(results):
        return results
    return results[results["settings"].isin([run.digest() for run in cell.runs])]


def _measured(made: "pd.DataFrame") -> dict[str, float]:
    if not len(made):
        nothing = dict.fromkeys(("mean", "std", "within_std", "seconds"), math.nan)
        return {**nothing, "seeds": 0, "diverged": 0}
    lost = diverged(made)
    good = made[~lost]
    accuracy = 100 * good["final_accuracy"].astype(float)
    return {
        "mean": accuracy.mean(),
        "std": accuracy.std(),  # n - 1: NaN for one run
        "within_std": 100 * good["final_accuracy_std"].astype(float).mean(),
        "seconds": made["wall_seconds"].mean(),
        "seeds": len(good),
        "diverged": int(lost.sum()),
    }


def _reported(cell: Cell, reported: "pd.DataFrame") -> dict[str, float]:
    found = reported[
        (reported["dataset"] == cell.dataset)
        & (reported["model"] == cell.model)
        & (reported["level"] == cell.alpha)
        & (reported["method"] == cell.method)
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} reported values for {cell.method}, {cell.group}")
    if not len(found):
        return {"reported_mean": math.nan, "reported_std": math.nan}
    return {"reported_mean": found["mean"].iloc[0], "reported_std": found["std"].iloc[0]}


def comparison_table(table: "pd.DataFrame", *, title: str, notes: Sequence[str] = ()) -> TextTable:
    """A comparison as people read it, one section per data set, network and alpha."""
    renamed = table.rename(columns={"mean": "mean_", "std": "std_"})  # tuples have methods too
    sections = []
    for place, members in itertools.groupby(
        renamed.itertuples(index=False), key=lambda row: (row.dataset, row.model, row.alpha)
    ):
        rows = list(members)
        dataset, model, alpha = place
        best = best_of([math.nan if row.diverged else row.mean_ for row in rows])
        sections.append(
            Section(
                rows=tuple(map(_texts, rows)),
                title=f"{dataset}, {model}, alpha {alpha:g}",
                labels={"Data": dataset, "Network": model, "alpha": f"{alpha:g}"},
                best=frozenset((place, "Measured") for place in best),
            )
        )
    return TextTable(title, ("Method",), _VALUES, tuple(sections), tuple(notes))


_VALUES = ("Measured", "Within run", "Reported", "Difference", "Seeds", "Time")


def _texts(row: Any) -> dict[str, str]:
    seeds = str(row.seeds) if row.seeds == row.planned else f"{row.seeds} of {row.planned}"
    return {
        "Method": row.method,
        "Measured": plus_minus(row.mean_, row.std_, diverged=bool(row.diverged)),
        "Within run": number_text(row.within_std),
        "Reported": plus_minus(row.reported_mean, row.reported_std),
        "Difference": number_text(row.difference, "+.2f"),
        "Seeds": seeds if row.planned else MISSING,
        "Time": MISSING if math.isnan(row.seconds) else f"{row.seconds:.1f} s",
    }


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
    """Test accuracy against round: a row of panels per data set and network, a column per alpha.

    Lines are means over seeds of a running mean over five rounds (so a line ends at the table's
    value), with a band of one standard deviation over seeds. A dashed tick right of the last round
    is the reported final value. Runs that diverged are left out; a panel without runs says so.
    """
    panels = list(dict.fromkeys((cell.dataset, cell.model, cell.alpha) for cell in cells))
    several_models = len({cell.model for cell in cells}) > 1

    def title(dataset: str, model: str, alpha: float) -> str:
        place = f"{dataset}, {model}" if several_models else dataset
        return f"{place}, alpha = {alpha:g}"

    lines = []
    for cell in cells:
        made = _made(cell, results)
        lines.append(
            Curve(
                panel=title(cell.dataset, cell.model, cell.alpha),
                method=cell.method,
                label=cell.method,
                runs=values_by_round(made, curves),
                diverged=bool(len(made) and diverged(made).any()),
                reported=_reported(cell, reported)["reported_mean"],
            )
        )
    return draw_curves(
        lines, [title(*panel) for panel in panels], columns=len({cell.alpha for cell in cells})
    )
