"""Output of a table: the table with its notes, its learning curves, and figures."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedjax_het.analysis.comparison import (
    TableCell,
    compare_with_reported,
    compute_rank_correlations,
    format_comparison_table,
    format_row,
    list_diverged_runs,
    make_comparison_caption,
    parse_row,
    select_cell_runs,
)
from fedjax_het.analysis.figures.curves import plot_table_curves
from fedjax_het.analysis.overview import make_overview_table, summarize_runs
from fedjax_het.analysis.render import format_number
from fedjax_het.config.protocols import describe_protocol
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.papers.table.columns import (
    compute_gains_over_real,
    compute_matching_losses,
    compute_p_values,
    describe_gains_column,
    describe_matching_losses,
    describe_p_values,
    describe_relative_gains,
)
from fedjax_het.papers.table.declaration import TableDeclaration
from fedjax_het.papers.table.table_run import TableRun

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_MAX_LINES_PER_PANEL = 6  # lines that a reader can distinguish


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
    if experiment.baseline_row:
        column_notes.append(describe_relative_gains(table, cells, experiment))
    methods = [parse_row(cell.method)[0] for cell in cells]
    diverged = "; ".join(list_diverged_runs(cells, results))
    reason = "Diverged or ended early" if "partial" in table else "Diverged"
    notes = [
        make_comparison_caption(table),
        *column_notes,
        _describe_rank_correlations(table),
        experiment.note,
        experiment.presets[table_run.preset].get_note(methods),
        *_make_table_notes(table_run, table),
        f"† {reason}, and left out of the mean: {diverged}." if diverged else "",
    ]
    title, notes = f"{table_run.title}.", list(filter(None, notes))
    text_table = format_comparison_table(table, title=title, notes=notes)
    stem, curves = "table", "curves"
    if experiment.results_folder:
        stem, curves = experiment.item, f"{experiment.item}_curves"
    names = table_run.write_table(stem, text_table, table)
    return [*names, *make_curves_writer(curves)(table_run)]


def make_curves_writer(name: str) -> Callable[[TableRun], list[str]]:
    """Make a writer of the learning curves as `<name>.png`, for `make_table_program`.

    The paper's methods are in color, FedAvg is dashed, the others are gray. More than six rows have
    a small panel each.

    Args:
      name: name of the file without suffix.

    Returns:
      Function of a table that returns the names of the files.
    """

    def write_curves(table_run: TableRun) -> list[str]:
        data = (table_run.cells, table_run.results, table_run.curves, table_run.reported)
        highlight = table_run.experiment.paper_methods
        names = table_run.experiment.row_display_names
        rows = {cell.method for cell, _ in table_run.iterate_results()}
        is_separate = len(rows) > _MAX_LINES_PER_PANEL
        curves = plot_table_curves(
            *data, highlight=highlight, separate_panels=is_separate, display_names=names
        )
        return table_run.write_figures({f"{name}.png": curves})

    return write_curves


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
      by: settings with separate rows in the table, if the runs have them.
      metric: a numeric column of the results.

    Returns:
      Function of a table that returns the names of the files.
    """

    def write_figure_and_table(table_run: TableRun) -> list[str]:
        results = table_run.cell_results
        if not len(results):
            print("There is no run to draw.")
            return []
        grouping: Any = {"by": [setting for setting in by if setting in results], "metric": metric}
        table = make_overview_table(results, title=table_run.title, **grouping)
        more_notes = filter(None, [table_run.experiment.note, *_describe_missing_runs(table_run)])
        table = replace(table, notes=(*table.notes, *more_notes))
        figures = {f"{name}.png": draw(results, table_run.curves)}
        return table_run.write_table(name, table, summarize_runs(results, **grouping), figures)

    return write_figure_and_table


