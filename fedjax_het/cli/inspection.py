"""`fedjax-het list` and `show` describe methods and other entries, `devices` this machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tyro

from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.registry import REQUIRED
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True)
class ListCommand:
    """Print the names of all methods, data sets, partitions, networks, sources of the server's
    examples, measures, local optimizers and learning rate schedules."""


@dataclass(frozen=True)
class ShowCommand:
    """Print the options of methods, data sets, partitions, networks, sources of the server's
    examples, local optimizers or learning rate schedules.

    For a method: paper, options, presets, numeric hyperparameters with range and default, base
    methods, and the settings of each protocol. Example: fedjax-het show fedamp convnet
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of the entries; `fedjax-het list` prints all."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description; return the exit status."""
    groups = _get_registries()
    width = max(len(name) for entries in groups.values() for name in entries)
    for title, entries in groups.items():
        lines = (f"  {name:{width}}  {entry.description}" for name, entry in entries.items())
        print(title, *lines, sep="\n", end="\n\n")
    print("fedjax-het show NAME prints the options of an entry.")
    return 0


def show_command(command: ShowCommand) -> int:
    """Print the options of the named entries; return the exit status."""
    records_by_name = {
        name: (title, record)
        for title, entries in _get_registries().items()
        for name, record in entries.items()
    }
    require(len(command.names) > 0, "name", "", "one that `fedjax-het list` names")
    for name in command.names:
        require_name("name", name, records_by_name)
    for name in command.names:
        print("\n".join(_describe_record(*records_by_name[name])), end="\n\n")
    return 0


def _get_registries() -> dict[str, Any]:
    from fedjax_het.algorithms import METHODS
    from fedjax_het.core.lr_schedules import LR_SCHEDULES
    from fedjax_het.core.optimizers import OPTIMIZERS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.metrics.registry import METRICS
    from fedjax_het.nn import NETWORKS

    return {
        "methods": METHODS,
        "data sets": DATASETS,
        "partitions": PARTITIONS,
        "networks": NETWORKS,
        "server's examples": SERVER_SOURCES,
        "measures": METRICS,
        "local optimizers": OPTIMIZERS,
        "learning rate schedules": LR_SCHEDULES,
    }


def _describe_record(title: str, record: Any) -> Iterator[str]:
    """Yield the lines that describe an entry and its options."""
    yield f"{record.name}: {record.description}"
    if title == "methods":
        yield from _describe_method(record)
        return
    if title in _DESCRIBERS:
        yield from _DESCRIBERS[title](record)
        return
    for name, default in _get_parameters(title, record.name).items():
        is_required = default is REQUIRED
        yield f"  {name}  ({'required' if is_required else f'default {default!r}'})"


def _describe_optimizer(optimizer: Any) -> Iterator[str]:
    from fedjax_het.core.optimizers import optional_optimizer_hyperparameters

    yield "numbers (--hp NAME=VALUE):"
    for name, hyperparameter in optimizer.hyperparameters.items():
        yield f"  {name} = {hyperparameter.default:g}: {_format_range(hyperparameter)}"
    yield "numbers that it has where they are given:"
    for name, hyperparameter in optional_optimizer_hyperparameters(optimizer.name, {}).items():
        yield f"  {name}: {_format_range(hyperparameter)}"
    if optimizer.options:
        yield "options (--optimizer-option NAME=VALUE):"
        yield from (f"  {name} = {default}" for name, default in optimizer.options.items())


def _describe_schedule(schedule: Any) -> Iterator[str]:
    from fedjax_het.core.lr_schedules import (
        ROUND_PREFIX,
        STEP_PREFIX,
        optional_schedule_hyperparameters,
        required_schedule_hyperparameters,
        schedule_hyperparameters,
    )

    for setting, prefix in (("--lr-schedule", ROUND_PREFIX), ("--lr-step-schedule", STEP_PREFIX)):
        yield f"numbers (--hp NAME=VALUE) of {setting} {schedule.name}:"
        required = required_schedule_hyperparameters(schedule.name, prefix)
        optional = optional_schedule_hyperparameters(schedule.name, prefix)
        for name, hyperparameter in {
            **schedule_hyperparameters(schedule.name, prefix),
            **optional,
        }.items():
            default = f" = {hyperparameter.default:g}" if name not in optional else ""
            default = ", required" if name in required else default
            yield f"  {name}{default}: {_format_range(hyperparameter)}"


