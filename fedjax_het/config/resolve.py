"""Resolution of a run: settings of the user, completed by defaults and validated.

The layers are method and protocol, partition, network, server data, client tests, local training,
options and hyperparameters. Each layer drops settings that equal their defaults, so that equal runs
have equal settings and one digest.
"""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Annotated, Any, get_origin

from fedjax_het.aggregation import AGGREGATION_SETTING, Bucketing, RobustAggregation
from fedjax_het.algorithms import METHODS, AlgorithmSpec, get_algorithm_spec, get_possible_bases
from fedjax_het.algorithms.pretraining import PRETRAINING_HYPERPARAMETERS
from fedjax_het.attacks import ATTACK_SETTING
from fedjax_het.compression import format_compression, parse_compression
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.config.protocols import (
    OWN_PROTOCOL,
    PROTOCOLS,
    choose_protocol,
    get_protocol_defaults,
)
from fedjax_het.config.settings import (
    HYPERPARAMETER_SETTINGS,
    LOCAL_TRAINING_SETTINGS,
    NETWORK_SETTINGS,
    PARTITION_SETTINGS,
    SERVER_DATA_SETTINGS,
    SETTINGS_BY_HYPERPARAMETER,
    RunSettings,
    drop_unused_settings,
    merge_hyperparameters,
    separate_hyperparameters,
    update_settings,
)
from fedjax_het.core import lr_schedules
from fedjax_het.core.lr_schedules import LR_SCHEDULES, ROUND_PREFIX, STEP_PREFIX
from fedjax_het.core.optimizers import (
    LOCAL_PREFIX,
    LR_NAME,
    OPTIMIZERS,
    optional_optimizer_hyperparameters,
)
from fedjax_het.data import (
    DATASETS,
    NORMALIZATIONS,
    PARTITIONS,
    SERVER_SOURCES,
    find_parameter_name,
    resolve_server_options,
)
from fedjax_het.data.dataset_registry import is_read_by_package, require_dataset_name
from fedjax_het.metrics.registry import parse_metrics
from fedjax_het.nn import NETWORKS
from fedjax_het.privacy import PRIVACY_SETTING, ClientLevel, require_dp_accounting
from fedjax_het.skews import (
    PARTITION_SKEW_EXAMPLES,
    PARTITION_SKEWS,
    SKEW_SETTING,
    AmountSkew,
    DriftSkew,
    FeatureSkew,
    Skew,
)
from fedjax_het.systems import (
    SYSTEM_SETTING,
    AdaptiveSelection,
    Deadline,
    DeviceModel,
    Dropout,
    PartialWork,
    PoissonSampling,
    validate_combination,
)
from fedjax_het.systems.traces import TraceModel
from fedjax_het.utils.config import (
    HyperParameter,
    PositiveInt,
    field_types,
    to_json_value,
    validate,
)
from fedjax_het.utils.errors import (
    display_name,
    display_names,
    display_names_within,
    make_value_error,
    require,
    require_name,
)
from fedjax_het.utils.registry import LIST_COMMAND, get_list_depth

USER_PROVIDED = "user"
"""Name of a data set, network or optimizer that is passed to the run itself."""

# Arguments of `simulate` for objects of the user, by the settings that name such objects.
_OBJECT_ARGUMENTS = {"dataset": "dataset", "model": "network", "local_optimizer": "optimizer"}
# Settings whose defaults a partition in the setting `skew` replaces.
_LABEL_SKEW_SETTINGS = ("partition", *PARTITION_SETTINGS)
# Prefixes of the hyperparameters of schedules, by the settings that name the schedules.
_SCHEDULE_PREFIXES = {"lr_schedule": ROUND_PREFIX, "lr_step_schedule": STEP_PREFIX}
NAMES: dict[str, Collection[str]] = {
    "algorithm": METHODS,
    "dataset": DATASETS,
    "model": NETWORKS,
    "partition": PARTITIONS,
    "server_data": SERVER_SOURCES,
    "protocol": (*PROTOCOLS, OWN_PROTOCOL),
    "local_optimizer": OPTIMIZERS,
    "lr_schedule": LR_SCHEDULES,
    "lr_step_schedule": LR_SCHEDULES,
    "optimizer_state": ("reset", "keep"),
    "averaging": ("uniform", "weighted"),
}
"""Names that a setting may have, by setting."""


