"""The program of every table: it makes the missing runs, then prints and writes the table."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedjax_het.papers.programs import ProgramMain
from fedjax_het.papers.table.cells import list_unique_runs, make_cells
from fedjax_het.papers.table.declaration import TableArguments, TableDeclaration
from fedjax_het.papers.table.search import (
    add_tuned_cells,
    choose_hyperparameters,
    describe_search,
)
from fedjax_het.papers.table.table_run import QUICK, TableRun
from fedjax_het.papers.table.writer import write_comparison_table
from fedjax_het.runtime.result_display import format_run_label, list_varying_settings
from fedjax_het.runtime.result_store import (
    compute_settings_digest,
    load_results,
)
from fedjax_het.runtime.sweep import plan_sweep, sweep
from fedjax_het.tuning.tuner import DEFAULT_BUDGET
from fedjax_het.utils import console
from fedjax_het.utils.command_line import display_flags, parse_arguments
from fedjax_het.utils.errors import require, run_with_exit_status

# Flags of settings of runs.
_FILTER_FLAGS = {
    "dataset": "--datasets",
    "model": "--models",
    "alpha": "--alphas",
    "seed": "--seeds",
    "algorithm": "--methods",
}
# Flags that replace settings of the preset.
_OVERRIDABLE_SETTINGS = ("rounds", "width", "validation")
_TUNED_NOTE = (
    "A trial has at least the rounds in which its method takes effect. A row is not repeated if its "
    "default values are the best, or if it is not tuned yet."
)
_VALIDATION_NOTE = (
    "The best round of a run is the round with the best accuracy on its validation examples, which "
    "no client trains on, instead of the round with the best test accuracy."
)


def make_table_program(
    experiment: TableDeclaration,
    write_outputs: Callable[[TableRun], Sequence[str]] = write_comparison_table,
) -> ProgramMain:
    """Make the program of a table: run the missing runs, then print and write the table.

    Args:
      experiment: declaration of the table.
      write_outputs: writes files from the finished table and returns their names; default: the
        table and its learning curves.

    Returns:
      `main(argv)`, which returns the exit status.

    Example:
      >>> from fedjax_het.papers.table import Preset, TableDeclaration, make_table_program
      >>> quick = Preset(datasets=("digits",), models=("mlp",), seeds=(0,), rows=("fedavg",))
      >>> table = TableDeclaration(name="mine", paper="dynafed", item="mine", title="Mine.",
      ...     has_reported_values=False, presets={"quick": quick})
      >>> make_table_program(table)(["--list"])
      9b0bb0404f6d4924  missing     fedavg, digits, mlp, alpha 0.01, protocol dynafed, seed 0
      0
    """

    def main(argv: Sequence[str] | None = None) -> int:
        def run_command() -> int:
            console.parse_output_flags(sys.argv[1:] if argv is None else argv)
            arguments = parse_arguments(
                TableArguments,
                argv,
                description=f"{experiment.title} Presets: {', '.join(experiment.presets)}.",
                defaults={"preset": next(iter(experiment.presets))},
            )
            with display_flags(TableArguments, _FILTER_FLAGS):
                return _run_table(experiment, arguments, write_outputs)

        stopped = "stopped; the same command continues from the finished runs"
        return run_with_exit_status(run_command, name="error", interrupt_message=stopped)

    return main


def _run_table(
    experiment: TableDeclaration,
    arguments: TableArguments,
    write_outputs: Callable[[TableRun], Sequence[str]],
) -> int:
    cells = make_cells(experiment, arguments)
    make_dataset = experiment.presets[arguments.preset].make_dataset
    dataset = make_dataset() if make_dataset else None
    folder_name = experiment.results_folder or experiment.name
    directory = Path(arguments.output_dir or f"results/{folder_name}-{arguments.preset}")
    runs_trials = not (arguments.list or arguments.show)
    if experiment.budget is not None:
        cells = choose_hyperparameters(
            *(cells, directory, experiment.budget),
            space=experiment.search_space,
            dataset=dataset,
            runs_trials=runs_trials,
        )
    if arguments.tuned:
        require(
            experiment.budget is None,
            "tuned",
            True,
            "a table whose rows are not tuned without this flag",
        )
        cells = add_tuned_cells(
            cells, directory, experiment.control_rows, dataset=dataset, runs_trials=runs_trials
        )
        rounds = cells[0].runs[0].resolved().rounds
        rule = describe_search(DEFAULT_BUDGET, rounds, "Each row is repeated with values")
        experiment = _add_note(experiment, f"{rule} {_TUNED_NOTE}")
    specs = list_unique_runs(cells)
    if arguments.list:
        plan = plan_sweep(specs, directory, dataset=dataset)
        varying = list_varying_settings(spec for _, spec, _ in plan)
        versions: dict[str, str] = {}
        if directory.is_dir() and len(kept := load_results(directory)):
            kept = kept[~kept["is_partial"]]
            versions = dict(zip(kept["settings"], kept["fedjax_het"], strict=True))
        for digest, spec, state in plan:
            if state == "missing" and (version := versions.get(compute_settings_digest(spec))):
                state = f"kept (version {version})"
            width = 20 if versions else 10
            print(f"{digest}  {state:{width}}  {format_run_label(spec, varying=varying)}")
        return 0
    if arguments.show:
        require(
            directory.is_dir(),
            "output_dir",
            str(directory),
            "an existing folder, since --show runs nothing",
        )

    def run_missing(specs) -> dict[str, str]:
        return {} if arguments.show else sweep(specs, directory, dataset=dataset).not_run

    skip_reasons = run_missing(specs)
    if arguments.validation is not None:
        experiment = _add_note(experiment, _VALIDATION_NOTE)
    overrides = {name: getattr(arguments, name) for name in _OVERRIDABLE_SETTINGS}
    flags = tuple(f"--{name} {value}" for name, value in overrides.items() if value is not None)
    table_run = TableRun.from_directory(experiment, arguments.preset, cells, directory)._replace(
        skip_reasons=skip_reasons,
        command_line_overrides=flags,
        formats=arguments.pictures,
        wide=arguments.wide,
    )
    with console.suppress_results_if_quiet():
        names = write_outputs(table_run)
    if arguments.quiet or arguments.json:
        counts = {"runs": len(specs), "not_run": len(skip_reasons)}
        console.print_json({"output_dir": str(directory), "files": list(names), **counts})
    elif written := [*names, *([] if arguments.show else ["two files per run"])]:
        print(f"Written to {directory}: {', '.join(written)}.")
        if arguments.preset == QUICK and not skip_reasons and not arguments.show:
            print(
                f"The installation works: all {len(specs)} runs ended. {table_run.scale_warning}."
            )
    return 2 if specs and len(skip_reasons) == len(specs) else 0


def _add_note(experiment: TableDeclaration, note: str) -> TableDeclaration:
    return replace(experiment, note=f"{experiment.note} {note}".strip())
