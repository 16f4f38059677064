"""Command `fedjax-het sweep`: every combination of values."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, Union, get_origin

import jax
import tyro

from fedjax_het.analysis.metric_columns import require_possible_metric
from fedjax_het.cli.options import CommonOptions
from fedjax_het.cli.plugins import import_plugins_once
from fedjax_het.cli.results import ReportCommand, report_command
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import RunSettings
from fedjax_het.utils import console
from fedjax_het.utils.config import (
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_types,
    union_members,
)

_TYPES = field_types(RunSettings)
_MAPPING_SETTINGS = [name for name, kind in _TYPES.items() if get_origin(kind) is dict]
# Settings whose flags accept lists in a sweep.
_LIST_SETTINGS = [name for name in _TYPES if name not in (*_MAPPING_SETTINGS, "seed", "metrics")]


def _make_list_config() -> type:
    """Return a dataclass of the settings of a run, each as a list of values."""
    union: Any = Union
    fields: list[Any] = []
    for name in _LIST_SETTINGS:
        value_type = union[tuple(union_members(_TYPES[name]))]
        fields.append((name, GenericAlias(tuple, (value_type, ...)), ()))
    return dataclasses.make_dataclass("Lists", fields, bases=(RunSettings,), frozen=True)


_ListSettings: Any = _make_list_config()


@dataclass(frozen=True)
class GridOptions(CommonOptions, _ListSettings):
    """Settings of runs as lists of values."""

    seed: tyro.conf.Suppress[int] = 0
    seeds: tuple[NonNegativeInt, ...] = (0,)
    """Seeds of all random draws; every combination runs with each seed."""
    hp: dict[str, tuple[float, ...]] = field(default_factory=dict)
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    partition_options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    server_options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    network_options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    optimizer_options: dict[str, tuple[bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepCommand(GridOptions):
    """Run every combination of the given values, many federations at a time.

    Every setting accepts several values, e.g. --alpha 0.01 0.1; an omitted setting has the value of
    the protocol (default: standard, of NIID-Bench). The output folder keeps results, tables and
    figures; runs with a result there are skipped. Processes share a folder's runs. In a pipe, the
    last line is JSON.
    """

    output_dir: Path = Path("results/sweep")
    """Folder of the results."""
    spread: str = "auto"
    """Work that the devices share: lanes (the clients of one federation), runs (each device has its
    own federations) or auto (the faster). It affects speed only."""
    vmapped: PositiveInt | Literal["auto"] = "auto"
    """Number of federations that are trained in parallel on each device. It affects speed only, not
    results."""
    memory: Annotated[float, Bounds(1e-9, 1e9)] | None = None
    """Memory in GB that federations may use on each device (default: the free memory)."""
    launcher: Literal["here", "ray"] = "here"
    """Place of the runs: this process (here) or tasks of Ray (ray)."""
    ray_address: str | None = None
    """Address of a Ray cluster: auto or HOST:PORT (default: the environment variable RAY_ADDRESS,
    otherwise this machine alone)."""
    cpus_per_task: PositiveInt = 1
    """Number of CPUs of each Ray task."""
    gpus_per_task: NonNegativeFloat = 0.0
    """Number of GPUs of each Ray task; tasks with a fraction share a GPU."""
    keep_state: bool = False
    """Keep the final state of every run in the output folder, which is needed to train more rounds
    and to load the models."""
    columns: tuple[str, ...] = ()
    """Further numeric columns of the table, each with a figure, e.g. split.label_hellinger."""
    sort: str | None = None
    """Numeric column that sorts the rows of the table, e.g. split.size_gini."""
    wide: bool = False
    """Print all columns and notes of the tables on a narrow terminal, too."""
    list: bool = False
    """Print the runs and whether they are done, without running them."""
    plugins: tyro.conf.Suppress[tuple[str, ...]] = ()


def build_run_specs(command: GridOptions) -> list[RunSpec]:
    """Return the runs of every combination of the given values."""
    from fedjax_het.config.grid import grid

    names = (*_LIST_SETTINGS, "metrics")
    settings = {name: getattr(command, name) for name in names if getattr(command, name)}
    mappings = {name: getattr(command, name) for name in _MAPPING_SETTINGS}
    return grid(**settings, **mappings, seed=command.seeds)


def sweep_command(command: SweepCommand) -> int:
    """Run a sweep, write its tables and figures, and print its summary.

    Returns:
      Exit status: 2 if no run could be made, otherwise 0.

    Raises:
      ConfigError: for settings that cannot be used, and for a result that cannot be written.
    """
    from fedjax_het.runtime.result_display import format_run_label, list_varying_settings
    from fedjax_het.runtime.result_store import ResultNotWrittenError
    from fedjax_het.runtime.sweep import SweepResult, plan_sweep, sweep

    console.set_output_mode(quiet=command.quiet, as_json=command.json)
    console.log_to_stderr(logging.WARNING)
    specs = build_run_specs(command)
    for argument, names in (("columns", command.columns), ("sort", (command.sort,))):
        for name in filter(None, names):
            require_possible_metric(argument, name, specs)
    if command.list:
        plan = plan_sweep(specs, command.output_dir)
        varying = list_varying_settings(spec for _, spec, _ in plan)
        for digest, spec, state in plan:
            print(f"{digest}  {state:10}  {format_run_label(spec, varying=varying)}")
        return 0
    memory = None if command.memory is None else int(command.memory * 1e9)
    placement = command.make_placement(spread=command.spread, width=command.vmapped, memory=memory)
    run_sweep: Callable[..., SweepResult] = sweep
    if command.launcher == "ray":
        from fedjax_het.runtime.ray_launcher import sweep_on_ray

        run_sweep = functools.partial(
            sweep_on_ray,
            address=command.ray_address,
            cpus_per_task=command.cpus_per_task,
            gpus_per_task=command.gpus_per_task,
            setup=functools.partial(import_plugins_once, command.plugins),
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
    except ResultNotWrittenError as error:  # the results are stored elsewhere
        sweep_result, write_error = error.results, error
    if jax.process_index() == 0 and any(sweep_result.results) and write_error is None:
        with console.suppress_results_if_quiet():
            extra: Any = {"columns": command.columns, "sort": command.sort}
            report_command(ReportCommand(command.output_dir, wide=command.wide, **extra))
    summary = sweep_result.to_summary(command.output_dir)
    console.print_summary(summary, _describe(summary))
    if write_error is not None:
        raise write_error
    return 2 if sweep_result.not_run and not any(sweep_result.results) else 0


def _describe(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary of a sweep for people."""
    folder = summary["output_dir"]
    yield f"Runs:   {summary['results']} of {summary['runs']} have a result in {folder}"
    for name, text in (("diverged", "diverged"), ("not_run", "cannot be executed")):
        if summary[name]:
            yield f"        {summary[name]} {text}"
    yield f"Again:  fedjax-het report {folder} prints the tables"
