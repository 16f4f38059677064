"""Programs of the papers' tables and figures, found by their files and loaded by their names.

Each program is a module of `fedjax_het.papers` that is called `all`, `tableN` or `figN`. It has a
function `main` (`ProgramMain`), and the first line of its docstring says what it makes.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_het.analysis.figures.output import (
    FIGURE_FORMATS_HELP,
    split_figure_formats,
    write_extra_formats,
)
from fedjax_het.utils import console
from fedjax_het.utils.command_line import run_program
from fedjax_het.utils.errors import require_name

PAPERS_FOLDER = Path(__file__).resolve().parent
_ITEM_PATTERN = re.compile(r"(all|table|fig)(\d*)")
_ITEM_KINDS = ("all", "table", "fig")


class ProgramMain(Protocol):
    """What `main` of a table's or figure's module is."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Takes the command line after the program's name (default: `sys.argv`); the exit status.

        0; 2 for a setting that cannot be used and when no run could be made; 130 after Ctrl-C.
        """
        ...


def make_function_program(function: Callable[..., int], description: str) -> ProgramMain:
    """Make the program of a function whose arguments are the command-line flags.

    Args:
      function: returns the exit status; its annotations are the checks of the flags.
      description: text of `--help`.

    Returns:
      `main(argv)`, which returns the exit status.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return _run_command_line(function, function, argv, description)

    return main


def make_config_program(
    config_type: type, function: Callable[[Any], int], description: str | None = None
) -> ProgramMain:
    """Make a program whose flags are the fields of a dataclass.

    Args:
      config_type: the dataclass; its annotations are the checks of the flags.
      function: gets the record and returns the exit status.
      description: text of `--help`, before the flags of all programs.

    Returns:
      `main(argv)`, which returns the exit status.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return _run_command_line(config_type, function, argv, description)

    return main


def _run_command_line(
    parsed_type: Callable[..., Any],
    function: Callable[..., int],
    argv: Sequence[str] | None,
    description: str | None,
) -> int:
    """`run_program` of a program that takes `--json`, `--quiet` and `--pictures` besides its own
    flags."""
    with console.preserve_output_mode():
        arguments = console.parse_output_flags(sys.argv[1:] if argv is None else argv)
        figure_formats, arguments = split_figure_formats(arguments)
        description_text = " ".join(
            filter(
                None, (description, console.OUTPUT_FLAGS_HELP, f"--pictures: {FIGURE_FORMATS_HELP}")
            )
        )

        def run_with_figure_formats(*args: Any, **kwargs: Any) -> int:
            with write_extra_formats(figure_formats):
                return function(*args, **kwargs)

        return run_program(parsed_type, run_with_figure_formats, arguments, description_text)


class ProgramModule(NamedTuple):
    """A module with a program."""

    name: str
    """Name below `fedjax_het.papers`, such as `dynafed.table5`."""
    path: Path

    @property
    def description(self) -> str:
        """Its docstring's first line; nothing of it is imported."""
        docstring = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return docstring.partition("\n")[0]


def find_programs() -> dict[str, ProgramModule]:
    """Find the programs of tables and figures by name, without importing them.

    Returns:
      By name: folder by folder, tables before figures, by number.
    """
    folder = PAPERS_FOLDER
    paths = [path for path in folder.rglob("*.py") if _ITEM_PATTERN.fullmatch(path.stem)]
    names = (".".join(path.relative_to(folder).with_suffix("").parts) for path in paths)
    modules = sorted(map(ProgramModule, names, paths), key=_sort_key)
    return {module.name: module for module in modules}


def load_program(name: str) -> ProgramMain:
    """Return `main` of the module `fedjax_het.papers.<name>`.

    Raises:
      ConfigError: if no program has this name.
    """
    require_name("table", name, find_programs())
    return importlib.import_module(f"fedjax_het.papers.{name}").main


def _sort_key(module: ProgramModule) -> tuple[str, int, int]:
    folder, _, item = module.name.rpartition(".")
    match = _ITEM_PATTERN.fullmatch(item)
    assert match is not None
    return folder, _ITEM_KINDS.index(match[1]), int(match[2] or 0)
