"""From the settings that a user gives to those of a run: one layer after the other.

method and protocol -> what they say of everything -> partition -> network -> server's data -> local
tests -> options -> numbers. Each layer takes the run as the last one left it, fills what it knows,
checks it, and leaves unsaid what goes without saying: equal runs have equal settings, and one name.
"""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, get_origin

from fedjax_het.algorithms import METHODS, Entry, bases, entry_of
from fedjax_het.algorithms.pretraining import PRETRAINING_NUMBERS
from fedjax_het.common.errors import is_whole, named_within, require, require_name, written_as
from fedjax_het.common.records import Number, checked, field_types, number, stored
from fedjax_het.common.registry import Registry
from fedjax_het.data import (
    DATASETS,
    NORMALISATIONS,
    PARTITIONS,
    SERVER_SOURCES,
    check_server_options,
    parameter_called,
)
from fedjax_het.engine.measured import chosen
from fedjax_het.engine.optimizers import OPTIMIZERS
from fedjax_het.engine.rate_schedules import SCHEDULES
from fedjax_het.nn import NETWORKS
from fedjax_het.settings.local_training import (
    numbers_of_schedules,
    optional_numbers_of,
    require_numbers,
    with_local_training,
)
from fedjax_het.settings.protocols import PROTOCOLS, protocol_values
from fedjax_het.settings.spec import (
    LOCAL_TRAINING,
    NETWORK_SETTINGS,
    PARTITION_SETTINGS,
    SERVER_DATA,
    RunSpec,
    of_use,
)

_CHOICES = {"optimizer_state": ("reset", "keep"), "averaging": ("uniform", "weighted")}
_REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": METHODS,
    "dataset": DATASETS,
    "model": NETWORKS,
    "partition": PARTITIONS,
    "server_data": SERVER_SOURCES,
}
USER = "user"  # the name of a data set, a network or an optimiser that is passed to the run itself


def resolve(given: RunSpec) -> RunSpec:
    """The same run with every default written out, and checked. Raises `ConfigError`."""
    given = entered(given)
    spec, entry, hp = _but_numbers(given)
    spec = _with_numbers(given, spec, entry, hp)
    with named_within("options", entry.option_names):
        entry.remarks(spec, entry)
    return spec


def takes_numbers(given: RunSpec, names: Iterable[str]) -> list[str]:
    """Those of these hyper-parameters that a run of these settings can have. Raises ConfigError."""
    names = list(names)
    spec, entry, _ = _but_numbers(entered(dataclasses.replace(given, hp=dict.fromkeys(names, 0.0))))
    known = {**_usual_numbers(spec, entry), **optional_numbers_of(spec)}
    return [name for name in names if name in known]


def _but_numbers(given: RunSpec) -> tuple[RunSpec, Entry, dict[str, Any]]:
    """-> (the run but for its hyper-parameters, its method, what its protocol says of these)."""
    entry = entry_of(given.algorithm, given.options)
    protocol = entry.protocol if given.protocol is None else given.protocol
    require_name("protocol", protocol, PROTOCOLS)
    settings, options, hp = protocol_values(protocol, entry, given.dataset, given.model)
    settings = of_use(given.algorithm, settings)
    usual = {name: settings.pop(name, None) for name in SERVER_DATA}
    usual["pretrain_epochs"] = settings.get("pretrain_epochs")
    # A protocol that is the method's own goes without saying.
    named = None if protocol == entry.protocol else protocol
    if given.local_steps is not None:
        needs = "nothing beside local_steps: clients go by epochs or by steps"
        require(given.local_epochs is None, "local_epochs", given.local_epochs, needs)
        settings.pop("local_epochs", None)
    spec = _filled(dataclasses.replace(given, protocol=named), settings)
    spec = _with_partition(given, spec)
    spec = _with_network(given, spec)
    spec = _with_server_data(given, spec, entry, usual)
    spec = _with_local_tests(given, spec, entry.scored, settings)
    _check(given, spec, entry)
    _check_held_out(spec, entry)
    spec = _with_measures(spec, entry)
    spec = with_local_training(spec)
    spec = _with_rules_to_stop(spec)
    return _with_options(given, spec, entry, options), entry, hp


