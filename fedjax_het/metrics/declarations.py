"""Declarations of metrics: label, unit, direction, scale, and the meaning of a missing value.

Tables, plots, files and comparisons read these declarations and nothing else. A metric without a
declaration is shown as it is, and none of its values is marked as the best.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

MissingKind = Literal["not evaluated", "not trained", "undefined"]
NOT_EVALUATED: MissingKind = "not evaluated"
NOT_TRAINED: MissingKind = "not trained"
UNDEFINED: MissingKind = "undefined"


class MetricInfo(NamedTuple):
    """Declaration of a metric.

    Attributes:
      label: name of the metric on axes and in headings; empty for the name in the results.
      unit: unit of the values; empty for fractions, which are shown in percent, and for metrics
        without a unit.
      higher_is_better: whether higher values are better; None if neither direction is. Tables mark
        no value of such a metric as the best.
      is_fraction: whether values are fractions that are shown in percent.
      missing: meaning of NaN. "not evaluated": the round had no evaluation; a curve connects the
        rounds that had one. "not trained": no client trained in the round; a curve has a gap.
        "undefined": the value does not exist.

    Example:
      >>> from fedjax_het import MetricInfo
      >>> MetricInfo("Top-two accuracy", higher_is_better=True, is_fraction=True).axis_label
      'Top-two accuracy (%)'
    """

    label: str = ""
    unit: str = ""
    higher_is_better: bool | None = None
    is_fraction: bool = False
    missing: MissingKind = NOT_EVALUATED

    @property
    def scale(self) -> float:
        """Factor of shown values: 100 for fractions, else 1."""
        return 100 if self.is_fraction else 1

    @property
    def axis_label(self) -> str:
        """Label with the unit."""
        unit = "%" if self.is_fraction else self.unit
        return f"{self.label} ({unit})" if self.label and unit else self.label


_accuracy = partial(MetricInfo, higher_is_better=True, is_fraction=True)
_loss = partial(MetricInfo, unit="nats", higher_is_better=False)
_cost = partial(MetricInfo, higher_is_better=False, missing=UNDEFINED)
_neutral = partial(MetricInfo, missing=UNDEFINED)

_CURVE_INFOS: Mapping[str, MetricInfo] = {
    "test_accuracy": _accuracy("Test accuracy"),
    "test_accuracy_domains": _accuracy("Mean test accuracy of domains"),
    "test_loss": _loss("Test loss"),
    "train_loss": _loss("Training loss", missing=NOT_TRAINED),
    "client_train_loss": _loss("Training loss of a client", missing=NOT_TRAINED),
    "candidate_loss": _loss("Loss of a candidate", missing=NOT_TRAINED),
    "update_norm": MetricInfo("Norm of the update", missing=NOT_TRAINED),
    "client_accuracy": _accuracy("Test accuracy of a client"),
    "mean_client_accuracy": _accuracy("Mean accuracy of clients"),
    "validation_accuracy": _accuracy("Validation accuracy"),
    "validation_loss": _loss("Validation loss"),
    "client_validation_accuracy": _accuracy("Validation accuracy of a client"),
    "mean_client_validation_accuracy": _accuracy("Mean validation accuracy of clients"),
    "gradient_gap": _neutral("Squared distance of gradients"),
    "server_gap": _neutral("Server's gradient gap"),
    "client_gap": _neutral("Clients' gradient gap"),
    "gradient_norm": _neutral("Norm of the gradient"),
    "server_norm": _neutral("Norm of the server's gradient"),
    "client_noise": _neutral("Variance of clients' minibatch gradients"),
    "server_noise": _neutral("Variance of the server's minibatch gradients"),
    "objective": _cost("FedAMP's objective"),
    "objective_gradient": _neutral("Gradient norm of FedAMP's objective"),
    "collaboration": _neutral("Weights of clients' collaboration"),
    "bytes_up": _cost("Bytes sent by clients"),
    "bytes_down": _cost("Bytes sent to clients"),
    "client_samples": _cost("Client samples"),
    "simulated_seconds": _cost("Simulated time", "s"),
    # A success of the attacker is no advantage of the method.
    "attack_success": MetricInfo("Success of the backdoor", "", False, True),
    "honest_client_accuracy": _accuracy("Mean accuracy of honest clients"),
    "epsilon": _cost("Privacy budget epsilon"),
    "clipped_fraction": _neutral("Share of clipped updates", is_fraction=True),
    "clip_norm": _neutral("Largest norm of an update"),
}

SUMMARY_INFOS: Mapping[str, MetricInfo] = {
    "final_accuracy": _accuracy("Test accuracy", missing=UNDEFINED),
    # A method that learns nothing has small deviations and rises at once: neither is an advantage.
    "final_accuracy_std": _neutral("Deviation of the last five rounds", is_fraction=True),
    "rise_time": _neutral("Rise time", "rounds"),
    # Methods are evaluated on different tests: none of the values is the best.
    "evaluated_accuracy": _neutral("Accuracy of the evaluated model", is_fraction=True),
    "evaluated_best": _accuracy("Best accuracy of the evaluated model", missing=UNDEFINED),
    "best_accuracy": _accuracy("Best test accuracy", missing=UNDEFINED),
    "best_validation_accuracy": _accuracy("Best validation accuracy", missing=UNDEFINED),
    "best_round": _neutral("Round of the best validation accuracy"),
    "best_client_validation_accuracy": _accuracy(
        "Best mean validation accuracy of clients", missing=UNDEFINED
    ),
    "last_accuracy": _accuracy("Test accuracy of the last round", missing=UNDEFINED),
    "window_accuracy": _accuracy("Accuracy, mean of 20 rounds", missing=UNDEFINED),
    "rounds_to_half": _cost("Rounds to 50 %"),
    "bmta": _accuracy("Best mean accuracy of clients", missing=UNDEFINED),
    "bmta_worst_decile": _accuracy("Worst decile of clients", missing=UNDEFINED),
    "bmta_round": _neutral("Round of the best mean"),
    "final_client_accuracy": _accuracy("Mean accuracy of clients", missing=UNDEFINED),
    "best_domains_accuracy": _accuracy("Best mean accuracy of domains", missing=UNDEFINED),
    "best_domain_round": _neutral("Round of the best mean of domains"),
    "held_out_accuracy": _accuracy("Accuracy of held-out clients", missing=UNDEFINED),
    "held_out_tuned_accuracy": _accuracy("Tuned accuracy of held-out clients", missing=UNDEFINED),
    "split.label_hellinger": _neutral("Hellinger distance of labels"),
    "split.label_jensen_shannon": _neutral("Jensen-Shannon distance of labels"),
    "split.label_total_variation": _neutral("Total variation of labels"),
    "split.effective_classes": _neutral("Effective classes of a client"),
    "split.classes_per_client": _neutral("Classes of a client"),
    "split.majority_share": _neutral("Share of the majority class", is_fraction=True),
    "split.size_gini": _neutral("Gini coefficient of sizes"),
    "epsilon": _cost("Privacy budget epsilon"),
    "matching_loss": _cost("Matching loss"),
    "synthesis_iterations": _neutral("Iterations of synthesis"),
    "synthesis_skipped": _neutral("Skipped iterations of synthesis"),
    "synthesis_step_size": _neutral("Learned step size"),
    "condensed_pairs": _neutral("Condensed pairs of client and class"),
    "condensed_images": _neutral("Condensed images"),
    "wall_seconds": _cost("Wall-clock", "s"),
    "compile_seconds": _cost("Compilation", "s"),
    "round_seconds": _cost("Rounds", "s"),
    "server_seconds": _cost("Server's work between rounds", "s"),
    "useful_work_fraction": MetricInfo("Share of useful work", "", True, True, UNDEFINED),
    "sample_flops": _neutral("Floating-point operations of a sample"),
    "client_samples_per_second": MetricInfo(
        "Client samples per second", higher_is_better=True, missing=UNDEFINED
    ),
}
"""Declarations by name of values of the summary.

Example:
  >>> from fedjax_het.metrics.declarations import SUMMARY_INFOS
  >>> SUMMARY_INFOS["bmta"].label
  'Best mean accuracy of clients'
"""

FAMILY_INFOS: Mapping[str, MetricInfo] = {
    "test_accuracy_": _accuracy("Test accuracy"),
    "client_accuracy_": _accuracy("Test accuracy of a client"),
    "accuracy_": _accuracy("Test accuracy", missing=UNDEFINED),
}
"""Declarations by prefix: each domain or named client has a metric, whose name it ends.

Example:
  >>> from fedjax_het.metrics.declarations import FAMILY_INFOS
  >>> FAMILY_INFOS["test_accuracy_"].label
  'Test accuracy'
"""

INFOS: Mapping[str, MetricInfo] = {**_CURVE_INFOS, **SUMMARY_INFOS}
"""Declarations by name of metrics by round and of values of the summary.

`registry.METRICS` declares the metrics of the setting `metrics`.

Example:
  >>> from fedjax_het.metrics.declarations import INFOS
  >>> INFOS["test_loss"].higher_is_better
  False
"""
