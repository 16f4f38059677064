"""Commands `fedjax-het list`, `show` and `devices`, which describe entries and this machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tyro

from fedjax_het.algorithms import METHODS, get_algorithm_spec, get_possible_bases
from fedjax_het.analysis.overview import format_setting_value
from fedjax_het.config.protocols import PROTOCOLS, describe_protocol
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core import lr_schedules
from fedjax_het.core.lr_schedules import LR_SCHEDULES
from fedjax_het.core.optimizers import OPTIMIZERS, optional_optimizer_hyperparameters
from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
from fedjax_het.metrics.registry import METRICS
from fedjax_het.nn import NETWORKS
from fedjax_het.utils.config import HyperParameter, document_fields, hyperparameters_of
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.registry import REQUIRED, Registry
from fedjax_het.utils.text import to_one_line


@dataclass(frozen=True)
class ListCommand:
    """Print the names of all methods, data sets, partitions, networks and other entries.

    The other entries are sources of the server's examples, metrics, local optimizers and learning
    rate schedules.
    """


@dataclass(frozen=True)
class ShowCommand:
    """Print the options of methods, data sets, partitions, networks and other entries.

    The other entries are sources of the server's examples, local optimizers and learning rate
    schedules. The description of a method contains its paper, options, presets, hyperparameters
    with range and default, base methods, and settings by protocol. Example: fedjax-het show fedamp
    convnet
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of the entries; `fedjax-het list` prints all names."""


def list_command(command: ListCommand) -> int:
    """Print every name with its description; return the exit status."""
    width = max(len(name) for registry, _ in REGISTRIES.values() for name in registry)
    for title, (registry, _) in REGISTRIES.items():
        lines = (f"  {name:{width}}  {entry.description}" for name, entry in registry.items())
        print(title, *lines, sep="\n", end="\n\n")
    print("fedjax-het show NAME prints the options of an entry.")
    return 0


def show_command(command: ShowCommand) -> int:
    """Print the options of the named entries; return the exit status."""
    entries = {
        name: (entry, describe)
        for registry, describe in REGISTRIES.values()
        for name, entry in registry.items()
    }
    require(len(command.names) > 0, "name", "", "one that `fedjax-het list` names")
    for name in command.names:
        require_name("name", name, entries)
    for entry, describe in map(entries.__getitem__, command.names):
        print(f"{entry.name}: {entry.description}", *describe(entry), sep="\n", end="\n\n")
    return 0


def _describe_parameters(parameters: Mapping[str, Any]) -> Iterator[str]:
    for name, default in parameters.items():
        yield f"  {name}  ({'required' if default is REQUIRED else f'default {default!r}'})"


def _describe_number(name: str, hyperparameter: HyperParameter, default: str = "") -> str:
    return f"  {name}{default}: a number {hyperparameter.bounds}".rstrip()


def _describe_optimizer(optimizer: Any) -> Iterator[str]:
    yield "hyperparameters (--hp NAME=VALUE):"
    for name, hyperparameter in optimizer.hyperparameters.items():
        yield _describe_number(name, hyperparameter, f" = {hyperparameter.default:g}")
    yield "optional hyperparameters (--hp NAME=VALUE):"
    for name, hyperparameter in optional_optimizer_hyperparameters(optimizer.name, {}).items():
        yield _describe_number(name, hyperparameter)
    if optimizer.options:
        yield "options (--optimizer-option NAME=VALUE):"
        yield from (f"  {name} = {default}" for name, default in optimizer.options.items())


def _describe_schedule(schedule: Any) -> Iterator[str]:
    for flag, prefix in (
        ("--lr-schedule", lr_schedules.ROUND_PREFIX),
        ("--lr-step-schedule", lr_schedules.STEP_PREFIX),
    ):
        yield f"hyperparameters (--hp NAME=VALUE) of {flag} {schedule.name}:"
        required = lr_schedules.required_schedule_hyperparameters(schedule.name, prefix)
        defaults = lr_schedules.schedule_hyperparameters(schedule.name, prefix)
        optional = lr_schedules.optional_schedule_hyperparameters(schedule.name, prefix)
        for name, hyperparameter in {**defaults, **optional}.items():
            default = "" if name in optional else f" = {hyperparameter.default:g}"
            default = ", required" if name in required else default
            yield _describe_number(name, hyperparameter, default)


def _describe_method(method: Any) -> Iterator[str]:
    if method.paper:
        yield f"paper: {method.paper}"
    yield f"default protocol: {describe_protocol(method.protocol)}"
    if method.has_base:
        yield f"base methods (option base): {', '.join(get_possible_bases(method))}"
    if presets := method.options.PRESETS:
        yield f"presets (option {method.options.PRESET_FIELD}): {', '.join(presets)}"
    defaults = get_algorithm_spec(method.name, {}).complete_options({})
    if fields := document_fields(method.options):
        yield "options (--option NAME=VALUE):"
        for name, (words, text) in fields.items():
            yield f"  {name} = {defaults[name]}: {words}" + (f". {text}" if text else "")
    config = method.make_hyperparameter_record({}, num_clients=10)
    if hyperparameters := hyperparameters_of(config):
        yield "hyperparameters (--hp NAME=VALUE), in addition to local training's:"
        fields = document_fields(type(config))
        for name, hyperparameter in hyperparameters.items():
            words, text = fields[name]
            yield f"  {name} = {hyperparameter.default:g}: {words}" + (f". {text}" if text else "")
    yield "settings by protocol (--protocol NAME):"
    for name, values in collect_settings_by_protocol(method).items():
        yield f"  {name}: {format_by_protocol(values)}"


def collect_settings_by_protocol(method: Any) -> dict[str, dict[str, Any]]:
    """Return a method's default settings on Fashion-MNIST: by flag, the value of each protocol."""
    values_by_setting: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        try:
            run = RunSpec(method.name, dataset="fashion_mnist", protocol=protocol).resolved()
        except ConfigError:  # the protocol lacks settings of the method
            continue
        settings = {f"--{name.replace('_', '-')}": getattr(run, name) for name in _LISTED_SETTINGS}
        for name, value in {**settings, **{f"--hp {n}": v for n, v in run.hp.items()}}.items():
            if value is not None:
                values_by_setting.setdefault(name, {})[protocol] = value
    return values_by_setting