def entered(given: RunSpec) -> RunSpec:
    """The same with every value of its annotation's kind and within its bounds, as JSON has it, and
    with names that something has. Raises `ConfigError`."""
    _check_names(given)
    values: dict[str, Any] = {}
    for name, kind in field_types(RunSpec).items():
        value = getattr(given, name)
        if get_origin(kind) is dict:
            words = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            require(words, name, value, "values by name, e.g. {} for none")
            values[name] = {key: stored(f"{name} {key}", each) for key, each in value.items()}
        else:
            values[name] = checked(name, value, kind)
    return dataclasses.replace(given, **values)


def _check_names(given: RunSpec) -> None:
    """Before anything else, that what is named exists: a misspelt name is what is wrong."""
    for name, registry in _REGISTRIES.items():
        value = getattr(given, name)
        own = isinstance(value, str) and value == USER and name in ("dataset", "model")
        if not own and (value is not None or name in ("algorithm", "dataset")):
            registry.require(value)
    optimizers = (*OPTIMIZERS, *([USER] if given.local_optimizer == USER else []))
    chosen: dict[str, Iterable[str]] = {
        "protocol": PROTOCOLS,
        "local_optimizer": optimizers,
        "lr_schedule": SCHEDULES,
        "lr_step_schedule": SCHEDULES,
    }
    if given.dataset in DATASETS.built_in:  # a user's own may have names of its own
        chosen["normalisation"] = NORMALISATIONS
    for name, valid in (chosen | _CHOICES).items():
        if getattr(given, name) is not None:
            require_name(name, getattr(given, name), valid)


def _filled(spec: RunSpec, settings: dict[str, Any]) -> RunSpec:
    """What is left out, as the protocol has it."""
    missing = {name: value for name, value in settings.items() if getattr(spec, name) is None}
    return dataclasses.replace(spec, **missing)


def _with_partition(given: RunSpec, spec: RunSpec) -> RunSpec:
    """Its partition, with the settings that are among its parameters; its seed."""
    partition = spec.partition or ""  # a protocol names one
    scheme = PARTITIONS.require(partition)
    settings: dict[str, Any] = {}
    called: dict[str, str] = {}  # a parameter's name, and that of the setting which is its value
    for setting in PARTITION_SETTINGS:
        parameter = parameter_called(partition, setting)
        if parameter is not None:
            called[parameter] = setting
            continue
        value = getattr(given, setting)
        able = ", ".join(name for name in PARTITIONS if parameter_called(name, setting))
        takers = f"no {setting}: the partition {partition} takes none ({able} do)"
        require(value is None, setting, value, takers)
        settings[setting] = None
    options = dict(given.partition_options)
    for name in {*called, *called.values()} & options.keys():
        setting = called.get(name, name)
        settings[setting] = _said_once(given, setting, options.pop(name), "partition_options")
    spec = dataclasses.replace(spec, partition_options=options, **settings)
    with names_of_partition(spec):
        found = scheme.checked(parameters_of_partition(spec))
    settings |= {called[name]: found[name] for name in called if name in found}
    options = {name: found[name] for name in options}
    seed = spec.seed if spec.partition_seed is None else spec.partition_seed
    return dataclasses.replace(spec, partition_seed=seed, partition_options=options, **settings)


def parameters_of_partition(spec: RunSpec) -> dict[str, Any]:
    """What a run's partition is made with, by the names of its parameters."""
    partition, given = spec.partition or "", spec.partition_arguments
    return {parameter_called(partition, name) or name: value for name, value in given.items()}


def names_of_partition(spec: RunSpec) -> AbstractContextManager[None]:
    """In here, messages call the partition's parameters what the run's settings do."""
    called = {name: parameter_called(spec.partition or "", name) for name in PARTITION_SETTINGS}
    settings = {parameter: name for name, parameter in called.items() if parameter}
    options = {name: f"partition_options {name}" for name in spec.partition_options}
    return written_as(settings | options)


