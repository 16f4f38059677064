"""`fedjax-het report DIRECTORY`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

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


def report_command(command: ReportCommand) -> int:
    """Print the tables, then name the files that were written. Returns the exit status."""
    report = write_report(command.directory, by=command.by, measure=command.measure)
    for table in report.tables:
        print_table(table)
        print()
    print(f"Written to {command.directory}: {', '.join(path.name for path in report.paths)}.")
    return 0
