"""Command `fedjax-het demo`: a small comparison of methods with a table and a plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedjax_het.cli.sweep import SweepCommand, sweep_command
from fedjax_het.utils import console

_METHODS = ("fedavg", "fedprox", "scaffold")
_ALPHAS = (0.1, 1.0)
_ROUNDS = 20
_NEXT_COMMANDS = (
    "fedjax-het run --algorithm scaffold --alpha 0.1 --output-dir results/run",
    "fedjax-het sweep --algorithm fedavg feddyn --alpha 0.1 1 --seeds 0 1 2",
    "fedjax-het show scaffold",
)


@dataclass(frozen=True)
class DemoCommand:
    """Compare FedAvg, FedProx and SCAFFOLD on the data set digits, in about 30 seconds.

    The command trains each method with 10 clients for 20 rounds, at a small and at a large
    Dirichlet alpha. It prints a table and writes a plot of accuracy by round.
    """

    output_dir: Path = Path("results/demo")
    """Folder of the results, the table and the plot."""
    quiet: bool = False
    """Print only errors on stderr, and only the last line on stdout, a JSON object."""
    json: bool = False
    """Print progress, log messages and errors on stderr as one JSON object per line."""


def demo_command(command: DemoCommand) -> int:
    """Run the comparison, and print its table, its plot and next commands.

    Returns:
      Exit status of the sweep.
    """
    sweep_settings: Any = {"algorithm": _METHODS, "alpha": _ALPHAS, "rounds": (_ROUNDS,)}
    status = sweep_command(
        SweepCommand(
            **sweep_settings,
            dataset=("digits",),
            output_dir=command.output_dir,
            quiet=command.quiet,
            json=command.json,
        )
    )
    if console.is_text_terminal():
        print(f"Plot:   {command.output_dir / 'learning_curves.png'}")
        print("Next:  ", "\n        ".join(_NEXT_COMMANDS))
    return status
