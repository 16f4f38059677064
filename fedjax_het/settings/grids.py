"""Every combination of settings, as specifications of runs."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_het.algorithms import METHODS
from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.settings.spec import RunSpec, of_use

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
    hps = {name: _values(f"hp {name}", value) for name, value in (hp or {}).items()}
    choices = {name: _values(f"option {name}", value) for name, value in (options or {}).items()}
    unused = {("hp", name) for name in hps} | {("option", name) for name in choices}
    named = [name for name in lists.get("algorithm", ()) if name in METHODS]
    some_train = any(METHODS[name].trains_locally for name in named)
    specs: dict[str, RunSpec] = {}
    for values in _combinations(lists):
        spec = RunSpec(**values)
        require_name("algorithm", spec.algorithm, METHODS)
        if some_train:
            spec = RunSpec(**of_use(spec.algorithm, values))
        entry = METHODS[spec.algorithm]
        known = {name: v for name, v in choices.items() if name in entry.option_names}
        unused -= {("option", name) for name in known}
        for chosen in _combinations(known):
            with_options = dataclasses.replace(spec, options=chosen)
            has = with_options.resolved().hp
            own = {name: v for name, v in hps.items() if name in has}
            unused -= {("hp", name) for name in own}
            for numbers in _combinations(own):
                filled = dataclasses.replace(with_options, hp=numbers)
                specs.setdefault(filled.digest(), filled)
    for kind, name in sorted(unused):
        methods = ", ".join(dict.fromkeys(spec.algorithm for spec in specs.values()))
        raise ConfigError(f"{kind} {name!r}: none of the methods ({methods}) has it")
    return list(specs.values())


def _values(name: str, value: Any) -> list[Any]:
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    values = list(value) if several else [value]
    require(len(values) > 0, name, value, "at least one value")
    return values


def _combinations(lists: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))
