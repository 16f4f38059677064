"""The program of every table: the missing runs are made, then it is written."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedjax_het.common import manner
from fedjax_het.common.command_line import called_by_flags, checked_words, one_line_errors
from fedjax_het.common.errors import exit_status, require
from fedjax_het.common.pictures import pictures_besides
from fedjax_het.report.paper_table.arguments import Arguments
from fedjax_het.report.paper_table.cells import make_cells, runs_of
from fedjax_het.report.paper_table.declaration import Experiment
from fedjax_het.report.paper_table.outcome import Outcome
from fedjax_het.report.paper_table.tuning import trials, tuned, tuning_note
from fedjax_het.report.paper_table.writing import write_table
from fedjax_het.report.programs import Program
from fedjax_het.running import store
from fedjax_het.running.ledger import describe
from fedjax_het.running.sweeps import plan_sweep, sweep

# What the flags call settings of runs.
_FILTERS = {
    "dataset": "--datasets",
    "model": "--models",
    "alpha": "--alphas",
    "seed": "--seeds",
    "algorithm": "--methods",
}
_SETTINGS = ("rounds", "width")  # of `Arguments`, which are the preset's where they are not given


def program(
    experiment: Experiment, write: Callable[[Outcome], Sequence[str]] = write_table
) -> Program:
    """`main` of a table: make the runs that are missing, then print and write the table and the
    learning curves.

    write: what is made of the outcome instead; it returns the names of the files it wrote.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        import tyro

        def arguments(words: Sequence[str]) -> Arguments:
            return tyro.cli(
                Arguments,
                args=words,
                description=f"{experiment.title} Presets: {', '.join(experiment.presets)}.",
                default=Arguments(preset=next(iter(experiment.presets))),
                config=(tyro.conf.FlagCreatePairsOff,),
            )

        def work() -> int:
            given = sys.argv[1:] if argv is None else argv
            manner.chosen_by(given)
            words = checked_words(Arguments, given)
            read = one_line_errors(lambda: arguments(words))
            with called_by_flags(Arguments, _FILTERS), pictures_besides(read.pictures):
                return _run(experiment, read, write)

        return exit_status(
            work,
            name="error",
            stopped="stopped; the same command goes on from the runs that are done",
        )

    return main


def _run(
    experiment: Experiment, arguments: Arguments, write: Callable[[Outcome], Sequence[str]]
) -> int:
    cells = make_cells(experiment, arguments)
    if arguments.tuned:
        require(bool(experiment.tuning), "tuned", True, "a table that says what is tuned")
    make_dataset = experiment.presets[arguments.preset].make_dataset
    dataset = make_dataset() if make_dataset else None
    tried = [cell for trial in trials(experiment, cells) for cell in trial.cells]
    specs = runs_of([*cells, *tried] if arguments.tuned else cells)
    folder = experiment.folder or experiment.name
    directory = Path(arguments.output_dir or f"results/{folder}-{arguments.preset}")
    if arguments.list:
        for digest, spec, state in plan_sweep(specs, directory, dataset=dataset):
            print(f"{digest}  {state:10}  {describe(spec)}")
        return 0

    if arguments.show:
        require(directory.is_dir(), "output_dir", str(directory), "a folder: --show runs nothing")

    def made(specs):
        reasons = {} if arguments.show else sweep(specs, directory, dataset=dataset).not_run
        return reasons, store.newest(store.load_results(directory))

    reasons, results = made(specs)
    if arguments.tuned:
        note = tuning_note(experiment, cells, results)
        cells = tuned(experiment, cells, results, experiment.values())
        experiment = replace(experiment, note=" ".join(filter(None, (experiment.note, note))))
        more, results = made(runs_of(cells))
        reasons |= more
    given = {name: getattr(arguments, name) for name in _SETTINGS}
    instead = tuple(f"--{name} {value}" for name, value in given.items() if value is not None)
    outcome = Outcome.of_folder(
        experiment, arguments.preset, cells, directory, reasons, results=results, instead=instead
    )
    with manner.results_shown():
        names = write(outcome)
    if arguments.quiet or arguments.json:
        counts = {"runs": len(specs), "not_run": len(reasons)}
        print(json.dumps({"output_dir": str(directory), "files": list(names), **counts}))
    else:
        written = [*names, *([] if arguments.show else ["two files per run"])]
        if written:
            print(f"Written to {directory}: {', '.join(written)}.")
    return 2 if specs and len(reasons) == len(specs) else 0
