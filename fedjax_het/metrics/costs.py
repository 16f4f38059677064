"""What it takes to reach an accuracy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class TrainingCost(NamedTuple):
    """Of a run, up to and with a round.

    rounds: from 1. bytes_up, bytes_down: of all clients. client_samples: that clients trained on.
    flops: floating-point operations of that training, by its matrix products (the server's work is
    not among them); None where they are not known. seconds: of rounds, each taken as long as the
    run's mean, and of the work between them, without compilation.
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
    """Until a curve first reaches `accuracy`, a share; None where it never does."""
    reached = np.flatnonzero(metrics[curve] >= accuracy)
    if not len(reached):
        return None
    rounds = int(reached[0]) + 1
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