def resolve_settings(raw: RunSettings) -> RunSettings:
    """Return the settings of a run with every default written out, after validating every setting.

    Args:
      raw: settings, in which None stands for a default of the protocol or of the method.

    Returns:
      The settings, with all hyperparameters in `hp`; resolving them again changes nothing.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    with display_hyperparameter_settings(raw):
        return resolve_valid_settings(validate_settings(raw))


def resolve_valid_settings(settings: RunSettings) -> RunSettings:
    """Return settings that `validate_settings` returned, with every default written out.

    Args:
      settings: validated settings.

    Returns:
      The settings, with all hyperparameters in `hp`.

    Raises:
      ConfigError: if the settings cannot be combined.
    """
    settings = merge_hyperparameters(settings)
    spec = _resolve(settings)
    num_users = DATASETS[spec.dataset].num_users if spec.dataset in DATASETS else None
    has_user_clients = num_users is not None and PARTITIONS[spec.partition or ""].clients_are_users
    if settings.num_clients is None and num_users is not None and has_user_clients:
        num_clients = max(num_users - (spec.held_out_clients or 0), 1)
        spec = _resolve(update_settings(settings, num_clients=num_clients))
    return spec


def validate_run(raw: RunSettings) -> RunSettings:
    """Return the settings of a run as its user gave them, after validating their combination.

    A network or an optimizer may be passed to the run later. If the settings do not name it, its
    options and hyperparameters are not validated.

    Args:
      raw: settings, in which None stands for a default.

    Returns:
      The settings, with values as JSON stores them and learning rates as settings.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    with display_hyperparameter_settings(raw):
        raw = validate_settings(raw)
        _resolve(merge_hyperparameters(raw), are_objects_known=False)
    return separate_hyperparameters(raw)


def _resolve(raw: RunSettings, *, are_objects_known: bool = True) -> RunSettings:
    """Resolve validated settings; unless all objects are known, user objects may follow."""
    spec, method, hp = _resolve_except_hyperparameters(raw, are_objects_known)
    spec = _resolve_hyperparameters(raw, spec, method, hp, are_objects_known)
    with display_names_within("options", method.option_names):
        method.settings_warnings(spec, method)
    for name, annotation in field_types(RunSettings).items():
        if get_origin(annotation) is dict:
            for key, item in getattr(spec, name).items():
                to_json_value(f"{name} {key}", item)
    return RunSettings(**vars(spec))  # converts numbers of rules


def display_hyperparameter_settings(settings: RunSettings) -> AbstractContextManager[None]:
    """Return a context in which messages name hyperparameters by the settings that contain them."""
    names = HYPERPARAMETER_SETTINGS.items()
    given = {name: setting for setting, name in names if getattr(settings, setting) is not None}
    is_in_hp = settings.hp if isinstance(settings.hp, dict) else {}
    return display_names({f"hp {n}": setting for n, setting in given.items() if n not in is_in_hp})


def supported_hyperparameters(raw: RunSettings, names: Iterable[str]) -> list[str]:
    """Select the hyperparameters that a run can have.

    Args:
      raw: settings of the run, whose hyperparameters are ignored.
      names: names of hyperparameters.

    Returns:
      The supported names, in their order.

    Raises:
      ConfigError: if a setting cannot be used.
    """
    names = list(names)
    raw = validate_settings(update_settings(raw, hp=dict.fromkeys(names, 0.0)))
    spec, method, _ = _resolve_except_hyperparameters(raw)
    supported = {**_default_hyperparameters(spec, method), **optional_hyperparameters(spec)}
    return [name for name in names if name in supported]


def get_option_depth(raw: RunSettings, argument: str, name: str) -> int | None:
    """Return the number of nested lists in the values of an option.

    Args:
      raw: settings of the run; the values of its options are ignored.
      argument: setting that contains the option, such as "partition_options".
      name: name of the option.

    Returns:
      0 for a number or a text, 1 for a list of them; None for a user's network, whose options are
      unknown.

    Raises:
      ConfigError: if a name of the settings is unknown.
    """
    _check_names(raw)
    if argument in KIND_SETTINGS:
        return 0
    method = get_algorithm_spec(raw.algorithm, {})
    protocol = choose_protocol(raw.protocol, method)
    defaults, _, _ = get_protocol_defaults(protocol, method, raw.dataset, raw.model)
    owner: Any = method.options
    if argument == "partition_options":
        scheme = PARTITIONS.require(raw.partition or defaults["partition"])
        owner, name = scheme.split, find_parameter_name(scheme.name, name) or name
    elif argument == "server_options":
        default_source = defaults.get("server_data") or "iid"
        source = SERVER_SOURCES.require(raw.server_data or default_source)
        owner = source.draw or source.pool
    elif argument == "network_options":
        model = raw.model or defaults["model"]
        if model == USER_PROVIDED:
            return None
        owner = NETWORKS.require(model).make
    return get_list_depth(owner, name)


