"""Programs of the papers' tables and figures, found and loaded by their names."""

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_het.analysis.figures.style import FigureFormat
from fedjax_het.utils import console
from fedjax_het.utils.command_line import display_flags, parse_arguments
from fedjax_het.utils.errors import require_name, run_with_exit_status

PAPERS_FOLDER = Path(__file__).resolve().parent
# The module of each program, below `fedjax_het.papers`, in the order of lists. The program is the
# module's attribute with the last part of the name, or its `main`.
PROGRAM_MODULES = {
    "all": "all",
    "table1": "dynafed.tables",
    "dynafed.table2": "dynafed.tables",
    "dynafed.table3": "dynafed.tables",
    "dynafed.table4": "dynafed.table4",
    "dynafed.table5": "dynafed.tables",
    "dynafed.table6": "dynafed.tables",
    "dynafed.fig2": "dynafed.tables",
    "dynafed.fig3": "dynafed.fig3",
    "dynafed.fig4": "dynafed.figures",
    "dynafed.fig5": "dynafed.figures",
    "dynafed.fig6": "dynafed.fig6",
    "dynafed.fig7": "dynafed.tables",
    "fedaf.table1": "fedaf.tables",
    "fedaf.table2": "fedaf.tables",
    "fedaf.table3": "fedaf.tables",
    "fedaf.table4": "fedaf.tables",
    "fedaf.table5": "fedaf.tables",
    "fedaf.table6": "fedaf.tables",
    "fedaf.table7": "fedaf.table7",
    "fedaf.fig3": "fedaf.tables",
    "fedaf.fig4": "fedaf.tables",
    "fedaf.fig5": "fedaf.fig5",
    "fedaf.fig6": "fedaf.partitions",
    "fedaf.fig7": "fedaf.partitions",
    "fedaf.fig8": "fedaf.partitions",
    "fedaf.fig9": "fedaf.fig9",
    "fedamp.table1": "fedamp.tables",
    "fedamp.table2": "fedamp.tables",
    "fedamp.table3": "fedamp.tables",
    "fedamp.fig2": "fedamp.fig2",
    "fedamp.fig3": "fedamp.fig3",
    "fsl.table1": "fsl.table1",
    "fsl.fig1": "fsl.figures",
    "fsl.fig2": "fsl.figures",
    "fsl.fig3": "fsl.server_examples",
    "fsl.fig4": "fsl.server_examples",
    "fsl.fig5": "fsl.figures",
    "fsl.fig6": "fsl.figures",
    "fsl.fig7": "fsl.figures",
    "fsl.fig8": "fsl.figures",
    "fsl.fig9": "fsl.fig9",
    "fsl.fig10": "fsl.figures",
    "fsl.fig11": "fsl.figures",
    "niid_bench.table3": "niid_bench.table3",
    "pfllib.table": "pfllib.table",
    "heterogeneity.atlas": "heterogeneity.atlas",
    "heterogeneity.systems": "heterogeneity.systems",
    "robustness.table": "robustness.table",
    "leaderboard.label": "leaderboard.tables",
    "leaderboard.feature": "leaderboard.tables",
    "leaderboard.quantity": "leaderboard.tables",
    "leaderboard.noise": "leaderboard.tables",
    "leaderboard.personal": "leaderboard.tables",
    "text.speakers": "text.speakers",
}


class ProgramMain(Protocol):
    """Type of a program."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the program.

        Args:
          argv: command line after the program's name; default: `sys.argv`.

        Returns:
          Exit status: 0; 2 for a setting that cannot be used, and if no run could be made; 130
          after Ctrl-C.
        """
        ...


@dataclass
class OutputFlags:
    """Flags of every program."""

    pictures: tuple[FigureFormat, ...] = ()
    """Additional files of each figure: pdf, svg (default: PNG only)."""
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

    Example:
      >>> from dataclasses import dataclass
      >>> from fedjax_het.papers.programs import make_config_program
      >>> @dataclass
      ... class Arguments:
      ...     times: int = 1
      >>> main = make_config_program(Arguments, lambda arguments: arguments.times)
      >>> main(["--times", "3"])
      3
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
            with display_flags(arguments_class):
                return function(arguments)

        return run_with_exit_status(run_command, name="error", interrupt_message="stopped")

    return main


class ProgramModule(NamedTuple):
    """A module with a program."""

    name: str
    """Name of the program, such as `dynafed.table5`."""
    path: Path

    @property
    def item(self) -> str:
        """Last part of the name, such as `table5`."""
        return self.name.rpartition(".")[2]

    @property
    def description(self) -> str:
        """First line of the docstring below the program, or of the module; nothing is imported."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree) or ""
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            is_program = isinstance(statement, ast.Assign) and self.item in map(
                ast.unparse, statement.targets
            )
            if is_program and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
        return text.partition("\n")[0]


def find_programs() -> dict[str, ProgramModule]:
    """Find the programs of tables and figures without importing them.

    Returns:
      Programs by name: paper by paper, tables before figures, by number.
    """
    return {
        name: ProgramModule(name, PAPERS_FOLDER / f"{module.replace('.', '/')}.py")
        for name, module in PROGRAM_MODULES.items()
    }


def load_program(name: str) -> ProgramMain:
    """Import a program.

    Args:
      name: name of the table or figure, for example `dynafed.table5`.

    Returns:
      The program.

    Raises:
      ConfigError: if no program has this name.

    Example:
      >>> from fedjax_het.papers.programs import load_program
      >>> load_program("fedaf.fig6")(["--list"])
      results/fedaf-partitions/fig6_alpha0.02.png
      results/fedaf-partitions/fig6_alpha0.05.png
      results/fedaf-partitions/fig6_alpha0.1.png
      0
    """
    require_name("table", name, PROGRAM_MODULES, listed_by="fedjax-het table --list")
    module = importlib.import_module(f"fedjax_het.papers.{PROGRAM_MODULES[name]}")
    return vars(module).get(name.rpartition(".")[2]) or module.main
