"""Output of a table: the table with its notes, its learning curves, and figures."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.comparison import (
    TableCell,
    compare_with_reported,
    compute_rank_correlations,
    list_diverged_runs,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.comparison_table import format_comparison_table, make_comparison_caption
from fedjax_het.analysis.figures.output import write_figure
from fedjax_het.analysis.figures.table_curves import plot_table_curves
from fedjax_het.analysis.overview import make_overview_table, summarize_runs
from fedjax_het.analysis.render import format_number
from fedjax_het.analysis.report import write_table_files
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import drop_unused_settings
from fedjax_het.papers.table.columns import (
    compute_gains_over_real,
    compute_matching_losses,
    describe_gains_column,
    describe_matching_losses,
    describe_relative_gains,
)
from fedjax_het.papers.table.declaration import (
    TableDeclaration,
    classify_variant_settings,
    merge_settings,
)
from fedjax_het.papers.table.significance import compute_p_values, describe_p_values
from fedjax_het.papers.table.table_run import TableRun

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_MAX_LINES_PER_PANEL = 6  # lines that one panel tells apart


def write_comparison_table(table_run: TableRun) -> list[str]:
    """Print the table, and write it as Markdown, LaTeX and CSV with its learning curves.

    Args:
      table_run: the table with its runs.

    Returns:
      Names of the files.
    """
    experiment, cells, results = table_run.experiment, table_run.cells, table_run.results
    table = compare_with_reported(cells, results, table_run.reported)
    column_notes = []
    if experiment.main_method and "domain" not in table:
        table["p_value"] = compute_p_values(table_run)
        if table["p_value"].notna().any():
            column_notes.append(describe_p_values(table_run))
    losses = compute_matching_losses(cells, results)
    if losses.notna().any():
        table["matching_loss"] = losses
        column_notes.append(describe_matching_losses(cells, results))
    if experiment.real_data_rows and "domain" not in table:
        table["over_real"] = compute_gains_over_real(table, cells, experiment)
        if table["over_real"].notna().any():
            column_notes.append(describe_gains_column(experiment))
    if experiment.baseline_row and (note := describe_relative_gains(table, cells, experiment)):
        column_notes.append(note)
    methods = [parse_row(cell.method)[0] for cell in cells]
    notes = [
        make_comparison_caption(table),
        *column_notes,
        *_describe_rank_correlations(table),
        *([experiment.note] if experiment.note else []),
        *filter(None, [experiment.presets[table_run.preset].get_note(methods)]),
        *_make_table_notes(table_run, table),
        *_describe_diverged_runs(list_diverged_runs(cells, results)),
    ]
    title = f"{table_run.title}."
    text_table = format_comparison_table(table, title=title, notes=notes)
    stem = experiment.item if experiment.results_folder else "table"
    curves = f"{stem}_curves" if experiment.results_folder else "curves"
    names = write_table_files(table_run.directory, stem, text_table, table)
    return [*names, *make_curves_writer(curves)(table_run)]


def make_curves_writer(name: str) -> Callable[[TableRun], list[str]]:
    """Make a writer of the learning curves as `<name>.png`, for `make_table_program`.

    The paper's methods are in color, the others in gray. If there are more than six rows,
    `<name>_apart.png` has a small panel for each.

    Args:
      name: name of the file without suffix.
    """

    def write_curve_figures(table_run: TableRun) -> list[str]:
        curve_inputs = (table_run.cells, table_run.results, table_run.curves, table_run.reported)
        experiment = table_run.experiment
        names = experiment.row_display_names
        curves = plot_table_curves(
            *curve_inputs, highlight=experiment.paper_methods, display_names=names
        )
        figures = {f"{name}.png": curves}
        methods_with_results = {cell.method for cell, _ in table_run.iterate_results()}
        if len(methods_with_results) > _MAX_LINES_PER_PANEL:
            figures[f"{name}_apart.png"] = plot_table_curves(
                *curve_inputs, separate_panels=True, display_names=names
            )
        for file_name, figure in figures.items():
            write_figure(table_run.directory / file_name, figure)
        return list(figures)

    return write_curve_figures


def make_figure_writer(
    name: str,
    draw: "Callable[[pd.DataFrame, pd.DataFrame], Figure]",
    *,
    by: Sequence[str],
    metric: str = "final_accuracy",
) -> Callable[[TableRun], list[str]]:
    """Make a writer of a figure without reported numbers, for `make_table_program`.

    The writer prints the means of the runs, and writes them and the figure under one name.

    Args:
      name: name of the files without suffix.
      draw: function of results and curves, as `load_results` and `load_curves` return them.
      by: settings with rows of their own in the table, if the runs have them.
      metric: a numeric column of the results.
    """

    def write_figure_and_table(table_run: TableRun) -> list[str]:
        experiment, results = table_run.experiment, table_run.cell_results
        if not len(results):
            print("No run is there to be drawn.")
            return []
        settings = [setting for setting in by if setting in results]
        title = table_run.title
        table = make_overview_table(results, title=title, by=settings, metric=metric)
        declaration_note = [experiment.note] if experiment.note else []
        table = replace(
            table, notes=(*table.notes, *declaration_note, *_describe_missing_runs(table_run))
        )
        summary = summarize_runs(results, by=settings, metric=metric)
        figures = {f"{name}.png": draw(results, table_run.curves)}
        return write_table_files(table_run.directory, name, table, summary, figures)

    return write_figure_and_table


def _make_table_notes(table_run: TableRun, table: "pd.DataFrame") -> list[str]:
    """What a reader must know to compare the measured values with the reported ones."""
    experiment, cells = table_run.experiment, table_run.cells
    notes = []
    # Of rows that nobody ran, settings would be said that no value here has.
    cells_with_runs = [cell for cell in cells if len(select_cell_runs(cell, table_run.results))]
    if deviations := list_protocol_deviations(experiment, cells_with_runs or cells):
        heading = f"Settings that differ from protocol {experiment.paper}"
        notes.append(f"{heading}: {'; '.join(deviations)}.")
    reported_datasets = {*table_run.reported["dataset"]}
    if names := [name for name in dict.fromkeys(table["dataset"]) if name not in reported_datasets]:
        notes.append(f"The paper's table has no values for {', '.join(names)}.")
    if "dataset_note" in table_run.results:
        first_notes = table_run.cell_results.groupby("dataset")["dataset_note"].first()
        for dataset, note in first_notes.dropna().items():
            if note:
                notes.append(f"{dataset}: {note}")
    if unimplemented_methods := list(dict.fromkeys(cell.method for cell in cells if not cell.runs)):
        notes.append(f"Not implemented here yet: {', '.join(unimplemented_methods)}.")
    return [*notes, *_describe_missing_runs(table_run)]


def _describe_missing_runs(table_run: TableRun) -> list[str]:
    """Why runs are missing, each reason once."""
    reasons = Counter(table_run.skip_reasons.values()).items()
    return [f"Not run ({count} runs): {reason}" for reason, count in reasons]


def _describe_rank_correlations(table: "pd.DataFrame") -> list[str]:
    """Whether the measured values rank the methods as the reported ones do, where there are
    ranks."""
    if "rank" not in table:
        return []
    sections = [
        f"{section} {format_number(rho)} ({count} methods)"
        for section, rho, count in compute_rank_correlations(table)
    ]
    heading = "Spearman's rank correlation of measured and reported values"
    return [f"{heading}: {'; '.join(sections)}."] if sections else []


def _describe_diverged_runs(runs: Sequence[str]) -> list[str]:
    return [f"† Diverged, and left out of the mean: {'; '.join(runs)}."] if runs else []


# A cell's place, or the seed's: no departure.
_CELL_SETTINGS = {"algorithm", "dataset", "model", "alpha", "classes", "seed", "partition_seed"}


def list_protocol_deviations(experiment: TableDeclaration, cells: Sequence[TableCell]) -> list[str]:
    """List the settings of the runs that differ from the paper's table.

    Args:
      experiment: declaration of the table.
      cells: cells of the table.

    Returns:
      Texts with the setting, its value and the paper's value.
    """
    rows_by_deviation: dict[str, list[str]] = {}
    for cell in cells:
        for run in cell.runs[:1]:
            used_spec, paper_spec = run.resolved(), _make_paper_spec(experiment, cell)
            for name, (used_value, paper_value) in _find_differences(
                used_spec.to_dict(), paper_spec.to_dict()
            ).items():
                used_value, paper_value = (
                    f"{v:g}" if isinstance(v, float) else v for v in (used_value, paper_value)
                )
                text = f"{name} {used_value}" + (
                    "" if paper_value is None else f" instead of {paper_value}"
                )
                rows = rows_by_deviation.setdefault(text, [])
                if cell.method not in rows:
                    rows.append(cell.method)
    all_rows = {cell.method for cell in cells if cell.runs}
    return [
        text if set(rows) == all_rows else f"{text} ({', '.join(rows)})"
        for text, rows in rows_by_deviation.items()
    ]


def _make_paper_spec(experiment: TableDeclaration, cell: TableCell) -> RunSpec:
    """The run of a cell as the paper has it."""
    method, variant = experiment.row_parser(cell.method, cell.dataset)
    settings = merge_settings(
        experiment.settings,
        experiment.dataset_settings.get(cell.dataset, {}),
        classify_variant_settings(method, variant),
    )
    return RunSpec(
        method,
        cell.dataset,
        model=cell.model,
        classes=cell.classes,
        protocol=experiment.paper,
        **drop_unused_settings(method, settings),
    ).resolved()


def _find_differences(used_settings: dict, paper_settings: dict) -> dict[str, tuple[Any, Any]]:
    differences: dict[str, tuple[Any, Any]] = {}
    for name, value in used_settings.items():
        if isinstance(value, dict):
            differences.update(_find_differences(value, paper_settings.get(name, {})))
        elif name not in _CELL_SETTINGS and value != paper_settings.get(name):
            differences[name] = (value, paper_settings.get(name))
    return differences
