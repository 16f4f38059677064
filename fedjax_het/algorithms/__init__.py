"""Federated methods: a file each, named in `METHODS`."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from fedjax_het.algorithms import (
    abavg,
    apfl,
    ditto,
    dynafed,
    fedaf,
    fedamp,
    fedavg,
    fedbe,
    fedbn,
    feddc,
    feddf,
    feddm,
    feddyn,
    fedgen,
    fedmix,
    fednova,
    fedopt,
    fedprox,
    fine_tuning,
    fsl,
    moon,
    per_fedavg,
    pfedme,
    scaffold,
    separate,
)
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry, Rule, checked_entry
from fedjax_het.common.doors import door
from fedjax_het.common.errors import require_name
from fedjax_het.common.records import record_of
from fedjax_het.common.registry import Registry

METHODS: Registry[Entry] = Registry(
    "method",
    (
        fedavg.ENTRY,
        fedprox.ENTRY,
        scaffold.ENTRY,
        dynafed.ENTRY,
        feddf.ENTRY,
        fedbe.ENTRY,
        abavg.ENTRY,
        fedgen.ENTRY,
        fedmix.FEDMIX,
        fedmix.NAIVEMIX,
        fedbn.ENTRY,
        moon.ENTRY,
        feddyn.ENTRY,
        feddc.ENTRY,
        fednova.ENTRY,
        fedopt.FEDAVGM,
        fedopt.FEDADAM,
        fedopt.FEDYOGI,
        feddm.ENTRY,
        fedaf.ENTRY,
        separate.ENTRY,
        fine_tuning.FEDAVG_FT,
        fine_tuning.FEDPROX_FT,
        apfl.ENTRY,
        fedamp.FEDAMP,
        fedamp.HEURFEDAMP,
        ditto.ENTRY,
        pfedme.ENTRY,
        per_fedavg.ENTRY,
        fsl.DATA_SHARING,
        fsl.FSL,
        fsl.FSL_P,
    ),
    argument="algorithm",
)


def bases(entry: Entry) -> tuple[str, ...]:
    """The methods that this one can be put over, the usual one first."""
    return tuple(name for name, other in METHODS.items() if entry.can_refine(other))


def entry_of(algorithm: str, options: Mapping[str, Any]) -> Entry:
    """A method as its option "base" has it. Raises ConfigError for one that does not exist, or a
    base that it cannot have."""
    entry = METHODS.require(algorithm)
    if not entry.has_base:
        return entry
    possible = bases(entry)
    named = options.get("base")
    base = possible[0] if named is None else named
    require_name("options base", base, possible)
    return entry.over(METHODS[base])


# What is so of a method because of its function, under whatever name.
_OF_THE_FUNCTION = (
    *("options", "numbers", "server_step", "needs", "trains_locally", "scored"),
    *("global_model", "surveys", "min_clients", "network"),
)


def _facts_of(build: Callable[..., Algorithm]) -> dict[str, Any]:
    """The facts of a function that is one of the package's, which a copy of it has too."""
    known = (METHODS[name] for name in METHODS.built_in)
    entry = next((entry for entry in known if entry.build is build and not entry.has_base), None)
    return {} if entry is None else {fact: getattr(entry, fact) for fact in _OF_THE_FUNCTION}


@door
def register_method(
    name: str, build: Callable[..., Algorithm], description: str = "", **facts: Any
) -> Entry:
    """Make a method of one's own known to runs, sweeps, tables and reports, as long as this process
    lasts.

    Args:
      build(training, plan) -> Algorithm, see `contract`; with `options=`, where it has any.
      facts: fields of `Entry`: `options` and `numbers`, its typed choices and hyper-parameters (of
        `numbers` a dict of defaults will do, none of them below 0); `scored`, `colour`,
        `refinable`, ... A function of the package's own has its options, numbers and needs under a
        new name too, unless they are given.
    Returns: the entry.
    Raises: ConfigError if `name` is a method of the package or no word, or for facts that cannot
      be.

    A name of one's own may be given again, as when a notebook's cell is run twice: what is run from
    then on is the new method. Results on disk are named by the settings, the method's name among
    them, not by its code: give a changed method a new name or a new folder.
    """
    for fact in facts:
        require_name("fact", fact, [field.name for field in fields(Entry) if field.name != "base"])
    facts = {**_facts_of(build), **facts}
    if isinstance(facts.get("numbers"), dict):
        facts["numbers"] = record_of(f"{name}_numbers", facts["numbers"])
    entry = checked_entry(Entry(name, build, description, **facts))
    METHODS.add(entry)
    return entry


__all__ = ["METHODS", "Algorithm", "Entry", "Rule", "bases", "entry_of", "register_method"]