def _resolve_except_hyperparameters(
    raw: RunSettings, are_objects_known: bool = True
) -> tuple[RunSettings, AlgorithmSpec, dict[str, Any]]:
    """Resolve all settings except `hp`; return them, the method, and the `hp` of the protocol."""
    method = get_algorithm_spec(raw.algorithm, raw.options)
    protocol = choose_protocol(raw.protocol, method)
    settings, options, hp = get_protocol_defaults(protocol, method, raw.dataset, raw.model)
    settings = drop_unused_settings(raw.algorithm, settings)
    protocol_defaults = {name: settings.pop(name, None) for name in SERVER_DATA_SETTINGS}
    protocol_defaults["pretrain_epochs"] = settings.get("pretrain_epochs")
    if raw.local_steps is not None:
        expected = "no value: local_epochs cannot be combined with local_steps"
        _require_unset(raw, ("local_epochs",), expected)
        settings.pop("local_epochs", None)
    missing = {name: value for name, value in settings.items() if getattr(raw, name) is None}
    missing["protocol"] = protocol
    for name, prefix in _SCHEDULE_PREFIXES.items():
        if method.trains_locally and getattr(raw, name) is None and f"{prefix}warmup" in raw.hp:
            missing[name] = "constant"
    partition_skews = {key.partition(".")[0] for key in raw.skew} & PARTITION_SKEWS.keys()
    raw, missing, skews = _resolve_skew(raw, missing)
    _require_allowed_skews(method, skews)
    raw = _resolve_system(raw, method)
    raw = _resolve_received_updates(raw)
    spec = update_settings(raw, **missing)
    spec = _resolve_partition(raw, spec, "".join(partition_skews))
    spec = _resolve_network(raw, spec, are_objects_known)
    spec = _resolve_server_data(raw, spec, method, protocol_defaults)
    spec = _resolve_client_tests(raw, spec, method.evaluated_models, settings)
    _check_training_settings(raw, spec, method)
    spec = _resolve_metrics(spec, method)
    spec = _resolve_local_training(spec)
    compression = format_compression(parse_compression(spec.compression))
    spec = update_settings(spec, compression=compression)
    expected = "no value, or patience >= 1"
    require(not spec.min_delta or spec.patience is not None, "min_delta", spec.min_delta, expected)
    spec = update_settings(spec, min_delta=spec.min_delta or None)
    spec = _resolve_privacy(raw, spec, skews)
    return _resolve_options(raw, spec, method, options), method, hp


def validate_settings(raw: RunSettings) -> RunSettings:
    """Validate every setting by its annotation and its valid names.

    Returns:
      The settings, with values as JSON stores them.

    Raises:
      ConfigError: if a value has another type, is out of its bounds, or is an unknown name.
    """
    _check_names(raw)
    expected = "one text such as 'topk:fraction=0.1', or a Compressor"
    require(isinstance(raw.compression, str | None), "compression", raw.compression, expected)
    values: dict[str, Any] = {}
    for name, annotation in field_types(RunSettings).items():
        value = getattr(raw, name)
        if get_origin(annotation) is dict:
            items = validate(name, value, dict[str, Any]).items()
            # A later check reports numbers that are not finite, with the range of the entry.
            values[name] = {
                key: to_json_value(f"{name} {key}", item, requires_finite=False)
                for key, item in items
            }
        else:
            values[name] = validate(name, value, annotation)
    return update_settings(raw, **values)


def _check_names(raw: RunSettings) -> None:
    """Check names before other settings, so that the message reports a misspelled name."""
    names = dict(NAMES)
    # A user's data set may have other class names.
    if isinstance(raw.dataset, str) and is_read_by_package(raw.dataset):
        names["normalization"] = NORMALIZATIONS
    for name, valid in names.items():
        value = getattr(raw, name)
        may_be_user_object = name in _OBJECT_ARGUMENTS
        if may_be_user_object and not isinstance(value, str | list | tuple | None):
            argument = _OBJECT_ARGUMENTS[name]
            require(False, name, value, f"a name; pass an object to simulate({argument}=...)")
        is_user_object = may_be_user_object and isinstance(value, str) and value == USER_PROVIDED
        if name == "dataset" and isinstance(value, str) and not is_user_object:
            require_dataset_name(value)
        elif not is_user_object and (value is not None or name in ("algorithm", "dataset")):
            require_name(name, value, valid, listed_by=LIST_COMMAND)


def _require_unset(raw: RunSettings, names: Iterable[str], expected: str) -> None:
    """Raise ConfigError for the first of these settings that the user has set."""
    for name in names:
        value = getattr(raw, name)
        require(value in (None, {}), name, value, expected)


