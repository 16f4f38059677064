"""`fedjax-het report` prints the tables of a folder; `fedjax-het export` writes a run's model."""

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
    """Print the tables of a folder of results, and write the tables and their figures as files."""

    directory: tyro.conf.Positional[Path]
    """Folder with the results of one or several sweeps."""
    by: tuple[str, ...] = ()
    """Settings whose values have rows of their own, e.g. algorithm alpha hp.prox_mu (default: the
    settings that vary, except seeds)."""
    measure: str | None = None
    """Number of each run that is averaged over seeds, e.g. best_accuracy or bytes_up (default:
    final_accuracy, or bmta if as many runs have it)."""
    output_dir: Path | None = None
    """Folder for the tables and figures (default: the folder of the results)."""
    pictures: tuple[str, ...] = ()
    """Additional files of each figure: pdf, svg, or dark for a dark variant NAME-dark.png (default:
    PNG only)."""


def report_command(command: ReportCommand) -> int:
    """Print the tables and the names of the written files; return the exit status."""
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
    """Write a run's trained model, or the images that its method synthesized, to a file.

    The run's state must be in the folder of its result: `fedjax-het run --output-dir` keeps it,
    `fedjax-het sweep` keeps it with --keep-state.
    """

    result: tyro.conf.Positional[Path]
    """JSON file of the result."""
    model: Path | None = None
    """File for the model in flax's msgpack format, which `load_model` and --init-from read (default:
    not written)."""
    client: NonNegativeInt | None = None
    """Number of the client whose own model is written (default: the global model)."""
    synthetic: Path | None = None
    """File for the synthetic images of DynaFed, FedDM or FedAF, as .npz (default: not written)."""


def export_command(command: ExportCommand) -> int:
    """Write the files and print their names; return the exit status."""
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
