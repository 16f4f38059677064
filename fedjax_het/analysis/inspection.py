"""Descriptions of methods, data sets, partitions, networks and other entries, and their lists."""

import functools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fedjax_het.aggregation import AGGREGATIONS
from fedjax_het.algorithms import METHODS, get_algorithm_spec, get_possible_bases
from fedjax_het.analysis.overview import format_setting_value
from fedjax_het.attacks import ATTACKS
from fedjax_het.compression import COMPRESSORS
from fedjax_het.config.protocols import PROTOCOLS, describe_protocol
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS
from fedjax_het.core import lr_schedules
from fedjax_het.core.lr_schedules import LR_SCHEDULES
from fedjax_het.core.optimizers import OPTIMIZERS, optional_optimizer_hyperparameters
from fedjax_het.data import DATASETS, PARTITIONS, SERVER_SOURCES
from fedjax_het.data.sources import SOURCES
from fedjax_het.metrics.registry import METRICS
from fedjax_het.nn import NETWORKS
from fedjax_het.privacy import PRIVACY
from fedjax_het.skews import PARTITION_SKEWS, SKEWS
from fedjax_het.systems import SYSTEMS
from fedjax_het.tasks import TASKS
from fedjax_het.utils.config import (
    HyperParameter,
    config_to_dict,
    document_fields,
    hyperparameters_of,
    validate_arguments,
)
from fedjax_het.utils.errors import ConfigError, require_name
from fedjax_het.utils.registry import LIST_COMMAND, REQUIRED, format_entry, get_argument_docs
from fedjax_het.utils.text import make_html_table


class EntryList(list[str]):
    """Names of entries; its representation also has their titles and descriptions.

    Example:
      >>> from fedjax_het import list_methods
      >>> methods = list_methods()
      >>> methods[:2], methods.titles["fedavg"]
      (['fedavg', 'fedprox'], 'FedAvg')
    """

    def __init__(self, titles: Mapping[str, str], descriptions: Mapping[str, str]):
        """Make the list.

        Args:
          titles: name for display, by name.
          descriptions: one line, by name.
        """
        super().__init__(titles)
        self.titles, self.descriptions = dict(titles), dict(descriptions)

    def __repr__(self) -> str:
        widths = [max(map(len, ["", *column])) for column in (self, self.titles.values())]
        return "\n".join(
            f"{name:{widths[0]}}  {self.titles[name]:{widths[1]}}  {self.descriptions[name]}"
            for name in self
        )

    def _repr_html_(self) -> str:
        rows = [(name, self.titles[name], self.descriptions[name]) for name in self]
        return make_html_table(rows, header=("name", "title", "description"))


