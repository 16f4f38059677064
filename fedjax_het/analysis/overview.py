"""Overview of the runs of a folder: the settings that vary, groups of runs, means over seeds.

Settings are columns of `load_results` such as `alpha`, `hp.prox_mu` or `options.preset`. Runs of
every method have the shared settings. Fractions such as accuracies are in percent.
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.render import (
    TableSection,
    TextTable,
    add_equal_note,
    choose_number_format,
    equals_baseline,
    find_best_indices,
    format_mean_std,
    format_number,
)
from fedjax_het.config.comparison import describe_unequal_settings, find_unequal_settings
from fedjax_het.config.kind_settings import KIND_SETTINGS, get_neutral_strength
from fedjax_het.config.protocols import describe_protocol
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS
from fedjax_het.metrics.registry import get_metric_info
from fedjax_het.runtime.history import PLATEAU, TARGET
from fedjax_het.runtime.identity import IDENTITY_FIELDS
from fedjax_het.runtime.result_display import TEST_SPLIT_ADVICE
from fedjax_het.runtime.result_store import is_partial_run, select_newest
from fedjax_het.tasks.wording import name_score
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require, require_name
from fedjax_het.utils.text import DIVERGED, EQUAL, MISSING, format_classes_per_client, to_one_line

if TYPE_CHECKING:
    import pandas as pd


_SPEC_FIELDS = [
    field.name
    for field in dataclasses.fields(RunSpec)
    if field.name not in ("hp", "options", *HYPERPARAMETER_SETTINGS)  # columns have names of `hp`
]
_SEED_SETTINGS = ("seed", "partition_seed")
# Settings that determine the defaults of hyperparameters and options.
_DEFAULTS_DETERMINED_BY = (
    "algorithm",
    "local_optimizer",
    "lr_schedule",
    "lr_step_schedule",
    "options.preset",
)
# Settings whose default depends on the method or the backend: a missing value is a value, too.
_METHOD_SETTINGS = (
    "protocol",
    "client_tests",
    "client_test_model",
    "server_data",
    "pretrain_epochs",
    "gradient_gaps",
    "precision",
)
_SERVER_PREFIX, _PARTITION_PREFIX = "server_options.", "partition_options."
_SHARED_PREFIXES = (
    *(_PARTITION_PREFIX, "network_options.", "optimizer_options."),
    *(f"{name}." for name in KIND_SETTINGS),
)
# Names of settings whose own names do not describe them.
_DISPLAY_NAMES = {
    "algorithm": "Method",
    f"{_SERVER_PREFIX}size": "n_0",
    **{f"hp.{name}": setting for setting, name in HYPERPARAMETER_SETTINGS.items()},
}
_SELF_DESCRIBING_SETTINGS = ("algorithm", "dataset", "partition", "model")
BASELINE = "fedavg"
"""Method whose rows other rows are compared with."""
# Columns that a narrow terminal leaves out, the least important column first.
_MINOR_COLUMNS = ("Samples/s", "Time (s)", "Diverged", "Seeds", "Worst decile (%)", "Rise time")
_REQUIRED_VERSIONS = ("fedjax_het", "jax", "device")


# Settings


def is_missing(value: Any) -> bool:
    """Return whether a value is None or NaN."""
    return value is None or value != value


def is_diverged(results: "pd.DataFrame") -> "pd.Series":
    """Return whether each run diverged, ended early, or has no final accuracy for another reason.

    A run without a global model may have the accuracy of clients on their own tests instead. Runs
    that a callback or the caller ended early are also reported by `is_partial_run`.
    """
    import pandas as pd

    if not len(results):
        return pd.Series(False, index=results.index)
    missing = results["final_accuracy"].isna()
    if "final_client_accuracy" in results:
        missing &= results["final_client_accuracy"].isna()
    return results["diverged"].astype(bool) | missing | is_partial_run(results)


def is_shared_setting(name: str) -> bool:
    """Return whether runs of every method have a setting, so that methods compare at its values."""
    return name not in ("algorithm", *_METHOD_SETTINGS) and not name.startswith(
        ("options.", "hp.", _SERVER_PREFIX)
    )


def list_setting_columns(results: "pd.DataFrame") -> list[str]:
    """List the columns that are settings: shared ones, `algorithm`, then the method's own."""
    columns = list(results.columns)
    fields = [name for name in _SPEC_FIELDS if name in columns and name != "algorithm"]

    def list_prefixed(*prefixes: str) -> list[str]:
        return sorted(name for name in columns if name.startswith(prefixes))

    return [
        *filter(is_shared_setting, fields),
        *list_prefixed(*_SHARED_PREFIXES),
        *(["algorithm"] if "algorithm" in columns else []),
        *(name for name in fields if name in _METHOD_SETTINGS),
        *list_prefixed(_SERVER_PREFIX),
        *sorted(list_prefixed("options."), key=lambda name: name != "options.preset"),
        *list_prefixed("hp."),
    ]


