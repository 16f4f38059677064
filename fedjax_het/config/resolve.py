"""Resolution of a run: from the settings that a user sets to the settings of the run.

Settings are filled in and checked in layers: method and protocol, partition, network, the server's
data, client tests, local training, options, hyper-parameters. Each layer drops settings that equal
their defaults, so that equal runs have equal settings and one digest.
"""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, get_origin

from fedjax_het.algorithms import METHODS, AlgorithmSpec, get_algorithm_spec, get_possible_bases
from fedjax_het.algorithms.builders import PRETRAINING_HYPERPARAMETERS
from fedjax_het.config.local_training import (
    lr_schedule_hyperparameters,
    optional_hyperparameters,
    require_schedule_hyperparameters,
    resolve_local_training,
)
from fedjax_het.config.protocols import PROTOCOLS, get_protocol_defaults
from fedjax_het.config.run_spec import (
    LOCAL_TRAINING_SETTINGS,
    NETWORK_SETTINGS,
    PARTITION_SETTINGS,
    SERVER_DATA_SETTINGS,
    ResolvedRunSpec,
    RunSpec,
    drop_unused_settings,
    mark_as_resolved,
)
from fedjax_het.core.lr_schedules import LR_SCHEDULES
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.data import (
    DATASETS,
    NORMALIZATIONS,
    PARTITIONS,
    SERVER_SOURCES,
    find_parameter_name,
    resolve_server_options,
)
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.nn import NETWORKS
from fedjax_het.utils.config import (
    HyperParameter,
    field_types,
    to_json_value,
    validate,
    validate_number,
)
from fedjax_het.utils.errors import (
    display_names,
    display_names_within,
    is_integer_at_least,
    require,
    require_name,
)
from fedjax_het.utils.registry import Registry

_CHOICE_SETTINGS = {"optimizer_state": ("reset", "keep"), "averaging": ("uniform", "weighted")}
_REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": METHODS,
    "dataset": DATASETS,
    "model": NETWORKS,
    "partition": PARTITIONS,
    "server_data": SERVER_SOURCES,
}
USER_PROVIDED = (
    "user"  # the name of a data set, a network or an optimiser that is passed to the run itself
)


def resolve(raw_spec: RunSpec) -> ResolvedRunSpec:
    """Return a run with every default written out, after checking every setting.

    Args:
      raw_spec: settings, of which None stands for a default of the method's paper or protocol.

    Returns:
      The same run; a run that is resolved already is returned as it is.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    if isinstance(raw_spec, ResolvedRunSpec):
        return raw_spec
    raw_spec = validate_fields(raw_spec)
    spec, method, hp = _resolve_except_hyperparameters(raw_spec)
    spec = _resolve_hyperparameters(raw_spec, spec, method, hp)
    with display_names_within("options", method.option_names):
        method.settings_warnings(spec, method)
    return mark_as_resolved(spec)


def supported_hyperparameters(raw_spec: RunSpec, names: Iterable[str]) -> list[str]:
    """Return the names among these of hyper-parameters that such a run can have.

    Args:
      raw_spec: settings of a run, whose hyper-parameters are ignored.
      names: names of hyper-parameters.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    names = list(names)
    spec, method, _ = _resolve_except_hyperparameters(
        validate_fields(dataclasses.replace(raw_spec, hp=dict.fromkeys(names, 0.0)))
    )
    supported = {**_default_hyperparameters(spec, method), **optional_hyperparameters(spec)}
    return [name for name in names if name in supported]


