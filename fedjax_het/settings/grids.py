"""Every combination of settings, as specifications of runs."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.common.errors import ConfigError, require, require_name, written
from fedjax_het.common.records import plain
from fedjax_het.settings.layers import entered, takes_numbers
from fedjax_het.settings.spec import RunSpec, of_use

MOST_RUNS = 10**6
_FIELDS = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("hp", "options")]


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
        require_name("setting", name, _FIELDS)
    lists = {name: _values(name, value) for name, value in settings.items()}
    hps, choices = _values_by_name("hp", hp), _values_by_name("options", options)
    count = math.prod(len(values) for part in (lists, hps, choices) for values in part.values())
    require(count <= MOST_RUNS, "grid", f"{count} runs", f"at most {MOST_RUNS}")
    unused = {("hp", name) for name in hps} | {("options", name) for name in choices}
    methods = [METHODS.require(plain(name)) for name in lists.get("algorithm", ())]
    some_train = any(method.trains_locally for method in methods)
    specs: dict[str, RunSpec] = {}
    for values in _combinations(lists):
        spec = entered(RunSpec(**values))
        if some_train:
            spec = RunSpec(**of_use(spec.algorithm, values))
        entry = METHODS[spec.algorithm]
        known = {name: v for name, v in choices.items() if name in entry.option_names}
        unused -= {("options", name) for name in known}
        for chosen in _combinations(known):
            with_options = dataclasses.replace(spec, options=chosen)
            own = {name: hps[name] for name in takes_numbers(with_options, hps)}
            unused -= {("hp", name) for name in own}
            for numbers in _combinations(own):
                filled = dataclasses.replace(with_options, hp=numbers)
                specs.setdefault(filled.digest(), filled)
    for kind, name in sorted(unused):
        named = ", ".join(dict.fromkeys(spec.algorithm for spec in specs.values()))
        raise ConfigError(f"{written(kind)} {name!r}: none of the methods ({named}) has it")
    return list(specs.values())


def _values(name: str, value: Any) -> list[Any]:
    value = plain(value)
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    values = list(itertools.islice(value, MOST_RUNS + 1)) if several else [value]
    require(0 < len(values) <= MOST_RUNS, name, value, f"1 to {MOST_RUNS} values")
    return values


def _values_by_name(argument: str, given: Any) -> dict[str, list[Any]]:
    given = {} if given is None else given
    words = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    require(words, argument, given, "values by name")
    return {name: _values(f"{argument} {name}", value) for name, value in given.items()}


def _combinations(lists: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))