@validate_arguments
def find_varying_settings(results: "pd.DataFrame") -> list[str]:
    """List `algorithm` and the settings in which the runs differ, except seeds.

    A hyperparameter or option counts if it differs between runs of the same method, local
    optimizer and preset. An option of a partition or of the server's data counts if it differs
    between runs of the same partition or source. Otherwise it follows from those settings.

    Args:
      results: as `load_results` returns it.

    Returns:
      Names of columns, in the order of `list_setting_columns`.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import find_varying_settings
      >>> runs = pd.DataFrame({"algorithm": ["fedavg"] * 2, "alpha": [0.1, 1.0], "rounds": [5, 5]})
      >>> find_varying_settings(runs)
      ['alpha', 'algorithm']
    """
    return [
        name
        for name in list_setting_columns(results)
        if name == "algorithm"
        or (
            name not in _SEED_SETTINGS
            and any(len(values) > 1 for _, values in _group_values(results, name))
        )
    ]


def find_derived_settings(results: "pd.DataFrame") -> dict[str, list[tuple[str, Any]]]:
    """Find settings that differ, but follow from the method, its optimizer or its preset.

    These are hyperparameters, and `client_test_model` if some methods have it.

    Args:
      results: as `load_results` returns it.

    Returns:
      By setting, pairs of the settings that determine it, in words, and its value.
    """
    varying = find_varying_settings(results)
    derived_settings = {}
    for name in list_setting_columns(results):
        if not name.startswith(("hp.", "client_test_model")) or name in varying:
            continue
        groups = _group_values(results, name)
        pairs = [
            (describe_settings({n: v for n, v in cause.items() if n in varying}), value)
            for cause, (value,) in groups
            if value is not None
        ]
        is_partly_set = name == "client_test_model" and 0 < len(pairs) < len(groups)
        if is_partly_set or len({value for _, value in pairs}) > 1:
            derived_settings[name] = pairs
    return derived_settings


def _group_values(results: "pd.DataFrame", name: str) -> list[tuple[dict[str, Any], set]]:
    """Return a setting's values among runs that have the same causes of its default."""
    if name.startswith((_PARTITION_PREFIX, _SERVER_PREFIX)):
        causes = ["partition" if name.startswith(_PARTITION_PREFIX) else "server_data"]
    elif is_shared_setting(name):
        causes = []
    else:
        causes = [*_DEFAULTS_DETERMINED_BY, *(["pretrain_epochs"] * (name == "hp.pretrain_lr"))]
        causes = [cause for cause in causes if cause in results and cause != name]
    groups = group_runs(results, causes)
    return [(keys, set(_get_hashable_values(runs[name]))) for keys, runs in groups]


def resolve_group_settings(results: "pd.DataFrame", by: Sequence[str] | None) -> list[str]:
    """Return the settings that distinguish groups of runs.

    Args:
      results: as `load_results` returns it.
      by: names of settings (default: settings that vary).

    Returns:
      The names without repetition.

    Raises:
      ConfigError: if there is no run, or a name is no setting of the runs.
    """
    require(len(results) > 0, "results", "no run", "at least one run")
    if not by:
        return find_varying_settings(results)
    columns = list(map(get_setting_column, by))
    for name in columns:
        require_name("by", name, list_setting_columns(results))
    return list(dict.fromkeys(columns))


def get_setting_column(name: str) -> str:
    """Return the column of a setting; `learning_rate` is in the column `hp.local_lr`."""
    return f"hp.{HYPERPARAMETER_SETTINGS[name]}" if name in HYPERPARAMETER_SETTINGS else name


def group_runs(
    results: "pd.DataFrame", by: Sequence[str]
) -> list[tuple[dict[str, Any], "pd.DataFrame"]]:
    """Group runs by their values of some settings.

    Args:
      results: as `load_results` returns it.
      by: names of settings.

    Returns:
      Values of the settings, None for a missing one, and runs of each group, sorted by the values.
    """
    columns = [_get_hashable_values(results[name]) for name in by]
    indices: dict[tuple, list[int]] = {}
    for index, key in enumerate(zip(*columns, strict=True) if by else [()] * len(results)):
        indices.setdefault(key, []).append(index)

    def sort_keys(key: tuple) -> list[tuple]:
        return [_make_sort_key(name, value) for name, value in zip(by, key, strict=True)]

    return [
        (dict(zip(by, key, strict=True)), results.iloc[indices[key]])
        for key in sorted(indices, key=sort_keys)
    ]


def _get_hashable_values(column: "pd.Series") -> list[Any]:
    values = [str(v) if isinstance(v, list | tuple | dict) else v for v in column.tolist()]
    return [None if is_missing(v) else v for v in values]


class RunLine(NamedTuple):
    """One line of a figure: the runs of a method and its hyperparameters."""

    panel: str
    """Title of the line's panel: the shared settings of its runs, in words."""
    method: str
    label: str
    runs: "pd.DataFrame"


