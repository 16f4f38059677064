"""Cost of reaching an accuracy: rounds, traffic, samples, operations and time."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class TrainingCost(NamedTuple):
    """Cost of a run up to and including a round.

    Attributes:
      rounds: number of rounds.
      bytes_up: bytes that all clients sent.
      bytes_down: bytes that all clients received.
      client_samples: number of samples on which clients trained, counted once per use.
      flops: floating-point operations of that training, counted by its matrix products, without the
        server's work; None if unknown.
      seconds: time without compilation: the mean duration of a round times `rounds`, plus the run's
        server work between rounds.

    Example:
      >>> from fedjax_het.metrics.costs import TrainingCost
      >>> TrainingCost(2, 3e6, 4e6, 1000.0, None, 0.5).bytes_up
      3000000.0
    """

    rounds: int
    bytes_up: float
    bytes_down: float
    client_samples: float
    flops: float | None
    seconds: float


def cost_to_reach(
    metrics: Mapping[str, np.ndarray], summary: Mapping[str, Any], accuracy: float, curve: str
) -> TrainingCost | None:
    """Compute the cost of a run until a curve first reaches an accuracy.

    Args:
      metrics: measures of the run by name, arrays `[rounds]`: the curve, `bytes_up`, `bytes_down`
        and `client_samples`.
      summary: summary of the run by name: `rounds`, `round_seconds`, `server_seconds` and, if
        known, `sample_flops`.
      accuracy: the accuracy to reach, a fraction in [0, 1].
      curve: name of the accuracy curve in `metrics`.

    Returns:
      The cost, or None if the curve never reaches the accuracy.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.costs import cost_to_reach
      >>> curves = {name: np.ones(3) for name in ("bytes_up", "bytes_down", "client_samples")}
      >>> curves["test_accuracy"] = np.array([0.2, 0.6, 0.7])
      >>> summary = {"rounds": 3, "round_seconds": 1.5, "server_seconds": 0.0}
      >>> cost = cost_to_reach(curves, summary, 0.5, "test_accuracy")
      >>> cost.rounds, cost.bytes_up, cost.seconds
      (2, 2.0, 1.0)
    """
    rounds_above = np.flatnonzero(metrics[curve] >= accuracy)
    if not len(rounds_above):
        return None
    rounds = int(rounds_above[0]) + 1
    bytes_up, bytes_down, client_samples = (
        float(metrics[name][:rounds].sum()) for name in ("bytes_up", "bytes_down", "client_samples")
    )
    sample_flops = summary.get("sample_flops")
    seconds = rounds / summary["rounds"] * summary["round_seconds"] + summary["server_seconds"]
    return TrainingCost(
        rounds,
        bytes_up,
        bytes_down,
        client_samples,
        None if sample_flops is None else sample_flops * client_samples,
        seconds,
    )