def _resolve_except_hyperparameters(
    raw_spec: RunSpec,
) -> tuple[RunSpec, AlgorithmSpec, dict[str, Any]]:
    """Return the run resolved except for `hp`, its method, and the `hp` of its protocol."""
    method = get_algorithm_spec(raw_spec.algorithm, raw_spec.options)
    protocol = method.protocol if raw_spec.protocol is None else raw_spec.protocol
    require_name("protocol", protocol, PROTOCOLS)
    settings, options, hp = get_protocol_defaults(
        protocol, method, raw_spec.dataset, raw_spec.model
    )
    settings = drop_unused_settings(raw_spec.algorithm, settings)
    protocol_defaults = {name: settings.pop(name, None) for name in SERVER_DATA_SETTINGS}
    protocol_defaults["pretrain_epochs"] = settings.get("pretrain_epochs")
    # The method's own protocol is dropped, as every default.
    explicit_protocol = None if protocol == method.protocol else protocol
    if raw_spec.local_steps is not None:
        expected = "nothing beside local_steps: clients go by epochs or by steps"
        require(raw_spec.local_epochs is None, "local_epochs", raw_spec.local_epochs, expected)
        settings.pop("local_epochs", None)
    spec = _fill_missing(dataclasses.replace(raw_spec, protocol=explicit_protocol), settings)
    spec = _resolve_partition(raw_spec, spec)
    spec = _resolve_network(raw_spec, spec)
    spec = _resolve_server_data(raw_spec, spec, method, protocol_defaults)
    spec = _resolve_client_tests(raw_spec, spec, method.evaluated_models, settings)
    _check_training_settings(raw_spec, spec, method)
    _check_held_out(spec, method)
    spec = _resolve_metrics(spec, method)
    spec = resolve_local_training(spec)
    spec = _resolve_early_stopping(spec)
    return _resolve_options(raw_spec, spec, method, options), method, hp


def validate_fields(raw_spec: RunSpec) -> RunSpec:
    """Check every setting by its annotation, and that names exist; return values as in JSON.

    Raises:
      ConfigError: if a value has another type, is out of its bounds, or is an unknown name.
    """
    _check_names(raw_spec)
    values: dict[str, Any] = {}
    for name, annotation in field_types(RunSpec).items():
        value = getattr(raw_spec, name)
        if get_origin(annotation) is dict:
            has_string_keys = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            require(has_string_keys, name, value, "values by name, e.g. {} for none")
            values[name] = {
                key: to_json_value(f"{name} {key}", item) for key, item in value.items()
            }
        else:
            values[name] = validate(name, value, annotation)
    return dataclasses.replace(raw_spec, **values)


def _check_names(raw_spec: RunSpec) -> None:
    """Check the names before anything else, so that a misspelt name is what is reported."""
    for name, registry in _REGISTRIES.items():
        value = getattr(raw_spec, name)
        is_user_object = (
            isinstance(value, str) and value == USER_PROVIDED and name in ("dataset", "model")
        )
        if not is_user_object and (value is not None or name in ("algorithm", "dataset")):
            registry.require(value)
    optimizers = (
        *OPTIMIZERS,
        *([USER_PROVIDED] if raw_spec.local_optimizer == USER_PROVIDED else []),
    )
    valid_names: dict[str, Iterable[str]] = {
        "protocol": PROTOCOLS,
        "local_optimizer": optimizers,
        "lr_schedule": LR_SCHEDULES,
        "lr_step_schedule": LR_SCHEDULES,
    }
    if raw_spec.dataset in DATASETS.built_in:  # a user's own may have names of its own
        valid_names["normalisation"] = NORMALIZATIONS
    for name, valid in (valid_names | _CHOICE_SETTINGS).items():
        if getattr(raw_spec, name) is not None:
            require_name(name, getattr(raw_spec, name), valid)


def _fill_missing(spec: RunSpec, settings: dict[str, Any]) -> RunSpec:
    """Fill the settings that are None from the protocol."""
    missing = {name: value for name, value in settings.items() if getattr(spec, name) is None}
    return dataclasses.replace(spec, **missing)