_DESCRIBERS = {
    "local optimizers": _describe_optimizer,
    "learning rate schedules": _describe_schedule,
}


def _format_range(hyperparameter: Any) -> str:
    return f"a number {hyperparameter.bounds}".rstrip()


def _get_parameters(title: str, name: str) -> dict[str, Any]:
    from fedjax_het.data import PARTITIONS, SERVER_SOURCES
    from fedjax_het.nn import NETWORKS

    if title == "networks":
        return NETWORKS[name].options
    if title == "partitions":
        return PARTITIONS[name].parameters
    return SERVER_SOURCES[name].options if title == "server's examples" else {}


def _describe_method(method: Any) -> Iterator[str]:
    from fedjax_het.algorithms import get_algorithm_spec, get_possible_bases
    from fedjax_het.utils.config import document_fields, hyperparameters_of

    if method.paper:
        yield f"paper: {method.paper}"
    yield f"protocol where none is named: {method.protocol}"
    if method.has_base:
        yield f"goes over (option base): {', '.join(get_possible_bases(method))}"
    if presets := method.options.PRESETS:
        yield f"presets (option {method.options.PRESET_FIELD}): {', '.join(presets)}"
    resolved_method = get_algorithm_spec(method.name, {})
    defaults = resolved_method.complete_options({})
    if fields := document_fields(method.options):
        yield "options (--option NAME=VALUE):"
        for name, (words, text) in fields.items():
            yield f"  {name} = {defaults[name]}: {words}" + (f". {text}" if text else "")
    config = method.make_hyperparameter_record({}, num_clients=10)
    if hyperparameters := hyperparameters_of(config):
        yield "numbers (--hp NAME=VALUE), besides those of local training:"
        fields = document_fields(type(config))
        for name, hyperparameter in hyperparameters.items():
            words, text = fields[name]
            yield f"  {name} = {hyperparameter.default:g}: {words}" + (f". {text}" if text else "")
    yield from _describe_protocol_settings(method)


def collect_settings_by_protocol(method: Any) -> dict[str, dict[str, Any]]:
    """Return a method's default settings on Fashion-MNIST: by flag, the value of each protocol."""
    from fedjax_het.config.protocols import PROTOCOLS
    from fedjax_het.config.run_spec import RunSpec

    values_by_setting: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        try:
            run = RunSpec(method.name, dataset="fashion_mnist", protocol=protocol).resolved()
        except ConfigError:  # it has no place there
            continue
        settings = {f"--{name.replace('_', '-')}": getattr(run, name) for name in _LISTED_SETTINGS}
        for name, value in {**settings, **{f"--hp {n}": v for n, v in run.hp.items()}}.items():
            if value is not None:
                values_by_setting.setdefault(name, {})[protocol] = value
    return values_by_setting


def _describe_protocol_settings(method: Any) -> Iterator[str]:
    from fedjax_het.config.protocols import PROTOCOLS

    yield "by protocol (--protocol NAME):"
    for name, values in collect_settings_by_protocol(method).items():
        is_varied = len(set(map(str, values.values()))) > 1 or len(values) < len(PROTOCOLS)
        words = ", ".join(
            f"{protocol} {format_setting(value)}" for protocol, value in values.items()
        )
        yield f"  {name}: {words if is_varied else format_setting(next(iter(values.values())))}"


_LISTED_SETTINGS = (
    *("partition", "alpha", "classes", "model", "norm", "num_clients", "participation", "rounds"),
    *("local_epochs", "batch_size", "local_optimizer", "optimizer_state", "averaging"),
    *("lr_schedule", "lr_step_schedule", "local_steps", "accumulation"),
    *("local_tests", "server_data", "pretrain_epochs"),
)


def format_setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class DevicesCommand:
    """Print the devices with their memory and precision, library versions, environment variables,
    recommended flags, and the numbers of lanes that short timings found fastest."""


def devices_command(command: DevicesCommand) -> int:
    """Print the description of the devices; return the exit status."""
    from fedjax_het.runtime.device_report import describe_devices

    for line in describe_devices():
        print(to_one_line(line))
    return 0
