"""The command line: `fedjax-het run`, `sweep`, `report` and `list`."""

import dataclasses
import json
import logging
import re
import sys
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import jax
import tyro

from fedjax_het.common.errors import ConfigError, exit_status, require
from fedjax_het.report.command import Report, report_command
from fedjax_het.settings.spec import RunSpec

_HP_HELP = "Numeric hyper-parameters of the method, e.g. --hp prox_mu=0.01 local_lr=0.05."
_OPTION_HELP = "Static choices of the method, e.g. --option preset=code."
_PARTITION_HELP = (
    "What else the partition takes, e.g. --partition-option dominating_share=0.9 "
    "groups=[[0,1],[2,3]]."
)
_SERVER_HELP = "What the source of the server's examples takes, e.g. --server-option size=500."
_PartitionOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="partition-option", metavar="NAME=VALUE", help=_PARTITION_HELP),
]
_ServerOptions = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name="server-option", metavar="NAME=VALUE", help=_SERVER_HELP),
]
_AS_WORDS = ("hp", "options", "partition_options", "server_options")
# The settings that a sweep takes lists of under their own names.
_LISTED = [f.name for f in dataclasses.fields(RunSpec) if f.name not in (*_AS_WORDS, "seed")]


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
    partition_options: _PartitionOptions = ()
    server_options: _ServerOptions = ()
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path | None = None
    """Where the result, pictures and checkpoints are written (default: nothing is)."""
    resume: bool = False
    """Continue from the checkpoint in the output folder, if there is one."""
    lanes: str = "auto"
    """Vmapped lanes per device; a matter of speed only."""
    client_state: str = "auto"
    """Where clients' states are: device, host (those of the next rounds' clients are put on the
    devices) or auto, the host if they would not fit; a matter of memory only."""
    quiet: bool = False
    """No progress on stderr."""
    distributed: bool = False
    """Several processes: call jax.distributed.initialize(), which finds SLURM, TPU pods, MPI."""


def _as_lists() -> type:
    """The settings of RunSpec, with their help, each as a list of values; `seed` as `seeds`."""
    kinds = get_type_hints(RunSpec)
    fields = []
    for name in _LISTED:
        own = [kind for kind in get_args(kinds[name]) if kind is not NoneType]
        kind = reduce(or_, own) if own else kinds[name]
        fields.append((name, tuple[kind, ...], dataclasses.field(default=())))
    return dataclasses.make_dataclass("Lists", fields, bases=(RunSpec,), frozen=True)


@dataclass(frozen=True)
class Sweep(_as_lists()):
    """Run every combination of the values given, many federations at a time.

    Every setting takes several values: --alpha 0.01 0.1 --algorithm fedavg fedprox. What is not
    given is as in the method's paper. Results, tables and figures are kept in one folder; what is
    there is not made again. The last line printed is one JSON object.
    """

    seed: tyro.conf.Suppress[int] = 0
    seeds: tuple[int, ...] = (0,)
    hp: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME=VALUE[,VALUE]",
            help="Numeric hyper-parameters, for the methods that have them, e.g. --hp "
            "prox_mu=0.001,0.01 local_lr=0.05.",
        ),
    ] = ()
    options: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            name="option",
            metavar="NAME=VALUE[,VALUE]",
            help="Static choices, for the methods that have them, e.g. --option preset=paper,code.",
        ),
    ] = ()
    partition_options: _PartitionOptions = ()
    server_options: _ServerOptions = ()
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path = Path("results/sweep")
    """Folder of the results."""
    shard: str | None = None
    """I/N: part I (from 0) of N, e.g. for a scheduler's array jobs. Folders merge by copying."""
    lanes: str = "auto"
    """Vmapped lanes per device; a matter of speed only, as are the next four."""
    spread: str = "auto"
    """What the devices share out: the lanes of one federation, or the runs."""
    vmapped: str = "auto"
    """Federations that are vmapped on each device."""
    client_state: str = "auto"
    """Where clients' states are: device, host (those of the next rounds' clients are put on the
    devices) or auto, the host if they would not fit."""
    memory: float | None = None
    """GB on each device that federations may take (default: what is free)."""
    distributed: bool = False
    """Several processes: call jax.distributed.initialize(), which finds SLURM, TPU pods, MPI."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""


@dataclass
class List:
    """Name the methods, data sets, partitions, networks and sources of the server's examples."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Exit code 2 for settings that cannot be used, 130 when interrupted."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"run": Run, "sweep": Sweep, "report": Report, "list": List},
        prog="fedjax-het",
        description="Federated learning on heterogeneous clients, simulated.",
        args=sys.argv[1:] if arguments is None else arguments,
    )
    if getattr(command, "distributed", False):  # before anything asks for devices
        jax.distributed.initialize()
    work = {Run: _run, Sweep: _sweep, Report: report_command, List: _list}[type(command)]
    again = "--resume" if isinstance(command, Run) else "the same command"
    return exit_status(
        lambda: work(command),
        name="fedjax-het",
        stopped=f"interrupted; {again} continues from the checkpoint",
    )


