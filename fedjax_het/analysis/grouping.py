"""Settings that differ between the runs of a folder, groups of runs, and the metrics of runs."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_het.analysis.figure_style import make_method_sort_key
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.text import MISSING, format_classes_per_client, to_one_line

if TYPE_CHECKING:
    import pandas as pd


_SPEC_FIELDS = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("hp", "options")]
_SEED_SETTINGS = ("seed", "partition_seed")
# What decides the defaults of hyper-parameters and options.
_DEFAULTS_DETERMINED_BY = (
    "algorithm",
    "local_optimizer",
    "lr_schedule",
    "lr_step_schedule",
    "options.preset",
)
# What a method, or a backend, has a default of its own for, so that its absence differs from no
# value.
_METHOD_SETTINGS = (
    "protocol",
    "local_tests",
    "scored",
    "server_data",
    "pretrain_epochs",
    "gradient_gaps",
    "precision",
)
_SERVER_PREFIX = "server_options."
# Where the name of a setting would not say what it is.
_DISPLAY_NAMES = {"algorithm": "Method", f"{_SERVER_PREFIX}size": "n_0"}
_PARTITION_PREFIX = "partition_options."
_SHARED_PREFIXES = ("network_options.", "optimizer_options.")
_SELF_DESCRIBING_SETTINGS = ("algorithm", "dataset", "partition", "model")


def is_missing(value: Any) -> bool:
    return value is None or value != value


def is_diverged(results: "pd.DataFrame") -> "pd.Series":
    """Whether each run diverged, or has no final accuracy for another reason.

    That of clients on their own tests will do: a method may have no global model.
    """
    missing = results["final_accuracy"].isna()
    if "final_client_accuracy" in results:
        missing &= results["final_client_accuracy"].isna()
    return results["diverged"].astype(bool) | missing


def is_shared_setting(name: str) -> bool:
    """Whether a setting is one that runs of every method have, so that methods compare at it."""
    is_method_setting = (
        name.startswith(("options.", "hp.", _SERVER_PREFIX)) or name in _METHOD_SETTINGS
    )
    return not is_method_setting and name != "algorithm"


def list_setting_columns(results: "pd.DataFrame") -> list[str]:
    """The settings among the columns: shared ones, `algorithm`, the method's own."""
    columns = list(results.columns)
    fields = [name for name in _SPEC_FIELDS if name in columns and name != "algorithm"]
    options = [name for name in columns if name.startswith("options.")]
    return [
        *filter(is_shared_setting, fields),
        *sorted(
            name for name in columns if name.startswith((_PARTITION_PREFIX, *_SHARED_PREFIXES))
        ),
        *(["algorithm"] if "algorithm" in columns else []),
        *(name for name in fields if name in _METHOD_SETTINGS),
        *sorted(name for name in columns if name.startswith(_SERVER_PREFIX)),
        *sorted(options, key=lambda name: (name != "options.preset", name)),
        *sorted(name for name in columns if name.startswith("hp.")),
    ]


@validate_arguments
def find_varying_settings(results: "pd.DataFrame") -> list[str]:
    """List `algorithm` and the settings in which the runs differ, except seeds.

    A hyper-parameter or option counts if it differs between runs of the same method, local
    optimizer and preset. An option of a partition or of the server's data counts if it differs
    between runs of the same partition or source. Otherwise it follows from those settings.

    Args:
      results: as `load_results` returns it.
    """
    columns = list_setting_columns(results)
    varying = []
    for name in columns:
        if name == "algorithm":
            varying.append(name)
        elif name.startswith((_PARTITION_PREFIX, _SERVER_PREFIX)):
            is_partition_option = name.startswith(_PARTITION_PREFIX)
            groups = group_runs(results, ["partition" if is_partition_option else "server_data"])
            if any(len(set(_get_hashable_values(runs[name]))) > 1 for _, runs in groups):
                varying.append(name)
        elif is_shared_setting(name):
            if name not in _SEED_SETTINGS and len(set(_get_hashable_values(results[name]))) > 1:
                varying.append(name)
        elif any(len(values) > 1 for _, values in _group_values_by_cause(results, name)):
            varying.append(name)
    return varying


def find_derived_settings(results: "pd.DataFrame") -> dict[str, list[tuple[str, Any]]]:
    """Hyper-parameters that differ, but follow from the method, its optimiser or its preset; and
    which model is scored, where not all methods leave that unsaid.

    Returns, for each: what they follow from in words, and the value.
    """
    varying = find_varying_settings(results)
    derived_settings = {}
    for name in list_setting_columns(results):
        if not name.startswith(("hp.", "scored")) or name in varying:
            continue
        values_by_cause = _group_values_by_cause(results, name)
        derived_values = [
            (describe_settings({n: v for n, v in cause.items() if n in varying}), value)
            for cause, (value,) in values_by_cause
            if value is not None
        ]
        is_partly_set = name == "scored" and 0 < len(derived_values) < len(values_by_cause)
        if is_partly_set or len({value for _, value in derived_values}) > 1:
            derived_settings[name] = derived_values
    return derived_settings


