"""The program of every table: the missing runs are made, then it is written."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedjax_het.analysis.figures.output import write_extra_formats
from fedjax_het.papers.programs import ProgramMain
from fedjax_het.papers.table.cells import list_unique_runs, make_cells
from fedjax_het.papers.table.declaration import TableArguments, TableDeclaration
from fedjax_het.papers.table.table_run import TableRun
from fedjax_het.papers.table.tuning import add_tuned_cells, describe_tuning, make_tuning_trials
from fedjax_het.papers.table.writer import write_comparison_table
from fedjax_het.runtime import result_store
from fedjax_het.runtime.sweep import plan_sweep, sweep
from fedjax_het.runtime.sweep_log import format_run_label
from fedjax_het.utils import console
from fedjax_het.utils.command_line import display_flags, parse_arguments
from fedjax_het.utils.errors import require, run_with_exit_status

# What the flags call settings of runs.
_FILTER_FLAGS = {
    "dataset": "--datasets",
    "model": "--models",
    "alpha": "--alphas",
    "seed": "--seeds",
    "algorithm": "--methods",
}
_OVERRIDABLE_SETTINGS = (
    "rounds",
    "width",
)  # of `TableArguments`, which are the preset's where they are not given


def make_table_program(
    experiment: TableDeclaration,
    write_outputs: Callable[[TableRun], Sequence[str]] = write_comparison_table,
) -> ProgramMain:
    """Make the program of a table: run the missing runs, then print and write the table.

    Args:
      experiment: declaration of the table.
      write_outputs: writes files from the finished table and returns their names; default: the table
        and its learning curves.

    Returns:
      `main(argv)`, which returns the exit status.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        def run_command() -> int:
            console.parse_output_flags(sys.argv[1:] if argv is None else argv)
            table_arguments = parse_arguments(
                TableArguments,
                argv,
                description=f"{experiment.title} Presets: {', '.join(experiment.presets)}.",
                defaults={"preset": next(iter(experiment.presets))},
            )
            with (
                display_flags(TableArguments, _FILTER_FLAGS),
                write_extra_formats(table_arguments.pictures),
            ):
                return _run_table(experiment, table_arguments, write_outputs)

        return run_with_exit_status(
            run_command,
            name="error",
            interrupt_message="stopped; the same command goes on from the runs that are done",
        )

    return main


def _run_table(
    experiment: TableDeclaration,
    arguments: TableArguments,
    write_outputs: Callable[[TableRun], Sequence[str]],
) -> int:
    cells = make_cells(experiment, arguments)
    if arguments.tuned:
        require(
            bool(experiment.tuned_hyperparameters), "tuned", True, "a table that says what is tuned"
        )
    make_dataset = experiment.presets[arguments.preset].make_dataset
    dataset = make_dataset() if make_dataset else None
    trial_cells = [cell for trial in make_tuning_trials(experiment, cells) for cell in trial.cells]
    specs = list_unique_runs([*cells, *trial_cells] if arguments.tuned else cells)
    folder_name = experiment.results_folder or experiment.name
    directory = Path(arguments.output_dir or f"results/{folder_name}-{arguments.preset}")
    if arguments.list:
        for digest, spec, state in plan_sweep(specs, directory, dataset=dataset):
            print(f"{digest}  {state:10}  {format_run_label(spec)}")
        return 0

    if arguments.show:
        require(directory.is_dir(), "output_dir", str(directory), "a folder: --show runs nothing")

    def run_and_load(specs):
        sweep_skip_reasons = (
            {} if arguments.show else sweep(specs, directory, dataset=dataset).not_run
        )
        return sweep_skip_reasons, result_store.select_newest(result_store.load_results(directory))

    skip_reasons, results = run_and_load(specs)
    if arguments.tuned:
        note = describe_tuning(experiment, cells, results)
        cells = add_tuned_cells(experiment, cells, results, experiment.load_reported())
        experiment = replace(experiment, note=" ".join(filter(None, (experiment.note, note))))
        more, results = run_and_load(list_unique_runs(cells))
        skip_reasons |= more
    given = {name: getattr(arguments, name) for name in _OVERRIDABLE_SETTINGS}
    instead = tuple(f"--{name} {value}" for name, value in given.items() if value is not None)
    outcome = TableRun.from_directory(
        experiment,
        arguments.preset,
        cells,
        directory,
        skip_reasons,
        results=results,
        command_line_overrides=instead,
    )
    with console.suppress_results_if_quiet():
        names = write_outputs(outcome)
    if arguments.quiet or arguments.json:
        counts = {"runs": len(specs), "not_run": len(skip_reasons)}
        print(json.dumps({"output_dir": str(directory), "files": list(names), **counts}))
    else:
        written = [*names, *([] if arguments.show else ["two files per run"])]
        if written:
            print(f"Written to {directory}: {', '.join(written)}.")
    return 2 if specs and len(skip_reasons) == len(specs) else 0
