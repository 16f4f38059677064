"""Commands `fedjax-het report`, `export` and `table`: tables of results and papers, and models."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from fedjax_het.analysis.figures.style import FigureFormat
from fedjax_het.analysis.render import print_table
from fedjax_het.analysis.report import write_report
from fedjax_het.papers.programs import find_programs, load_program
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.console import log_to_stderr, print_json, print_wrapped
from fedjax_het.utils.errors import ConfigError, display_name, make_value_error, require
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True)
class ReportCommand:
    """Print the tables of a folder of results, and write tables and figures to files."""

    directory: tyro.conf.Positional[Path]
    """Folder with the results of one or several sweeps."""
    by: tuple[str, ...] = ()
    """Settings that select the rows of the tables, e.g. algorithm alpha hp.prox_mu (default: the
    settings that vary, except seeds)."""
    metric: str | None = None
    """Number of each run that is averaged over seeds, e.g. best_accuracy or bytes_up: a numeric
    column of `load_results` (default: final_accuracy; for personalized methods the accuracy of the
    clients' own models)."""
    columns: tuple[str, ...] = ()
    """Further numeric columns of the overview, each with a figure, e.g. split.label_hellinger."""
    sort: str | None = None
    """Numeric column that sorts the rows, e.g. split.size_gini (default: the settings)."""
    output_dir: Path | None = None
    """Folder for the tables and figures (default: the folder of the results)."""
    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""
    wide: bool = False
    """Print all columns and notes of the tables on a narrow terminal, too."""
    quiet: bool = False
    """Print only the names of the written files."""
    json: bool = False
    """Print one JSON object with the names of the written files."""


def report_command(command: ReportCommand) -> int:
    """Print the tables and the names of the written files; return the exit status."""
    log_to_stderr(logging.WARNING)
    is_folder = os.path.isdir(command.directory)  # False also for invalid paths
    require(is_folder, "directory", str(command.directory), "a folder with results of runs")
    report = write_report(
        command.directory,
        by=command.by,
        metric=command.metric,
        columns=command.columns,
        sort=command.sort,
        output_dir=command.output_dir,
        formats=command.pictures,
    )
    if not (command.quiet or command.json):
        for table in report.tables:
            print_table(table, wide=command.wide, notes_file="overview.md")
            print()
    if command.json:
        files = [path.name for path in report.paths]
        folder = report.paths[0].parent if files else command.output_dir or command.directory
        print_json({"output_dir": str(folder), "files": files})
    elif report.paths:
        names = ", ".join(path.name for path in report.paths)
        print_wrapped(to_one_line(f"Written to {report.paths[0].parent}: {names}."))
    return 0


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's trained model, or the data that its method synthesized, to a file.

    The folder of the result must contain the final state of the run: `fedjax-het run --output-dir`
    keeps it, `fedjax-het sweep` keeps it with --keep-state.
    """

    result: tyro.conf.Positional[Path]
    """JSON file of the result."""
    model: Path | None = None
    """File for the model in flax's msgpack format, which `load_model` and --init-from read
    (default: not written)."""
    client: NonNegativeInt | None = None
    """Number of the client whose own model is written (default: the global model)."""
    synthetic: Path | None = None
    """File for the synthetic data of DynaFed, FedDM or FedAF, as .npz (default: not written)."""
    json: bool = False
    """Print a JSON object with the names of the written files."""


def export_command(command: ExportCommand) -> int:
    """Write the files and print their names; return the exit status."""
    from fedjax_het.config.resolve import USER_PROVIDED
    from fedjax_het.runtime.results import Result

    paths = {"model": command.model, "synthetic": command.synthetic}
    expected = f"a path, or {display_name('synthetic')} PATH"
    require(any(paths.values()), "model", None, expected)
    expected = f"no value, or {display_name('model')} PATH"
    require(command.client is None or bool(command.model), "client", command.client, expected)
    expected = "the JSON file of a result"
    require(command.result.suffix in (".json", ""), "result", command.result, expected)
    with _name_file_errors("result", command.result, expected):
        result = Result.load(command.result)
    if result.spec.model == USER_PROVIDED:
        raise ConfigError(
            f"result = {str(command.result)!r}: the network of the run is known in Python only: "
            "expected Result.load(result).save_model(path, network=...) in Python"
        )
    written = []
    for name, path in paths.items():
        if path is not None:
            with _name_file_errors(name, path, "a file that can be written"):
                if name == "model":
                    written.append(result.save_model(path, command.client))
                else:
                    written.append(result.save_synthetic_dataset(path))
    if command.json:
        print_json({"files": [str(path) for path in written]})
    else:
        print(to_one_line(f"Written: {', '.join(map(str, written))}."))
    return 0


@contextlib.contextmanager
def _name_file_errors(argument: str, path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        expected = f"{expected} ({error.strerror or error})"
        raise make_value_error(argument, path, expected) from error


@dataclass(frozen=True)
class TableCommand:
    """Make a table or figure of a paper, e.g. `fedjax-het table dynafed.table5 --models mlp`.

    Words after the name are options of the table; `fedjax-het table NAME --help` lists them.
    """

    name: tyro.conf.Positional[str] = ""
    """Name of the table or figure; `fedjax-het table --list` prints all names."""
    list: bool = False
    """Print the names of all tables and figures with a description."""
    program_args: tyro.conf.Suppress[tuple[str, ...]] = ()


def table_command(command: TableCommand) -> int:
    """Run the program of a table, or print the names of all tables; return the exit status."""
    if command.list:
        programs = find_programs()
        width = max(map(len, programs))
        for name, module in programs.items():
            print_wrapped(f"{name:{width}}  {module.description}")
        return 0
    expected = "the name of a table or figure; `fedjax-het table --list` prints all"
    require(bool(command.name), "table", command.name, expected)
    program, previous_argv = load_program(command.name), sys.argv
    # The help of the program starts with these words.
    sys.argv = [f"fedjax-het table {command.name}", *command.program_args]
    try:
        return program(command.program_args)
    finally:
        sys.argv = previous_argv
