"""Tables and figures from results: measured beside reported, and nothing missing out of sight.

Every function here is a function of its arguments: data frames in, a data frame, text or a figure
out. Accuracies are percentages from here on.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedjax_het.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MISSING = "—"
CAPTION = (
    "Test accuracy in percent, mean of the last five rounds. Measured: mean ± standard deviation "
    "over seeds. Within run: standard deviation over the last five rounds, averaged over seeds. "
    "Difference: measured − reported, in points. Time: wall-clock of one run, compilation included."
)
# Okabe and Ito's colours for the first methods, Tol's muted ones for the rest: both are told apart
# by colour-blind readers. A method keeps its colour in every figure.
COLOURS = {
    "fedavg": "#0072B2",
    "fedprox": "#E69F00",
    "scaffold": "#009E73",
    "dynafed": "#D55E00",
    "feddf": "#CC79A7",
    "fedbe": "#88CCEE",
    "abavg": "#332288",
    "fedgen": "#999933",
    "fedmix": "#882255",
}
_OTHER_COLOURS = ("#000000", "#AA4499", "#117733", "#DDCC77", "#661100", "#6699CC", "#888888")
# Methods whose curves often lie on FedAvg's: it shows through their gaps.
_DASHES = {"fedprox": (0, (4, 1.5)), "feddf": (0, (6, 2)), "fedbe": (0, (2, 1.5))}
_SMOOTHED_ROUNDS = 5
_TICK = (0, (3, 1))  # dashes, in points


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

    by_settings = results.set_index("settings") if len(results) else results
    rows = []
    for cell in cells:
        made = by_settings.loc[
            [d for d in (run.digest() for run in cell.runs) if d in by_settings.index]
        ]
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


def _diverged(results: "pd.DataFrame") -> "pd.Series":
    return results["diverged"].astype(bool) | results["final_accuracy"].isna()


def _measured(made: "pd.DataFrame") -> dict[str, float]:
    if not len(made):
        nothing = dict.fromkeys(("mean", "std", "within_std", "seconds"), math.nan)
        return {**nothing, "seeds": 0, "diverged": 0}
    diverged = _diverged(made)
    good = made[~diverged]
    accuracy = 100 * good["final_accuracy"].astype(float)
    return {
        "mean": accuracy.mean(),
        "std": accuracy.std(),  # n - 1: NaN for one run
        "within_std": 100 * good["final_accuracy_std"].astype(float).mean(),
        "seconds": made["wall_seconds"].mean(),
        "seeds": len(good),
        "diverged": int(diverged.sum()),
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


def _texts(row: Any) -> dict[str, str]:
    """The printed columns of one row of a comparison."""
    measured = _plus_minus(row.mean_, row.std_)
    if row.diverged:
        measured = f"{measured} †" if row.seeds else "diverged †"
    all_made = row.seeds == row.planned
    return {
        "Method": row.method,
        "Measured": measured,
        "Within run": _number(row.within_std),
        "Reported": _plus_minus(row.reported_mean, row.reported_std),
        "Difference": _number(row.difference, sign=True),
        "Seeds": (str(row.seeds) if all_made else f"{row.seeds} of {row.planned}")
        if row.planned
        else MISSING,
        "Time": MISSING if math.isnan(row.seconds) else f"{row.seconds:.1f} s",
    }


def _rows(table: "pd.DataFrame") -> list[tuple[str, dict[str, str], Any]]:
    renamed = table.rename(columns={"mean": "mean_", "std": "std_"})  # tuples have methods too
    return [
        (f"{row.dataset}, {row.model}, alpha {row.alpha:g}", _texts(row), row)
        for row in renamed.itertuples(index=False)
    ]


def _number(value: float, *, sign: bool = False) -> str:
    if math.isnan(value):
        return MISSING
    return f"{value:{'+' if sign else ''}.2f}".replace("-", "−")


def _plus_minus(mean: float, std: float) -> str:
    if math.isnan(mean):
        return MISSING
    return f"{mean:.2f}" + ("" if math.isnan(std) else f" ± {std:.2f}")


def print_table(
    table: "pd.DataFrame", *, title: str, notes: Sequence[str] = (), console: Any = None
) -> None:
    """Print a comparison, one section per data set, network and alpha, and the notes under it.

    In a terminal it has the terminal's width and a little weight; in a pipe, 100 columns of plain
    text without any control code.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=100, color_system=None, highlight=False)
    rows = _rows(table)
    names = list(rows[0][1]) if rows else []
    widths = {n: max(len(n), *(len(texts[n]) for _, texts, _ in rows)) for n in names}
    widths["Method"] += 2

    def grid(header: bool) -> Table:
        grid = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=header, pad_edge=False)
        for name in names:
            justify = "left" if name == "Method" else "right"
            grid.add_column(name, justify=justify, width=widths[name], no_wrap=True)
        return grid

    console.print(title, style="bold")
    if rows:
        console.print(grid(header=True))
    for group, members in itertools.groupby(rows, key=lambda row: row[0]):
        console.print(group, style="bold")
        body = grid(header=False)
        for _, texts, _ in members:
            body.add_row("  " + texts["Method"], *list(texts.values())[1:])
        console.print(body)
    console.print()
    for note in notes:
        console.print(note)