def _resolve_skew(
    raw: RunSettings, missing: dict[str, Any]
) -> tuple[RunSettings, dict[str, Any], tuple[Skew, ...]]:
    """Resolve the setting `skew`, whose kinds of label skew are partitions.

    Args:
      raw: settings of the user.
      missing: defaults of settings that the user has not set.

    Returns:
      The settings, in which the skew has its canonical order, lacks skews that change nothing and
      has the rounds of its drifts; the defaults; and the skews.
    """
    skew = dict(raw.skew)
    kinds = {key.partition(".")[0] for key in skew} & PARTITION_SKEWS.keys()
    for kind in kinds:
        partition = PARTITION_SKEWS[kind]
        example = PARTITION_SKEW_EXAMPLES.get(kind)
        expected = f"no value: skew {kind} is the partition {partition}"
        expected += f", and has its parameters as in {example}" if example else ""
        _require_unset(raw, ("partition", *PARTITION_SETTINGS, "partition_options"), expected)
        require(len(kinds) == 1, "skew", ", ".join(sorted(kinds)), "one kind of partition")
        names = [key for key in skew if key.partition(".")[0] == kind]
        options = {key.partition(".")[2]: skew.pop(key) for key in names}
        options.pop("", None)
        if example and not options:
            raise make_value_error("skew", kind, f"a field and its value, as in {example}")
        raw = update_settings(raw, partition=partition, partition_options=options)
        missing = {name: v for name, v in missing.items() if name not in _LABEL_SKEW_SETTINGS}
    resolved, skews = SKEW_SETTING.resolve(skew)
    num_rounds = missing.get("rounds", raw.rounds)
    drifts = [kind for kind in skews if isinstance(kind, DriftSkew) and kind.rounds is None]
    if drifts:
        default_rounds = {f"{kind.name}.rounds": num_rounds for kind in drifts}
        resolved, skews = SKEW_SETTING.resolve(resolved | default_rounds)
    return update_settings(raw, skew=resolved), missing, skews


def _require_allowed_skews(method: AlgorithmSpec, skews: tuple[Skew, ...]) -> None:
    """Raise ConfigError for skews of examples that a method gives to several clients."""
    feature_skews = [skew.name for skew in skews if isinstance(skew, FeatureSkew)]
    is_valid = not (feature_skews and "averages" in method.required_data)
    expected = f"no skew of images: {method.name} averages inputs before the clients see them"
    require(is_valid, "skew", ", ".join(feature_skews), expected)
    other_skews = [skew.name for skew in skews if not isinstance(skew, AmountSkew)]
    is_valid = not (other_skews and "shared_server_data" in method.required_data)
    expected = f"skews of numbers of examples: clients of {method.name} hold the server's, too"
    require(is_valid, "skew", ", ".join(other_skews), expected)


def _resolve_received_updates(raw: RunSettings) -> RunSettings:
    """Return the settings with `attack` and `aggregation` in their canonical order."""
    attack, _ = ATTACK_SETTING.resolve(raw.attack)
    aggregation, rules = AGGREGATION_SETTING.resolve(raw.aggregation)
    replacing = [rule.name for rule in rules if isinstance(rule, RobustAggregation)]
    require(len(replacing) < 2, "aggregation", ", ".join(replacing), "one rule beside clipping")
    has_buckets = any(isinstance(rule, Bucketing) for rule in rules)
    expected = "a rule for the buckets, as in 'bucketing:size=2 median'"
    require(bool(replacing) or not has_buckets, "aggregation", "bucketing", expected)
    return update_settings(raw, attack=attack, aggregation=aggregation)


def _resolve_privacy(raw: RunSettings, spec: RunSettings, skews: tuple[Skew, ...]) -> RunSettings:
    """Return the settings with `privacy` in its canonical order, if its guarantee holds.

    Args:
      raw: settings of the user.
      spec: settings with defaults.
      skews: the skews of the run.

    Returns:
      The settings. With client-level privacy the average counts every client once.
    """
    privacy, mechanisms = PRIVACY_SETTING.resolve(raw.privacy)
    spec = update_settings(spec, privacy=privacy)
    if not mechanisms:
        return spec
    names = ", ".join(mechanism.name for mechanism in mechanisms)
    require(len(mechanisms) == 1, "privacy", names, "one mechanism")
    mechanism, name = mechanisms[0], f"privacy {names}"
    if mechanism.noise_multiplier:
        require_dp_accounting("privacy", names)
    if spec.server_data is not None:
        source = SERVER_SOURCES.require(spec.server_data)
        is_valid = source.draw is None or source.withheld is not None
        expected = f"examples that no client holds, such as held_out, with {name}"
        require(is_valid, "server_data", spec.server_data, expected)
    if not isinstance(mechanism, ClientLevel):
        for model in SYSTEM_SETTING.parse(raw.system):
            expected = f"no value with {name}: the server reads losses of clients without noise"
            require(not isinstance(model, AdaptiveSelection), "system", model.name, expected)
        return spec
    rules = ", ".join(dict.fromkeys(key.partition(".")[0] for key in raw.aggregation))
    for setting, value in (("aggregation", rules), ("compression", raw.compression)):
        expected = f"no value with {name}, whose noise is for the mean of clipped updates"
        require(not value, setting, value, expected)
    drifts = ", ".join(skew.name for skew in skews if isinstance(skew, DriftSkew))
    require(not drifts, "skew", drifts, f"no drift with {name}: clients may join and leave")
    for model in SYSTEM_SETTING.parse(raw.system):
        is_valid = isinstance(model, DeviceModel | PartialWork | Dropout | PoissonSampling)
        expected = f"no value with {name}, which requires draws of clients that ignore their data"
        require(is_valid, "system", model.name, expected)
    expected = f"uniform with {name}: a weight of examples would reveal their number"
    require(raw.averaging in (None, "uniform"), "averaging", raw.averaging, expected)
    return update_settings(spec, averaging="uniform" if spec.averaging else spec.averaging)


