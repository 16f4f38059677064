"""The command line: `fedjax-het run`, `list` and `report`."""

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedjax_het.errors import ConfigError, exit_status
from fedjax_het.report.command import Report, report_command
from fedjax_het.spec import RunSpec

_HP_HELP = "Numeric hyper-parameters of the method, e.g. --hp prox_mu=0.01 local_lr=0.05."
_OPTION_HELP = "Static choices of the method, e.g. --option preset=code."


@dataclass(frozen=True)
class Run(RunSpec):
    """Run one federation; the last line printed is one JSON object.

    Whatever is not given is as in the method's paper. `fedjax-het list` names what there is.
    """

    # As words; the settings themselves, with their help, are those of RunSpec.
    hp: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE", help=_HP_HELP)] = ()
    options: Annotated[
        tuple[str, ...], tyro.conf.arg(name="option", metavar="NAME=VALUE", help=_OPTION_HELP)
    ] = ()
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path | None = None
    """Where the result, pictures and checkpoints are written (default: nothing is)."""
    resume: bool = False
    """Continue from the checkpoint in the output folder, if there is one."""
    lanes: str = "auto"
    """Vmapped lanes per device; a matter of speed only."""
    quiet: bool = False
    """No progress on stderr."""


@dataclass
class List:
    """Name the methods, data sets, partitions and networks, one line each."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Exit code 2 for settings that cannot be used, 130 when interrupted."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"run": Run, "list": List, "report": Report},
        prog="fedjax-het",
        description="Federated learning on heterogeneous clients, simulated.",
        args=sys.argv[1:] if arguments is None else arguments,
    )
    if isinstance(command, Report):
        return exit_status(
            lambda: report_command(command), name="fedjax-het", stopped="interrupted"
        )
    return exit_status(
        _list if isinstance(command, List) else lambda: _run(command),
        name="fedjax-het",
        stopped="interrupted; --resume continues from the checkpoint",
    )


def spec_of(command: Run) -> RunSpec:
    """The settings that a command line names."""
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(RunSpec)}
    values["hp"] = {name: _number("hp", name, text) for name, text in _pairs("hp", command.hp)}
    words = _pairs("option", command.options)
    values["options"] = {name: _literal(text) for name, text in words}
    return RunSpec(**values)


def _run(command: Run) -> int:
    from fedjax_het.data import load_dataset
    from fedjax_het.pictures import draw_run
    from fedjax_het.progress import progress_line
    from fedjax_het.simulation import simulate

    log = logging.getLogger("fedjax_het")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.WARNING if command.quiet else logging.INFO)

    spec = spec_of(command).resolved()
    lanes = command.lanes if command.lanes == "auto" else int(_number("lanes", "", command.lanes))
    dataset = load_dataset(
        spec.dataset, normalisation=spec.normalisation, data_dir=command.data_dir
    )
    with progress_line(f"{spec.algorithm} on {spec.dataset}", quiet=command.quiet) as show:
        result = simulate(
            spec,
            dataset=dataset,
            output_dir=command.output_dir,
            resume=command.resume,
            progress=show,
            lanes=lanes,
        )
    if command.output_dir is not None:
        draw_run(result, dataset, result.partition, command.output_dir)
    print(json.dumps(result.summary, allow_nan=False))
    return 0


def _list() -> int:
    from fedjax_het.algorithms import ALGORITHMS
    from fedjax_het.data import DATASETS, PARTITIONS
    from fedjax_het.nn import MODELS

    groups = {
        "methods": {name: entry.description for name, entry in ALGORITHMS.items()},
        "data sets": DATASETS,
        "partitions": PARTITIONS,
        "networks": MODELS,
    }
    width = max(len(name) for group in groups.values() for name in group)
    for title, entries in groups.items():
        print(title, *(f"  {name:{width}}  {text}" for name, text in entries.items()), sep="\n")
        print()
    return 0


def _pairs(argument: str, items: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals and text):
            raise ConfigError(f"{argument} = {item!r}: expected NAME=VALUE, e.g. prox_mu=0.01")
        pairs.append((name, text))
    return pairs


def _number(argument: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{argument} {name} = {text!r}: expected a number") from None


def _literal(text: str) -> Any:
    """A number or a truth value if it reads as one, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    sys.exit(main())
