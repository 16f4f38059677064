"""Settings in which the methods of one comparison differ although the user did not choose that."""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS, RunSettings
from fedjax_het.utils.errors import display_name

log = logging.getLogger("fedjax_het")

_SETTING_NAMES = {f"hp.{number}": setting for setting, number in HYPERPARAMETER_SETTINGS.items()}
_LOCAL_NUMBERS = ("local_lr", "local_momentum", "local_weight_decay")
_COMPARED_SETTINGS = (
    *("protocol", "dataset", "normalization", "partition", "alpha", "classes", "num_clients"),
    *("participation", "model", "local_optimizer", "optimizer_state", "averaging"),
    *(f"hp.{name}" for name in _LOCAL_NUMBERS),
    *("batch_size", "local_epochs", "rounds", "client_tests"),
)
Methods = dict[str, list[str]]


def find_unequal_settings(
    runs: Iterable[Mapping[str, Any]], given: Iterable[Mapping[str, Any]] | None = None
) -> dict[str, Methods]:
    """Find settings for which two methods of a comparison have no value in common.

    Args:
      runs: resolved settings of each run, by the names of columns of `load_results`.
      given: settings of each run that the user gave. A setting that all of its runs have from the
        user is left out (default: nothing is left out).

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
    values: dict[str, dict[str, set[str]]] = {name: {} for name in _COMPARED_SETTINGS}
    chosen: dict[str, dict[str, bool]] = {name: {} for name in _COMPARED_SETTINGS}
    runs = list(runs)
    for run, given_settings in zip(runs, [{}] * len(runs) if given is None else given, strict=True):
        method = run["algorithm"]
        for name in _COMPARED_SETTINGS:
            value = _get_value(run, name)
            if value is not None:
                values[name].setdefault(method, set()).add(value)
                is_given = given_settings.get(name) is not None
                chosen[name][method] = chosen[name].get(method, True) and is_given
    return {
        name: _group_methods(by_method)
        for name, by_method in values.items()
        if _have_unequal_pair(by_method, chosen[name])
    }


def _get_value(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as text; None if the run does not have it or gives it another meaning."""
    value, method = settings.get(name), METHODS.get(settings["algorithm"])
    value = None if value != value else value  # NaN in a frame
    if name == "normalization" and value is None:
        return "usual"
    if method is not None and name == "client_tests":
        value = bool(value) or method.is_personalized
    if method is not None and name == "batch_size" and not method.trains_locally:
        return None  # the number of real images of a class
    return f"{value:g}" if isinstance(value, float) else None if value is None else str(value)


def _have_unequal_pair(values: dict[str, set[str]], chosen: dict[str, bool]) -> bool:
    methods = sorted(values)
    return any(
        values[first].isdisjoint(values[second]) and not (chosen[first] and chosen[second])
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

    Example:
      >>> from fedjax_het.config.comparison import describe_unequal_settings
      >>> describe_unequal_settings({"rounds": {"50": ["fedavg", "fedprox"], "200": ["dynafed"]}})
      'rounds (50: fedavg, fedprox; 200: dynafed)'
    """
    return ", ".join(
        f"{_SETTING_NAMES.get(name, name)} ("
        + "; ".join(f"{value}: {', '.join(methods)}" for value, methods in groups.items())
        + ")"
        for name, groups in unequal.items()
    )


def warn_unequal_settings(given: Sequence[RunSettings], resolved: Sequence[RunSettings]) -> None:
    """Log a warning of the settings in which methods differ although the user did not give them.

    Args:
      given: the runs as the user gave them.
      resolved: the runs of `given` with every default written out.
    """
    if len({run.algorithm for run in resolved}) < 2:
        return
    unequal = find_unequal_settings(map(_to_row, resolved), map(_to_row, given))
    if unequal:
        text = (
            f"methods differ in settings that are not given: {describe_unequal_settings(unequal)}"
        )
        if "client_tests" in unequal:
            text += (
                f"; {display_name('client_tests')} = True tests all methods on clients' own data"
            )
        warn_once(text)


def _to_row(run: RunSettings) -> dict[str, Any]:
    numbers = {f"hp.{name}": run.hyperparameters.get(name) for name in _LOCAL_NUMBERS}
    return vars(run) | numbers


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