def to_markdown(table: "pd.DataFrame", *, title: str, notes: Sequence[str] = ()) -> str:
    """A comparison as a Markdown section: title, table, notes as a list."""
    rows = _rows(table)
    names = ["Data", "Network", "alpha", *(rows[0][1] if rows else ())]
    lines = [
        f"# {title}",
        "",
        _markdown_row(names),
        _markdown_row(["---"] * 4 + ["---:"] * (len(names) - 4)),
    ]
    for _, texts, row in rows:
        lines.append(_markdown_row([row.dataset, row.model, f"{row.alpha:g}", *texts.values()]))
    return "\n".join([*lines, "", *[f"- {note}" for note in notes], ""])


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def to_csv(table: "pd.DataFrame") -> str:
    """A comparison as CSV, numbers in percent with four decimals; what is missing is empty."""
    return table.to_csv(index=False, float_format="%.4f", lineterminator="\n")


def diverged_runs(cells: Sequence[Cell], results: "pd.DataFrame") -> list[str]:
    """The runs of these cells that diverged, named for a note under the table."""
    if not len(results):
        return []
    diverged = set(results["settings"][_diverged(results)])
    return [
        f"{cell.method}, {cell.group}, seed {run.seed}"
        for cell in cells
        for run in cell.runs
        if run.digest() in diverged
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
    from matplotlib.figure import Figure

    places = list(dict.fromkeys((cell.dataset, cell.model) for cell in cells))
    alphas = list(dict.fromkeys(cell.alpha for cell in cells))
    several_models = len({model for _, model in places}) > 1
    figure = Figure(
        figsize=(max(6.4, 3.5 * len(alphas)), 2.7 * len(places) + 0.9), layout="constrained"
    )
    panels = figure.subplots(len(places), len(alphas), squeeze=False, sharey="row")
    colours = _colours([cell.method for cell in cells])
    ticks = False
    for cell in cells:
        panel = panels[places.index((cell.dataset, cell.model)), alphas.index(cell.alpha)]
        runs = _accuracy_by_seed(cell, results, curves)
        if runs is None:
            continue
        mean, spread = runs.mean(axis=1), runs.std(axis=1).fillna(0)
        colour = colours[cell.method]
        dashes = _DASHES.get(cell.method, "-")
        panel.plot(mean.index, mean, color=colour, ls=dashes, lw=1.6, label=cell.method)
        if runs.shape[1] > 1:
            panel.fill_between(
                mean.index, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0
            )
        value = _reported(cell, reported)["reported_mean"]
        if not math.isnan(value):
            last = mean.index[-1]
            panel.plot(
                [1.03 * last, 1.13 * last], [value, value], color=colour, linestyle=_TICK, lw=1.4
            )
            ticks = True
    for (dataset, model), row in zip(places, panels, strict=True):
        for alpha, panel in zip(alphas, row, strict=True):
            name = f"{dataset}, {model}" if several_models else dataset
            panel.set_title(f"{name}, alpha = {alpha:g}", fontsize=10)
            panel.grid(alpha=0.25, linewidth=0.6)
            panel.tick_params(labelsize=9)
            panel.spines[["top", "right"]].set_visible(False)
            if panel.lines:
                low, high = panel.get_ylim()
                panel.set_ylim(max(low, 0), min(high, 100))
            else:
                panel.text(
                    0.5, 0.5, "not run", transform=panel.transAxes, ha="center", color="#666666"
                )
                panel.set_xticks([])
                if not any(other.lines for other in row):
                    panel.set_yticks([])
        row[0].set_ylabel("Test accuracy (%)", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel(f"Round (running mean of {_SMOOTHED_ROUNDS})", fontsize=10)
    _add_legend(figure, panels, colours, ticks)
    return figure


def _accuracy_by_seed(
    cell: Cell, results: "pd.DataFrame", curves: "pd.DataFrame"
) -> "pd.DataFrame | None":
    """Smoothed accuracy in percent, a row per evaluated round and a column per seed."""
    if not len(curves) or not len(results):
        return None
    good = results[~_diverged(results)]
    wanted = good["digest"][good["settings"].isin([run.digest() for run in cell.runs])]
    own = curves[curves["digest"].isin(wanted)].dropna(subset="test_accuracy")
    if not len(own):
        return None
    by_round = own.pivot(index="round", columns="digest", values="test_accuracy")
    return 100 * by_round.rolling(_SMOOTHED_ROUNDS, min_periods=1).mean()


def _colours(methods: Sequence[str]) -> dict[str, str]:
    others = iter(_OTHER_COLOURS * (1 + len(methods) // len(_OTHER_COLOURS)))
    return {method: COLOURS.get(method) or next(others) for method in dict.fromkeys(methods)}


def _add_legend(figure: "Figure", panels: Any, colours: dict[str, str], ticks: bool) -> None:
    from matplotlib.lines import Line2D

    drawn = {line.get_label() for panel in panels.flat for line in panel.lines}
    handles = [
        Line2D([], [], color=colour, ls=_DASHES.get(method, "-"), lw=2, label=method)
        for method, colour in colours.items()
        if method in drawn
    ]
    if ticks:
        handles.append(
            Line2D([], [], color="#444444", linestyle=_TICK, label="reported final value")
        )
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(handles), 5),
            frameon=False,
            fontsize=10,
        )
