"""Programs of the papers' tables and figures, found by their files and loaded by their names.

Each program is a module of `fedjax_het.papers` that is called `all`, `tableN` or `figN`. It has a
function `main` (`ProgramMain`), and the first line of its docstring says what it makes.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_het.analysis.figures.output import write_extra_formats
from fedjax_het.utils import console
from fedjax_het.utils.command_line import display_flags, parse_arguments
from fedjax_het.utils.errors import require_name, run_with_exit_status

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


@dataclass
class OutputFlags:
    """Flags of every program."""

    pictures: tuple[str, ...] = ()
    """Additional files of each figure: pdf, svg, or dark for a dark variant NAME-dark.png (default:
    PNG only)."""
    quiet: bool = False
    """Print only errors on stderr."""
    json: bool = False
    """Print progress, log messages and errors on stderr as one JSON object per line."""


def make_config_program(
    config_type: type, function: Callable[[Any], int], description: str | None = None
) -> ProgramMain:
    """Make a program whose flags are the fields of a dataclass, and `OutputFlags`.

    Args:
      config_type: dataclass that is not frozen; its annotations are the checks of the flags.
      function: takes an instance of the dataclass and returns the exit status.
      description: first paragraphs of the help (default: the docstring of the dataclass).

    Returns:
      `main(argv)`, which returns the exit status.
    """
    arguments_class = make_dataclass(
        config_type.__name__,
        [],
        bases=(OutputFlags, config_type),
        namespace={"__doc__": config_type.__doc__},
    )

    def main(argv: Sequence[str] | None = None) -> int:
        def run_command() -> int:
            console.parse_output_flags(sys.argv[1:] if argv is None else argv)
            arguments: Any = parse_arguments(arguments_class, argv, description=description)
            with display_flags(arguments_class), write_extra_formats(arguments.pictures):
                return function(arguments)

        return run_with_exit_status(run_command, name="error", interrupt_message="stopped")

    return main


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
