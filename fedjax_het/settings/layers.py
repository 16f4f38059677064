"""From the settings that a user gives to those of a run: one layer after the other.

method and protocol -> what they say of everything -> partition -> network -> server's data -> local
tests -> options -> numbers. Each layer takes the run as the last one left it, fills what it knows,
checks it, and leaves unsaid what goes without saying: equal runs have equal settings, and one name.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, get_origin

from fedjax_het.algorithms import METHODS, Entry, bases, entry_of
from fedjax_het.algorithms.pretraining import PRETRAINING_NUMBERS
from fedjax_het.common.errors import is_whole, require, require_name
from fedjax_het.common.records import checked, field_types, number
from fedjax_het.common.signatures import check_given
from fedjax_het.data import (
    DATASETS,
    PARTITIONS,
    SERVER_SOURCES,
    check_server_options,
    parameter_called,
)
from fedjax_het.engine.local import OPTIMIZERS
from fedjax_het.nn import NETWORKS, network_options
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
USER = "user"  # the name of a data set or a network that is passed to the run itself


def resolve(given: RunSpec) -> RunSpec:
    """The same run with every default written out, and checked. Raises `ConfigError`."""
    _check_names(given)
    _check_kinds(given)
    entry = entry_of(given.algorithm, given.options)
    protocol = entry.protocol if given.protocol is None else given.protocol
    require_name("protocol", protocol, PROTOCOLS)
    if given.dataset != USER:
        DATASETS.require(given.dataset)
    settings, options, hp = protocol_values(protocol, entry, given.dataset, given.model)
    settings = of_use(given.algorithm, settings)
    usual = {name: settings.pop(name, None) for name in SERVER_DATA}
    usual["pretrain_epochs"] = settings.get("pretrain_epochs")
    # A protocol that is the method's own goes without saying.
    named = None if protocol == entry.protocol else protocol
    spec = _filled(dataclasses.replace(given, protocol=named), settings)
    spec = _with_partition(given, spec)
    spec = _with_network(given, spec)
    spec = _with_server_data(given, spec, entry, usual)
    spec = _with_local_tests(given, spec, entry.scored, settings)
    _check(given, spec, entry)
    spec = _with_options(given, spec, entry, options)
    spec = _with_numbers(given, spec, entry, hp)
    entry.remarks(spec, entry)
    return spec


def _check_names(given: RunSpec) -> None:
    """Before anything else, that what is named exists: a misspelt name is what is wrong."""
    METHODS.require(given.algorithm)
    if given.dataset != USER:
        DATASETS.require(given.dataset)
    if given.model not in (None, USER):
        NETWORKS.require(given.model or "")
    if given.partition is not None:
        PARTITIONS.require(given.partition)
    if given.server_data is not None:
        SERVER_SOURCES.require(given.server_data)
    chosen: dict[str, Iterable[str]] = {"protocol": PROTOCOLS, "local_optimizer": OPTIMIZERS}
    for name, valid in (chosen | _CHOICES).items():
        if getattr(given, name) is not None:
            require_name(name, getattr(given, name), valid)


def _check_kinds(given: RunSpec) -> None:
    """That every setting is of its annotation's kind and within its bounds."""
    for name, kind in field_types(RunSpec).items():
        value = getattr(given, name)
        if get_origin(kind) is dict:
            words = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            require(words, name, value, "values by name, e.g. {} for none")
        elif name == "test_per_client":
            ok = value in (None, "all") if isinstance(value, str | None) else is_whole(value, 1)
            require(ok, name, value, "a whole number >= 1, or 'all'")
        else:
            checked(name, value, kind)


def _filled(spec: RunSpec, settings: dict[str, Any]) -> RunSpec:
    """What is left out, as the protocol has it."""
    missing = {name: value for name, value in settings.items() if getattr(spec, name) is None}
    return dataclasses.replace(spec, **missing)


