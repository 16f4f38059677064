"""`fedjax-het table NAME` makes a table or figure of a paper."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from fedjax_het.papers.programs import find_programs, load_program
from fedjax_het.utils.errors import require


@dataclass(frozen=True)
class TableCommand:
    """Make a table or figure of a paper, e.g. `fedjax-het table dynafed.table5 --models mlp`.

    The words after the name are options of the table; `fedjax-het table NAME --help` lists them.
    """

    name: tyro.conf.Positional[str] = ""
    """Name of the table or figure."""
    list: bool = False
    """Print the names of all tables and figures with a description."""
    program_args: tyro.conf.Suppress[tuple[str, ...]] = ()


def split_program_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for `fedjax-het`, and the words after a table's name."""
    words = list(argv)
    has_program = words[:1] == ["table"] and len(words) > 1 and not words[1].startswith("-")
    return (words[:2], words[2:]) if has_program else (words, [])


def table_command(command: TableCommand) -> int:
    """Run the program of a table, or print the names of all; return the exit status."""
    if command.list:
        programs = find_programs()
        width = max(map(len, programs))
        for name, module in programs.items():
            print(f"{name:{width}}  {module.description}")
        return 0
    expected = "the name of a table or figure; `fedjax-het table --list` prints all"
    require(bool(command.name), "table", command.name, expected)
    program = load_program(command.name)
    previous_argv = sys.argv
    sys.argv = [
        f"fedjax-het table {command.name}",
        *command.program_args,
    ]  # the program's help begins with these words
    try:
        return program(command.program_args)
    finally:
        sys.argv = previous_argv