def _said_once(given: RunSpec, setting: str, value: Any, where: str) -> Any:
    """The value of a setting that is also among a run's options. Raises `ConfigError` if the
    setting has another one."""
    other = getattr(given, setting)
    ok = other is None or other == value
    require(ok, setting, other, f"{value!r}, as {where} say, or only one of the two")
    return value


def _with_network(given: RunSpec, spec: RunSpec) -> RunSpec:
    """Its network's options, each where it is named: those that are settings under their own."""
    settings = dict(given.network_options)
    named = {
        name: _said_once(given, name, settings.pop(name), "network_options")
        for name in NETWORK_SETTINGS
        if name in settings
    }
    spec = dataclasses.replace(spec, network_options=settings, **named)
    if spec.model == USER:
        return spec
    with named_within("network_options", settings):
        found = NETWORKS.require(spec.model or "").checked(spec.model_options)
    options = {name: found.pop(name) for name in settings}
    return dataclasses.replace(spec, network_options=options, **found)


def _with_server_data(
    given: RunSpec, spec: RunSpec, entry: Entry, usual: dict[str, Any]
) -> RunSpec:
    """Its server's examples, where they have a use, checked; `usual` are the protocol's."""
    epochs, gaps = spec.pretrain_epochs, spec.gradient_gaps or None
    if epochs:
        needs = "none: the method has no global model to pretrain"
        require(entry.global_model, "pretrain_epochs", epochs, needs)
    elif not usual["pretrain_epochs"]:
        epochs = None  # none, where none is usual, goes without saying
    surveyed = entry.global_model or entry.surveys
    needs = "none: the method has no global model whose gradients could be measured"
    require(gaps is None or surveyed, "gradient_gaps", gaps, needs)
    if entry.server_data or epochs or (gaps and given.server_data):
        source = given.server_data or usual["server_data"] or "iid"
        usual_options = usual["server_options"] or {}
        usual_options = usual_options if source == (usual["server_data"] or "iid") else {}
        options = {**usual_options, **given.server_options}
        with named_within("server_options", {*options, *SERVER_SOURCES.require(source).options}):
            options = check_server_options(source, options)
    else:
        source, options = None, {}
        nothing = f"nothing: the server of {spec.algorithm} has no examples, unless it pretrains"
        for name in SERVER_DATA:
            require(getattr(given, name) in (None, {}), name, getattr(given, name), nothing)
    return dataclasses.replace(
        spec,
        server_data=source,
        server_options=options,
        pretrain_epochs=epochs,
        gradient_gaps=gaps,
    )


def _with_local_tests(
    given: RunSpec, spec: RunSpec, models: tuple[str, ...], usual: dict[str, Any]
) -> RunSpec:
    """Its local tests checked, and left unsaid where they are as without saying; `usual` are the
    protocol's settings."""
    own = models[0] != "global"
    tested = own if spec.local_tests is None else spec.local_tests
    scored, count = spec.scored, spec.test_per_client
    if not tested:
        require(not own, "local_tests", False, f"True: {spec.algorithm} has no other test")
        for name in ("scored", "test_per_client"):
            value = getattr(given, name)
            require(value is None, name, value, "nothing, or local_tests = True")
        scored = count = None
    if scored is not None:
        require_name("scored", scored, models)
    stated = None if own else True if tested else False if usual.get("local_tests") else None
    unsaid = scored == models[0] and "scored" not in usual
    return dataclasses.replace(
        spec,
        local_tests=stated,
        scored=None if unsaid else scored,
        test_per_client=count,
    )


def _with_measures(spec: RunSpec, entry: Entry) -> RunSpec:
    """What it measures besides, each name as it is, in the order given; checked."""
    found = chosen(spec.measures)
    for measure in found:
        ok = measure.sums is None or entry.global_model
        lacks = f"none of outputs: {spec.algorithm} has no global model that is tested"
        require(ok, "measures", measure.name, lacks)
        ok = measure.of_clients is None or spec.tests_clients
        require(ok, "measures", measure.name, "local_tests = True beside it, or another measure")
        ok = not measure.of_uploads or entry.trains_locally
        condense = f"none of changes of the model: clients of {spec.algorithm} send none"
        require(ok, "measures", measure.name, condense)
    names = ", ".join(measure.name for measure in found)
    return dataclasses.replace(spec, measures=names or None)