def _resolve_system(raw: RunSettings, method: AlgorithmSpec) -> RunSettings:
    """Return the settings with the setting `system` in its canonical order, if it can be used."""
    settings, models = SYSTEM_SETTING.resolve(raw.system)
    validate_combination(models)
    for model in models:
        reads_training = isinstance(model, PartialWork | AdaptiveSelection)
        reads_training |= isinstance(model, Deadline) and model.late == "partial"
        expected = f"another kind: clients of {method.name} condense data instead of training"
        is_valid = method.trains_locally or not reads_training
        require(is_valid, "system", model.name, expected)
        reads_losses = isinstance(model, AdaptiveSelection) and model.loss_reports is not None
        expected = f"stale losses of candidates: {method.name} has no global model"
        is_valid = method.has_global_model or not reads_losses
        require(is_valid, "system", model.name, expected)
        counts_epochs = isinstance(model, PartialWork) and model.unit == "epochs"
        expected = "partial_work:unit=steps with local_steps"
        is_valid = raw.local_steps is None or not counts_epochs
        require(is_valid, "system", model.name, expected)
    for model in models:
        if isinstance(model, TraceModel):
            settings[f"{model.name}.digest"] = model.compute_digest()
    return update_settings(raw, system=settings)


def _resolve_partition(raw: RunSettings, spec: RunSettings, skew: str) -> RunSettings:
    """Resolve the partition, the settings that are its parameters, and its seed.

    Args:
      raw: settings of the user.
      spec: settings with defaults.
      skew: name of the skew that is the partition, for messages; empty: none.

    Returns:
      The settings.
    """
    partition = spec.partition or ""  # every protocol sets it
    scheme = PARTITIONS.require(partition)
    parameters = {name: find_parameter_name(partition, name) for name in PARTITION_SETTINGS}
    settings: dict[str, Any] = {}
    options = dict(raw.partition_options)
    for setting, parameter in parameters.items():
        if parameter is None:
            if getattr(raw, setting) is not None:
                others = ", ".join(n for n in PARTITIONS if find_parameter_name(n, setting))
                expected = f"no value: partition {partition} has no {setting} ({others} have it)"
                _require_unset(raw, (setting,), expected)
            settings[setting] = None
            continue
        for name in {setting, parameter} & options.keys():
            value = options.pop(name)
            settings[setting] = _require_consistent(raw, setting, value, "partition_options")
    spec = update_settings(spec, partition_options=options, **settings)
    arguments = {
        find_parameter_name(partition, name) or name: value
        for name, value in spec.partition_arguments.items()
    }
    with display_partition_names(spec, skew):
        arguments = scheme.validate_parameters(arguments)
    for setting, parameter in parameters.items():
        if parameter in arguments:
            settings[setting] = arguments[parameter]
    options = {name: arguments[name] for name in options}
    seed = spec.seed if spec.partition_seed is None else spec.partition_seed
    return update_settings(spec, partition_seed=seed, partition_options=options, **settings)


def display_partition_names(spec: RunSettings, skew: str = "") -> AbstractContextManager[None]:
    """Return a context in which messages name the partition's parameters as the settings do.

    Args:
      spec: the settings.
      skew: name of the skew that is the partition; empty: none.

    Returns:
      The context.
    """
    partition = spec.partition or ""
    settings = {find_parameter_name(partition, name) or name: name for name in PARTITION_SETTINGS}
    names = {*PARTITIONS[partition].parameters, *spec.partition_options}
    if skew:
        return display_names({n: f"skew {skew}:{settings.get(n, n)}" for n in names})
    return display_names({n: f"partition_options {n}" for n in names} | settings)


