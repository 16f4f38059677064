"""`fedjax-het table NAME`: the papers' tables and figures."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from fedjax_het.papers.programs import find_programs, load_program
from fedjax_het.utils.errors import require


@dataclass(frozen=True)
class TableCommand:
    """Make a table or figure of a paper, e.g. `fedjax-het table dynafed.table5 --models mlp`.

    What follows the name is the table's own: `fedjax-het table NAME --help` lists it.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """Which; `--list` names them."""
    list: bool = False
    """Print the names of the tables and figures, and what they are."""
    program_args: tyro.conf.Suppress[tuple[str, ...]] = ()

    def with_program_args(self, program_args: Sequence[str]) -> "TableCommand":
        """The same with the words that are the table's own."""
        return replace(self, program_args=tuple(program_args))


def split_program_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of `fedjax-het`, and those after a table's name, which only its program knows."""
    words = list(argv)
    has_program = words[:1] == ["table"] and len(words) > 1 and not words[1].startswith("-")
    return (words[:2], words[2:]) if has_program else (words, [])


def table_command(command: TableCommand) -> int:
    """Run the program; print the names and descriptions of all instead."""
    if command.list:
        programs = find_programs()
        width = max(map(len, programs))
        for name, module in programs.items():
            print(f"{name:{width}}  {module.description}")
        return 0
    expected = "the name of a table or figure: `fedjax-het table --list` has them all"
    require(bool(command.name), "table", command.name, expected)
    program = load_program(command.name)
    previous_argv = sys.argv
    sys.argv = [
        f"fedjax-het table {command.name}",
        *command.program_args,
    ]  # which its help begins with
    try:
        return program(command.program_args)
    finally:
        sys.argv = previous_argv