class Description(str):
    """Text whose representation is the text itself, for notebooks and the interpreter."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@validate_arguments
def list_methods(*, personalized: bool | None = None) -> EntryList:
    """List the federated learning methods, including the methods registered in this process.

    Args:
      personalized: True for methods that give each client its own model, False for methods with one
        model for all clients (default: all methods).

    Returns:
      The names, e.g. for `grid(algorithm=list_methods())`. The list prints as a table of names,
      titles and descriptions.

    Example:
      >>> from fedjax_het import list_methods
      >>> "fedprox" in list_methods(), "ditto" in list_methods(personalized=True)
      (True, True)
      >>> print(list_methods(personalized=True))
      separate ...
    """
    methods = [
        method for method in METHODS.values() if personalized in (None, method.is_personalized)
    ]
    return EntryList(
        {method.name: method.title for method in methods},
        {method.name: method.description for method in methods},
    )


@validate_arguments
def describe(name: str) -> Description:
    """Describe a method, data set, partition, network, optimizer, metric or other entry.

    All entries of the name are described, such as the skew and the metric `drift`. The text of a
    method has its paper, base methods, evaluated models, presets, options, hyperparameters with
    range and default, and settings by protocol. `fedjax-het show NAME` prints this text.

    Args:
      name: name of the entry; `fedjax-het list` prints all names.

    Returns:
      The text, which a notebook shows as it is.

    Raises:
      ConfigError: if no entry has the name.

    Example:
      >>> from fedjax_het import describe
      >>> describe("fedprox").splitlines()[1]
      'paper: Li et al., MLSys 2020, arXiv:1812.06127'
    """
    names = {entry_name for registry, _ in REGISTRIES.values() for entry_name in registry}
    require_name("name", name, names, listed_by=LIST_COMMAND)
    found = [
        (title, describe_entry, registry[name])
        for title, (registry, describe_entry) in REGISTRIES.items()
        if name in registry
    ]
    lines = []
    for title, describe_entry, entry in found:
        owner = f" ({title})" if len(found) > 1 else ""
        lines += [f"{entry.name}{owner}: {entry.description}", *describe_entry(entry)]
    return Description("\n".join(lines))


def _describe_parameters(
    parameters: Mapping[str, Any], function: Callable | None, usage: str
) -> Iterator[str]:
    """Describe options by their defaults and by the docstring of the function that has them."""
    if parameters:
        yield f"options ({usage}):"
    texts = get_argument_docs(function)
    for name, default in parameters.items():
        value = " (required)" if default is REQUIRED else f" = {default}"
        yield f"  {name}{value}" + (f": {texts[name]}" if name in texts else "")


def _describe_source(source: Any) -> Iterator[str]:
    return _describe_parameters(
        source.options, source.read, f"--dataset '{source.name}:LOCATION?NAME=VALUE&NAME=VALUE'"
    )


def _describe_partition(scheme: Any) -> Iterator[str]:
    usage = "--partition-option NAME=VALUE, or the flag"
    return _describe_parameters(scheme.parameters, scheme.split, usage)


def _describe_server_source(source: Any) -> Iterator[str]:
    function = source.draw or source.pool
    return _describe_parameters(source.options, function, "--server-option NAME=VALUE")


def _describe_network(network: Any) -> Iterator[str]:
    yield f"inputs: {', '.join(network.input_kinds)}"
    yield from _describe_parameters(network.options, network.make, "--network-option NAME=VALUE")


def _describe_number(name: str, hyperparameter: HyperParameter, default: str = "") -> str:
    return f"  {name}{default}: a number {hyperparameter.bounds}".rstrip()


def _describe_kind(setting: str, kind: Any) -> Iterator[str]:
    defaults = config_to_dict(kind.make())
    yield f"options (--{setting} {kind.name}:NAME=VALUE):"
    for name, (words, text) in document_fields(kind.make).items():
        yield f"  {name} = {defaults[name]}: {words}. {text}"


class PartitionSkewEntry(NamedTuple):
    """Entry of a partition that the setting `skew` accepts by another name."""

    name: str
    "Word that names the partition in the setting `skew`."
    description: str
    "One line for `fedjax-het list`."
    partition: str
    "Name of the partition."

    def __repr__(self) -> str:
        return format_entry(self)


def _make_partition_skews() -> dict[str, PartitionSkewEntry]:
    entries = {}
    for name, partition in PARTITION_SKEWS.items():
        text = PARTITIONS[partition].description
        entries[name] = PartitionSkewEntry(name, text[0].lower() + text[1:], partition)
    return entries


def _describe_skew(entry: Any) -> Iterator[str]:
    if not isinstance(entry, PartitionSkewEntry):
        yield from _describe_kind("skew", entry)
        return
    scheme = PARTITIONS[entry.partition]
    yield f"the partition {entry.partition}"
    yield from _describe_parameters(
        scheme.parameters, scheme.split, f"--skew {entry.name}:NAME=VALUE"
    )


def _describe_optimizer(optimizer: Any) -> Iterator[str]:
    settings = {name: f"--{s}".replace("_", "-") for s, name in HYPERPARAMETER_SETTINGS.items()}
    yield "hyperparameters (--hp NAME=VALUE, or the flag):"
    for name, hyperparameter in optimizer.hyperparameters.items():
        default = f" = {hyperparameter.default:g}"
        yield _describe_number(settings.get(name, name), hyperparameter, default)
    yield "optional hyperparameters (--hp NAME=VALUE, or the flag):"
    for name, hyperparameter in optional_optimizer_hyperparameters(optimizer.name, {}).items():
        yield _describe_number(settings.get(name, name), hyperparameter)
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
    yield f"inputs: {', '.join(method.input_kinds)}"
    yield f"tasks: {'classification' if method.needs_classes else 'all'}"
    if method.has_base:
        bases = get_possible_bases(method)
        yield f"base methods (option base; default {bases[0]}): {', '.join(bases)}"
    yield from _describe_evaluated_models(method)
    yield from _describe_presets(method)
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
            searched = f" (tune: {s})" if (s := hyperparameter.search_range) else ""
            line = f"  {name} = {hyperparameter.default:g}: {words}{searched}"
            yield line + (f". {text}" if text else "")
    protocol = method.protocol
    default = collect_settings_by_protocol(method, RunSpec.dataset)
    yield (
        f"settings of the protocol {protocol} on Fashion-MNIST (in parentheses: on {RunSpec.dataset}; "
        "after a semicolon: other protocols, --protocol NAME; —: not set):"
    )
    settings = collect_settings_by_protocol(method)
    accepted = {name: None for values in settings.values() for name in values}
    for name, values in settings.items():
        text = format_by_protocol(accepted | values, default.get(name, {}), first=protocol)
        yield f"  {name}: {text}"


_MODEL_MEANINGS = {
    "global": "the server's model",
    "client": "each client's model after its local training",
    "personal": "a model of each client that the method defines",
    "tuned": "copies of the global model that the clients fine-tune for the evaluation",
    "received": "the model that each client received",
}


def _describe_evaluated_models(method: Any) -> Iterator[str]:
    """Describe the models that the test set and the clients' own tests can evaluate."""
    on_test_set = "the global model" if method.has_global_model else "no model"
    yield f"evaluated on the test set: {on_test_set}"
    models = get_algorithm_spec(method.name, {}).evaluated_models
    texts = [
        f"{name}{' (default)' * (i == 0 and len(models) > 1)}, {_MODEL_MEANINGS[name]}"
        if name in _MODEL_MEANINGS
        else f"{name}{' (default)' * (i == 0 and len(models) > 1)}"
        for i, name in enumerate(models)
    ]
    yield f"evaluated on clients' own tests (--client-test-model NAME): {'; '.join(texts)}"


