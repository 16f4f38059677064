"""Tables and figures of a folder of results as files."""

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.figures.curves import plot_learning_curves
from fedjax_het.analysis.figures.metric_vs_setting import (
    find_numeric_pair,
    plot_heat_map,
    plot_metric_vs_alpha,
)
from fedjax_het.analysis.figures.split_figures import plot_metric_vs_measure
from fedjax_het.analysis.figures.style import FigureFormat, write_figure
from fedjax_het.analysis.overview import (
    BMTA_METRICS,
    EVALUATED_ACCURACY,
    ROLLING_MEAN_METRICS,
    add_evaluated_accuracy,
    choose_default_metric,
    format_setting_value,
    get_method_title,
    get_metric_label,
    list_tasks,
    make_overview_table,
    make_pivot_table,
    resolve_group_settings,
    summarize_runs,
)
from fedjax_het.analysis.render import TextTable, to_csv, to_latex, to_markdown
from fedjax_het.metrics.convergence import WINDOW
from fedjax_het.runtime.result_store import (
    list_renamed_files,
    list_run_files,
    load_curves,
    load_results,
    select_newest,
)
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import make_value_error
from fedjax_het.utils.io import make_output_directory, write_atomically
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


log = logging.getLogger("fedjax_het")


class ReportFiles(NamedTuple):
    """Tables and files of `write_report`."""

    tables: list[TextTable]
    paths: list[Path]


@validate_arguments
def write_report(
    directory: str | os.PathLike,
    *,
    by: Sequence[str] | None = None,
    metric: str | None = None,
    columns: Sequence[str] = (),
    sort: str | None = None,
    output_dir: str | os.PathLike | None = None,
    formats: Sequence[FigureFormat] = (),
) -> ReportFiles:
    """Read a folder of results and write its tables and figures.

    Files: `overview.md`, `overview.tex`, `overview.csv` and `learning_curves.png`; if alpha varies,
    `accuracy_against_alpha.png` (named after another metric) and a table with a column per alpha;
    if two numeric settings vary, `heat_map.png`; for each name of `columns`, the metric of the runs
    against this column, for example `accuracy_against_split.size_gini.png`; for runs with simulated
    time, `learning_curves_over_time.png`. Files are replaced in one step. A run with damaged files,
    and a figure that cannot be drawn, are left out with a warning. If the folder cannot be written,
    the log has a line.

    Args:
      directory: folder of results.
      by: settings that distinguish rows and lines; default: all that vary, except seeds.
      metric: a numeric column of `load_results`; default: `final_accuracy`, `bmta` if all runs have
        it, or `evaluated_accuracy` if only some methods are personalized. Curves are measured
        values, or running means over 20 rounds if the metric is one of 20 rounds.
      columns: further numeric columns of the overview, for example "split.label_hellinger".
      sort: numeric column that sorts the rows of the overview, the smallest value first.
      output_dir: folder of the files; default: `directory`.
      formats: formats of further files of each figure.

    Returns:
      The tables, and the files that were written.

    Raises:
      ConfigError: if the folder has no results, or the runs do not have a setting or the metric.

    Example:
      >>> import tempfile
      >>> from fedjax_het import RunSpec, simulate
      >>> from fedjax_het.analysis import write_report
      >>> folder = tempfile.mkdtemp()
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=1)
      >>> result = simulate(spec, output_dir=folder, progress=None)
      >>> [path.name for path in write_report(folder).paths]
      ['overview.md', 'overview.tex', 'overview.csv', 'learning_curves.png']
    """
    directory = Path(directory)
    results = select_newest(load_results(directory))
    for name in list_renamed_files(directory):
        text = f"left out: {name} is not named by its digest, as Result.digest() returns it"
        warnings.warn(to_one_line(text), stacklevel=2)
    if not len(results):
        expected = "a folder with results of runs"
        if num_damaged := len(list_run_files(directory)):
            expected += f" ({num_damaged} result{'s' * (num_damaged > 1)}, damaged)"
        raise make_value_error("directory", str(directory), expected)
    curves = load_curves(directory, results=results)
    results, curves = add_evaluated_accuracy(results, curves)
    by = resolve_group_settings(results, by)
    metric = choose_default_metric(results) if metric is None else metric
    grouping: dict[str, Any] = {"by": by, "metric": metric}
    title = _make_title(results, metric)
    has_alphas = "alpha" in by and results["alpha"].nunique() > 1

    extra: dict[str, Any] = {"columns": columns, "sort": sort}
    tables = [make_overview_table(results, title=title, **grouping, **extra)]
    if has_alphas:
        tables.insert(0, make_pivot_table(results, title=title, **grouping))
    contents: dict[str, str | Callable[[], Figure]] = {
        "overview.md": "\n".join(map(to_markdown, tables)),
        "overview.tex": "\n".join(map(to_latex, tables)),
        "overview.csv": to_csv(summarize_runs(results, **grouping, **extra)),
    }
    curve_metric = "mean_client_accuracy" if metric in BMTA_METRICS else "test_accuracy"
    curve_metric = metric if metric == EVALUATED_ACCURACY else curve_metric
    window = WINDOW if metric in ROLLING_MEAN_METRICS else 1
    contents["learning_curves.png"] = lambda: plot_learning_curves(
        results, curves, by=by, metric=curve_metric, window=window
    )
    if "simulated_seconds" in curves:
        contents["learning_curves_over_time.png"] = lambda: plot_learning_curves(
            results, curves, by=by, metric=curve_metric, x="seconds"
        )
    name = "accuracy" if metric == "final_accuracy" else metric
    for column in columns:
        contents[f"{name}_against_{column}.png"] = partial(
            plot_metric_vs_measure, results, measure=column, metric=metric
        )
    if has_alphas:
        contents[f"{name}_against_alpha.png"] = lambda: plot_metric_vs_alpha(results, **grouping)
    if pair := find_numeric_pair(results, by):
        contents["heat_map.png"] = lambda: plot_heat_map(results, x=pair[0], y=pair[1], **grouping)
    folder = directory if output_dir is None else make_output_directory(output_dir)
    return ReportFiles(tables, write_files(folder, contents, formats))