def _group_values_by_cause(results: "pd.DataFrame", name: str) -> list[tuple[dict[str, Any], set]]:
    extra_causes = ("pretrain_epochs",) if name == "hp.pretrain_lr" else ()
    causes = [
        cause
        for cause in (*_DEFAULTS_DETERMINED_BY, *extra_causes)
        if cause in results and cause != name
    ]
    return [
        (keys, set(_get_hashable_values(runs[name]))) for keys, runs in group_runs(results, causes)
    ]


def find_constant_settings(results: "pd.DataFrame") -> dict[str, Any]:
    """The shared settings that all runs have the same value of, seeds and `None` left out."""
    constant_values = {}
    for name in list_setting_columns(results):
        if is_shared_setting(name) and name not in _SEED_SETTINGS:
            values = set(_get_hashable_values(results[name]))
            if len(values) == 1 and None not in values:
                (constant_values[name],) = values
    return constant_values


def resolve_group_settings(results: "pd.DataFrame", by: Sequence[str] | None) -> list[str]:
    """`by`, or what varies. ConfigError for a name that is no setting of these runs."""
    require(len(results) > 0, "results", "no run", "at least one run")
    if not by:
        return find_varying_settings(results)
    for name in by:
        require_name("by", name, list_setting_columns(results))
    return list(dict.fromkeys(by))


def group_runs(
    results: "pd.DataFrame", by: Sequence[str]
) -> list[tuple[dict[str, Any], "pd.DataFrame"]]:
    """The runs by their values of these settings, sorted by them; a missing value is `None`."""
    columns = [_get_hashable_values(results[name]) for name in by]
    row_indices: dict[tuple, list[int]] = {}
    for index, key in enumerate(zip(*columns, strict=True) if by else [()] * len(results)):
        row_indices.setdefault(key, []).append(index)

    def sort_keys(key: tuple) -> list[tuple]:
        return [make_sort_key(name, value) for name, value in zip(by, key, strict=True)]

    return [
        (dict(zip(by, key, strict=True)), results.iloc[row_indices[key]])
        for key in sorted(row_indices, key=sort_keys)
    ]


class RunLine(NamedTuple):
    """One line of a figure: the runs of a method and its hyper-parameters."""

    panel: str
    """The shared settings of its runs, in words."""
    method: str
    label: str
    runs: "pd.DataFrame"


def group_figure_lines(
    results: "pd.DataFrame", by: Sequence[str], panels: Sequence[str] | None = None
) -> list[RunLine]:
    """The runs as lines, in panels by `panels`: those of `by`, or the settings of it that methods
    compare at. A panel's title says its data set, and what differs between panels."""
    panel_settings = list(filter(is_shared_setting, by)) if panels is None else list(panels)
    line_settings = [name for name in by if name not in panel_settings]
    groups = group_runs(results, [*panel_settings, *line_settings])
    differing_settings = [
        name
        for name in panel_settings
        if name == "dataset"
        or len({format_setting_value(settings[name]) for settings, _ in groups}) > 1
    ]
    title_settings = differing_settings or panel_settings
    lines = []
    for settings, runs in groups:
        panel_values = {name: settings[name] for name in title_settings}
        line_values = {name: settings[name] for name in line_settings}
        label = describe_settings(line_values) or "all runs"
        method = str(line_values.get("algorithm", label))
        lines.append(RunLine(describe_settings(panel_values), method, label, runs))
    return lines


def _get_hashable_values(column: "pd.Series") -> list[Any]:
    values = [str(v) if isinstance(v, list | tuple | dict) else v for v in column.tolist()]
    return [None if is_missing(v) else v for v in values]


def is_numeric(column: "pd.Series") -> bool:
    """Whether every value that is there is a number, and no truth value."""
    return all(
        isinstance(value, numbers.Real) and not isinstance(value, bool)
        for value in column.tolist()
        if not is_missing(value)
    )


def make_sort_key(name: str, value: Any) -> tuple:
    """Orders the values of a setting: numbers, then texts, then what is missing."""
    if is_missing(value):
        return (2,)
    if name == "algorithm":
        return (1, *make_method_sort_key(value))
    return (0, value) if isinstance(value, numbers.Real) else (1, str(value))


def format_setting_value(value: Any) -> str:
    """A value as it is shown: numbers with at most six digits, a dash for what is missing; a text,
    which may be foreign, in one line."""
    if is_missing(value):
        return MISSING
    return f"{value:g}" if isinstance(value, float) else to_one_line(str(value))


def format_setting_name(name: str) -> str:
    """As it is shown: `hp.prox_mu` is `prox_mu`."""
    return _DISPLAY_NAMES.get(name) or to_one_line(name.split(".", 1)[-1])


