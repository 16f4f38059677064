"""Settings in which the methods of one comparison differ although the user did not choose that."""

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.config.settings import (
    HYPERPARAMETER_SETTINGS,
    LOCAL_TRAINING_SETTINGS,
    NETWORK_SETTINGS,
    PARTITION_SETTINGS,
    RunSettings,
)
from fedjax_het.core.lr_schedules import ROUND_PREFIX
from fedjax_het.core.optimizers import LOCAL_PREFIX
from fedjax_het.utils.errors import display_name

log = logging.getLogger("fedjax_het")

_SETTING_NAMES = {f"hp.{number}": setting for setting, number in HYPERPARAMETER_SETTINGS.items()}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RunSettings)}
_OPTION_SETTINGS = ("partition_options", *KIND_SETTINGS, "network_options", "optimizer_options")
# Choices of a method, and settings that change what is recorded, not what is trained.
_NOT_COMPARED = (
    *("algorithm", "options", "hp", *HYPERPARAMETER_SETTINGS, "server_data", "server_options"),
    *("pretrain_epochs", "gradient_gaps", "client_test_model", "held_out_epochs", "metrics"),
    *_OPTION_SETTINGS,
)
_COMPARED_SETTINGS = dict.fromkeys(
    name for name in ("protocol", *_DEFAULTS) if name not in _NOT_COMPARED
)
_TRAINING_PREFIXES = ("optimizer_options.", f"hp.{LOCAL_PREFIX}", f"hp.{ROUND_PREFIX}")
_COMPARED_PREFIXES = (
    *("partition_options.", "network_options.", *_TRAINING_PREFIXES),
    *(f"{name}." for name in KIND_SETTINGS),
)
# Settings that another setting replaces, such as alpha for another partition: None is no value.
_REPLACEABLE = (*PARTITION_SETTINGS, *NETWORK_SETTINGS, "local_epochs", "test_per_client")
_DEFAULT = "default"
_MAX_LISTED_METHODS = 4
Methods = dict[str, list[str]]


def find_unequal_settings(
    runs: Iterable[Mapping[str, Any]],
    given: Iterable[Mapping[str, Any]] | None = None,
    *,
    averaged: Collection[str] = (),
) -> dict[str, Methods]:
    """Find settings for which two methods of a comparison have no value in common.

    Args:
      runs: resolved settings of each run, by the names of columns of `load_results`.
      given: settings of each run that the user gave. A setting that all of its runs have from the
        user is left out (default: nothing is left out).
      averaged: settings whose values are averaged, for which methods must have all values in
        common.

    Returns:
      By setting, the methods by the text of their values. A setting that a method does not have is
      not compared.

    Example:
      >>> from fedjax_het.config.comparison import find_unequal_settings
      >>> find_unequal_settings(
      ...     [{"algorithm": "fedavg", "rounds": 50}, {"algorithm": "fedprox", "rounds": 200}]
      ... )
      {'rounds': {'50': ['fedavg'], '200': ['fedprox']}}
    """
    runs = list(runs)
    given = [{}] * len(runs) if given is None else given
    names = _COMPARED_SETTINGS | dict.fromkeys(
        name for run in runs for name in run if name.startswith(_COMPARED_PREFIXES)
    )
    values: dict[str, dict[str, set[str]]] = {name: {} for name in names}
    chosen: dict[str, dict[str, bool]] = {name: {} for name in names}
    for run, given_settings in zip(runs, given, strict=True):
        method = run["algorithm"]
        for name in names:
            value = _get_value(run, name)
            if value is not None:
                values[name].setdefault(method, set()).add(value)
                is_given = given_settings.get(name) not in (None, _DEFAULTS.get(name))
                chosen[name][method] = chosen[name].get(method, True) and is_given
    return {
        name: _group_methods(by_method)
        for name, by_method in values.items()
        if _have_unequal_pair(by_method, chosen[name], name in averaged)
    }


