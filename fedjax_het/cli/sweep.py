"""`fedjax-het sweep`: every combination of values."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import jax
import tyro

from fedjax_het.cli.arguments import (
    NetworkOptions,
    OptimizerOptions,
    PartitionOptions,
    ServerOptions,
    parse_count,
    parse_literal,
    parse_literals,
    parse_number,
    parse_pairs,
)
from fedjax_het.cli.config_file import MAPPING_SETTINGS
from fedjax_het.cli.plugins import import_plugins, list_imported_plugins
from fedjax_het.cli.results import ReportCommand, report_command
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils import console
from fedjax_het.utils.config import Bounds, NonNegativeFloat, PositiveInt

# The settings that a sweep takes lists of under their own names.
_LIST_SETTINGS = [
    f.name for f in dataclasses.fields(RunSpec) if f.name not in (*MAPPING_SETTINGS, "seed")
]


def _make_list_config() -> type:
    """The settings of RunSpec, with their help, each as a list of values; `seed` as `seeds`."""
    annotations = get_type_hints(RunSpec)
    fields = []
    for name in _LIST_SETTINGS:
        value_types = [kind for kind in get_args(annotations[name]) if kind is not NoneType]
        value_type = reduce(or_, value_types) if value_types else annotations[name]
        list_type = GenericAlias(tuple, (value_type, ...))
        fields.append((name, list_type, dataclasses.field(default=())))
    return dataclasses.make_dataclass("Lists", fields, bases=(RunSpec,), frozen=True)


_ListSettings: Any = _make_list_config()


@dataclass(frozen=True)
class SweepCommand(_ListSettings):
    """Run every combination of the values given, many federations at a time.

    Every setting takes several values: --alpha 0.01 0.1 --algorithm fedavg fedprox. What is not
    given is as in the method's paper. Results, tables and figures are kept in one folder; what is
    there is not made again. Started several times on one folder, also on several machines that
    share it, the workers share out the runs. The last line printed is one JSON object.
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
    optimizer_options: OptimizerOptions = ()
    config: Path | None = None
    """A file of settings in YAML, where lists are grids; what is given here goes over it."""
    data_dir: Path | None = None
    """Folder of the prepared data (default: TFDS_DATA_DIR)."""
    output_dir: Path = Path("results/sweep")
    """Folder of the results."""
    track: tuple[str, ...] = ()
    """Trackers that keep a record of every run, in the output folder: csv, tensorboard, wandb,
    mlflow."""
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
    """Where clients' states are: device, split (of a run that devices share, a part on each), host
    (those of the next rounds' clients are put on the devices) or auto, the last two if they would
    not fit."""
    memory: Annotated[float, Bounds(1e-9, 1e9)] | None = None
    """GB on each device that federations may take (default: what is free)."""
    launcher: Literal["here", "ray"] = "here"
    """Where runs are made: in this process, or by tasks of Ray."""
    ray_address: str | None = None
    """Of a cluster of Ray's: auto, HOST:PORT (default: RAY_ADDRESS, or this machine alone)."""
    cpus_per_task: PositiveInt = 1
    """Of each of Ray's tasks."""
    gpus_per_task: NonNegativeFloat = 0.0
    """Of each of Ray's tasks."""
    distributed: bool = False
    """Several processes: call jax.distributed.initialize(), which finds SLURM, TPU pods, MPI."""
    resume_anyway: bool = False
    """Go on also from checkpoints that were begun under another version, device or precision."""
    keep_state: bool = False
    """Keep how every run ended, in the output folder: from there a sweep with more rounds goes on,
    and loaded results have their models."""
    quiet: bool = False
    """Nothing but errors on stderr, and of stdout the last line alone. Otherwise stdout gets a line
    per run, and stderr what is running: where it is no terminal, a line every 30 s, and less often
    the longer it takes, every 10 min in the end."""
    json: bool = False
    """Progress, the lines of runs, notes and errors on stderr as one JSON object a line."""
    list: bool = False
    """Print the runs and whether they are done; run nothing."""


def build_run_specs(command: SweepCommand) -> list[RunSpec]:
    """The runs that a sweep's command line names."""
    from fedjax_het.config.grid import grid

    settings = {name: getattr(command, name) for name in _LIST_SETTINGS if getattr(command, name)}
    hp = {
        name: [parse_number("hp", name, value) for value in text.split(",")]
        for name, text in parse_pairs("hp", command.hp)
    }
    options = {
        name: [parse_literal(value) for value in text.split(",")]
        for name, text in parse_pairs("options", command.options)
    }
    network_options = parse_literals("network_options", command.network_options)
    partition_options = parse_literals("partition_options", command.partition_options)
    server_options = parse_literals("server_options", command.server_options)
    return grid(
        **settings,
        seed=command.seeds,
        network_options=network_options,
        partition_options=partition_options,
        server_options=server_options,
        optimizer_options=parse_literals("optimizer_options", command.optimizer_options),
        hp=hp,
        options=options,
    )


def sweep_command(command: SweepCommand) -> int:
    from fedjax_het.runtime.placement import Placement
    from fedjax_het.runtime.result_store import ResultNotWrittenError
    from fedjax_het.runtime.sweep import SweepResult, plan_sweep, sweep
    from fedjax_het.runtime.sweep_log import format_run_label

    console.set_output_mode(quiet=command.quiet, as_json=command.json)
    console.log_to_stderr(logging.WARNING)
    memory = None if command.memory is None else int(command.memory * 1e9)
    lanes, num_parallel = (
        parse_count("lanes", command.lanes),
        parse_count("vmapped", command.vmapped),
    )
    specs = build_run_specs(command)
    if command.list:
        for digest, spec, state in plan_sweep(specs, command.output_dir):
            print(f"{digest}  {state:10}  {format_run_label(spec)}")
        return 0
    placement = Placement(
        lanes=lanes,
        spread=command.spread,
        width=num_parallel,
        server_work=command.server_work,
        client_state=command.client_state,
        memory=memory,
    )
    run_sweep: Callable[..., SweepResult] = sweep
    if command.launcher == "ray":
        from fedjax_het.runtime.launchers.ray import sweep_on_ray

        run_sweep = functools.partial(
            sweep_on_ray,
            address=command.ray_address,
            cpus_per_task=command.cpus_per_task,
            gpus_per_task=command.gpus_per_task,
            setup=functools.partial(import_plugins, list_imported_plugins()),
        )
    write_error: ResultNotWrittenError | None = None
    try:
        sweep_result = run_sweep(
            specs,
            command.output_dir,
            resume_anyway=command.resume_anyway,
            keep_state=command.keep_state,
            track=command.track,
            data_dir=command.data_dir,
            placement=placement,
        )
    except ResultNotWrittenError as error:  # the others are made, and these are elsewhere
        sweep_result, write_error = error.results, error
    if jax.process_index() == 0 and any(sweep_result.results) and write_error is None:
        with console.suppress_results_if_quiet():
            report_command(ReportCommand(command.output_dir))
    print(json.dumps(sweep_result.to_summary(command.output_dir), allow_nan=False), flush=True)
    if write_error is not None:
        raise write_error
    return 2 if sweep_result.not_run and not any(sweep_result.results) else 0
