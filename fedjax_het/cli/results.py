"""`fedjax-het report DIRECTORY`.

`fedjax-het export RESULT`: models and synthetic images of a run, as files of their own.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from fedjax_het.analysis.render import print_table
from fedjax_het.analysis.report import write_report
from fedjax_het.utils.config import NonNegativeInt
from fedjax_het.utils.console import log_to_stderr
from fedjax_het.utils.errors import ConfigError, display_name, display_names, format_value, require
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True)
class ReportCommand:
    """Print the tables of a folder of results, and write them and their figures into it."""

    directory: tyro.conf.Positional[Path]
    """Folder of results, of one sweep or merged from several."""
    by: tuple[str, ...] = ()
    """Settings that have rows of their own, e.g. --by algorithm alpha hp.prox_mu (default: those
    that vary, apart from the seeds)."""
    measure: str | None = None
    """What is averaged over seeds: a number that runs leave, e.g. best_accuracy, bytes_up (default:
    final_accuracy, or bmta where at least as many runs have that)."""
    output_dir: Path | None = None
    """Where tables and figures are written (default: into the folder of results)."""
    pictures: tuple[str, ...] = ()
    """Kinds of pictures besides PNG: pdf, svg; dark: each on a dark page, too, as NAME-dark.png."""


def report_command(command: ReportCommand) -> int:
    """Print the tables, then name the files that were written. Returns the exit status."""
    log_to_stderr(logging.WARNING)
    is_folder = os.path.isdir(command.directory)  # False for what is no path, too
    require(is_folder, "directory", str(command.directory), "a folder with results of runs")
    with display_names({"metric": "--measure"}):
        report = write_report(
            command.directory, by=command.by, metric=command.measure, output_dir=command.output_dir
        )
    for table in report.tables:
        print_table(table)
        print()
    if report.paths:
        names = ", ".join(path.name for path in report.paths)
        print(to_one_line(f"Written to {report.paths[0].parent}: {names}."))
    return 0


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's trained model, or the images that its method made, to files of their own.

    The run's state must be beside its result, as `fedjax-het run --output-dir` and `sweep
    --keep-state` leave it.
    """

    result: tyro.conf.Positional[Path]
    """The JSON file of a result."""
    model: Path | None = None
    """Where the model is written, in flax's msgpack: `load_model`, `--init-from`."""
    client: NonNegativeInt | None = None
    """Whose model, of clients that have models of their own (default: the global one)."""
    synthetic: Path | None = None
    """Where synthetic images are written, as a plain .npz (DynaFed, FedDM, FedAF)."""


def export_command(command: ExportCommand) -> int:
    """Write them, then name the files. Returns the exit status."""
    from fedjax_het.runtime.results import Result

    has_output = command.model is not None or command.synthetic is not None
    require(
        has_output,
        "model",
        None,
        f"a path, or {display_name('synthetic')} PATH: nothing is asked for",
    )
    has_model_for_client = command.client is None or command.model is not None
    require(
        has_model_for_client, "client", command.client, f"{display_name('model')} PATH beside it"
    )
    try:
        result = Result.load(command.result)
    except OSError as error:
        expected = f"the JSON file of a result ({error.strerror or error})"
        raise ConfigError(
            f"{display_name('result')} = {format_value(str(command.result))}: {expected}"
        ) from error
    paths = []
    for name in ("model", "synthetic"):
        path = getattr(command, name)
        if path is None:
            continue
        try:
            if name == "model":
                paths.append(result.save_model(path, command.client))
            else:
                paths.append(result.save_synthetic_dataset(path))
        except OSError as error:
            expected = f"a file that can be written ({error.strerror or error})"
            raise ConfigError(
                f"{display_name(name)} = {format_value(str(path))}: expected {expected}"
            ) from error
    print(to_one_line(f"Written: {', '.join(map(str, paths))}."))
    return 0