def _get_value(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as text; None if the run does not have it or gives it another meaning."""
    value, method = settings.get(name), METHODS.get(settings["algorithm"])
    value = None if value != value else value  # NaN in a frame
    if method is not None and not method.trains_locally:
        is_training = name in LOCAL_TRAINING_SETTINGS or name.startswith(_TRAINING_PREFIXES)
        if is_training or name == "batch_size":  # the number of real examples of a class
            return None
    if method is not None and name == "client_tests":
        value = bool(value) or method.is_personalized
    if name == "partition_seed" and value == settings.get("seed"):
        value = None
    if value is None:
        is_replaceable = name in _REPLACEABLE or name.startswith("hp.")
        return None if is_replaceable else _DEFAULT
    return f"{value:g}" if isinstance(value, float) else str(value)


def _have_unequal_pair(
    values: dict[str, set[str]], chosen: dict[str, bool], is_averaged: bool
) -> bool:
    methods = sorted(values)
    return any(
        (
            values[first] != values[second]
            if is_averaged
            else values[first].isdisjoint(values[second]) and not (chosen[first] and chosen[second])
        )
        for index, first in enumerate(methods)
        for second in methods[index + 1 :]
    )


def _group_methods(values: dict[str, set[str]]) -> Methods:
    groups: Methods = {}
    for method, method_values in values.items():
        groups.setdefault(", ".join(sorted(method_values)), []).append(method)
    return groups


def describe_unequal_settings(unequal: Mapping[str, Methods]) -> str:
    """Return settings and the methods of each value in one line; "" if there are none.

    The methods of the most frequent value are "others" if there are more than four.

    Example:
      >>> from fedjax_het.config.comparison import describe_unequal_settings
      >>> describe_unequal_settings({"rounds": {"50": ["fedavg", "fedprox"], "200": ["dynafed"]}})
      'rounds (50: FedAvg, FedProx; 200: DynaFed)'
    """
    return ", ".join(
        f"{_SETTING_NAMES.get(name, name)} ("
        + "; ".join(f"{value}: {names}" for value, names in _list_methods(groups).items())
        + ")"
        for name, groups in unequal.items()
    )


def _list_methods(groups: Methods) -> dict[str, str]:
    most_frequent = max(groups, key=lambda value: len(groups[value]))
    return {
        value: "others"
        if value == most_frequent and len(methods) > _MAX_LISTED_METHODS and len(groups) > 1
        else ", ".join(METHODS[m].title if m in METHODS else m for m in methods)
        for value, methods in groups.items()
    }


def warn_unequal_settings(given: Sequence[RunSettings], resolved: Sequence[RunSettings]) -> None:
    """Log a warning of the settings in which methods differ although the user did not give them.

    Args:
      given: the runs as the user gave them. Settings of a resolved run count as not given.
      resolved: the runs of `given` with every default written out.
    """
    if len({run.algorithm for run in resolved}) < 2:
        return
    given_rows = ({} if isinstance(run, ResolvedRunSpec) else _to_row(run) for run in given)
    unequal = find_unequal_settings(map(_to_row, resolved), given_rows)
    if unequal:
        text = (
            f"methods differ in settings that are not given: {describe_unequal_settings(unequal)}"
        )
        if "client_tests" in unequal:
            name = display_name("client_tests")
            value = "" if name.startswith("--") else "=True"
            text += f"; {name}{value} tests all methods on clients' own data"
        warn_once(text)


def _to_row(run: RunSettings) -> dict[str, Any]:
    options = {name: getattr(run, name) for name in _OPTION_SETTINGS} | {"hp": run.hyperparameters}
    return vars(run) | {
        f"{setting}.{name}": value
        for setting, values in options.items()
        for name, value in values.items()
    }


@functools.lru_cache(maxsize=128)
def warn_once(text: str) -> None:
    """Log a warning once per process, since a grid and its sweep find equal differences."""
    log.warning("%s", text)


def warn_common_protocol(defaults: Mapping[str, str], protocol: str) -> None:
    """Log that all methods of a grid have one protocol although their defaults differ.

    Args:
      defaults: default protocol of each method.
      protocol: the common protocol.
    """
    methods: Methods = {}
    for method, default in defaults.items():
        methods.setdefault(default, []).append(method)
    own = describe_unequal_settings({"default protocols": methods})
    warn_once(
        f"{display_name('protocol')} = {protocol!r} for all methods, since they differ in their "
        f"{own}; 'own' selects the defaults"
    )