class LineGroups(NamedTuple):
    """Runs as the lines of a figure, and the arrangement of its panels."""

    lines: list[RunLine]
    columns: int
    """Panels per row: the number of values of the last setting with panels."""
    has_dataset_panels: bool
    """Whether each data set has its own panel."""

    @property
    def titles(self) -> list[str]:
        """Titles of the panels."""
        return list(dict.fromkeys(line.panel for line in self.lines))


def group_figure_lines(
    results: "pd.DataFrame", by: Sequence[str], panels: Sequence[str] | None = None
) -> LineGroups:
    """Group runs to the lines of a figure.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish lines and panels.
      panels: settings with panels; default: the shared settings of `by`. A panel's title has the
        data set and the settings that differ between panels.

    Returns:
      The lines by panel.

    Raises:
      ConfigError: if the runs do not have a setting of `panels`.
    """
    panel_settings = (
        resolve_group_settings(results, panels) if panels else list(filter(is_shared_setting, by))
    )
    line_settings = [name for name in by if name not in panel_settings]
    groups = group_runs(results, [*panel_settings, *line_settings])
    differing_settings = [
        name
        for name in panel_settings
        if name == "dataset" or len({format_setting_value(keys[name]) for keys, _ in groups}) > 1
    ]
    lines = []
    for settings, runs in groups:
        title = describe_settings({n: settings[n] for n in differing_settings or panel_settings})
        line_values = {name: settings[name] for name in line_settings}
        label = describe_settings(line_values) or "all runs"
        lines.append(RunLine(title, str(line_values.get("algorithm", label)), label, runs))
    by_dataset = group_runs(results, [name for name in panel_settings if name == "dataset"])
    columns = max(len(group_runs(runs, panel_settings[-1:])) for _, runs in by_dataset)
    return LineGroups(lines, columns, "dataset" in panel_settings)


def is_numeric(column: "pd.Series") -> bool:
    """Return whether every value of a column is a number, apart from missing ones."""
    return all(
        isinstance(value, numbers.Real) and not isinstance(value, bool)
        for value in column.tolist()
        if not is_missing(value)
    )


def _make_sort_key(name: str, value: Any) -> tuple:
    """Return a key that sorts numbers, texts, then missing values; methods as registered."""
    if is_missing(value):
        return (2,)
    if name == "algorithm":
        return (1, [*METHODS].index(value) if value in METHODS else len(METHODS), value)
    return (0, value) if isinstance(value, numbers.Real) else (1, str(value))


def format_setting_value(value: Any, name: str = "") -> str:
    """Format a value in one line: numbers with six digits, a dash for a missing value.

    Args:
      value: the value.
      name: name of the setting; methods have their names for display.

    Returns:
      The text.
    """
    if is_missing(value):
        return MISSING
    if name == "algorithm":
        return get_method_title(str(value))
    return f"{value:g}" if isinstance(value, float) else to_one_line(str(value))


def format_setting_name(name: str) -> str:
    """Return a setting's name without its prefix: `hp.prox_mu` is `prox_mu`."""
    return _DISPLAY_NAMES.get(name) or to_one_line(name.split(".", 1)[-1])


def get_method_title(name: str) -> str:
    """Return the name of a method for display, such as `FedAvg`; unknown methods keep their name.

    Args:
      name: name of the method.
    """
    return METHODS[name].title if name in METHODS else to_one_line(name)


def describe_settings(settings: dict[str, Any]) -> str:
    """Describe settings in a few words: `FedProx, alpha 0.1, prox_mu 0.01`.

    None is left out. So are strengths of skews and systems that change nothing, unless there is
    only one strength.

    Args:
      settings: values by column.

    Returns:
      The words; "none" for several strengths that change nothing.
    """
    neutral_strengths = {name: get_neutral_strength(name) for name in settings}
    strengths = [name for name, neutral in neutral_strengths.items() if neutral is not None]
    shown = {
        name: value
        for name, value in settings.items()
        if not is_missing(value) and (len(strengths) < 2 or value != neutral_strengths[name])
    }
    text = ", ".join(_describe_setting(name, value) for name, value in shown.items())
    return text or ("none" if strengths else "")


def _describe_setting(name: str, value: Any) -> str:
    if name == "classes":
        return format_classes_per_client(value)
    text = format_setting_value(value, name)
    return text if name in _SELF_DESCRIBING_SETTINGS else f"{format_setting_name(name)} {text}"


def describe_comparison(results: "pd.DataFrame", by: Sequence[str] | None = None) -> list[str]:
    """Describe what the runs of a table or figure have in common.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish rows or lines; runs that differ in other settings are averaged
        (default: all settings that vary).

    Returns:
      Phrases: the protocol, and the settings in which methods differ.
    """
    if not {"algorithm", "protocol"} <= {*results}:
        return []
    protocols = [describe_protocol(name) for name in results["protocol"].dropna().unique()]
    averaged = set() if by is None else {*find_varying_settings(results)} - {*by}
    unequal = describe_unequal_settings(
        find_unequal_settings(results.to_dict("records"), averaged=averaged)
    )
    return [
        *([f"protocol: {', '.join(protocols)}"] if protocols else []),
        *([f"methods differ in settings: {unequal}"] if unequal else []),
    ]