_LISTED_SETTINGS = (
    *("partition", "alpha", "classes", "model", "norm", "num_clients", "participation", "rounds"),
    *("local_epochs", "batch_size", "local_optimizer", "optimizer_state", "averaging"),
    *("lr_schedule", "lr_step_schedule", "local_steps", "gradient_accumulation"),
    *("client_tests", "server_data", "pretrain_epochs"),
)


def format_by_protocol(values: Mapping[str, Any]) -> str:
    """Return the value of each protocol as text, or the value that all protocols share."""
    texts = {protocol: format_setting_value(value) for protocol, value in values.items()}
    if len(texts) == len(PROTOCOLS) and len(set(texts.values())) == 1:
        return texts.popitem()[1]
    return ", ".join(f"{protocol} {text}" for protocol, text in texts.items())


REGISTRIES: dict[str, tuple[Registry[Any], Callable[[Any], Iterable[str]]]] = {
    "methods": (METHODS, _describe_method),
    "data sets": (DATASETS, lambda dataset: ()),
    "partitions": (PARTITIONS, lambda scheme: _describe_parameters(scheme.parameters)),
    "networks": (NETWORKS, lambda network: _describe_parameters(network.options)),
    "server's examples": (SERVER_SOURCES, lambda source: _describe_parameters(source.options)),
    "metrics": (METRICS, lambda metric: ()),
    "local optimizers": (OPTIMIZERS, _describe_optimizer),
    "learning rate schedules": (LR_SCHEDULES, _describe_schedule),
}
"""Registry and function that describes the options of an entry, by title."""


@dataclass(frozen=True)
class DevicesCommand:
    """Print the devices of this machine and the software that uses them.

    The output contains memory and precision of the devices, versions of libraries, environment
    variables and recommended flags. It also has the numbers of lanes that short timings found
    fastest.
    """


def devices_command(command: DevicesCommand) -> int:
    """Print the description of the devices; return the exit status."""
    from fedjax_het.runtime.device_report import describe_devices

    for line in describe_devices():
        print(to_one_line(line))
    return 0