def _describe_presets(method: Any) -> Iterator[str]:
    """Describe the values of each preset that the method does not have by default."""
    field = method.options.PRESET_FIELD
    if method.options.PRESETS:
        yield f"presets (--option {field}=NAME):"
    defaults = _collect_preset_values(method, {})
    for preset in method.options.PRESETS:
        values = _collect_preset_values(method, {field: preset})
        changed = [
            f"{name} {value}"
            for name, value in values.items()
            if value != defaults.get(name) and name != field
        ]
        yield f"  {preset}: {', '.join(changed) or 'the defaults below'}"


def _collect_preset_values(method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options and hyperparameters by name."""
    completed = get_algorithm_spec(method.name, {}).complete_options(options)
    config = method.make_hyperparameter_record(options, num_clients=10)
    numbers = {name: f"{h.default:g}" for name, h in hyperparameters_of(config).items()}
    return completed | numbers


def collect_settings_by_protocol(
    method: Any, dataset: str = "fashion_mnist"
) -> dict[str, dict[str, Any]]:
    """Return a method's default settings on a data set.

    Args:
      method: the method's entry.
      dataset: name of the data set.

    Returns:
      By flag, the value of each protocol.
    """
    values_by_setting: dict[str, dict[str, Any]] = {}
    for protocol in PROTOCOLS:
        try:
            run = RunSpec(method.name, dataset=dataset, protocol=protocol).resolved()
        except ConfigError:  # the protocol lacks settings of the method
            continue
        names = (*_LISTED_SETTINGS, *HYPERPARAMETER_SETTINGS)
        settings = {f"--{name.replace('_', '-')}": getattr(run, name) for name in names}
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


def format_by_protocol(
    values: Mapping[str, Any], default: Mapping[str, Any] = {}, *, first: str = ""
) -> str:
    """Return the values of all protocols as text.

    Args:
      values: values by protocol.
      default: values on the default data set, which are added in parentheses if they differ.
      first: one of these protocols, whose value begins the text, without the protocol's name.

    Returns:
      The values, each after the names of its protocols. A value that all protocols share has no
      names.
    """
    texts = {protocol: format_setting_value(value) for protocol, value in values.items()}
    for protocol in texts.keys() & default.keys():
        if values[protocol] != default[protocol]:
            text = format_setting_value(default[protocol])
            texts[protocol] += f" ({RunSpec.dataset} {text})"
    if len(texts) == len(PROTOCOLS) and len(set(texts.values())) == 1:
        return texts.popitem()[1]
    names: dict[str, list[str]] = {}
    for protocol, text in texts.items():
        names.setdefault(text, []).append(protocol)
    own_texts = [texts[first]] if first else []
    groups = [f"{', '.join(names[text])} {text}" for text in names if text not in own_texts]
    return "; ".join(own_texts + groups)


REGISTRIES: dict[str, tuple[Mapping[str, Any], Callable[[Any], Iterable[str]]]] = {
    "methods": (METHODS, _describe_method),
    "data sets": (DATASETS, lambda dataset: ()),
    "data sources": (SOURCES, _describe_source),
    "tasks": (TASKS, lambda kind: ()),
    "partitions": (PARTITIONS, _describe_partition),
    "skews": (ChainMap(SKEWS, _make_partition_skews()), _describe_skew),
    "systems": (SYSTEMS, functools.partial(_describe_kind, "system")),
    "attacks": (ATTACKS, functools.partial(_describe_kind, "attack")),
    "aggregations": (AGGREGATIONS, functools.partial(_describe_kind, "aggregation")),
    "privacy": (PRIVACY, functools.partial(_describe_kind, "privacy")),
    "networks": (NETWORKS, _describe_network),
    "server's examples": (SERVER_SOURCES, _describe_server_source),
    "compressors": (COMPRESSORS, functools.partial(_describe_kind, "compression")),
    "metrics": (METRICS, lambda metric: ()),
    "local optimizers": (OPTIMIZERS, _describe_optimizer),
    "learning rate schedules": (LR_SCHEDULES, _describe_schedule),
}
"""Registry and function that describes the options of an entry, by title."""
