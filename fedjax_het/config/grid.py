"""Every combination of settings, as specifications of runs."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.config.resolve import supported_hyperparameters, validate_settings
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import drop_unused_settings
from fedjax_het.utils.config import to_python_scalar
from fedjax_het.utils.errors import ConfigError, display_name, require, require_name

MAX_RUNS = 10**6
_SETTING_NAMES = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("hp", "options")]


def grid(
    *,
    hp: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[RunSpec]:
    """The runs of every combination of the values given, each a value or a list of values.

        grid(algorithm=["fedavg", "fedprox"], alpha=[0.01, 0.1], seed=range(3),
             hp={"prox_mu": [0.001, 0.01]}, model="mlp")

    `settings` are fields of `RunSpec`. A hyper-parameter or option applies to the methods that have
    it, and the others run once without it: above, FedAvg makes 6 runs and FedProx 12. So do
    settings of local training beside methods whose clients condense their data instead. The last
    name varies fastest; runs are unique and checked. Raises ConfigError for a setting that does not
    exist or that no method of the grid has.
    """
    for name in settings:
        require_name("setting", name, _SETTING_NAMES)
    lists = {name: _list_values(name, value) for name, value in settings.items()}
    hp_values, option_values = (
        _list_values_by_name("hp", hp),
        _list_values_by_name("options", options),
    )
    count = math.prod(
        len(values) for part in (lists, hp_values, option_values) for values in part.values()
    )
    require(count <= MAX_RUNS, "grid", f"{count} runs", f"at most {MAX_RUNS}")
    unused = {("hp", name) for name in hp_values} | {("options", name) for name in option_values}
    grid_methods = [METHODS.require(to_python_scalar(name)) for name in lists.get("algorithm", ())]
    has_local_training = any(method.trains_locally for method in grid_methods)
    specs: dict[str, RunSpec] = {}
    for values in _combinations(lists):
        spec = validate_settings(RunSpec(**values))
        if has_local_training:
            spec = RunSpec(**drop_unused_settings(spec.algorithm, values))
        method = METHODS[spec.algorithm]
        method_options = {
            name: v for name, v in option_values.items() if name in method.option_names
        }
        unused -= {("options", name) for name in method_options}
        for option_choice in _combinations(method_options):
            spec_with_options = dataclasses.replace(spec, options=option_choice)
            method_hps = {
                name: hp_values[name]
                for name in supported_hyperparameters(spec_with_options, hp_values)
            }
            unused -= {("hp", name) for name in method_hps}
            for hp_choice in _combinations(method_hps):
                run = dataclasses.replace(spec_with_options, hp=hp_choice)
                specs.setdefault(run.digest(), run)
    for argument, name in sorted(unused):
        method_names = ", ".join(dict.fromkeys(spec.algorithm for spec in specs.values()))
        raise ConfigError(
            f"{display_name(argument)} {name!r}: none of the methods ({method_names}) has it"
        )
    return list(specs.values())


def _list_values(name: str, value: Any) -> list[Any]:
    value = to_python_scalar(value)
    is_iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    values = list(itertools.islice(value, MAX_RUNS + 1)) if is_iterable else [value]
    require(0 < len(values) <= MAX_RUNS, name, value, f"1 to {MAX_RUNS} values")
    return values


def _list_values_by_name(argument: str, mapping: Any) -> dict[str, list[Any]]:
    mapping = {} if mapping is None else mapping
    has_string_keys = isinstance(mapping, Mapping) and all(
        isinstance(name, str) for name in mapping
    )
    require(has_string_keys, argument, mapping, "values by name")
    return {name: _list_values(f"{argument} {name}", value) for name, value in mapping.items()}


def _combinations(lists: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))
