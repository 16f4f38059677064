"""The report of a folder of results: its tables and figures as files in that folder."""

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.figures.heat_map import find_numeric_pair, plot_heat_map
from fedjax_het.analysis.figures.learning_curves import SMOOTHING_WINDOW, plot_learning_curves
from fedjax_het.analysis.figures.metric_vs_setting import plot_metric_vs_alpha
from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.analysis.grouping import (
    ROLLING_MEAN_METRICS,
    choose_default_metric,
    resolve_group_settings,
)
from fedjax_het.analysis.overview import make_overview_table, make_pivot_table, summarize_runs
from fedjax_het.analysis.render import TextTable, print_table, to_csv, to_latex, to_markdown
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.runtime.result_store import load_curves, load_results, select_newest
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.io import make_output_directory, write_atomically
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


log = logging.getLogger("fedjax_het")


class ReportFiles(NamedTuple):
    """What `write_report` made."""

    tables: list[TextTable]
    paths: list[Path]


@validate_arguments
def write_report(
    directory: str | os.PathLike,
    *,
    by: Sequence[str] | None = None,
    metric: str | None = None,
    output_dir: str | os.PathLike | None = None,
) -> ReportFiles:
    """Read a folder of results and write its tables and figures.

    Files: `overview.md`, `overview.tex`, `overview.csv` and `learning_curves.png`; if alpha
    varies, `accuracy_against_alpha.png` (named after another metric) and a table with a column per
    alpha; if two numeric settings vary, `heat_map.png`. Files are replaced in one step. A run with
    damaged files, and a figure that cannot be drawn, are left out with a warning. If the folder
    cannot be written, the log has a line.

    Args:
      directory: folder of results.
      by: settings that distinguish rows and lines; default: all that vary, except seeds.
      metric: a numeric column of `load_results`; default: `final_accuracy`, or `bmta` if at least as
        many runs have it. Curves are running means over 5 rounds, or over 20 if the metric is one
        of 20 rounds.
      output_dir: folder of the files; default: `directory`.

    Returns:
      The files that were written.

    Raises:
      ConfigError: if the folder has no results, or the runs do not have a setting or the metric.
    """
    directory = Path(directory)
    results = select_newest(load_results(directory))
    require(len(results) > 0, "directory", str(directory), "a folder with results of runs")
    by = resolve_group_settings(results, by)
    metric = choose_default_metric(results) if metric is None else metric
    grouping: dict[str, Any] = {"by": by, "metric": metric}
    title = f"{directory.resolve().name}: {len(results)} runs"
    num_alphas = results["alpha"].nunique() if "alpha" in by else 0

    tables = [make_overview_table(results, title=title, **grouping)]
    if num_alphas > 1:
        tables.insert(0, make_pivot_table(results, title=title, **grouping))
    texts = {
        "overview.md": "\n".join(map(to_markdown, tables)),
        "overview.tex": "\n".join(map(to_latex, tables)),
        "overview.csv": to_csv(summarize_runs(results, **grouping)),
    }
    curve_metric = "mean_client_accuracy" if metric.startswith("bmta") else "test_accuracy"
    window = WINDOW if metric in ROLLING_MEAN_METRICS else SMOOTHING_WINDOW
    curves = load_curves(directory, results=results)
    figures = {
        "learning_curves.png": lambda: plot_learning_curves(
            results, curves, by=by, metric=curve_metric, window=window
        )
    }
    if num_alphas > 1:
        name = "accuracy" if metric == "final_accuracy" else metric
        figures[f"{name}_against_alpha.png"] = lambda: plot_metric_vs_alpha(results, **grouping)
    if pair := find_numeric_pair(results, by):
        figures["heat_map.png"] = lambda: plot_heat_map(results, x=pair[0], y=pair[1], **grouping)

    folder = directory if output_dir is None else make_output_directory(output_dir)
    return ReportFiles(tables, _write_files(folder, texts, figures))


def write_table_files(
    directory: Path,
    stem: str,
    table: TextTable,
    frame: "pd.DataFrame",
    figures: "Mapping[str, Figure] | None" = None,
) -> list[str]:
    """Print a table and write it as `<stem>.md`, `<stem>.tex` and `<stem>.csv`, with figures.

    Args:
      directory: folder of the files.
      stem: name of the files without suffix.
      table: the table of texts.
      frame: its numbers, for the CSV.
      figures: figures by file name.

    Returns:
      Names of the files. If they cannot be written, the log has a line.
    """
    print_table(table)
    texts = {
        f"{stem}.md": to_markdown(table),
        f"{stem}.tex": to_latex(table),
        f"{stem}.csv": to_csv(frame),
    }
    draw_functions = {
        name: (lambda figure=figure: figure) for name, figure in (figures or {}).items()
    }
    return [path.name for path in _write_files(directory, texts, draw_functions)]


def _write_files(
    directory: Path, texts: Mapping[str, str], figures: "Mapping[str, Callable[[], Figure]]"
) -> list[Path]:
    """Write these files; -> those that are there. Why others are not is a line in the log; what the
    system refuses is not tried again with the next file."""
    paths: list[Path] = []
    names = [*texts, *figures]
    for name in names:
        try:
            if name in texts:
                write_text(directory / name, texts[name])
            else:
                _write_drawn_figure(directory / name, figures[name])
        except OSError as error:
            missing = ", ".join(names[names.index(name) :])
            text = (
                f"{missing}: not written to {str(directory)!r} ({error.strerror or error}); "
                "output_dir (--output-dir) names another place"
            )
            log.warning("%s", to_one_line(text))
            return paths
        except _DrawingError as error:
            warnings.warn(f"{name} is left out: {to_one_line(str(error))}", stacklevel=3)
        else:
            paths.append(directory / name)
    return paths


class _DrawingError(Exception):
    """A figure cannot be drawn."""


def _write_drawn_figure(path: Path, draw: "Callable[[], Figure]") -> None:
    try:
        write_figure(path, draw())
    except OSError:
        raise
    except Exception as error:  # of what strangers' results hold
        raise _DrawingError(f"{type(error).__name__}: {error}") from error


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))