def describe_settings(settings: dict[str, Any]) -> str:
    """In a few words: `fedprox, alpha 0.1, prox_mu 0.01`. What is missing is left out."""
    return ", ".join(
        _describe_setting(name, value) for name, value in settings.items() if not is_missing(value)
    )


def _describe_setting(name: str, value: Any) -> str:
    if name == "classes":
        return format_classes_per_client(value)
    text = format_setting_value(value)
    return text if name in _SELF_DESCRIBING_SETTINGS else f"{format_setting_name(name)} {text}"


_METRIC_LABELS = {
    "final_accuracy": "Test accuracy (%)",
    "final_accuracy_std": "Deviation of the last five rounds (%)",
    "best_accuracy": "Best test accuracy (%)",
    "last_accuracy": "Test accuracy of the last round (%)",
    "window_accuracy": "Accuracy, mean of 20 rounds (%)",
    "rise_time": "Rise time (rounds)",
    "rounds_to_half": "Rounds to 50 %",
    "bmta": "Best mean accuracy of clients (%)",
    "bmta_worst_decile": "Worst decile of clients (%)",
    "bmta_round": "Round of the best mean",
    "final_client_accuracy": "Mean accuracy of clients (%)",
    "mean_client_accuracy": "Mean accuracy of clients (%)",
    "test_accuracy": "Test accuracy (%)",
    "test_loss": "Test loss (nats)",
    "train_loss": "Training loss (nats)",
    "gradient_gap": "Squared distance of gradients",
    "server_gap": "Server's gradient gap",
    "client_gap": "Clients' gradient gap",
    "wall_seconds": "Wall-clock (s)",
    "client_samples_per_second": "Client samples per second",
    "bytes_up": "Bytes sent by clients",
    "bytes_down": "Bytes sent to clients",
}
# Those of a running mean over 20 rounds.
ROLLING_MEAN_METRICS = ("window_accuracy", "rise_time", "rounds_to_half")
# Accuracies by another name.
_OTHER_ACCURACIES = ("bmta", "bmta_worst_decile")


def get_display_scale(metric: str) -> float:
    """Return 100 for accuracies, which are shown in percent, otherwise 1.

    Args:
      metric: a column of `load_results` or `load_curves`.
    """
    return 100 if "accuracy" in metric or metric in _OTHER_ACCURACIES else 1


def is_higher_better(metric: str) -> bool:
    return get_display_scale(metric) == 100 and not metric.endswith("_std")


def choose_default_metric(results: "pd.DataFrame") -> str:
    """Choose the metric of a folder of runs: `final_accuracy` or `bmta`.

    `bmta` is chosen if at least as many runs have it, since personalized methods may have no
    global model.

    Args:
      results: as `load_results` returns it.
    """
    if "bmta" not in results:
        return "final_accuracy"
    converged_runs = results[~is_diverged(results)]
    num_client_tested, num_globally_tested = (
        int(converged_runs[name].notna().sum()) for name in ("bmta", "final_accuracy")
    )
    return (
        "bmta"
        if num_client_tested and num_client_tested >= num_globally_tested
        else "final_accuracy"
    )


def get_companion_metric(metric: str) -> tuple[str, str, str]:
    """Return the metric that an overview shows beside a metric: its name, heading and description.

    Args:
      metric: the overview's main metric.
    """
    if metric.startswith("bmta"):
        description = "mean over the worst tenth of clients in the round of the best mean"
        return "bmta_worst_decile", "Worst decile (%)", f"Worst decile: {description}"
    if metric == "window_accuracy":
        description = (
            "the first round at which the running mean over 20 reaches 90 % of its last value"
        )
        return "rise_time", "Rise time", f"Rise time: {description}, mean over seeds"
    return "best_accuracy", "Best (%)", "Best: mean over seeds of a run's best round"


def get_metric_label(metric: str) -> str:
    """Return the label of a metric for an axis or a heading."""
    return _METRIC_LABELS.get(metric) or to_one_line(metric)


def require_result_metric(results: "pd.DataFrame", metric: str) -> None:
    """Raise ConfigError unless the metric is a numeric column that is no setting.

    Args:
      results: as `load_results` returns it.
      metric: name of the column.
    """
    settings = list_setting_columns(results)
    names = [n for n in results.columns if n not in settings and is_numeric(results[n])]
    require_name("metric", metric, names)


def get_metric_values(results: "pd.DataFrame", metric: str) -> "pd.Series":
    """Return one number per run: percent for accuracies, NaN for a run without the metric.

    Args:
      results: as `load_results` returns it.
      metric: a column of it.
    """
    import pandas as pd

    if metric not in results:
        return pd.Series(float("nan"), index=results.index)
    return get_display_scale(metric) * pd.to_numeric(results[metric], errors="coerce")
