"""Command line `fedjax-het`: demo, run, sweep, tune, report, export, table, list, show, devices."""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tyro

from fedjax_het._version import __version__
from fedjax_het.cli.plugins import IMPORT_HELP, import_plugin, split_imports
from fedjax_het.utils import command_line, console
from fedjax_het.utils.command_line import HELP_FLAGS, display_flags
from fedjax_het.utils.config import field_types
from fedjax_het.utils.env import require_variables
from fedjax_het.utils.errors import (
    ConfigError,
    make_value_error,
    require_name,
    run_with_exit_status,
    summarize_error,
)

# With these names of files, the usage of `export` is short: tyro prints [OPTIONS] in it.
_METAVARS = {"result": "RESULT.json", "model": "MODEL.msgpack", "synthetic": "IMAGES.npz"}
_COMMAND_ALIASES = {"describe": "show"}
# The first flag prints the script of a shell, the second writes it to a file.
_COMPLETION_FLAGS = ("--tyro-print-completion", "--tyro-write-completion")


class Command(NamedTuple):
    """A command of `fedjax-het`, whose module is imported when the command runs."""

    summary: str
    """First paragraph of the docstring of the dataclass, for the help of `fedjax-het`."""
    example: str
    """Words after `fedjax-het` of an example."""
    module: str
    """Module of `fedjax_het.cli` with the dataclass and the function of the command."""
    config_name: str
    """Name of the dataclass of the arguments; its docstring is the help of the command."""
    function_name: str
    """Name of the function of the dataclass that returns the exit status."""
    flag_aliases: Mapping[str, str] = {}
    """Flags of arguments that have other names in the dataclass."""

    @property
    def config_class(self) -> type:
        """Dataclass of the arguments."""
        return getattr(importlib.import_module(f"fedjax_het.cli.{self.module}"), self.config_name)

    @property
    def run(self) -> Callable[[Any], int]:
        """Function of the dataclass that returns the exit status."""
        return getattr(importlib.import_module(f"fedjax_het.cli.{self.module}"), self.function_name)


COMMANDS = {
    "demo": Command(
        "Compare FedAvg, FedProx and SCAFFOLD on the data set digits, in about 30 seconds.",
        "demo",
        *("demo", "DemoCommand", "demo_command"),
    ),
    "run": Command(
        "Train one federation and print a summary.",
        "run --algorithm scaffold --alpha 0.1 --rounds 30",
        *("run", "RunCommand", "run_command"),
    ),
    "sweep": Command(
        "Run every combination of the given values, many federations at a time.",
        "sweep --algorithm fedavg scaffold --alpha 0.1 1 --seeds 0 1 2",
        *("sweep", "SweepCommand", "sweep_command"),
        {"seed": "--seeds", "address": "--ray-address"},
    ),
    "tune": Command(
        "Choose hyperparameters by validation accuracy, with equal budgets for all methods.",
        "tune --algorithm fedavg fedprox --trials 9 --rounds 30",
        *("tune", "TuneCommand", "tune_command"),
        {"seed": "--seeds"},
    ),
    "report": Command(
        "Print the tables of a folder of results, and write tables and figures to files.",
        "report results/sweep",
        *("results", "ReportCommand", "report_command"),
    ),
    "export": Command(
        "Write a run's trained model, or the data that its method synthesized, to a file.",
        "export results/RESULT.json --model model.msgpack",
        *("results", "ExportCommand", "export_command"),
        {"keep_state": "--keep-state"},
    ),
    "table": Command(
        "Make a table or figure of a paper, e.g. `fedjax-het table dynafed.table5 --models mlp`.",
        "table table1 --preset quick",
        *("results", "TableCommand", "table_command"),
    ),
    "list": Command(
        "Print the names of all methods, data sets, partitions, skews, systems and other entries.",
        "list methods partitions",
        *("show", "ListCommand", "list_command"),
    ),
    "show": Command(
        "Print the options of methods, data sets, partitions, skews, systems and other entries.",
        "show fedprox dirichlet",
        *("show", "ShowCommand", "show_command"),
    ),
    "devices": Command(
        "Print the devices of this machine and the software that uses them.",
        "devices",
        *("show", "DevicesCommand", "devices_command"),
    ),
}
"""Commands by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      arguments: words after `fedjax-het` (default: the arguments of this process).

    Returns:
      Exit status: 2 for settings that cannot be used, 130 after Ctrl-C, otherwise the command's.

    Example:
      >>> from fedjax_het.cli import main
      >>> main(["--version"])
      fedjax-het ...
      0
    """
    argv = sys.argv[1:] if arguments is None else arguments
    flags = [word.partition("=")[0].replace("_", "-") for word in argv]
    if flags[:1] == ["run"] and "--output-dir" not in flags:
        message = "interrupted; without --output-dir nothing is kept"
    elif flags[:1] == ["run"]:
        message = "interrupted; repeat the command"
    else:
        message = "interrupted; repeat the command to continue"
    main = functools.partial(_run, argv)
    return run_with_exit_status(main, name="fedjax-het", interrupt_message=message)


