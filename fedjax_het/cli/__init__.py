"""The command line: `fedjax-het run`, `sweep`, `report`, `export`, `table`, `list`, `show`
and `devices`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import tyro

from fedjax_het import __version__
from fedjax_het.cli.defaults import with_defaults_said
from fedjax_het.cli.devices import DevicesCommand, devices_command
from fedjax_het.cli.export import ExportCommand, export_command
from fedjax_het.cli.listing import ListCommand, ShowCommand, list_command, show_command
from fedjax_het.cli.own_code import HELP, import_own, without_imports
from fedjax_het.cli.report import ReportCommand, report_command
from fedjax_het.cli.run import RunCommand, run_command
from fedjax_het.cli.sweep import SweepCommand, sweep_command
from fedjax_het.cli.table import TableCommand, split_words, table_command
from fedjax_het.common import manner
from fedjax_het.common.command_line import (
    HELP_FLAGS,
    called_by_flags,
    checked_words,
    flags_of,
    one_line_errors,
)
from fedjax_het.common.errors import ConfigError, exit_status, require_name
from fedjax_het.common.pictures import pictures_besides
from fedjax_het.common.records import field_types
from fedjax_het.common.variables import require_variables
from fedjax_het.settings.files import read_settings, without_config, words_of


class Command(NamedTuple):
    """A subcommand."""

    words: type
    """The record of its arguments, whose docstring is its help."""
    work: Callable[[Any], int]
    """From that record, the exit status."""
    called: Mapping[str, str] = {}
    """Its flags for arguments that its record has under other names."""


COMMANDS = {
    "run": Command(RunCommand, run_command),
    "sweep": Command(SweepCommand, sweep_command, {"seed": "--seeds", "address": "--ray-address"}),
    "report": Command(ReportCommand, report_command),
    "export": Command(ExportCommand, export_command),
    "table": Command(TableCommand, table_command),
    "list": Command(ListCommand, list_command),
    "show": Command(ShowCommand, show_command),
    "devices": Command(DevicesCommand, devices_command),
}


_KEPT = "interrupted; the same command, `run` with --resume, continues from the checkpoint"


def _keeps(words: Sequence[str]) -> bool:
    """Whether the command leaves checkpoints; of `run` only in a folder that is named."""
    flags = [word.partition("=")[0].replace("_", "-") for word in words]
    return flags[:1] != ["run"] or "--output-dir" in flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 2 for settings that cannot be used, 130 when interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status(
        lambda: _run(*without_imports(given)),
        name="fedjax-het",
        stopped=_KEPT if _keeps(given) else "interrupted; without --output-dir nothing is kept",
    )


def _run(arguments: list[str], imports: list[str]) -> int:
    manner.chosen_by(arguments)
    if arguments == ["--version"]:
        print(f"fedjax-het {__version__}")
        return 0
    words, program_words = split_words(arguments)
    words = _checked(words)
    command = one_line_errors(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {name: with_defaults_said(command.words) for name, command in COMMANDS.items()},
            prog="fedjax-het",
            description=f"Federated learning on heterogeneous clients, simulated. {HELP}",
            args=words,
        )
    )
    if getattr(command, "distributed", False):  # before anything asks for devices
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            expected = "processes that SLURM, a TPU pod or Open MPI have started"
            raise ConfigError(f"--distributed: expected {expected} ({why})") from error
    if isinstance(command, RunCommand | SweepCommand):
        require_variables()
    if isinstance(command, TableCommand):
        command = command.with_words(program_words)
    (entry,) = (each for each in COMMANDS.values() if isinstance(command, each.words))
    for name in imports:
        import_own(name)
    kinds = getattr(command, "pictures", ())
    with called_by_flags(entry.words, entry.called), pictures_besides(kinds):
        return entry.work(command)


def _checked(words: list[str]) -> list[str]:
    """A command and its words, see `checked_words`; what tyro alone knows as they are."""
    if words and (words[0] in HELP_FLAGS or words[0].startswith("--tyro-")):
        return words
    require_name("command", words[0] if words else "", COMMANDS)
    record = COMMANDS[words[0]].words
    return [words[0], *_with_file(record, checked_words(record, words[1:]))]


def _with_file(record: type, words: list[str]) -> list[str]:
    """The words, with those of the file that `--config` names before them."""
    path, own = without_config(words)
    if path is None or any(word in HELP_FLAGS for word in words):
        return words
    flags, kinds = flags_of(record), field_types(record)
    switches = {flags[name] for name in flags if kinds[name] is bool}
    with called_by_flags(record):
        settings = read_settings(path)
    try:
        listed = record is SweepCommand
        said = words_of(settings, flags, own, switches=switches, lists=listed)
        checked_words(record, said)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return checked_words(record, [*said, *own])