def _add_protocol(title: str, results: "pd.DataFrame") -> str:
    """Return a title with the protocols of the runs."""
    protocols = results["protocol"].dropna().unique() if "protocol" in results else []
    return f"{title}, protocol {', '.join(protocols)}" if len(protocols) else title


# Metrics

# Metrics of a running mean over 20 rounds.
ROLLING_MEAN_METRICS = ("window_accuracy", "rise_time", "rounds_to_half")
EVALUATED_ACCURACY = "evaluated_accuracy"
"""Accuracy of the model that a method evaluates, see `add_evaluated_accuracy`."""
# Metrics of the round with the best mean over clients.
BMTA_METRICS = ("bmta", "bmta_worst_decile", "bmta_round")
_METRIC_DESCRIPTIONS = {
    "final_accuracy": ", mean of the last five rounds",
    "evaluated_accuracy": ", mean of the last five rounds",
    "rounds_to_half": ", of the runs that reach it (Seeds: their number)",
    "bmta": " on tests like their own data, in the round where it is highest",
}


def choose_default_metric(results: "pd.DataFrame") -> str:
    """Choose the metric of a folder of runs: `final_accuracy`, `bmta` or `evaluated_accuracy`.

    `bmta` is chosen if all runs have it that have an accuracy, since personalized methods may have
    no global model. If personalized methods have it and other methods do not, each run has the
    accuracy of the model that its method evaluates (`add_evaluated_accuracy`).

    Args:
      results: as `load_results` returns it.
    """
    if "bmta" not in results:
        return "final_accuracy"
    converged = results[~is_diverged(results)]
    has_bmta = converged["bmta"].notna()
    if has_bmta.any() and has_bmta.all():
        return "bmta"
    return EVALUATED_ACCURACY if evaluates_clients(converged).any() else "final_accuracy"


def evaluates_clients(results: "pd.DataFrame") -> "pd.Series":
    """Return whether each run's method aims at models of clients, which the run has tested.

    Args:
      results: as `load_results` returns it.
    """
    import pandas as pd

    if "final_client_accuracy" not in results:
        return pd.Series(False, index=results.index)
    is_personal = pd.Series(
        [
            (name in METHODS and METHODS[name].is_personalized)
            if is_missing(model)
            else model != "global"
            for name, model in zip(
                results["algorithm"],
                results.get("client_test_model", [None] * len(results)),
                strict=True,
            )
        ],
        index=results.index,
        dtype=bool,
    )
    return is_personal & results["final_client_accuracy"].notna()