def _require_consistent(raw: RunSettings, setting: str, value: Any, options_name: str) -> Any:
    """Return the value of a setting that is also among a run's options.

    Raises:
      ConfigError: if the setting has another value.
    """
    setting_value = getattr(raw, setting)
    expected = f"{value!r} as in {options_name}, or a value in one place only"
    require(setting_value in (None, value), setting, setting_value, expected)
    return value


def _resolve_network(raw: RunSettings, spec: RunSettings, are_objects_known: bool) -> RunSettings:
    """Resolve the network's options; options that are settings move to their settings."""
    settings = dict(raw.network_options)
    network_settings = {
        name: _require_consistent(raw, name, settings.pop(name), "network_options")
        for name in NETWORK_SETTINGS
        if name in settings
    }
    spec = update_settings(spec, network_options=settings, **network_settings)
    if spec.model == USER_PROVIDED or (raw.model is None and not are_objects_known):
        return spec
    with display_names_within("network_options", settings):
        network_arguments = NETWORKS.require(spec.model or "").validate_options(spec.model_options)
    options = {name: network_arguments.pop(name) for name in settings}
    return update_settings(spec, network_options=options, **network_arguments)


def _resolve_server_data(
    raw: RunSettings, spec: RunSettings, method: AlgorithmSpec, protocol_defaults: dict[str, Any]
) -> RunSettings:
    """Resolve the source of the server's examples, where the run uses any."""
    epochs, gaps = spec.pretrain_epochs, spec.gradient_gaps or None
    if epochs:
        expected = "no value: the method has no global model to pretrain"
        require(method.has_global_model, "pretrain_epochs", epochs, expected)
    elif not protocol_defaults["pretrain_epochs"]:
        epochs = None  # 0 is the default, and dropped
    has_gradients = method.has_global_model or method.has_diagnostics
    expected = "no value: the method has no global model with gradients to measure"
    require(gaps is None or has_gradients, "gradient_gaps", gaps, expected)
    source, options = None, {}
    if method.requires_server_examples or epochs or (gaps and raw.server_data):
        default_source = protocol_defaults["server_data"] or "iid"
        source = raw.server_data or default_source
        if source == default_source:
            options = dict(protocol_defaults["server_options"] or {})
        options |= raw.server_options
        names = {*options, *SERVER_SOURCES.require(source).options}
        with display_names_within("server_options", names):
            options = resolve_server_options(source, options)
    else:
        expected = f"no value: the server of {spec.algorithm} uses examples only to pretrain"
        _require_unset(raw, SERVER_DATA_SETTINGS, expected)
    return update_settings(
        spec, server_data=source, server_options=options, pretrain_epochs=epochs, gradient_gaps=gaps
    )


def _resolve_client_tests(
    raw: RunSettings, spec: RunSettings, models: tuple[str, ...], protocol_settings: dict[str, Any]
) -> RunSettings:
    """Check the settings of clients' tests, and drop settings that equal their defaults."""
    is_personalized = models[0] != "global"
    has_client_tests = is_personalized if spec.client_tests is None else spec.client_tests
    test_model, test_size = spec.client_test_model, spec.test_per_client
    if not has_client_tests:
        expected = f"True: {spec.algorithm} is evaluated on clients' test data only"
        require(not is_personalized, "client_tests", False, expected)
        expected = "no value, or client_tests = True"
        _require_unset(raw, ("client_test_model", "test_per_client"), expected)
        test_model = test_size = None
    if test_model is not None:
        require_name("client_test_model", test_model, models)
    is_protocol_test = protocol_settings.get("client_tests")
    is_default_test = is_personalized or not (has_client_tests or is_protocol_test)
    is_default_model = test_model == models[0] and "client_test_model" not in protocol_settings
    return update_settings(
        spec,
        client_tests=None if is_default_test else has_client_tests,
        client_test_model=None if is_default_model else test_model,
        test_per_client=test_size,
    )


def _resolve_metrics(spec: RunSettings, method: AlgorithmSpec) -> RunSettings:
    """Check that the run can compute its additional metrics; sort their names."""
    metrics = parse_metrics(spec.metrics)
    for metric in metrics:
        ok = metric.sums is None or method.has_global_model
        expected = f"no metric of outputs: {spec.algorithm} has no global model to evaluate"
        require(ok, "metrics", metric.name, expected)
        ok = metric.from_client_accuracy is None or spec.has_client_tests
        require(ok, "metrics", metric.name, "client_tests = True, or another metric")
        ok = not metric.update_metric_names or method.trains_locally
        expected = f"no metric of updates: clients of {spec.algorithm} send no updates"
        require(ok, "metrics", metric.name, expected)
    names = ", ".join(metric.name for metric in metrics)
    return update_settings(spec, metrics=names or None)


