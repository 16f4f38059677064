"""The command line: `fedjax-het run`, `sweep`, `report`, `export`, `table`, `list`, `show`
and `devices`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import tyro

from fedjax_het._version import __version__
from fedjax_het.analysis.figures.output import write_extra_formats
from fedjax_het.cli.arguments import with_default_hints
from fedjax_het.cli.config_file import load_config_file, settings_to_argv, split_config_flag
from fedjax_het.cli.inspection import (
    DevicesCommand,
    ListCommand,
    ShowCommand,
    devices_command,
    list_command,
    show_command,
)
from fedjax_het.cli.plugins import IMPORT_HELP, import_plugin, split_imports
from fedjax_het.cli.results import ExportCommand, ReportCommand, export_command, report_command
from fedjax_het.cli.run import RunCommand, run_command
from fedjax_het.cli.sweep import SweepCommand, sweep_command
from fedjax_het.cli.table import TableCommand, split_program_args, table_command
from fedjax_het.utils import console
from fedjax_het.utils.command_line import (
    HELP_FLAGS,
    display_flags,
    get_flags,
    parse_with_one_line_errors,
    validate_command_line,
)
from fedjax_het.utils.config import field_types
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import ConfigError, require_name, run_with_exit_status


class Command(NamedTuple):
    """A subcommand."""

    config_class: type
    """The record of its arguments, whose docstring is its help."""
    run: Callable[[Any], int]
    """From that record, the exit status."""
    flag_aliases: Mapping[str, str] = {}
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


_RESUMABLE_MESSAGE = (
    "interrupted; the same command, `run` with --resume, continues from the checkpoint"
)


def _saves_checkpoints(argv: Sequence[str]) -> bool:
    """Whether the command leaves checkpoints; of `run` only in a folder that is named."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv]
    return flags[:1] != ["run"] or "--output-dir" in flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 2 for settings that cannot be used, 130 when interrupted."""
    argv = sys.argv[1:] if arguments is None else arguments
    return run_with_exit_status(
        lambda: _run(*split_imports(argv)),
        name="fedjax-het",
        interrupt_message=_RESUMABLE_MESSAGE
        if _saves_checkpoints(argv)
        else "interrupted; without --output-dir nothing is kept",
    )


def _run(arguments: list[str], imports: list[str]) -> int:
    console.parse_output_flags(arguments)
    if arguments == ["--version"]:
        print(f"fedjax-het {__version__}")
        return 0
    words, program_args = split_program_args(arguments)
    words = _validate_words(words)
    command = parse_with_one_line_errors(
        lambda: tyro.extras.subcommand_cli_from_dict(
            {name: with_default_hints(command.config_class) for name, command in COMMANDS.items()},
            prog="fedjax-het",
            description=f"Federated learning on heterogeneous clients, simulated. {IMPORT_HELP}",
            args=words,
        )
    )
    if getattr(command, "distributed", False):  # before anything asks for devices
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            expected = "processes that SLURM, a TPU pod or Open MPI have started"
            raise ConfigError(f"--distributed: expected {expected} ({reason})") from error
    if isinstance(command, RunCommand | SweepCommand):
        require_variables()
    if isinstance(command, TableCommand):
        command = command.with_program_args(program_args)
    (subcommand,) = (
        candidate for candidate in COMMANDS.values() if isinstance(command, candidate.config_class)
    )
    for name in imports:
        import_plugin(name)
    figure_formats = getattr(command, "pictures", ())
    with (
        display_flags(subcommand.config_class, subcommand.flag_aliases),
        write_extra_formats(figure_formats),
    ):
        return subcommand.run(command)


def _validate_words(words: list[str]) -> list[str]:
    """A command and its words, see `validate_command_line`; what tyro alone knows as they are."""
    if words and (words[0] in HELP_FLAGS or words[0].startswith("--tyro-")):
        return words
    require_name("command", words[0] if words else "", COMMANDS)
    config_class = COMMANDS[words[0]].config_class
    return [
        words[0],
        *_add_config_file_words(config_class, validate_command_line(config_class, words[1:])),
    ]


def _add_config_file_words(config_class: type, words: list[str]) -> list[str]:
    """The words, with those of the file that `--config` names before them."""
    path, command_words = split_config_flag(words)
    if path is None or any(word in HELP_FLAGS for word in words):
        return words
    flags, annotations = get_flags(config_class), field_types(config_class)
    boolean_flags = {flags[name] for name in flags if annotations[name] is bool}
    with display_flags(config_class):
        settings = load_config_file(path)
    try:
        allow_lists = config_class is SweepCommand
        file_words = settings_to_argv(
            settings, flags, command_words, boolean_flags=boolean_flags, allow_lists=allow_lists
        )
        validate_command_line(config_class, file_words)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return validate_command_line(config_class, [*file_words, *command_words])