def _resolve_partition(raw_spec: RunSpec, spec: RunSpec) -> RunSpec:
    """Resolve the partition, the settings that are its parameters, and its seed."""
    partition = spec.partition or ""  # a protocol names one
    scheme = PARTITIONS.require(partition)
    settings: dict[str, Any] = {}
    setting_by_parameter: dict[
        str, str
    ] = {}  # a parameter's name, and that of the setting which is its value
    for setting in PARTITION_SETTINGS:
        parameter = find_parameter_name(partition, setting)
        if parameter is not None:
            setting_by_parameter[parameter] = setting
            continue
        value = getattr(raw_spec, setting)
        supporting_partitions = ", ".join(
            name for name in PARTITIONS if find_parameter_name(name, setting)
        )
        expected = (
            f"no {setting}: the partition {partition} takes none ({supporting_partitions} do)"
        )
        require(value is None, setting, value, expected)
        settings[setting] = None
    options = dict(raw_spec.partition_options)
    for name in {*setting_by_parameter, *setting_by_parameter.values()} & options.keys():
        setting = setting_by_parameter.get(name, name)
        settings[setting] = _require_consistent(
            raw_spec, setting, options.pop(name), "partition_options"
        )
    spec = dataclasses.replace(spec, partition_options=options, **settings)
    with display_partition_names(spec):
        arguments = scheme.validate_parameters(get_partition_arguments(spec))
    settings |= {
        setting_by_parameter[name]: arguments[name]
        for name in setting_by_parameter
        if name in arguments
    }
    options = {name: arguments[name] for name in options}
    seed = spec.seed if spec.partition_seed is None else spec.partition_seed
    return dataclasses.replace(spec, partition_seed=seed, partition_options=options, **settings)


