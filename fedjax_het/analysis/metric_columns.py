"""Metrics that runs will have, for checks before the runs."""

import dataclasses
from collections.abc import Sequence

from fedjax_het.algorithms import METHODS
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.data import PartitionSummary
from fedjax_het.metrics.declarations import FAMILY_INFOS, SUMMARY_INFOS
from fedjax_het.metrics.registry import METRICS, parse_metrics
from fedjax_het.runtime.results import SUMMARY_NUMBERS
from fedjax_het.utils.errors import display_name, require, require_name, suggest_name

_FURTHER_NUMBERS = ("made_together", "client_samples")
_COLUMNS = (
    *dict.fromkeys((*SUMMARY_NUMBERS, *SUMMARY_INFOS)),
    *(
        f"{split}.{field.name}"
        for split in ("split", "client_test_split")
        for field in dataclasses.fields(PartitionSummary)
    ),
)


def require_possible_metric(argument: str, metric: str, specs: Sequence[RunSpec]) -> None:
    """Check that runs can have a metric, before they are made.

    A method of the user may have further numbers. With such methods unknown names are accepted.

    Args:
      argument: argument that contains the name, for messages.
      metric: name of a column of `load_results`.
      specs: settings of the runs.

    Raises:
      ConfigError: for a name that no run has, and for a metric that no run measures.

    Example:
      >>> from fedjax_het import ConfigError, RunSpec
      >>> from fedjax_het.analysis.metric_columns import require_possible_metric
      >>> try:
      ...     require_possible_metric("sort", "split.feature_distance", [RunSpec(model="mlp")])
      ... except ConfigError as error:
      ...     print(error)
      sort = 'split.feature_distance': expected metrics feature_distance, which measures it
    """
    if metric in (*_COLUMNS, *_FURTHER_NUMBERS):
        return
    measured = {entry.name for spec in specs for entry in parse_metrics(spec.metrics)}
    for entry in METRICS.values():
        if metric in {name for value, _ in entry.infos for name in (value, f"final_{value}")}:
            expected = f"{display_name('metrics')} {entry.name}, which measures it"
            require(entry.name in measured, argument, metric, expected)
            return
    has_own_method = any(spec.algorithm not in METHODS.built_in for spec in specs)
    if not has_own_method and not metric.startswith(tuple(FAMILY_INFOS)):
        expected = "a number of a result, such as best_accuracy or split.size_gini"
        require(suggest_name(metric, _COLUMNS) is not None, argument, metric, expected)
        require_name(argument, metric, _COLUMNS)
