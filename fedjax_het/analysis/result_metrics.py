"""The measures of a run: which there are, in what unit they are shown, what they are called."""

from typing import TYPE_CHECKING

from fedjax_het.analysis.grouping import is_diverged, is_numeric, list_setting_columns
from fedjax_het.utils.errors import require_name
from fedjax_het.utils.text import to_one_line

if TYPE_CHECKING:
    import pandas as pd

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
    """Accuracies are shown in percent, everything else as it is."""
    return 100 if "accuracy" in metric or metric in _OTHER_ACCURACIES else 1


def is_higher_better(metric: str) -> bool:
    return get_display_scale(metric) == 100 and not metric.endswith("_std")


def choose_default_metric(results: "pd.DataFrame") -> str:
    """What a folder of runs is about: `final_accuracy`; `bmta` where at least as many runs have
    that: personalised methods may have no global model."""
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
    """What stands beside a measure in an overview: a measure, its heading and what it is."""
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
    """For an axis or a heading."""
    return _METRIC_LABELS.get(metric) or to_one_line(metric)


def require_result_metric(results: "pd.DataFrame", metric: str) -> None:
    """ConfigError unless `measure` is a column of numbers, and no setting."""
    settings = list_setting_columns(results)
    names = [n for n in results.columns if n not in settings and is_numeric(results[n])]
    require_name("metric", metric, names)


def get_metric_values(results: "pd.DataFrame", metric: str) -> "pd.Series":
    """One number per run, accuracies in percent; NaN where a run does not have it."""
    import pandas as pd

    if metric not in results:
        return pd.Series(float("nan"), index=results.index)
    return get_display_scale(metric) * pd.to_numeric(results[metric], errors="coerce")
