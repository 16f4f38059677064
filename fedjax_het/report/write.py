"""The report of a folder of results: its tables and figures as files in that folder."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.common.errors import require
from fedjax_het.common.files import write_atomically
from fedjax_het.measures.convergence import WINDOW
from fedjax_het.report.against import plot_against_alpha
from fedjax_het.report.grouping import chosen_settings
from fedjax_het.report.heat_map import numeric_pair, plot_heat_map
from fedjax_het.report.learning_curves import SMOOTHED_ROUNDS, plot_learning_curves
from fedjax_het.report.measures import OF_WINDOW, usual_measure
from fedjax_het.report.overview import overview_table, pivot_table, summarise_runs
from fedjax_het.report.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.running.store import load_curves, load_results, newest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class WrittenReport(NamedTuple):
    """What `write_report` made."""

    tables: list[TextTable]
    paths: list[Path]


def write_report(
    directory: str | os.PathLike,
    *,
    by: Sequence[str] | None = None,
    measure: str | None = None,
) -> WrittenReport:
    """Read a folder of results and write its tables and figures into it.

    `overview.md`, `overview.tex`, `overview.csv` and `learning_curves.png` always;
    `accuracy_against_alpha.png`, and a table with a column per alpha, where alpha varies (the file
    is named after the measure if it is another); `heat_map.png` where two numeric settings vary.
    Every file is replaced in one step. A run whose files are broken is left out with a warning.

    Args:
      by: names of settings; default: those that vary, apart from the seeds.
      measure: a column of `load_results` that holds numbers; default: `final_accuracy`, or `bmta`
        where at least as many runs have that, whose curves are then means over clients too. Curves
        are running means over five rounds, over 20 where the measure is of those.
    Errors:
      ConfigError where the folder holds no results, and for a setting or measure they do not have.
    """
    directory = Path(directory)
    results = newest(load_results(directory))
    require(len(results) > 0, "directory", str(directory), "a folder with results of runs")
    by = chosen_settings(results, by)
    measure = usual_measure(results) if measure is None else measure
    chosen: dict[str, Any] = {"by": by, "measure": measure}
    title = f"{directory.resolve().name}: {len(results)} runs"
    alphas = results["alpha"].nunique() if "alpha" in by else 0

    tables = [overview_table(results, title=title, **chosen)]
    if alphas > 1:
        tables.insert(0, pivot_table(results, title=title, **chosen))
    texts = {
        "overview.md": "\n".join(map(to_markdown, tables)),
        "overview.tex": "\n".join(map(to_latex, tables)),
        "overview.csv": to_csv(summarise_runs(results, **chosen)),
    }
    curve = "mean_client_accuracy" if measure.startswith("bmta") else "test_accuracy"
    window = WINDOW if measure in OF_WINDOW else SMOOTHED_ROUNDS
    curves = load_curves(directory)
    curves = plot_learning_curves(results, curves, by=by, measure=curve, window=window)
    figures = {"learning_curves.png": curves}
    if alphas > 1:
        name = "accuracy" if measure == "final_accuracy" else measure
        figures[f"{name}_against_alpha.png"] = plot_against_alpha(results, **chosen)
    if pair := numeric_pair(results, by):
        figures["heat_map.png"] = plot_heat_map(results, x=pair[0], y=pair[1], **chosen)

    for name, text in texts.items():
        write_text(directory / name, text)
    for name, figure in figures.items():
        write_figure(directory / name, figure)
    return WrittenReport(tables, [directory / name for name in (*texts, *figures)])


def publish(
    directory: Path,
    stem: str,
    table: TextTable,
    numbers: "pd.DataFrame",
    figures: "Mapping[str, Figure] | None" = None,
) -> list[str]:
    """Print a table; write it as `<stem>.md` and `<stem>.tex`, its numbers as `<stem>.csv`, and the
    figures under their names. Returns the names of the files in that order."""
    print_table(table)
    texts = {
        f"{stem}.md": to_markdown(table),
        f"{stem}.tex": to_latex(table),
        f"{stem}.csv": to_csv(numbers),
    }
    for name, text in texts.items():
        write_text(directory / name, text)
    for name, figure in (figures or {}).items():
        write_figure(directory / name, figure)
    return [*texts, *(figures or {})]


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def write_figure(path: Path, figure: "Figure") -> None:
    """As a PNG of 150 dots per inch."""
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
