"""What is made of a table's outcome: the table itself, its learning curves, a drawing."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedjax_het.common.pictures import write_figure
from fedjax_het.report.cell import parse_row
from fedjax_het.report.comparison import compare, diverged_runs, runs_made
from fedjax_het.report.comparison_curves import plot_curves
from fedjax_het.report.comparison_table import caption, comparison_table
from fedjax_het.report.overview import overview_table, summarise_runs
from fedjax_het.report.paper_table.departures import departures
from fedjax_het.report.paper_table.gains import gains_note, gains_over_real, relative_gains_note
from fedjax_het.report.paper_table.outcome import Outcome
from fedjax_het.report.paper_table.quality import matching_losses, quality_note
from fedjax_het.report.paper_table.significance import p_values, significance_note
from fedjax_het.report.ranks import rank_correlations
from fedjax_het.report.render import number_text
from fedjax_het.report.write import publish

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_FEW = 6  # lines that one panel tells apart


def write_table(outcome: Outcome) -> list[str]:
    """Print the table, and write it in three forms and the learning curves."""
    experiment, cells, results = outcome.experiment, outcome.cells, outcome.results
    table = compare(cells, results, outcome.reported)
    own_notes = []
    if experiment.focus and "domain" not in table:
        table["p_value"] = p_values(outcome)
        if table["p_value"].notna().any():
            own_notes.append(significance_note(outcome))
    losses = matching_losses(cells, results)
    if losses.notna().any():
        table["matching_loss"] = losses
        own_notes.append(quality_note(cells, results))
    if experiment.real and "domain" not in table:
        table["over_real"] = gains_over_real(table, cells, experiment)
        if table["over_real"].notna().any():
            own_notes.append(gains_note(experiment))
    if experiment.baseline and (note := relative_gains_note(table, cells, experiment)):
        own_notes.append(note)
    methods = [parse_row(cell.method)[0] for cell in cells]
    notes = [
        caption(table),
        *own_notes,
        *_rank_note(table),
        *([experiment.note] if experiment.note else []),
        *filter(None, [experiment.presets[outcome.preset].note_of(methods)]),
        *_notes(outcome, table),
        *_divergence_note(diverged_runs(cells, results)),
    ]
    title = f"{outcome.title}."
    text_table = comparison_table(table, title=title, notes=notes)
    stem = experiment.item if experiment.folder else "table"
    curves = f"{stem}_curves" if experiment.folder else "curves"
    names = publish(outcome.directory, stem, text_table, table)
    return [*names, *write_curves(curves)(outcome)]


def write_curves(name: str) -> Callable[[Outcome], list[str]]:
    """For `program`: the learning curves alone, as `<name>.png`: the paper's own methods in colour,
    the others in grey. Of more than six rows besides as `<name>_apart.png`, a small panel each."""

    def write(outcome: Outcome) -> list[str]:
        given = (outcome.cells, outcome.results, outcome.curves, outcome.reported)
        experiment = outcome.experiment
        names = experiment.names
        curves = plot_curves(*given, focus=experiment.own_methods, names=names)
        figures = {f"{name}.png": curves}
        made = {cell.method for cell, _ in outcome.made()}
        if len(made) > _FEW:
            figures[f"{name}_apart.png"] = plot_curves(*given, apart=True, names=names)
        for path, figure in figures.items():
            write_figure(outcome.directory / path, figure)
        return list(figures)

    return write


def write_drawing(
    name: str,
    draw: "Callable[[pd.DataFrame, pd.DataFrame], Figure]",
    *,
    by: Sequence[str],
    measure: str = "final_accuracy",
) -> Callable[[Outcome], list[str]]:
    """For `program`, of a figure without reported numbers: print the means of its runs, and write
    them and the figure under this name.

    draw: from results and curves, as `load_results` and `load_curves` give them, the figure.
    by: settings that have rows of their own in the table, as far as the runs have them.
    """

    def write(outcome: Outcome) -> list[str]:
        experiment, results = outcome.experiment, outcome.own_results
        if not len(results):
            print("No run is there to be drawn.")
            return []
        settings = [setting for setting in by if setting in results]
        title = outcome.title
        table = overview_table(results, title=title, by=settings, measure=measure)
        own_note = [experiment.note] if experiment.note else []
        table = replace(table, notes=(*table.notes, *own_note, *_missing_runs(outcome)))
        summary = summarise_runs(results, by=settings, measure=measure)
        figures = {f"{name}.png": draw(results, outcome.curves)}
        return publish(outcome.directory, name, table, summary, figures)

    return write


def _notes(outcome: Outcome, table: "pd.DataFrame") -> list[str]:
    """What a reader must know to compare the measured values with the reported ones."""
    experiment, cells = outcome.experiment, outcome.cells
    notes = []
    # Of rows that nobody ran, settings would be said that no value here has.
    made = [cell for cell in cells if len(runs_made(cell, outcome.results))]
    if changed := departures(experiment, made or cells):
        differ = f"Settings that differ from protocol {experiment.paper}"
        notes.append(f"{differ}: {'; '.join(changed)}.")
    known = {*outcome.reported["dataset"]}
    if names := [name for name in dict.fromkeys(table["dataset"]) if name not in known]:
        notes.append(f"The paper's table has no values for {', '.join(names)}.")
    if "dataset_note" in outcome.results:
        first_notes = outcome.own_results.groupby("dataset")["dataset_note"].first()
        for dataset, note in first_notes.dropna().items():
            if note:
                notes.append(f"{dataset}: {note}")
    if unmade := list(dict.fromkeys(cell.method for cell in cells if not cell.runs)):
        notes.append(f"Not implemented here yet: {', '.join(unmade)}.")
    return [*notes, *_missing_runs(outcome)]


def _missing_runs(outcome: Outcome) -> list[str]:
    """Why runs are missing, each reason once."""
    reasons = Counter(outcome.not_run.values()).items()
    return [f"Not run ({count} runs): {reason}" for reason, count in reasons]


def _rank_note(table: "pd.DataFrame") -> list[str]:
    """Whether the measured values rank the methods as the reported ones do, where there are
    ranks."""
    if "rank" not in table:
        return []
    sections = [
        f"{section} {number_text(rho)} ({count} methods)"
        for section, rho, count in rank_correlations(table)
    ]
    what = "Spearman's rank correlation of measured and reported values"
    return [f"{what}: {'; '.join(sections)}."] if sections else []


def _divergence_note(runs: Sequence[str]) -> list[str]:
    return [f"† Diverged, and left out of the mean: {'; '.join(runs)}."] if runs else []