def get_partition_arguments(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments of a run's partition by the names of its parameters."""
    partition, settings = spec.partition or "", spec.partition_arguments
    return {find_parameter_name(partition, name) or name: value for name, value in settings.items()}


def display_partition_names(spec: RunSpec) -> AbstractContextManager[None]:
    """Return a context in which messages name the partition's parameters as the settings do."""
    parameters = {
        name: find_parameter_name(spec.partition or "", name) for name in PARTITION_SETTINGS
    }
    settings = {parameter: name for name, parameter in parameters.items() if parameter}
    options = {name: f"partition_options {name}" for name in spec.partition_options}
    return display_names(settings | options)


def _require_consistent(raw_spec: RunSpec, setting: str, value: Any, options_name: str) -> Any:
    """Return the value of a setting that is also among a run's options.

    Raises:
      ConfigError: if the setting has another value.
    """
    setting_value = getattr(raw_spec, setting)
    ok = setting_value is None or setting_value == value
    require(ok, setting, setting_value, f"{value!r}, as {options_name} say, or only one of the two")
    return value


def _resolve_network(raw_spec: RunSpec, spec: RunSpec) -> RunSpec:
    """Resolve the network's options; options that are settings move to their settings."""
    settings = dict(raw_spec.network_options)
    network_settings = {
        name: _require_consistent(raw_spec, name, settings.pop(name), "network_options")
        for name in NETWORK_SETTINGS
        if name in settings
    }
    spec = dataclasses.replace(spec, network_options=settings, **network_settings)
    if spec.model == USER_PROVIDED:
        return spec
    with display_names_within("network_options", settings):
        network_arguments = NETWORKS.require(spec.model or "").validate_options(spec.model_options)
    options = {name: network_arguments.pop(name) for name in settings}
    return dataclasses.replace(spec, network_options=options, **network_arguments)


def _resolve_server_data(
    raw_spec: RunSpec, spec: RunSpec, method: AlgorithmSpec, protocol_defaults: dict[str, Any]
) -> RunSpec:
    """Resolve the source of the server's examples, where the run uses any."""
    epochs, gaps = spec.pretrain_epochs, spec.gradient_gaps or None
    if epochs:
        expected = "none: the method has no global model to pretrain"
        require(method.has_global_model, "pretrain_epochs", epochs, expected)
    elif not protocol_defaults["pretrain_epochs"]:
        epochs = None  # none, where none is usual, goes without saying
    has_gradients = method.has_global_model or method.has_diagnostics
    expected = "none: the method has no global model whose gradients could be measured"
    require(gaps is None or has_gradients, "gradient_gaps", gaps, expected)
    if method.requires_server_examples or epochs or (gaps and raw_spec.server_data):
        source = raw_spec.server_data or protocol_defaults["server_data"] or "iid"
        default_options = protocol_defaults["server_options"] or {}
        default_options = (
            default_options if source == (protocol_defaults["server_data"] or "iid") else {}
        )
        options = {**default_options, **raw_spec.server_options}
        with display_names_within(
            "server_options", {*options, *SERVER_SOURCES.require(source).options}
        ):
            options = resolve_server_options(source, options)
    else:
        source, options = None, {}
        no_use_text = (
            f"nothing: the server of {spec.algorithm} has no examples, unless it pretrains"
        )
        for name in SERVER_DATA_SETTINGS:
            require(
                getattr(raw_spec, name) in (None, {}), name, getattr(raw_spec, name), no_use_text
            )
    return dataclasses.replace(
        spec,
        server_data=source,
        server_options=options,
        pretrain_epochs=epochs,
        gradient_gaps=gaps,
    )


def _resolve_client_tests(
    raw_spec: RunSpec, spec: RunSpec, models: tuple[str, ...], protocol_settings: dict[str, Any]
) -> RunSpec:
    """Check the settings of clients' tests, and drop those that equal their defaults."""
    is_personalized = models[0] != "global"
    has_client_tests = is_personalized if spec.local_tests is None else spec.local_tests
    scored, test_size = spec.scored, spec.test_per_client
    if not has_client_tests:
        require(
            not is_personalized, "local_tests", False, f"True: {spec.algorithm} has no other test"
        )
        for name in ("scored", "test_per_client"):
            value = getattr(raw_spec, name)
            require(value is None, name, value, "nothing, or local_tests = True")
        scored = test_size = None
    if scored is not None:
        require_name("scored", scored, models)
    local_tests = (
        None
        if is_personalized
        else True
        if has_client_tests
        else False
        if protocol_settings.get("local_tests")
        else None
    )
    is_default = scored == models[0] and "scored" not in protocol_settings
    return dataclasses.replace(
        spec,
        local_tests=local_tests,
        scored=None if is_default else scored,
        test_per_client=test_size,
    )


def _resolve_metrics(spec: RunSpec, method: AlgorithmSpec) -> RunSpec:
    """Check that the run can compute its further metrics; write their names in their order."""
    metrics = parse_metrics(spec.measures)
    for metric in metrics:
        ok = metric.sums is None or method.has_global_model
        no_global_model_text = (
            f"none of outputs: {spec.algorithm} has no global model that is tested"
        )
        require(ok, "measures", metric.name, no_global_model_text)
        ok = metric.from_client_accuracy is None or spec.has_client_tests
        require(ok, "measures", metric.name, "local_tests = True beside it, or another measure")
        ok = not metric.update_metric_names or method.trains_locally
        no_updates_text = f"none of changes of the model: clients of {spec.algorithm} send none"
        require(ok, "measures", metric.name, no_updates_text)
    names = ", ".join(measure.name for measure in metrics)
    return dataclasses.replace(spec, measures=names or None)


def _resolve_early_stopping(spec: RunSpec) -> RunSpec:
    """Check that `min_gain` has a use, and drop 0, its default."""
    expected = "nothing, or patience >= 1"
    require(not spec.min_gain or spec.patience is not None, "min_gain", spec.min_gain, expected)
    return dataclasses.replace(spec, min_gain=spec.min_gain or None)


def _check_held_out(spec: RunSpec, method: AlgorithmSpec) -> None:
    """Check that the method has a model for held-out clients, and can fine-tune it."""
    held_out, epochs = spec.held_out_clients, spec.held_out_epochs
    no_global_model_text = (
        f"none: {spec.algorithm} has no global model that could be scored on them"
    )
    require(
        held_out is None or method.has_global_model,
        "held_out_clients",
        held_out,
        no_global_model_text,
    )
    expected = "nothing, or held_out_clients >= 1"
    require(epochs is None or held_out is not None, "held_out_epochs", epochs, expected)
    no_training_text = f"0: clients of {spec.algorithm} condense their data instead of training"
    require(not epochs or method.trains_locally, "held_out_epochs", epochs, no_training_text)


def _resolve_options(
    raw_spec: RunSpec, spec: RunSpec, method: AlgorithmSpec, protocol_options: dict[str, Any]
) -> RunSpec:
    """Write out all options of the method; the default base is dropped."""
    applicable_options = {
        name: value
        for name, value in _evaluate_rule_values(protocol_options, spec, method).items()
        if name in method.option_names
    }
    option_values = {**applicable_options, **raw_spec.options}
    base = option_values.pop("base", None)
    for name in raw_spec.options:
        require_name("options", name, method.option_names)
    with display_names_within("options", method.option_names):
        options = method.complete_options(option_values)
    if base not in (None, *get_possible_bases(method)[:1]):
        options["base"] = base
    return dataclasses.replace(spec, options=options)


def _resolve_hyperparameters(
    raw_spec: RunSpec, spec: RunSpec, method: AlgorithmSpec, protocol_hp: dict[str, Any]
) -> RunSpec:
    """Write out all hyper-parameters: set by the user, by the protocol, or by the method."""
    defaults = _default_hyperparameters(spec, method)
    supported = {**optional_hyperparameters(spec), **defaults}
    for name in raw_spec.hp:
        require_name("hp", name, supported)
    require_schedule_hyperparameters(spec, raw_spec.hp)
    hp = {name: hyperparameter.default for name, hyperparameter in defaults.items()}
    hp.update(
        {
            name: v
            for name, v in _evaluate_rule_values(protocol_hp, spec, method).items()
            if name in defaults
        }
    )
    hp.update(raw_spec.hp)
    hp = {
        name: validate_number(f"hp {name}", value, supported[name].bounds)
        for name, value in hp.items()
    }
    return dataclasses.replace(spec, hp=hp)


def _default_hyperparameters(spec: RunSpec, method: AlgorithmSpec) -> dict[str, HyperParameter]:
    """Return the hyper-parameters that such a run always has."""
    method_hyperparameters = method.collect_hyperparameters(
        spec.local_optimizer, spec.options, spec.num_clients or 1
    )
    pretraining = PRETRAINING_HYPERPARAMETERS if spec.pretrain_epochs else {}
    return {**method_hyperparameters, **lr_schedule_hyperparameters(spec), **pretraining}


def _evaluate_rule_values(
    rule_values: dict[str, Any], spec: RunSpec, method: AlgorithmSpec
) -> dict[str, Any]:
    """Evaluate a protocol's rules for this run, see `DefaultsRule`; None leaves it to the method."""
    values = {
        name: value(vars(spec), method) if callable(value) else value
        for name, value in rule_values.items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_training_settings(raw_spec: RunSpec, spec: RunSpec, method: AlgorithmSpec) -> None:
    if not method.trains_locally:
        no_training_text = f"nothing: clients of {spec.algorithm} condense their data"
        for name in LOCAL_TRAINING_SETTINGS:
            require(
                getattr(raw_spec, name) in (None, {}),
                name,
                getattr(raw_spec, name),
                no_training_text,
            )
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        if value is None and name in LOCAL_TRAINING_SETTINGS:
            continue
        require(is_integer_at_least(value, 1), name, value, "a whole number >= 1")
    clients, min_clients = spec.num_clients, method.min_clients
    has_enough_clients = clients is not None and clients >= min_clients
    require(has_enough_clients, "num_clients", clients, f"at least {min_clients}: {spec.algorithm}")
    if method.trains_locally:
        require(spec.local_optimizer is not None, "local_optimizer", None, "a name")