def _make_title(results: "pd.DataFrame", metric: str) -> str:
    """Return the title of the tables: metric, data sets, methods and number of runs."""
    datasets = ", ".join(map(format_setting_value, results["dataset"].unique()))
    methods = results["algorithm"].unique()
    subject = f"{len(methods)} methods" if len(methods) > 1 else get_method_title(methods[0])
    runs = "1 run" if len(results) == 1 else f"{len(results)} runs"
    label = get_metric_label(metric, list_tasks(results)).removesuffix(" (%)")
    return f"{label} of {subject} on {datasets}, {runs}"


def write_files(
    directory: Path,
    contents: "Mapping[str, str | Callable[[], Figure]]",
    formats: Sequence[FigureFormat] = (),
) -> list[Path]:
    """Write texts and figures to a folder.

    If the folder cannot be written, the log has a line, and the remaining files are left out. A
    figure that cannot be drawn is left out with a warning.

    Args:
      directory: folder of the files.
      contents: by file name, a text or a function that draws a figure.
      formats: formats of further files of each figure.

    Returns:
      The files that were written.
    """
    paths: list[Path] = []
    names = list(contents)
    for index, (name, content) in enumerate(contents.items()):
        path = directory / name
        try:
            if isinstance(content, str):
                write_text(path, content)
            else:
                write_figure(path, content(), formats=formats)
        except OSError as error:
            reason = f"not written to {str(directory)!r} ({error.strerror or error})"
            hint = "output_dir (--output-dir) names another place"
            log.warning("%s", to_one_line(f"{', '.join(names[index:])}: {reason}; {hint}"))
            return paths
        except Exception as error:  # results of strangers may hold anything
            if isinstance(content, str):
                raise
            reason = to_one_line(f"{type(error).__name__}: {error}")
            warnings.warn(f"{name} is left out: {reason}", stacklevel=3)
        else:
            paths.append(path)
    return paths


def write_text(path: Path, text: str) -> None:
    """Write a text to a file in UTF-8; the file is replaced in one step.

    Args:
      path: file to write.
      text: its content.
    """
    write_atomically(path, lambda file: file.write(text.encode()))
