"""`fedjax-het report DIRECTORY`."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from fedjax_het.common.errors import display_names, require
from fedjax_het.common.manner import log_to_stderr
from fedjax_het.common.text import to_one_line
from fedjax_het.report.render import print_table
from fedjax_het.report.write import write_report


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