def _resolve_local_training(spec: RunSettings) -> RunSettings:
    """Check the settings of local training, and drop settings that equal their defaults.

    Defaults are an optimizer's option at its default, a constant rate, and steps of one minibatch.
    """
    is_user_optimizer = spec.local_optimizer == USER_PROVIDED
    has_options = spec.local_optimizer is not None and not is_user_optimizer
    defaults = OPTIMIZERS[str(spec.local_optimizer)].options if has_options else {}
    for option, value in spec.optimizer_options.items():
        require_name("optimizer_options", option, defaults)
        require(isinstance(value, bool), f"optimizer_options {option}", value, "True or False")
    options = {n: value for n, value in spec.optimizer_options.items() if value != defaults[n]}
    changes: dict[str, Any] = {"optimizer_options": options}
    if spec.gradient_accumulation == 1:
        changes["gradient_accumulation"] = None
    for setting, schedule, prefix in _list_schedules(spec):
        if schedule == "constant" and f"{prefix}warmup" not in spec.hp:
            changes[setting] = None
        elif is_user_optimizer:  # it can read a rate that varies over rounds from `hp`
            expected = "no schedule over steps: a user's optimizer has its own"
            require(setting == "lr_schedule", setting, schedule, expected)
            expected = f"hp {LR_NAME}, which a user's optimizer reads as a function of hp"
            require(LR_NAME in spec.hp, setting, schedule, expected)
    return update_settings(spec, **changes)


def _resolve_options(
    raw: RunSettings, spec: RunSettings, method: AlgorithmSpec, protocol_options: dict[str, Any]
) -> RunSettings:
    """Write out all options of the method; the default base is dropped."""
    for name, value in raw.options.items():
        if name in method.option_names:
            continue
        if name in method.collect_method_hyperparameters({}, spec.num_clients or 1):
            expected = f"no value, since it is a hyperparameter: {display_name(f'hp {name}')}"
            raise make_value_error(f"options {name}", value, expected)
        require_name("options", name, method.option_names)
    if "base" in raw.options and method.has_base:
        expected = f"a method ({', '.join(get_possible_bases(method))}), or no value"
        require(raw.options["base"] is not None, "options base", None, expected)
    values = _evaluate_rule_values(protocol_options, spec, method, method.option_names)
    values |= raw.options
    base = values.pop("base", None)
    with display_names_within("options", method.option_names):
        options = method.complete_options(values)
    if base not in (None, *get_possible_bases(method)[:1]):
        options["base"] = base
    return update_settings(spec, options=options)


def _resolve_hyperparameters(
    raw: RunSettings,
    spec: RunSettings,
    method: AlgorithmSpec,
    protocol_hp: dict[str, Any],
    are_objects_known: bool,
) -> RunSettings:
    """Write out all hyperparameters: set by the user, by the protocol, or by the method."""
    defaults = _default_hyperparameters(spec, method)
    supported = {**optional_hyperparameters(spec), **defaults}
    if raw.local_optimizer is None and method.trains_locally and not are_objects_known:
        supported = optional_optimizer_hyperparameters(USER_PROVIDED, raw.hp) | supported
    for name, value in raw.hp.items():
        if name in SETTINGS_BY_HYPERPARAMETER and name not in supported:
            setting = SETTINGS_BY_HYPERPARAMETER[name]
            expected = f"no value: {_explain_missing(spec, method, setting)}"
            raise make_value_error(f"hp {name}", value, expected)
        if name not in supported and (expected := _explain_schedule(name)):
            raise make_value_error(f"hp {name}", value, expected)
        if name not in supported and name in method.option_names:
            expected = f"no value, since it is an option: {display_name(f'options {name}')}"
            raise make_value_error(f"hp {name}", value, expected)
        require_name("hp", name, supported)
    for setting, schedule, prefix in _list_schedules(spec):
        unit = "rounds" if prefix == ROUND_PREFIX else "steps"
        expected = f"a number of {unit} >= 1, for {setting} {schedule}"
        for name in lr_schedules.required_schedule_hyperparameters(schedule, prefix):
            require(name in raw.hp, f"hp {name}", None, expected)
    values = {name: hyperparameter.default for name, hyperparameter in defaults.items()}
    values |= _evaluate_rule_values(protocol_hp, spec, method, supported) | raw.hp
    for name, value in values.items():
        values[name] = validate(f"hp {name}", value, Annotated[float, supported[name].bounds])
    return update_settings(spec, hp=values)


