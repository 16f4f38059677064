"""Which settings tell the runs of a folder apart, and the runs grouped by them."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.common.doors import door
from fedjax_het.common.errors import require, require_name
from fedjax_het.common.text import MISSING, classes_text, one_line
from fedjax_het.report.style import method_rank
from fedjax_het.settings.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_FIELDS = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("hp", "options")]
_SEEDS = ("seed", "partition_seed")
# What decides the defaults of hyper-parameters and options.
_CAUSES = ("algorithm", "local_optimizer", "lr_schedule", "lr_step_schedule", "options.preset")
# What a method, or a backend, has a default of its own for, so that its absence differs from no
# value.
_OF_METHOD = (
    "protocol",
    "local_tests",
    "scored",
    "server_data",
    "pretrain_epochs",
    "gradient_gaps",
    "precision",
)
_OF_SERVER = "server_options."
# Where the name of a setting would not say what it is.
_SHOWN = {"algorithm": "Method", f"{_OF_SERVER}size": "n_0"}
_OF_PARTITION = "partition_options."
_OF_ALL = ("network_options.", "optimizer_options.")
_NAMED_BY_VALUE = ("algorithm", "dataset", "partition", "model")


def is_missing(value: Any) -> bool:
    return value is None or value != value


def diverged(results: "pd.DataFrame") -> "pd.Series":
    """Whether each run diverged, or has no final accuracy for another reason.

    That of clients on their own tests will do: a method may have no global model.
    """
    missing = results["final_accuracy"].isna()
    if "final_client_accuracy" in results:
        missing &= results["final_client_accuracy"].isna()
    return results["diverged"].astype(bool) | missing


def is_shared(name: str) -> bool:
    """Whether a setting is one that runs of every method have, so that methods compare at it."""
    own = name.startswith(("options.", "hp.", _OF_SERVER)) or name in _OF_METHOD
    return not own and name != "algorithm"


def setting_columns(results: "pd.DataFrame") -> list[str]:
    """The settings among the columns: shared ones, `algorithm`, the method's own."""
    columns = list(results.columns)
    fields = [name for name in _FIELDS if name in columns and name != "algorithm"]
    options = [name for name in columns if name.startswith("options.")]
    return [
        *filter(is_shared, fields),
        *sorted(name for name in columns if name.startswith((_OF_PARTITION, *_OF_ALL))),
        *(["algorithm"] if "algorithm" in columns else []),
        *(name for name in fields if name in _OF_METHOD),
        *sorted(name for name in columns if name.startswith(_OF_SERVER)),
        *sorted(options, key=lambda name: (name != "options.preset", name)),
        *sorted(name for name in columns if name.startswith("hp.")),
    ]


@door
def varying_settings(results: "pd.DataFrame") -> list[str]:
    """`algorithm`, and the settings in which the runs differ apart from their seeds.

    A hyper-parameter or option counts if it differs between runs of the same method, local
    optimiser and preset, an option of the partition or of the server's data between runs of the
    same kind of them; else it follows from these, and is no column of its own.
    """
    names = setting_columns(results)
    varying = []
    for name in names:
        if name == "algorithm":
            varying.append(name)
        elif name.startswith((_OF_PARTITION, _OF_SERVER)):
            of_partition = name.startswith(_OF_PARTITION)
            groups = group_runs(results, ["partition" if of_partition else "server_data"])
            if any(len(set(_values(runs[name]))) > 1 for _, runs in groups):
                varying.append(name)
        elif is_shared(name):
            if name not in _SEEDS and len(set(_values(results[name]))) > 1:
                varying.append(name)
        elif any(len(values) > 1 for _, values in _by_cause(results, name)):
            varying.append(name)
    return varying


def following_settings(results: "pd.DataFrame") -> dict[str, list[tuple[str, Any]]]:
    """Hyper-parameters that differ, but follow from the method, its optimiser or its preset; and
    which model is scored, where not all methods leave that unsaid.

    Returns, for each: what they follow from in words, and the value.
    """
    varying = varying_settings(results)
    following = {}
    for name in setting_columns(results):
        if not name.startswith(("hp.", "scored")) or name in varying:
            continue
        causes = _by_cause(results, name)
        found = [
            (describe_settings({n: v for n, v in cause.items() if n in varying}), value)
            for cause, (value,) in causes
            if value is not None
        ]
        some = name == "scored" and 0 < len(found) < len(causes)
        if some or len({value for _, value in found}) > 1:
            following[name] = found
    return following


