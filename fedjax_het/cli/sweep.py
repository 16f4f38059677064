"""`fedjax-het sweep`: every combination of values."""

import dataclasses
import json
import logging
import re
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, get_args, get_type_hints

import jax
import tyro

from fedjax_het.cli.report import ReportCommand, report_command
from fedjax_het.cli.words import (
    NetworkOptions,
    PartitionOptions,
    ServerOptions,
    count,
    literal,
    literals,
    log_to_stderr,
    number,
    pairs,
)
from fedjax_het.common.errors import ConfigError
from fedjax_het.common.records import Bounds
from fedjax_het.common.records import number as number_within
from fedjax_het.settings.spec import RunSpec

_AS_WORDS = ("hp", "options", "network_options", "partition_options", "server_options")
# The settings that a sweep takes lists of under their own names.
_LISTED = [f.name for f in dataclasses.fields(RunSpec) if f.name not in (*_AS_WORDS, "seed")]


def _as_lists() -> type:
    """The settings of RunSpec, with their help, each as a list of values; `seed` as `seeds`."""
    kinds = get_type_hints(RunSpec)
    fields = []
    for name in _LISTED:
        own = [kind for kind in get_args(kinds[name]) if kind is not NoneType]
        kind = reduce(or_, own) if own else kinds[name]
        kinds_of = GenericAlias(tuple, (kind, ...))
        fields.append((name, kinds_of, dataclasses.field(default=())))
    return dataclasses.make_dataclass("Lists", fields, bases=(RunSpec,), frozen=True)


_Lists: Any = _as_lists()


@dataclass(frozen=True)
class SweepCommand(_Lists):
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
    network_options: NetworkOptions = ()
    partition_options: PartitionOptions = ()
    server_options: ServerOptions = ()
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path = Path("results/sweep")
    """Folder of the results."""
    shard: str | None = None
    """I/N: part I (from 0) of N, e.g. for a scheduler's array jobs. Folders merge by copying."""
    lanes: str = "auto"
    """Vmapped lanes per device; a matter of speed only, as are the next five."""
    spread: str = "auto"
    """What the devices share out: the lanes of one federation, or the runs."""
    vmapped: str = "auto"
    """Federations that are vmapped on each device."""
    server_work: str = "auto"
    """Whether devices that share a federation share its server's work: shared, alone or auto, what
    is faster."""
    client_state: str = "auto"
    """Where clients' states are: device, host (those of the next rounds' clients are put on the
    devices) or auto, the host if they would not fit."""
    memory: float | None = None
    """GB on each device that federations may take (default: what is free)."""
    distributed: bool = False
    """Several processes: call jax.distributed.initialize(), which finds SLURM, TPU pods, MPI."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""


def specs_of(command: SweepCommand) -> list[RunSpec]:
    """The runs that a sweep's command line names."""
    from fedjax_het.settings.grids import grid

    settings = {name: getattr(command, name) for name in _LISTED if getattr(command, name)}
    hp = {
        name: [number("hp", name, value) for value in text.split(",")]
        for name, text in pairs("hp", command.hp)
    }
    options = {
        name: [literal(value) for value in text.split(",")]
        for name, text in pairs("option", command.options)
    }
    of_network = literals("network-option", command.network_options)
    of_partition = literals("partition-option", command.partition_options)
    of_server = literals("server-option", command.server_options)
    return grid(
        **settings,
        seed=command.seeds,
        network_options=of_network,
        partition_options=of_partition,
        server_options=of_server,
        hp=hp,
        options=options,
    )


def sweep_command(command: SweepCommand) -> int:
    from fedjax_het.running.ledger import describe
    from fedjax_het.running.placement import Placement
    from fedjax_het.running.sweeps import plan_sweep, sweep

    log_to_stderr(logging.WARNING)
    memory = command.memory
    if memory is not None:
        memory = int(number_within("memory", memory, Bounds(1e-9, 1e9)) * 1e9)
    lanes, width = count("lanes", command.lanes), count("vmapped", command.vmapped)
    specs = specs_of(command)
    shard = None
    if command.shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", command.shard)
        if match is None:
            raise ConfigError(f"shard = {command.shard!r}: expected I/N, e.g. 0/4")
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
        placement=Placement(
            lanes=lanes,
            spread=command.spread,
            width=width,
            server_work=command.server_work,
            client_state=command.client_state,
            memory=memory,
        ),
    )
    if jax.process_index() == 0 and any(made.results):
        report_command(ReportCommand(command.output_dir))
    print(json.dumps(made.summary(command.output_dir), allow_nan=False))
    return 2 if made.not_run and not any(made.results) else 0
