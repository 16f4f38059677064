"""`fedjax-het list`: what there is to choose from; `fedjax-het show`: what each of it takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.common.signatures import REQUIRED


@dataclass(frozen=True)
class ListCommand:
    """Name the methods, data sets, partitions, networks, sources of the server's examples, local
    optimisers, schedules of their rates, and measures."""


@dataclass(frozen=True)
class ShowCommand:
    """Say what some of them take: `fedjax-het show fedamp convnet`.

    Of a method: its paper, options and presets, numbers, ranges and defaults, what it can be put
    over, and its settings by protocol.
    """

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME ...")] = ()
    """Of methods, data sets, partitions, networks, sources, optimisers or schedules."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description."""
    groups = _groups()
    width = max(len(name) for entries in groups.values() for name in entries)
    for title, entries in groups.items():
        lines = (f"  {name:{width}}  {entry.description}" for name, entry in entries.items())
        print(title, *lines, sep="\n", end="\n\n")
    print("What one of them takes: fedjax-het show NAME")
    return 0


def show_command(command: ShowCommand) -> int:
    """Print what those that are named take."""
    known = {
        name: (title, record)
        for title, entries in _groups().items()
        for name, record in entries.items()
    }
    require(len(command.names) > 0, "name", "", "one that `fedjax-het list` names")
    for name in command.names:
        require_name("name", name, known)
    for name in command.names:
        print("\n".join(_about(*known[name])), end="\n\n")
    return 0


def _groups() -> dict[str, Any]:
    from fedjax_het.algorithms import METHODS
    from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
    from fedjax_het.engine.measured import MEASURES
    from fedjax_het.engine.optimizers import OPTIMIZERS
    from fedjax_het.engine.rate_schedules import SCHEDULES
    from fedjax_het.nn import NETWORKS

    return {
        "methods": METHODS,
        "data sets": DATASETS,
        "partitions": PARTITIONS,
        "networks": NETWORKS,
        "server's examples": SERVER_SOURCES,
        "measures": MEASURES,
        "local optimisers": OPTIMIZERS,
        "rate schedules": SCHEDULES,
    }


def _about(title: str, record: Any) -> Iterator[str]:
    """A record in lines: what it is, and what it takes."""
    yield f"{record.name}: {record.description}"
    if title == "methods":
        yield from _about_method(record)
        return
    if title in _NUMBERED:
        yield from _NUMBERED[title](record)
        return
    for name, default in _parameters(title, record.name).items():
        needed = default is REQUIRED
        yield f"  {name}  ({'required' if needed else f'default {default!r}'})"


def _about_optimizer(entry: Any) -> Iterator[str]:
    from fedjax_het.engine.optimizers import optional_numbers

    yield "numbers (--hp NAME=VALUE):"
    for name, number in entry.numbers.items():
        yield f"  {name} = {number.default:g}: {_range(number)}"
    yield "numbers that it has where they are given:"
    for name, number in optional_numbers(entry.name, {}).items():
        yield f"  {name}: {_range(number)}"
    if entry.options:
        yield "options (--optimizer-option NAME=VALUE):"
        yield from (f"  {name} = {default}" for name, default in entry.options.items())


def _about_schedule(schedule: Any) -> Iterator[str]:
    from fedjax_het.engine.rate_schedules import (
        OVER_ROUNDS,
        OVER_STEPS,
        optional_schedule_numbers,
        required_schedule_numbers,
        schedule_numbers,
    )

    for setting, prefix in (("--lr-schedule", OVER_ROUNDS), ("--lr-step-schedule", OVER_STEPS)):
        yield f"numbers (--hp NAME=VALUE) of {setting} {schedule.name}:"
        required = required_schedule_numbers(schedule.name, prefix)
        optional = optional_schedule_numbers(schedule.name, prefix)
        for name, number in {**schedule_numbers(schedule.name, prefix), **optional}.items():
            default = f" = {number.default:g}" if name not in optional else ""
            default = ", required" if name in required else default
            yield f"  {name}{default}: {_range(number)}"


_NUMBERED = {"local optimisers": _about_optimizer, "rate schedules": _about_schedule}


def _range(number: Any) -> str:
    return f"a number {number.bounds}".rstrip()


def _parameters(title: str, name: str) -> dict[str, Any]:
    from fedjax_het.data import SERVER_SOURCES, partition_parameters
    from fedjax_het.nn import network_options

    if title == "networks":
        return network_options(name)
    if title == "partitions":
        return partition_parameters(name)
    return dict(SERVER_SOURCES[name].options) if title == "server's examples" else {}


def _about_method(entry: Any) -> Iterator[str]:
    from fedjax_het.algorithms import bases, entry_of
    from fedjax_het.common.records import documentation, numbers_of

    if entry.paper:
        yield f"paper: {entry.paper}"
    yield f"protocol where none is named: {entry.protocol}"
    if entry.has_base:
        yield f"goes over (option base): {', '.join(bases(entry))}"
    if presets := entry.options.PRESETS:
        yield f"presets (option {entry.options.PRESET_FIELD}): {', '.join(presets)}"
    full = entry_of(entry.name, {})
    defaults = full.fill({})
    if fields := documentation(entry.options):
        yield "options (--option NAME=VALUE):"
        for name, (words, text) in fields.items():
            yield f"  {name} = {defaults[name]}: {words}" + (f". {text}" if text else "")
    record = entry.numbers_record({}, num_clients=10)
    if numbers := numbers_of(record):
        yield "numbers (--hp NAME=VALUE), besides those of local training:"
        fields = documentation(type(record))
        for name, number in numbers.items():
            words, text = fields[name]
            yield f"  {name} = {number.default:g}: {words}" + (f". {text}" if text else "")
    yield from _by_protocol(entry)


def settings_by_protocol(entry: Any) -> dict[str, dict[str, Any]]:
    """What holds where nothing else is said, on Fashion-MNIST: by setting, as on the command line,
    its value under each protocol in which it has one."""
    from fedjax_het.settings.protocols import PROTOCOLS
    from fedjax_het.settings.spec import RunSpec

    found: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        try:
            run = RunSpec(entry.name, dataset="fashion_mnist", protocol=protocol).resolved()
        except ConfigError:  # it has no place there
            continue
        said = {f"--{name.replace('_', '-')}": getattr(run, name) for name in _SETTINGS}
        for name, value in {**said, **{f"--hp {n}": v for n, v in run.hp.items()}}.items():
            if value is not None:
                found.setdefault(name, {})[protocol] = value
    return found


def _by_protocol(entry: Any) -> Iterator[str]:
    from fedjax_het.settings.protocols import PROTOCOLS

    yield "by protocol (--protocol NAME):"
    for name, values in settings_by_protocol(entry).items():
        several = len(set(map(str, values.values()))) > 1 or len(values) < len(PROTOCOLS)
        words = ", ".join(f"{protocol} {short(value)}" for protocol, value in values.items())
        yield f"  {name}: {words if several else short(next(iter(values.values())))}"


_SETTINGS = (
    *("partition", "alpha", "classes", "model", "norm", "num_clients", "participation", "rounds"),
    *("local_epochs", "batch_size", "local_optimizer", "optimizer_state", "averaging"),
    *("lr_schedule", "lr_step_schedule", "local_steps", "accumulation"),
    *("local_tests", "server_data", "pretrain_epochs"),
)


def short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
