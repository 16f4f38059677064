"""The command line: `fedjax-het run`, `sweep`, `report`, `export`, `table`, `list`, `show`
and `devices`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import tyro

from fedjax_het._version import __version__
from fedjax_het.analysis.figures.output import write_extra_formats
from fedjax_het.cli.config_file import merge_settings, read_settings
from fedjax_het.cli.inspection import (
    DevicesCommand,
    ListCommand,
    ShowCommand,
    devices_command,
    list_command,
    show_command,
)
from fedjax_het.cli.options import get_run_layout
from fedjax_het.cli.plugins import IMPORT_HELP, import_plugin, split_imports
from fedjax_het.cli.results import ExportCommand, ReportCommand, export_command, report_command
from fedjax_het.cli.run import RunCommand, run_command
from fedjax_het.cli.sweep import SweepCommand, sweep_command
from fedjax_het.cli.table import TableCommand, split_program_args, table_command
from fedjax_het.utils import console
from fedjax_het.utils.command_help import (
    HELP_ALL_FLAG,
    HELP_FLAGS,
    HelpLayout,
    make_help_class,
    print_help,
    wrap_description,
)
from fedjax_het.utils.command_line import display_flags, get_options, parse_flags
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import ConfigError, require_name, run_with_exit_status

SHELLS = ("bash", "zsh", "fish")


class Command(NamedTuple):
    """A command, such as `run`."""

    config_class: type
    """Record of the arguments; its docstring is the help of the command."""
    run: Callable[[Any], int]
    """Function of the record that returns the exit status."""
    flag_aliases: Mapping[str, str] = {}
    """Flags of arguments that have other names in the record."""


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
    """Return whether the command writes checkpoints; `run` does so only into a given folder."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv]
    return flags[:1] != ["run"] or "--output-dir" in flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      arguments: words after `fedjax-het` (default: those of this process).

    Returns:
      Exit status: 2 for settings that cannot be used, 130 after Ctrl-C, otherwise the command's.
    """
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
    argv, program_args = split_program_args(arguments)
    if argv and (argv[0] in HELP_FLAGS or argv[0].startswith("--tyro-")):
        _print_help_or_completion(argv)
    name = argv[0] if argv else ""
    require_name("command", name, COMMANDS)
    subcommand = COMMANDS[name]
    if any(word in HELP_FLAGS for word in argv):
        print_help(
            subcommand.config_class,
            prog=f"fedjax-het {name}",
            layout=_get_layout(name),
            include_rare=HELP_ALL_FLAG in argv,
        )
    command = _parse_command(subcommand.config_class, argv[1:], program_args)
    if getattr(command, "distributed", False):  # before anything asks for devices
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            expected = "processes that SLURM, a TPU pod or Open MPI have started"
            raise ConfigError(f"--distributed: expected {expected} ({reason})") from error
    if name in ("run", "sweep"):
        require_variables()
    for plugin in imports:
        import_plugin(plugin)
    with (
        display_flags(subcommand.config_class, subcommand.flag_aliases),
        write_extra_formats(getattr(command, "pictures", ())),
    ):
        return subcommand.run(command)


def _parse_command(config_class: type, argv: Sequence[str], program_args: Sequence[str]) -> Any:
    """Return the record of a command: the values of its flags over those of its `--config`."""
    given = parse_flags(config_class, argv)
    if given.get("config") is not None:
        with display_flags(config_class):
            settings = read_settings(given["config"], get_options(config_class))
        given = merge_settings(settings, given)
    if config_class is TableCommand:
        given["program_args"] = tuple(program_args)
    return config_class(**given)


def _get_layout(name: str) -> HelpLayout:
    return get_run_layout() if name in ("run", "sweep") else HelpLayout()


def _print_help_or_completion(argv: Sequence[str]) -> NoReturn:
    """Print the help of `fedjax-het` itself, or the script that completes its words in a shell."""
    if argv[0] not in HELP_FLAGS:
        require_name("flag", argv[0], ("--tyro-print-completion", "--tyro-write-completion"))
        require_name(argv[0], "".join(argv[1:2]), SHELLS)
    help_classes = {
        name: make_help_class(command.config_class, _get_layout(name), include_rare=True)
        for name, command in COMMANDS.items()
    }
    text = f"Federated learning on heterogeneous clients, simulated. {IMPORT_HELP}"
    tyro.extras.subcommand_cli_from_dict(
        help_classes,
        prog="fedjax-het",
        description=wrap_description(text),
        args=["--help"] if argv[0] in HELP_FLAGS else argv,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    raise SystemExit(0)