def add_evaluated_accuracy(
    results: "pd.DataFrame", curves: "pd.DataFrame"
) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Add the accuracy of the model that each run's method evaluates.

    It is the mean of clients' own tests for personalized methods, and the test accuracy of the
    global model for other methods.

    Args:
      results: as `load_results` returns it.
      curves: as `load_curves` returns it.

    Returns:
      Results with `evaluated_accuracy` and `evaluated_best`, and curves with `evaluated_accuracy`.
    """
    is_personal = evaluates_clients(results)
    columns = {EVALUATED_ACCURACY: ("final_client_accuracy", "final_accuracy")}
    columns["evaluated_best"] = ("bmta", "best_accuracy")
    for name, (own, shared) in columns.items():
        if own in results and shared in results:
            results = results.assign(**{name: results[own].where(is_personal, results[shared])})
    if "mean_client_accuracy" in curves:
        is_own = curves["digest"].isin(results["digest"][is_personal])
        own_curve = curves["mean_client_accuracy"].where(is_own, curves["test_accuracy"])
        curves = curves.assign(**{EVALUATED_ACCURACY: own_curve})
    return results, curves


def _describe_evaluated_models(results: "pd.DataFrame") -> str:
    """Name the methods with each kind of evaluated model."""
    is_personal = evaluates_clients(results)
    kinds = {
        "the clients' own models on the clients' own tests": results[is_personal],
        "the global model on all test examples": results[~is_personal],
    }
    parts = [
        f"{', '.join(map(get_method_title, runs['algorithm'].unique()))}: {kind}"
        for kind, runs in kinds.items()
        if len(runs)
    ]
    return f"Rows measure different things. {'; '.join(parts)}."


def get_companion_metric(metric: str) -> tuple[str, str, str]:
    """Return the metric that an overview shows beside a metric: its name, heading and description.

    Args:
      metric: the overview's main metric.
    """
    if metric in BMTA_METRICS:
        description = "mean over the worst tenth of clients in the round of the best mean"
        return "bmta_worst_decile", "Worst decile (%)", f"Worst decile: {description}"
    if metric == EVALUATED_ACCURACY:
        return "evaluated_best", "Best (%)", "Best: mean over seeds of a run's best round"
    if metric == "window_accuracy":
        description = (
            "the first round at which the running mean over 20 reaches 90 % of its last value"
        )
        return "rise_time", "Rise time", f"Rise time: {description}, mean over seeds"
    return "best_accuracy", "Best (%)", "Best: mean over seeds of a run's best round"


def get_metric_label(metric: str, tasks: Sequence[object] = ()) -> str:
    """Return the label of a metric for an axis or a heading.

    Args:
      metric: name of the metric.
      tasks: names of the runs' tasks, whose score has its own name, see `list_tasks`.

    Returns:
      One line of text.
    """
    return to_one_line(name_score(get_metric_info(metric).axis_label or metric, tasks))


def list_tasks(results: "pd.DataFrame") -> list[object]:
    """Return the names of the tasks of runs; [] for results without them.

    Args:
      results: as `load_results` returns it.
    """
    return [*results["task"].unique()] if "task" in results else []


def require_result_metric(results: "pd.DataFrame", metric: str, argument: str = "metric") -> None:
    """Raise ConfigError unless the metric is a numeric column that is no setting.

    Args:
      results: as `load_results` returns it.
      metric: name of the column.
      argument: argument that has the name, for messages.
    """
    settings = list_setting_columns(results)
    names = [n for n in results.columns if n not in settings and is_numeric(results[n])]
    if metric not in names:
        declared = [name for name in names if get_metric_info(name).label]
        require_name(argument, metric, declared or names)


def get_metric_values(results: "pd.DataFrame", metric: str) -> "pd.Series":
    """Return one number per run: percent for fractions, NaN for a run without the metric.

    Args:
      results: as `load_results` returns it.
      metric: a column of it.

    Returns:
      The values with the index of `results`.
    """
    import pandas as pd

    if metric not in results:
        return pd.Series(float("nan"), index=results.index)
    return get_metric_info(metric).scale * pd.to_numeric(results[metric], errors="coerce")


# Tables


@validate_arguments
def summarize_runs(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
    columns: Sequence[str] = (),
    sort: str | None = None,
) -> "pd.DataFrame":
    """Average a metric over the runs that share settings, one row per combination.

    Args:
      results: as `load_results` returns it; of runs with equal settings the newest counts.
      by: settings that distinguish rows; default: `find_varying_settings`. Runs that differ in
        other settings are averaged together.
      metric: a numeric column of `results`.
      columns: further numeric columns, averaged over all runs of a row, for example
        "split.label_hellinger".
      sort: numeric column whose mean sorts the rows, the smallest value first; default: `by`.

    Returns:
      A frame sorted by `sort` or by `by`; missing values are NaN, fractions in percent:

      * the settings of `by`;
      * `mean` and `std` of the metric (n − 1; NaN for one run);
      * `best_accuracy`, the mean of the runs' best rounds; for BMTA instead `bmta_worst_decile`,
        and for the mean of 20 rounds `rise_time`;
      * `seeds`, the number of runs in the mean;
      * `diverged`, `partial` and `undefined`, the numbers of runs that the mean excludes. A
        callback or the caller ended `partial` runs early. `undefined` runs have no value of the
        metric, for example no `rounds_to_half` below an accuracy of 50 %;
      * `wall_seconds`, `client_samples_per_second` and `seconds_without_compilation` of a run,
        diverged or not;
      * the means of `columns`.

    Raises:
      ConfigError: if the runs do not have a setting or the metric, or if there is no run.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> from fedjax_het.runtime.result_store import build_dataframe
      >>> from fedjax_het.analysis import summarize_runs
      >>> spec = RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=1)
      >>> results = build_dataframe([simulate(spec, progress=None)])
      >>> summarize_runs(results)[["algorithm", "seeds"]].to_numpy().tolist()
      [['fedavg', 1]]
    """
    import pandas as pd

    results = select_newest(results)
    by = resolve_group_settings(results, by)
    rows = _summarize_groups(results, by, metric, columns, sort)
    return pd.DataFrame([{**settings, **summary} for settings, summary in rows])


def _summarize_groups(
    results: "pd.DataFrame",
    by: Sequence[str],
    metric: str,
    columns: Sequence[str] = (),
    sort: str | None = None,
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the settings of each group of runs, and its columns of `summarize_runs`."""
    require_result_metric(results, metric)
    for column in columns:
        require_result_metric(results, column, "columns")
    groups = group_runs(results, by)
    if sort is not None:
        require_result_metric(results, sort, "sort")
        means = [get_metric_values(runs, sort).mean() for _, runs in groups]
        groups = [groups[i] for i in np.argsort(means, kind="stable")]  # NaN comes last
    companion_metric, *_ = get_companion_metric(metric)
    rows = []
    for settings, runs in groups:
        has_diverged = is_diverged(runs)
        values = get_metric_values(runs[~has_diverged], metric)
        summary = {
            "mean": values.mean(),
            "std": values.std(),  # n - 1: NaN for one run
            companion_metric: get_metric_values(runs[~has_diverged], companion_metric).mean(),
            "seeds": int(values.count()),
            "undefined": int(values.isna().sum()),
            "diverged": int((has_diverged & ~is_partial_run(runs)).sum()),
            "partial": int(is_partial_run(runs).sum()),
        }
        for name in ("wall_seconds", "client_samples_per_second"):
            summary[name] = get_metric_values(runs, name).mean()
        run_seconds = get_metric_values(runs, "wall_seconds") - _get_compile_seconds(runs)
        summary["seconds_without_compilation"] = run_seconds.mean()
        summary |= {column: get_metric_values(runs, column).mean() for column in columns}
        rows.append((settings, summary))
    return rows


