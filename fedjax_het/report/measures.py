"""The measures of a run: which there are, in what unit they are shown, what they are called."""

from typing import TYPE_CHECKING

from fedjax_het.common.errors import require_name
from fedjax_het.common.text import one_line
from fedjax_het.report.grouping import diverged, is_numeric, setting_columns

if TYPE_CHECKING:
    import pandas as pd

_LABELS = {
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
OF_WINDOW = ("window_accuracy", "rise_time", "rounds_to_half")
# Accuracies by another name.
_SHARES = ("bmta", "bmta_worst_decile")


def scale_of(measure: str) -> float:
    """Accuracies are shown in percent, everything else as it is."""
    return 100 if "accuracy" in measure or measure in _SHARES else 1


def higher_is_better(measure: str) -> bool:
    return scale_of(measure) == 100 and not measure.endswith("_std")


def usual_measure(results: "pd.DataFrame") -> str:
    """What a folder of runs is about: `final_accuracy`; `bmta` where at least as many runs have
    that: personalised methods may have no global model."""
    if "bmta" not in results:
        return "final_accuracy"
    good = results[~diverged(results)]
    tested, final = (int(good[name].notna().sum()) for name in ("bmta", "final_accuracy"))
    return "bmta" if tested and tested >= final else "final_accuracy"


def beside_of(measure: str) -> tuple[str, str, str]:
    """What stands beside a measure in an overview: a measure, its heading and what it is."""
    if measure.startswith("bmta"):
        about = "mean over the worst tenth of clients in the round of the best mean"
        return "bmta_worst_decile", "Worst decile (%)", f"Worst decile: {about}"
    if measure == "window_accuracy":
        about = "the first round at which the running mean over 20 reaches 90 % of its last value"
        return "rise_time", "Rise time", f"Rise time: {about}, mean over seeds"
    return "best_accuracy", "Best (%)", "Best: mean over seeds of a run's best round"


def measure_label(measure: str) -> str:
    """For an axis or a heading."""
    return _LABELS.get(measure) or one_line(measure)


def require_measure(results: "pd.DataFrame", measure: str) -> None:
    """ConfigError unless `measure` is a column of numbers, and no setting."""
    settings = setting_columns(results)
    names = [n for n in results.columns if n not in settings and is_numeric(results[n])]
    require_name("measure", measure, names)


def values_of(results: "pd.DataFrame", measure: str) -> "pd.Series":
    """One number per run, accuracies in percent; NaN where a run does not have it."""
    import pandas as pd

    if measure not in results:
        return pd.Series(float("nan"), index=results.index)
    return scale_of(measure) * pd.to_numeric(results[measure], errors="coerce")