def _with_rules_to_stop(spec: RunSpec) -> RunSpec:
    """A least gain of 0 goes without saying. Raises `ConfigError` for one that nothing looks at."""
    nobody = "nothing, or patience >= 1"
    require(not spec.min_gain or spec.patience is not None, "min_gain", spec.min_gain, nobody)
    return dataclasses.replace(spec, min_gain=spec.min_gain or None)


def _check_held_out(spec: RunSpec, entry: Entry) -> None:
    """That there is a model for clients that take no part, and something to tune it by."""
    held_out, epochs = spec.held_out_clients, spec.held_out_epochs
    lacks = f"none: {spec.algorithm} has no global model that could be scored on them"
    require(held_out is None or entry.global_model, "held_out_clients", held_out, lacks)
    nobody = "nothing, or held_out_clients >= 1"
    require(epochs is None or held_out is not None, "held_out_epochs", epochs, nobody)
    condense = f"0: clients of {spec.algorithm} condense their data instead of training"
    require(not epochs or entry.trains_locally, "held_out_epochs", epochs, condense)


def _with_options(given: RunSpec, spec: RunSpec, entry: Entry, usual: dict[str, Any]) -> RunSpec:
    """Its method's choices, all of them; the usual base goes without saying."""
    named = {
        name: value
        for name, value in _stated(usual, spec, entry).items()
        if name in entry.option_names
    }
    chosen = {**named, **given.options}
    base = chosen.pop("base", None)
    for name in given.options:
        require_name("options", name, entry.option_names)
    with named_within("options", entry.option_names):
        options = entry.fill(chosen)
    if base not in (None, *bases(entry)[:1]):
        options["base"] = base
    return dataclasses.replace(spec, options=options)


def _with_numbers(given: RunSpec, spec: RunSpec, entry: Entry, said: dict[str, Any]) -> RunSpec:
    """Its numeric hyper-parameters: the method's, what the protocol says, what is given."""
    usual = _usual_numbers(spec, entry)
    known = {**optional_numbers_of(spec), **usual}
    for name in given.hp:
        require_name("hp", name, known)
    require_numbers(spec, given.hp)
    hp = {name: numeric.default for name, numeric in usual.items()}
    hp.update({name: v for name, v in _stated(said, spec, entry).items() if name in usual})
    hp.update(given.hp)
    hp = {name: number(f"hp {name}", value, known[name].bounds) for name, value in hp.items()}
    return dataclasses.replace(spec, hp=hp)


def _usual_numbers(spec: RunSpec, entry: Entry) -> dict[str, Number]:
    """Those that such a run always has."""
    known = entry.hyper_parameters(spec.local_optimizer, spec.options, spec.num_clients or 1)
    pretraining = PRETRAINING_NUMBERS if spec.pretrain_epochs else {}
    return {**known, **numbers_of_schedules(spec), **pretraining}


def _stated(usual: dict[str, Any], spec: RunSpec, entry: Entry) -> dict[str, Any]:
    """What rules say of this run, without what they leave to the method, see `Rule`."""
    said = {
        name: value(vars(spec), entry) if callable(value) else value
        for name, value in usual.items()
    }
    return {name: value for name, value in said.items() if value is not None}


def _check(given: RunSpec, spec: RunSpec, entry: Entry) -> None:
    if not entry.trains_locally:
        nothing = f"nothing: clients of {spec.algorithm} condense their data"
        for name in LOCAL_TRAINING:
            require(getattr(given, name) in (None, {}), name, getattr(given, name), nothing)
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        if value is None and name in LOCAL_TRAINING:
            continue
        require(is_whole(value, 1), name, value, "a whole number >= 1")
    clients, least = spec.num_clients, entry.min_clients
    enough = clients is not None and clients >= least
    require(enough, "num_clients", clients, f"at least {least}: {spec.algorithm}")
    if entry.trains_locally:
        require(spec.local_optimizer is not None, "local_optimizer", None, "a name")