def _get_compile_seconds(runs: "pd.DataFrame") -> "pd.Series":
    """Return each run's share of the compilation; 0 without the metric."""
    compile_seconds = get_metric_values(runs, "compile_seconds").fillna(0.0)
    if "fedjax_het" not in runs:
        return compile_seconds
    # Versions before 0.7 gave each of the runs in lockstep the compilation of all of them.
    is_undivided = runs["fedjax_het"].astype(str).str.match(r"0\.[0-6]\.")
    num_runs = get_metric_values(runs, "made_together").fillna(1)
    return compile_seconds / num_runs.where(is_undivided, 1)


class _OverviewRow(NamedTuple):
    settings: dict[str, Any]
    texts: dict[str, str]
    means: dict[str, float]
    """Numbers by column that compete for bold type; NaN if runs diverged."""


@validate_arguments
def make_overview_table(
    results: "pd.DataFrame",
    *,
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
    columns: Sequence[str] = (),
    sort: str | None = None,
    title: str = "Overview",
) -> TextTable:
    """Format `summarize_runs` as a table of texts, with the common settings of all runs as notes.

    Args:
      results: as `load_results` returns it.
      by: settings that distinguish rows; default: `find_varying_settings`.
      metric: a numeric column of `results`.
      columns: further numeric columns, see `summarize_runs`.
      sort: numeric column that sorts the rows, the smallest value first; default: `by`.
      title: title of the table.

    Returns:
      A table with a section per combination of shared settings.

    Raises:
      ConfigError: if the runs do not have a setting or the metric, or if there is no run.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import make_overview_table
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": ["fedavg", "fsl"], "seed": 0,
      ...     "settings": ["a", "b"], "finished": "2026", "diverged": False,
      ...     "final_accuracy": [0.5, 0.6]})
      >>> table = make_overview_table(results)
      >>> [row["Test accuracy (%)"] for row in table.sections[0].rows]
      ['50.00', '60.00']
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    groups = _summarize_groups(results, by, metric, columns, sort)
    format_spec = _choose_format(groups, metric)
    formats = {column: choose_number_format(row[column] for _, row in groups) for column in columns}
    seconds_format = choose_number_format(row["seconds_without_compilation"] for _, row in groups)
    tasks = list_tasks(results)
    value_column = get_metric_label(metric, tasks)
    companion_metric, companion_heading, companion_note = get_companion_metric(metric)
    rows = [
        _OverviewRow(
            settings,
            {
                value_column: _format_summary(row, format_spec),
                companion_heading: format_number(row[companion_metric]),
                **{
                    get_metric_label(column, tasks): format_number(row[column], formats[column])
                    for column in columns
                },
                "Seeds": str(row["seeds"]),
                "Diverged": str(row["diverged"] or MISSING),
                "Time (s)": format_number(row["seconds_without_compilation"], seconds_format),
                "Samples/s": format_number(row["client_samples_per_second"], ",.0f"),
            },
            {value_column: _get_rankable_mean(row)},
        )
        for settings, row in groups
    ]
    notes = (
        *_make_metric_notes(results, by, metric),
        f"{companion_note}. Time: wall-clock per run, without compilation and measurements of lanes. "
        "Samples/s: client samples per second of training.",
        *_make_settings_notes(results),
    )
    title = _add_protocol(title, results)
    return _make_table(f"{title}.", rows, by, (metric, format_spec), notes)


@validate_arguments
def make_pivot_table(
    results: "pd.DataFrame",
    *,
    columns: str = "alpha",
    by: Sequence[str] | None = None,
    metric: str = "final_accuracy",
    title: str = "Overview",
) -> TextTable:
    """Format means over seeds with methods as rows and the values of one setting as columns.

    Args:
      results: as `load_results` returns it.
      columns: the setting whose values are columns. A combination without runs is a dash.
      by: settings that distinguish rows; default: `find_varying_settings`.
      metric: a numeric column of `results`.
      title: title of the table.

    Returns:
      A table with a section per combination of the other shared settings.

    Raises:
      ConfigError: if the runs do not have a setting or the metric, or if there is no run.

    Example:
      >>> import pandas as pd
      >>> from fedjax_het.analysis import make_pivot_table
      >>> results = pd.DataFrame({"dataset": "digits", "algorithm": "fedavg", "alpha": [0.1, 1.0],
      ...     "seed": 0, "settings": ["a", "b"], "finished": "2026", "diverged": False,
      ...     "final_accuracy": [0.5, 0.6]})
      >>> make_pivot_table(results).sections[0].rows[0]
      {'Method': 'FedAvg', 'alpha 0.1': '50.00', 'alpha 1': '60.00'}
    """
    results = select_newest(results)
    by = resolve_group_settings(results, by)
    if get_setting_column(columns) not in by:
        require_name("columns", columns, by)
    columns = get_setting_column(columns)
    others = [name for name in by if name != columns]
    groups = _summarize_groups(results, [*others, columns], metric)
    format_spec = _choose_format(groups, metric)
    titles = {
        keys[columns]: describe_settings(keys) or MISSING
        for keys, _ in group_runs(results, [columns])
    }
    rows = []
    for settings, group in itertools.groupby(groups, lambda item: {n: item[0][n] for n in others}):
        texts, means = dict.fromkeys(titles.values(), MISSING), {}
        for row_settings, row in group:
            column = titles[row_settings[columns]]
            texts[column] = _format_summary(row, format_spec)
            means[column] = _get_rankable_mean(row)
        rows.append(_OverviewRow(settings, texts, means))
    title = f"{_add_protocol(title, results)}, by {format_setting_name(columns)}."
    notes = _make_metric_notes(results, by, metric)
    return _make_table(title, rows, others, (metric, format_spec), notes)


def _choose_format(groups: Sequence[tuple[dict, dict]], metric: str) -> str:
    is_percentage = get_metric_info(metric).is_fraction
    return ".2f" if is_percentage else choose_number_format(row["mean"] for _, row in groups)


def _format_summary(row: dict[str, Any], format_spec: str) -> str:
    is_incomplete = bool(row["diverged"] or (row["undefined"] and row["seeds"]))
    reasons = {"diverged": is_incomplete, "ended_early": bool(row["partial"])}
    return format_mean_std(row["mean"], row["std"], **reasons, format_spec=format_spec)


def _get_rankable_mean(row: dict[str, Any]) -> float:
    return math.nan if row["diverged"] or row["partial"] or row["undefined"] else row["mean"]


def _make_table(
    title: str,
    rows: Sequence[_OverviewRow],
    by: Sequence[str],
    metric_and_format: tuple[str, str],
    notes: Sequence[str],
) -> TextTable:
    """Divide rows into sections by their shared settings.

    The best values of a section follow the metric's declared direction and are compared as printed.
    The table is not divided if every section would hold one row: then every setting is a column,
    and there is nothing to compare.
    """
    shared = [name for name in by if is_shared_setting(name)]
    groups: dict[tuple, list[_OverviewRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.settings[name] for name in shared), []).append(row)
    metric, format_spec = metric_and_format
    direction = get_metric_info(metric).higher_is_better
    if shared and all(len(group) == 1 for group in groups.values()):
        shared, groups, direction = [], {(): list(rows)}, None
    own = [name for name in by if name not in shared]
    sections = []
    for group in groups.values():
        if direction is not None and get_metric_info(metric).is_fraction:
            _mark_equal_means(group)
        section_settings = {name: group[0].settings[name] for name in shared}
        best_cells = {
            (index, column)
            for column in group[0].texts
            for index in find_best_indices(
                [row.means.get(column, math.nan) for row in group],
                higher_is_better=direction,
                format_spec=format_spec,
            )
        }
        sections.append(
            TableSection(
                [{**_format_settings(row.settings, own), **row.texts} for row in group],
                title=describe_settings(section_settings),
                labels=_format_settings(section_settings, shared),
                best_cells=frozenset(best_cells),
            )
        )
    names = tuple(format_setting_name(name) for name in own)
    return TextTable(title, names, sections, add_equal_note(notes, sections), _MINOR_COLUMNS)


def _mark_equal_means(rows: Sequence[_OverviewRow]) -> None:
    """Mark means that are FedAvg's.

    If a section has several rows of FedAvg, a row is compared with the one of equal settings.
    """
    baselines = [row for row in rows if row.settings.get("algorithm") == BASELINE]
    for row in [row for row in rows if row.settings.get("algorithm") != BASELINE]:
        equal_rows = [each for each in baselines if _has_settings_of(row, each)]
        candidates = baselines if len(baselines) == 1 else equal_rows
        for column, mean in row.means.items() if len(candidates) == 1 else ():
            if equals_baseline(mean, candidates[0].means.get(column, math.nan)):
                row.texts[column] += f" {EQUAL}"


def _has_settings_of(row: _OverviewRow, baseline: _OverviewRow) -> bool:
    """Return whether a row has all settings of a row of FedAvg, apart from the method."""
    return all(
        name == "algorithm" or is_missing(value) or row.settings.get(name) == value
        for name, value in baseline.settings.items()
    )


def _format_settings(settings: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {format_setting_name(name): format_setting_value(settings[name], name) for name in names}


def _make_metric_notes(results: "pd.DataFrame", by: Sequence[str], metric: str) -> list[str]:
    runs_by_row = [runs for _, runs in group_runs(results, by)]
    averaged_settings = [
        f"{format_setting_name(name)} "
        f"({', '.join(format_setting_value(settings[name], name) for settings, _ in groups)})"
        for name in find_varying_settings(results)
        if name not in by
        for groups in [group_runs(results, [name])]
        if any(len(group_runs(runs, [name])) > 1 for runs in runs_by_row)
    ]
    averaged_text = f"runs that differ in {', '.join(averaged_settings)}, and seeds"
    direction = "; lower is better" if get_metric_info(metric).higher_is_better is False else ""
    spread = f"mean ± standard deviation over {averaged_text if averaged_settings else 'seeds'}"
    if all(len(runs) == 1 for runs in runs_by_row):
        spread = "one run, hence no deviation"
    description = _METRIC_DESCRIPTIONS.get(metric, "")
    notes = [f"{get_metric_label(metric, list_tasks(results))}{description}: {spread}{direction}."]
    if metric == EVALUATED_ACCURACY:
        notes.append(_describe_evaluated_models(results))
    results = results.reset_index(drop=True)
    is_partial = is_partial_run(results)
    has_diverged, values = is_diverged(results), get_metric_values(results, metric)
    is_in_mean = values.notna() & ~has_diverged
    is_undefined = values.isna() & ~has_diverged
    for _, runs in group_runs(results, by):  # a cell without any value is a dash
        is_undefined[runs.index] &= is_in_mean[runs.index].any()
    excluded = {
        "Diverged": has_diverged & ~is_partial,
        "Ended early": is_partial,
        "Without a value": is_undefined,
    }
    for reason, is_excluded in excluded.items():
        run_texts = [
            f"{describe_settings(settings) or 'runs'} (seed {', '.join(map(str, runs['seed']))})"
            for settings, runs in group_runs(results[is_excluded], by)
        ]
        if run_texts:
            notes.append(f"{DIVERGED} {reason}, and left out of the mean: {'; '.join(run_texts)}.")
    if "stopped_early.why" in results:
        has_stopped = results["stopped_early.why"].isin((TARGET, PLATEAU))
        if "validation" in results:
            has_stopped &= results["validation"].isna()
        if has_stopped.any():
            notes.append(f"{has_stopped.sum()} of {len(results)} runs {TEST_SPLIT_ADVICE}.")
    comparison = describe_comparison(results, by)
    return [*notes, *(f"{text[0].upper()}{text[1:]}." for text in comparison)]


def _make_settings_notes(results: "pd.DataFrame") -> list[str]:
    """Describe the settings that all runs share, and others that differ between them."""
    shared_values = {
        name: set(_get_hashable_values(results[name]))
        for name in list_setting_columns(results)
        if (is_shared_setting(name) and name not in _SEED_SETTINGS) or name.startswith("hp.")
    }
    constants = {name: values.pop() for name, values in shared_values.items() if len(values) == 1}
    constant_text = describe_settings(constants)
    notes = [f"All runs: {constant_text}."] if constant_text else []
    varying = find_varying_settings(results)
    for name, values in shared_values.items():  # hyperparameters that some methods lack
        if name.startswith("hp.") and name not in varying and len(values - {None}) == 1:
            runs = results[results[name].notna()]
            methods = ", ".join(map(get_method_title, runs["algorithm"].unique()))
            notes.append(f"{methods}: {_describe_setting(name, runs[name].iloc[0])}.")
    for name, pairs in find_derived_settings(results).items():
        texts = [f"{format_setting_value(value)} ({cause})" for cause, value in pairs]
        notes.append(f"{format_setting_name(name)} follows from the method: {', '.join(texts)}.")
    if "dataset_note" in results:
        for settings, _ in group_runs(results, ["dataset", "dataset_note"]):
            if settings["dataset_note"]:
                notes.append(f"{settings['dataset']}: {settings['dataset_note']}")
    if "dataset_digest" in results:
        names = [name for name in ("dataset", "normalization") if name in results]
        notes += [
            f"{settings['dataset']}: the runs have different data under this name"
            f"{_describe_sources(runs)}."
            for settings, runs in group_runs(results, names)
            if runs["dataset_digest"].nunique() > 1
        ]
    if "optimizer_digest" in results:  # depends on the hyperparameters of a method
        notes += [
            f"{settings['algorithm']}: the runs have different optimizers of the user."
            for settings, runs in group_runs(results, ["algorithm"])
            if runs["optimizer_digest"].nunique() > 1
        ]
    versions = [
        f"{name} {', '.join(map(str, results[name].dropna().unique()))}"
        for name in dict.fromkeys([*_REQUIRED_VERSIONS, *IDENTITY_FIELDS, "prng"])
        if name in results and (name in _REQUIRED_VERSIONS or results[name].nunique() > 1)
    ]
    return [*notes, f"Made with {'; '.join(versions)}."] if versions else notes


def _describe_sources(runs: "pd.DataFrame") -> str:
    """Return the sources and orders from which the data of runs were read, if they differ."""
    names = [name for name in ("dataset_source", "dataset_order") if name in runs]
    if len(names) < 2:  # results of 0.6
        return ""
    pairs = runs[names].dropna().drop_duplicates().itertuples(index=False)
    texts = [f"{source} in the order {order!r}" for source, order in pairs if source]
    return f" ({'; '.join(texts)})" if len(texts) > 1 else ""