def _by_cause(results: "pd.DataFrame", name: str) -> list[tuple[dict[str, Any], set]]:
    own = ("pretrain_epochs",) if name == "hp.pretrain_lr" else ()
    causes = [cause for cause in (*_CAUSES, *own) if cause in results and cause != name]
    return [(keys, set(_values(runs[name]))) for keys, runs in group_runs(results, causes)]


def constant_settings(results: "pd.DataFrame") -> dict[str, Any]:
    """The shared settings that all runs have the same value of, seeds and `None` left out."""
    constant = {}
    for name in setting_columns(results):
        if is_shared(name) and name not in _SEEDS:
            values = set(_values(results[name]))
            if len(values) == 1 and None not in values:
                (constant[name],) = values
    return constant


def chosen_settings(results: "pd.DataFrame", by: Sequence[str] | None) -> list[str]:
    """`by`, or what varies. ConfigError for a name that is no setting of these runs."""
    require(len(results) > 0, "results", "no run", "at least one run")
    if not by:
        return varying_settings(results)
    for name in by:
        require_name("by", name, setting_columns(results))
    return list(dict.fromkeys(by))


def group_runs(
    results: "pd.DataFrame", by: Sequence[str]
) -> list[tuple[dict[str, Any], "pd.DataFrame"]]:
    """The runs by their values of these settings, sorted by them; a missing value is `None`."""
    columns = [_values(results[name]) for name in by]
    members: dict[tuple, list[int]] = {}
    for place, key in enumerate(zip(*columns, strict=True) if by else [()] * len(results)):
        members.setdefault(key, []).append(place)

    def order(key: tuple) -> list[tuple]:
        return [sort_key(name, value) for name, value in zip(by, key, strict=True)]

    return [
        (dict(zip(by, key, strict=True)), results.iloc[members[key]])
        for key in sorted(members, key=order)
    ]


class Line(NamedTuple):
    """One line of a figure: the runs of a method and its hyper-parameters."""

    panel: str
    """The shared settings of its runs, in words."""
    method: str
    label: str
    runs: "pd.DataFrame"


def figure_lines(
    results: "pd.DataFrame", by: Sequence[str], panels: Sequence[str] | None = None
) -> list[Line]:
    """The runs as lines, in panels by `panels`: those of `by`, or the settings of it that methods
    compare at. A panel's title says its data set, and what differs between panels."""
    named = list(filter(is_shared, by)) if panels is None else list(panels)
    inside = [name for name in by if name not in named]
    groups = group_runs(results, [*named, *inside])
    differ = [
        name
        for name in named
        if name == "dataset" or len({setting_text(settings[name]) for settings, _ in groups}) > 1
    ]
    said = differ or named
    lines = []
    for settings, runs in groups:
        shared = {name: settings[name] for name in said}
        own = {name: settings[name] for name in inside}
        label = describe_settings(own) or "all runs"
        method = str(own.get("algorithm", label))
        lines.append(Line(describe_settings(shared), method, label, runs))
    return lines


def _values(column: "pd.Series") -> list[Any]:
    values = [str(v) if isinstance(v, list | tuple | dict) else v for v in column.tolist()]
    return [None if is_missing(v) else v for v in values]


def is_numeric(column: "pd.Series") -> bool:
    """Whether every value that is there is a number, and no truth value."""
    return all(
        isinstance(value, numbers.Real) and not isinstance(value, bool)
        for value in column.tolist()
        if not is_missing(value)
    )


def sort_key(name: str, value: Any) -> tuple:
    """Orders the values of a setting: numbers, then texts, then what is missing."""
    if is_missing(value):
        return (2,)
    if name == "algorithm":
        return (1, *method_rank(value))
    return (0, value) if isinstance(value, numbers.Real) else (1, str(value))


def setting_text(value: Any) -> str:
    """A value as it is shown: numbers with at most six digits, a dash for what is missing; a text,
    which may be foreign, in one line."""
    if is_missing(value):
        return MISSING
    return f"{value:g}" if isinstance(value, float) else one_line(str(value))


def setting_name(name: str) -> str:
    """As it is shown: `hp.prox_mu` is `prox_mu`."""
    return _SHOWN.get(name) or one_line(name.split(".", 1)[-1])


def describe_settings(settings: dict[str, Any]) -> str:
    """In a few words: `fedprox, alpha 0.1, prox_mu 0.01`. What is missing is left out."""
    return ", ".join(
        _setting_in_words(name, value) for name, value in settings.items() if not is_missing(value)
    )


def _setting_in_words(name: str, value: Any) -> str:
    if name == "classes":
        return classes_text(value)
    text = setting_text(value)
    return text if name in _NAMED_BY_VALUE else f"{setting_name(name)} {text}"