def _make_table_notes(table_run: TableRun, table: "pd.DataFrame") -> list[str]:
    """Describe the differences between the measured values and the reported ones."""
    experiment, cells = table_run.experiment, table_run.cells
    notes = []
    # Rows without runs do not count: their settings would be stated, but no value has them.
    cells_with_runs = [cell for cell in cells if len(select_cell_runs(cell, table_run.results))]
    if deviations := list_protocol_deviations(experiment, cells_with_runs or cells):
        heading = f"Settings that differ from protocol {experiment.run_protocol}"
        notes.append(f"{heading}: {'; '.join(deviations)}.")
    else:
        notes.append(f"Protocol: {describe_protocol(experiment.run_protocol)}.")
    reported_datasets = {*table_run.reported["dataset"]}
    names = [name for name in dict.fromkeys(table["dataset"]) if name not in reported_datasets]
    if names and experiment.has_reported_values:
        notes.append(f"The paper's table has no values for {', '.join(names)}.")
    if "dataset_note" in table_run.results:
        first_notes = table_run.cell_results.groupby("dataset")["dataset_note"].first().dropna()
        notes += [f"{dataset}: {note}" for dataset, note in first_notes.items() if note]
    return [*notes, *_describe_missing_runs(table_run)]


def _describe_missing_runs(table_run: TableRun) -> list[str]:
    """Return each reason why runs are missing once."""
    reasons = Counter(table_run.skip_reasons.values()).items()
    return [f"Not run ({count} runs): {reason}" for reason, count in reasons]


def _describe_rank_correlations(table: "pd.DataFrame") -> str:
    """Describe the rank correlations of a table with ranks."""
    correlations = compute_rank_correlations(table) if "rank" in table else []
    sections = [
        f"{section} {format_number(rho)} ({count} methods)" for section, rho, count in correlations
    ]
    heading = "Spearman's rank correlation of measured and reported values"
    return f"{heading}: {'; '.join(sections)}." if sections else ""


# Settings that place a cell, and seeds: no deviations from a protocol.
_CELL_SETTINGS = {"algorithm", "dataset", "model", "alpha", "classes", "seed", "partition_seed"}


def list_protocol_deviations(experiment: TableDeclaration, cells: Sequence[TableCell]) -> list[str]:
    """List the settings of the runs that differ from the paper's table.

    Args:
      experiment: declaration of the table.
      cells: cells of the table.

    Returns:
      Texts with the setting, its value and the paper's value.

    Example:
      >>> from fedjax_het.papers.dynafed.tables import TABLE1
      >>> from fedjax_het.papers.table import TableArguments, list_protocol_deviations, make_cells
      >>> cells = make_cells(TABLE1, TableArguments("quick", methods=("fedavg",)))
      >>> list_protocol_deviations(TABLE1, cells)[0]
      'num_clients 20 instead of 80'
    """
    rows_by_deviation: dict[str, list[str]] = {}
    for cell in cells:
        used = cell.runs[0].resolved().to_dict()
        expected = _make_paper_spec(experiment, cell).to_dict()
        for name, values in _find_differences(used, expected).items():
            value, paper_value = (f"{v:g}" if isinstance(v, float) else v for v in values)
            text = f"{name} {value}"
            text += "" if paper_value is None else f" instead of {paper_value}"
            rows = rows_by_deviation.setdefault(text, [])
            if cell.method not in rows:
                rows.append(cell.method)
    all_rows = {cell.method for cell in cells}
    return [
        text if set(rows) == all_rows else f"{text} ({', '.join(map(format_row, rows))})"
        for text, rows in rows_by_deviation.items()
    ]


def _make_paper_spec(experiment: TableDeclaration, cell: TableCell) -> RunSpec:
    """Return the settings of a cell's run in the paper."""
    method, settings = experiment.merge_row_settings(cell.method, cell.dataset)
    settings |= {"model": cell.model, "protocol": experiment.run_protocol}
    if cell.classes is not None:
        settings["classes"] = cell.classes
    return RunSpec(method, cell.dataset, **settings).resolved()


def _find_differences(used: dict, expected: dict) -> dict[str, tuple[Any, Any]]:
    differences: dict[str, tuple[Any, Any]] = {}
    for name, value in used.items():
        if isinstance(value, dict):
            differences.update(_find_differences(value, expected.get(name, {})))
        elif name not in _CELL_SETTINGS and value != expected.get(name):
            differences[name] = (value, expected.get(name))
    return differences