def _run(words: Sequence[str]) -> int:
    arguments, imports = split_imports(words)
    console.parse_output_flags(arguments)
    if arguments in (["--version"], ["version"]):
        print(f"fedjax-het {__version__}")
        return 0
    if arguments[:1] == ["help"]:  # `help run` is `run --help`
        arguments = [*arguments[1:], "--help"]
    if not words:
        _print_help(status=2)  # a script that calls the program without a command has a fault
    name, argv = "".join(arguments[:1]), arguments[1:]
    if name in HELP_FLAGS:
        _print_help()
    if name.startswith("--tyro-"):
        return _print_completion(arguments)
    name = _COMMAND_ALIASES.get(name, name)
    require_name("command", name, COMMANDS)
    has_program = name == "table" and argv and not argv[0].startswith("-")
    config_class, run = COMMANDS[name].config_class, COMMANDS[name].run
    command: Any
    if has_program:
        command = config_class(argv[0], program_args=tuple(argv[1:]))
    elif any(word in HELP_FLAGS for word in argv):
        options = _list_help_options(name, include_rare=command_line.HELP_ALL_FLAG in argv)
        command_line.print_help(config_class, options, prog=f"fedjax-het {name}")
    else:
        command = _parse_command(config_class, argv, f"fedjax-het {name}")
    if getattr(command, "distributed", False):  # before anything asks for devices
        import jax

        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            reason = summarize_error(error)
            expected = "processes that SLURM, a TPU pod or Open MPI have started"
            raise ConfigError(f"--distributed: expected {expected} ({reason})") from error
    if name in ("demo", "run", "sweep", "tune"):
        require_variables()
    for plugin in imports:
        import_plugin(plugin)
    if name == "sweep":  # a Ray process may have another current folder
        paths = [os.path.abspath(name) if name.endswith(".py") else name for name in imports]
        command = dataclasses.replace(command, plugins=tuple(paths))
    with display_flags(config_class, COMMANDS[name].flag_aliases):
        return run(command)


def _parse_command(config_class: type, argv: Sequence[str], prog: str = "") -> Any:
    """Return the dataclass of a command: values of its flags, then of the file `--config`.

    A mapping, such as `hp`, keeps the names of the file that the command line omits.
    """
    from fedjax_het.cli.options import read_settings, rename_flags
    from fedjax_het.config.run_spec import RunSpec
    from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS

    flags = [option.flag for option in command_line.get_options(config_class).values()]
    if not {"--seed", "--seeds"}.isdisjoint(flags):  # run and sweep accept both names
        flag = "--seeds" if "--seeds" in flags else "--seed"
        argv = [re.sub(r"^--seeds?(?==|$)", flag, word) for word in argv]
    hints: dict[str, str] = {}
    if config_class is COMMANDS["run"].config_class:
        hints = dict.fromkeys(field_types(RunSpec), "; only `fedjax-het sweep` accepts several")
    argv = rename_flags(argv, flags)
    values = command_line.parse_flags(config_class, argv, prog=prog, count_hints=hints)
    if values.get("config") is not None:
        with display_flags(config_class):
            settings = read_settings(values["config"], command_line.get_options(config_class))
        for setting, name in HYPERPARAMETER_SETTINGS.items():
            if setting in values or name in values.get("hp", {}):  # the flag replaces the file's
                settings.pop(setting, None)
                settings.get("hp", {}).pop(name, None)
        for name, value in settings.items():
            if isinstance(value, dict):
                values[name] = {**value, **values.get(name, {})}
        values = {**settings, **values}
    return config_class(**values)


def _list_help_options(name: str, *, include_rare: bool = True) -> Iterable[command_line.Option]:
    config_class = COMMANDS[name].config_class
    if name in ("run", "sweep", "tune"):
        from fedjax_het.cli.options import list_help_options

        return list_help_options(config_class, include_rare=include_rare)
    options = command_line.get_options(config_class).values()
    return [option._replace(metavar=_METAVARS.get(option.name, "")) for option in options]


def _print_completion(argv: Sequence[str]) -> int:
    """Print or write the script that completes words in a shell; return the exit status."""
    from fedjax_het.cli.completion import SHELLS, make_completion_script
    from fedjax_het.papers.table.declaration import TableArguments

    require_name("flag", argv[0], _COMPLETION_FLAGS)
    require_name(argv[0], "".join(argv[1:2]), SHELLS)
    commands = {name: [*_list_help_options(name)] for name in COMMANDS}
    commands["table"] += command_line.get_options(TableArguments).values()
    commands |= {alias: commands[name] for alias, name in _COMMAND_ALIASES.items()}
    script = make_completion_script(argv[1], commands)
    if argv[0] == _COMPLETION_FLAGS[0]:
        print(script, end="")
        return 0
    path = "".join(argv[2:3])
    try:
        Path(path).write_text(script, encoding="utf-8")
    except OSError as error:
        expected = f"a file that can be written ({error.strerror or error})"
        raise make_value_error(argv[0], path, expected) from error
    return 0


def _print_help(status: int = 0) -> NoReturn:
    """Print the help of `fedjax-het` itself, and end the process with the status."""
    help_classes: dict[str, Callable[..., Any]] = {
        name: dataclasses.make_dataclass(name, (), namespace={"__doc__": command.summary})
        for name, command in COMMANDS.items()
    }
    text = f"Federated learning on heterogeneous clients, simulated. {IMPORT_HELP}"
    examples = [f"   fedjax-het {command.example}" for command in COMMANDS.values()]
    command_line.configure_help_output()
    is_terminal, output = sys.stdout.isatty, io.StringIO()
    output.isatty = is_terminal  # type: ignore[method-assign]
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            help_classes,
            prog="fedjax-het",
            description="\n".join([command_line.wrap_description(text), " Examples:", *examples]),
            args=["--help"],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        )
    # tyro lists all commands in the line of the usage, which is then too long.
    print(re.sub(r"\{[\w,]+\}", "COMMAND", output.getvalue(), count=1), end="")
    raise SystemExit(status)