def _explain_missing(spec: RunSettings, method: AlgorithmSpec, setting: str) -> str:
    """Return the reason for which a run lacks a hyperparameter that is a setting."""
    noun, name = setting.replace("_", " "), HYPERPARAMETER_SETTINGS[setting]
    if not name.startswith(LOCAL_PREFIX):
        return f"{spec.algorithm} has no {noun}"
    if not method.trains_locally:
        return f"clients of {spec.algorithm} condense their data instead of training"
    owners = [
        optimizer.name
        for optimizer in OPTIMIZERS.values()
        if name in (optimizer.hyperparameters | optimizer.optional_hyperparameters)
    ]
    return f"local optimizer {spec.local_optimizer} has no {noun} ({', '.join(owners)} have it)"


def _explain_schedule(name: str) -> str:
    """Return the schedules that a hyperparameter requires; "" if no schedule has it."""
    for setting, prefix in _SCHEDULE_PREFIXES.items():
        owners = [
            schedule
            for schedule in LR_SCHEDULES
            if name in lr_schedules.schedule_hyperparameters(schedule, prefix)
            or name in lr_schedules.optional_schedule_hyperparameters(schedule, prefix)
        ]
        if owners:
            return f"no value, or {display_name(setting)} {' or '.join(owners)}"
    return ""


def _default_hyperparameters(spec: RunSettings, method: AlgorithmSpec) -> dict[str, HyperParameter]:
    """Return the hyperparameters that such a run always has."""
    num_clients = spec.num_clients or 1
    hyperparameters = dict(
        method.collect_hyperparameters(spec.local_optimizer, spec.options, num_clients)
    )
    for _, schedule, prefix in _list_schedules(spec):
        hyperparameters |= lr_schedules.schedule_hyperparameters(schedule, prefix)
    return hyperparameters | (PRETRAINING_HYPERPARAMETERS if spec.pretrain_epochs else {})


def optional_hyperparameters(spec: RunSettings) -> dict[str, HyperParameter]:
    """Return the hyperparameters of local training that are used only if they are set."""
    if spec.local_optimizer is None:
        return {}
    given = spec.hyperparameters
    hyperparameters = dict(optional_optimizer_hyperparameters(spec.local_optimizer, given))
    for _, schedule, prefix in _list_schedules(spec):
        hyperparameters |= lr_schedules.optional_schedule_hyperparameters(schedule, prefix)
    return hyperparameters


def _list_schedules(spec: RunSettings) -> list[tuple[str, str, str]]:
    """Return setting, name and hyperparameter prefix of each learning rate schedule of a run."""
    return [
        (setting, name, prefix)
        for setting, prefix in _SCHEDULE_PREFIXES.items()
        if (name := getattr(spec, setting)) is not None
    ]


def is_horizon_dependent(spec: RunSettings) -> bool:
    """Return whether the learning rates of a run depend on its number of rounds.

    They do if the schedule over rounds has an end (cosine, linear, polynomial) and `hp` does not
    set the end as `lr_length`. The run then cannot be continued as a longer run.
    """
    schedule, has_length = spec.lr_schedule, f"{ROUND_PREFIX}length" in spec.hp
    return schedule is not None and LR_SCHEDULES[schedule].has_length and not has_length


def _evaluate_rule_values(
    rule_values: dict[str, Any], spec: RunSettings, method: AlgorithmSpec, names: Collection[str]
) -> dict[str, Any]:
    """Evaluate a protocol's rules for these names, see `DefaultsRule`.

    A rule that evaluates to None is ignored.
    """
    values = {
        name: value(vars(spec), method) if callable(value) else value
        for name, value in rule_values.items()
        if name in names
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_training_settings(raw: RunSettings, spec: RunSettings, method: AlgorithmSpec) -> None:
    """Check settings of training and held-out clients, which the rules of a method may set."""
    if not method.trains_locally:
        expected = f"no value: clients of {spec.algorithm} condense their data instead of training"
        _require_unset(raw, LOCAL_TRAINING_SETTINGS, expected)
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        if value is not None or name not in LOCAL_TRAINING_SETTINGS:
            validate(name, value, PositiveInt)
    clients, min_clients = spec.num_clients, method.min_clients
    has_enough_clients = clients is not None and clients >= min_clients
    require(has_enough_clients, "num_clients", clients, f"at least {min_clients}: {spec.algorithm}")
    if method.trains_locally:
        require(spec.local_optimizer is not None, "local_optimizer", None, "a name")
    held_out, epochs = spec.held_out_clients, spec.held_out_epochs
    ok = held_out is None or method.has_global_model
    expected = f"no value: {spec.algorithm} has no global model to evaluate on them"
    require(ok, "held_out_clients", held_out, expected)
    ok = epochs is None or held_out is not None
    require(ok, "held_out_epochs", epochs, "no value, or held_out_clients >= 1")
    expected = f"0: clients of {spec.algorithm} condense their data instead of training"
    require(not epochs or method.trains_locally, "held_out_epochs", epochs, expected)