def _with_partition(given: RunSpec, spec: RunSpec) -> RunSpec:
    """Its partition, with the settings that are among its parameters; its seed."""
    partition = spec.partition or ""  # a protocol names one
    PARTITIONS.require(partition)
    unused: dict[str, Any] = {}
    for setting in PARTITION_SETTINGS:
        if parameter_called(partition, setting) is not None:
            continue
        value = getattr(given, setting)
        able = ", ".join(name for name in PARTITIONS if parameter_called(name, setting))
        takers = f"no {setting}: the partition {partition} takes none ({able} do)"
        require(value is None, setting, value, takers)
        unused[setting] = None
    seed = spec.seed if spec.partition_seed is None else spec.partition_seed
    return dataclasses.replace(spec, partition_seed=seed, **unused)


def _with_network(given: RunSpec, spec: RunSpec) -> RunSpec:
    """Its network's options, each where it is named: those that are settings under their own."""
    settings = {name: value for name, value in given.network_options.items()}
    named = {name: settings.pop(name) for name in NETWORK_SETTINGS if name in settings}
    for name, value in named.items():
        other = getattr(given, name)
        ok = other is None or other == value
        require(ok, name, other, f"{value!r}, as network_options say, or only one of the two")
    spec = dataclasses.replace(spec, network_options=settings, **named)
    if spec.model == USER:
        return spec
    model = spec.model or ""  # a protocol names one
    NETWORKS.require(model)
    check_given(f"network {model!r}", spec.model_options, network_options(model), "option")
    return spec


def _with_server_data(
    given: RunSpec, spec: RunSpec, entry: Entry, usual: dict[str, Any]
) -> RunSpec:
    """Its server's examples, where they have a use, checked; `usual` are the protocol's."""
    for name in ("pretrain_epochs", "gradient_gaps"):
        value = getattr(spec, name)
        require(value is None or is_whole(value, 0), name, value, "a whole number >= 0")
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
        options = check_server_options(source, {**usual_options, **given.server_options})
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
    ok = count in (None, "all") or is_whole(count, 1)
    require(ok, "test_per_client", count, "a whole number >= 1, or 'all'")
    stated = None if own else True if tested else False if usual.get("local_tests") else None
    unsaid = scored == models[0] and "scored" not in usual
    return dataclasses.replace(
        spec,
        local_tests=stated,
        scored=None if unsaid else scored,
        test_per_client=count,
    )


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
        require_name("option", name, entry.option_names)
    options = entry.fill(chosen)
    if base not in (None, *bases(entry)[:1]):
        options["base"] = base
    return dataclasses.replace(spec, options=options)


def _with_numbers(given: RunSpec, spec: RunSpec, entry: Entry, usual: dict[str, Any]) -> RunSpec:
    """Its numeric hyper-parameters: the method's, what the protocol says, what is given."""
    known = entry.hyper_parameters(spec.local_optimizer, spec.options, spec.num_clients or 1)
    if spec.pretrain_epochs:
        known = {**known, **PRETRAINING_NUMBERS}
    for name in given.hp:
        require_name("hp", name, known)
    hp = {name: numeric.default for name, numeric in known.items()}
    hp.update({name: v for name, v in _stated(usual, spec, entry).items() if name in known})
    hp.update(given.hp)
    hp = {name: number(f"hp {name}", value, known[name].bounds) for name, value in hp.items()}
    return dataclasses.replace(spec, hp=hp)


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
            require(getattr(given, name) is None, name, getattr(given, name), nothing)
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        if value is None and name in LOCAL_TRAINING:
            continue
        require(is_whole(value, 1), name, value, "a whole number >= 1")
    clients, least = spec.num_clients, entry.min_clients
    enough = clients is not None and clients >= least
    require(enough, "num_clients", clients, f"at least {least}: {spec.algorithm}")
    if entry.trains_locally:
        require_name("local_optimizer", spec.local_optimizer or "", OPTIMIZERS)