def spec_of(command: Run) -> RunSpec:
    """The settings that a command line names."""
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(RunSpec)}
    values["hp"] = {name: _number("hp", name, text) for name, text in _pairs("hp", command.hp)}
    values["options"] = _literals("option", command.options)
    values["partition_options"] = _literals("partition-option", command.partition_options)
    values["server_options"] = _literals("server-option", command.server_options)
    return RunSpec(**values)


def specs_of(command: Sweep) -> list[RunSpec]:
    """The runs that a sweep's command line names."""
    from fedjax_het.settings.grids import grid

    settings = {name: getattr(command, name) for name in _LISTED if getattr(command, name)}
    hp = {
        name: [_number("hp", name, value) for value in text.split(",")]
        for name, text in _pairs("hp", command.hp)
    }
    options = {
        name: [_literal(value) for value in text.split(",")]
        for name, text in _pairs("option", command.options)
    }
    of_partition = _literals("partition-option", command.partition_options)
    of_server = _literals("server-option", command.server_options)
    return grid(
        **settings,
        seed=command.seeds,
        partition_options=of_partition,
        server_options=of_server,
        hp=hp,
        options=options,
    )


def _sweep(command: Sweep) -> int:
    from fedjax_het.running.sweeps import describe, plan_sweep, sweep

    _log_to_stderr(logging.WARNING)
    specs = specs_of(command)
    shard = None
    if command.shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", command.shard)
        require(match is not None, "shard", command.shard, "I/N, e.g. 0/4")
        shard = int(match[1]), int(match[2])
    if command.list:
        for digest, spec, state in plan_sweep(specs, command.output_dir, shard=shard):
            print(f"{digest}  {state:10}  {describe(spec)}")
        return 0
    made = sweep(
        specs,
        command.output_dir,
        shard=shard,
        data_dir=command.data_dir,
        lanes=_count("lanes", command.lanes),
        spread=command.spread,
        width=_count("vmapped", command.vmapped),
        client_state=command.client_state,
        memory=None if command.memory is None else int(command.memory * 1e9),
    )
    if jax.process_index() == 0 and any(made.results):
        report_command(Report(command.output_dir))
    print(json.dumps(made.summary(command.output_dir), allow_nan=False))
    return 2 if made.not_run and not any(made.results) else 0


def _run(command: Run) -> int:
    from fedjax_het.data import load_dataset
    from fedjax_het.report.run_pictures import draw_run
    from fedjax_het.running.progress import progress_line
    from fedjax_het.running.simulation import simulate

    first = jax.process_index() == 0
    quiet = command.quiet or not first
    _log_to_stderr(logging.WARNING if quiet else logging.INFO)
    spec = spec_of(command).resolved()
    dataset = load_dataset(
        spec.dataset, normalisation=spec.normalisation, data_dir=command.data_dir
    )
    with progress_line(f"{spec.algorithm} on {spec.dataset}", quiet=quiet) as show:
        result = simulate(
            spec,
            dataset=dataset,
            output_dir=command.output_dir,
            resume=command.resume,
            progress=show,
            lanes=_count("lanes", command.lanes),
            client_state=command.client_state,
            data_dir=command.data_dir,
        )
    if not first:
        return 0
    if command.output_dir is not None:
        draw_run(result, dataset, result.partition, command.output_dir)
    print(json.dumps(result.summary, allow_nan=False))
    return 0


def _log_to_stderr(level: int) -> None:
    log = logging.getLogger("fedjax_het")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(level)


def _list(command: List) -> int:
    from fedjax_het.algorithms import ALGORITHMS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    def described(entries: dict[str, Any]) -> dict[str, str]:
        return {name: entry.description for name, entry in entries.items()}

    groups = {
        "methods": described(ALGORITHMS),
        "data sets": described(DATASETS),
        "partitions": described(PARTITIONS),
        "networks": described(NETWORKS),
        "server's examples": described(SERVER_SOURCES),
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


def _literals(argument: str, items: tuple[str, ...]) -> dict[str, Any]:
    return {name: _literal(text) for name, text in _pairs(argument, items)}


def _number(argument: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{argument} {name} = {text!r}: expected a number") from None


def _count(argument: str, text: str) -> int | str:
    return text if text == "auto" else int(_number(argument, "", text))


def _literal(text: str) -> Any:
    """A number or a truth value if it reads as one, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    sys.exit(main())
