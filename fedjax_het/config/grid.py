"""Grids: runs of every combination of settings."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fedjax_het.algorithms import METHODS
from fedjax_het.compression import expand_compression
from fedjax_het.config.comparison import warn_common_protocol, warn_unequal_settings
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.config.resolve import (
    get_option_depth,
    resolve_valid_settings,
    supported_hyperparameters,
    validate_settings,
)
from fedjax_het.config.run_spec import RunSpec, hash_settings
from fedjax_het.config.settings import (
    HYPERPARAMETER_SETTINGS,
    RunSettings,
    drop_unused_settings,
    rename_former_settings,
    require_one_name,
    require_setting,
)
from fedjax_het.utils.config import to_python_scalar, validate
from fedjax_het.utils.errors import ConfigError, display_name, display_names, require
from fedjax_het.utils.registry import count_list_depth

NameT = TypeVar("NameT")
MAX_RUNS = 10**6
"""Largest number of runs of a grid."""
_SETTING_NAMES = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("hp", "options")]
_OPTION_SETTINGS = [n for n in _SETTING_NAMES if n.endswith("_options") or n in KIND_SETTINGS]


def grid(
    *,
    hp: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[RunSpec]:
    """Create the runs of every combination of values.

    A hyperparameter or option applies to the methods that have it; other methods run once without
    it, and None is the default. `learning_rate`, `momentum`, `weight_decay` and
    `server_learning_rate` are hyperparameters, too. Settings of local training do not apply to
    methods whose clients condense their data. The last name varies fastest. Runs are unique and
    validated.

    All runs have one protocol: the given one, or the methods' default. Methods whose defaults
    differ have the protocol `standard`, which a warning reports. The protocol "own" gives each
    method its default. A warning also lists the settings in which methods still differ although the
    grid does not set them.

    The settings `partition_options`, `server_options`, `network_options` and `optimizer_options`
    also have values, or lists of values, by name. If the value of an option is a list by its
    annotation or default, a list is one value, and a list of lists contains several values. The
    types of the options of a user's network (`model="user"`) are unknown: each value is one value,
    and a list of mappings contains several values.

    Args:
      hp: values, or lists of values, of hyperparameters by name.
      options: values, or lists of values, of method options by name.
      **settings: values, or lists of values, of fields of `RunSpec`. The list of `metrics` is one
        value: every run has all of them. So is a list of skews, whose fields may have several
        values, as in `skew=["noise:std=0.1,0.3"]`.

    Returns:
      The runs.

    Raises:
      ConfigError: for an unknown setting, a hyperparameter or option that no method of the grid
        has, an invalid value, and more than `MAX_RUNS` combinations.

    Example:
      >>> from fedjax_het import grid
      >>> specs = grid(
      ...     algorithm=["fedavg", "fedprox"], alpha=[0.01, 0.1], seed=range(3),
      ...     hp={"prox_mu": [0.001, 0.01]}, model="mlp",
      ... )
      >>> [sum(spec.algorithm == name for spec in specs) for name in ("fedavg", "fedprox")]
      [6, 12]
    """
    settings = rename_former_settings(settings, "grid")
    for name in settings:
        require_setting("setting", name, _SETTING_NAMES)
    hps = _list_values_by_name("hp", hp)
    names: dict[str, str] = {}  # of hyperparameters that are settings
    for setting, name in HYPERPARAMETER_SETTINGS.items():
        if (value := settings.pop(setting, None)) is not None:
            values = _list_values(setting, value)
            require_one_name(setting, values, hps.get(name))
            hps[name], names[f"hp {name}"] = values, setting
    lists = {name: _list_values(name, value) for name, value in settings.items()}
    for name, kind_setting in KIND_SETTINGS.items():
        if kind_setting.is_one_value(settings.get(name)):
            lists[name] = [kind_setting.to_settings(settings[name])]
    if "compression" in lists:
        lists["compression"] = [
            v for text in lists["compression"] for v in expand_compression(text)
        ]
    metrics = lists.get("metrics", ())
    if not isinstance(settings.get("metrics"), str | None) and all(type(n) is str for n in metrics):
        lists["metrics"] = [tuple(metrics)]
    with display_names(names):
        return _build_runs(lists, hps, options)


def _build_runs(
    lists: dict[str, list[Any]], hps: dict[str, list[Any]], options: Any
) -> list[RunSpec]:
    """Return the runs of every combination of settings, hyperparameters and options."""
    all_options = _list_values_by_name("options", options)
    all_lists = (*lists.values(), *hps.values(), *all_options.values())
    count = math.prod(map(len, all_lists))
    require(count <= MAX_RUNS, "grid", f"{count} runs", f"at most {MAX_RUNS}")
    unused = {*(("hp", name) for name in hps), *(("options", name) for name in all_options)}
    methods = [METHODS.require(to_python_scalar(name)) for name in lists.get("algorithm", ())]
    has_local_training = any(method.trains_locally for method in methods)
    has_mixed_defaults = len({method.protocol for method in methods}) > 1
    if has_mixed_defaults and None in (protocols := lists.get("protocol", [None])):
        lists["protocol"] = ["standard" if name is None else name for name in protocols]
        warn_common_protocol({method.name: method.protocol for method in methods}, "standard")
    specs: dict[str, RunSpec] = {}
    resolved_runs: dict[str, RunSettings] = {}
    for values in itertools.chain.from_iterable(map(_expand_options, _combinations(lists))):
        require(len(specs) < MAX_RUNS, "grid", "more runs", f"at most {MAX_RUNS}")
        settings = validate_settings(RunSettings(**values))
        if has_local_training:
            settings = RunSettings(**drop_unused_settings(settings.algorithm, vars(settings)))
        names = METHODS[settings.algorithm].option_names & all_options.keys()
        unused -= {("options", name) for name in names}
        option_lists = {
            name: [values] if _is_list_option(settings, "options", name, options[name]) else values
            for name, values in all_options.items()
            if name in names
        }
        for option_values in _combinations(option_lists):
            with_options = dataclasses.replace(settings, options=option_values)
            hp_names = supported_hyperparameters(with_options, hps)
            unused -= {("hp", name) for name in hp_names}
            for hp_values in _combinations({name: hps[name] for name in hp_names}):
                given = {name: value for name, value in hp_values.items() if value is not None}
                run = validate_settings(dataclasses.replace(with_options, hp=given))
                resolved = resolve_valid_settings(run)
                digest = hash_settings(resolved)
                specs.setdefault(digest, RunSpec.from_settings(run))
                resolved_runs.setdefault(digest, resolved)
    for argument, name in sorted(unused):
        methods_text = ", ".join(dict.fromkeys(spec.algorithm for spec in specs.values()))
        reason = f"none of the methods ({methods_text}) has it"
        raise ConfigError(f"{display_name(f'{argument} {name}')}: {reason}")
    warn_unequal_settings(list(specs.values()), list(resolved_runs.values()))
    return list(specs.values())


def _list_values(name: str, value: Any) -> list[Any]:
    value = to_python_scalar(value)
    is_iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    values = list(itertools.islice(value, MAX_RUNS + 1)) if is_iterable else [value]
    require(0 < len(values) <= MAX_RUNS, name, value, f"1 to {MAX_RUNS} values")
    return values


def _expand_options(values: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield settings with each combination of the options that have lists of values."""
    lists = {
        (argument, name): _list_values(f"{argument} {name}", value)
        for argument in _OPTION_SETTINGS
        if isinstance(values.get(argument), Mapping)
        for name, value in values[argument].items()
        if count_list_depth(to_python_scalar(value))
        and not _is_list_option(RunSettings(**values), argument, name, value)
    }
    count = math.prod(map(len, lists.values()))
    require(count <= MAX_RUNS, "grid", f"{count} runs", f"at most {MAX_RUNS}")
    for combination in _combinations(lists):
        changed = {argument: dict(values[argument]) for argument, _ in lists}
        for (argument, name), value in combination.items():
            changed[argument][name] = value
        yield values | changed


def _is_list_option(spec: RunSettings, argument: str, name: str, value: Any) -> bool:
    """Return whether a list is one value of an option, not a list of values."""
    depth = count_list_depth(to_python_scalar(value))
    option_depth = get_option_depth(spec, argument, name) if depth else -1
    return option_depth is None or depth <= option_depth


def _list_values_by_name(argument: str, mapping: Any) -> dict[str, list[Any]]:
    mapping = validate(argument, {} if mapping is None else mapping, dict[str, Any])
    return {name: _list_values(f"{argument} {name}", value) for name, value in mapping.items()}


def _combinations(lists: Mapping[NameT, list[Any]]) -> Iterable[dict[NameT, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))
