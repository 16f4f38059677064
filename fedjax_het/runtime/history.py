"""What runs measured and cost: curves, traffic, time."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedjax_het.algorithms.base import Algorithm, InitialTraffic, Traffic
from fedjax_het.core.round_program import EvaluationOptions, RoundMetrics
from fedjax_het.core.schedule import WorkCounts
from fedjax_het.data import Dataset, Partition
from fedjax_het.metrics.personal import mean_accuracies
from fedjax_het.metrics.registry import Metric
from fedjax_het.utils.arrays import AnyArray

log = logging.getLogger("fedjax_het")

Curves = dict[str, np.ndarray]


@dataclass
class Timing:
    """Seconds of runs that go in step, together; and the rounds that were timed."""

    start_time: float = field(default_factory=time.perf_counter)
    resumed_seconds: float = 0.0  # of each run, before it was resumed
    compile_seconds: float = 0.0
    round_seconds: float = 0.0
    server_seconds: float = 0.0  # work between rounds
    timed_rounds: int = 0  # of each run, in `rounds`
    timed_samples: int = 0  # of the clients of all runs

    @property
    def rounds_per_second(self) -> float:
        return self.timed_rounds / max(self.round_seconds, 1e-9)

    @property
    def samples_per_second(self) -> float:
        return self.timed_samples / max(self.round_seconds, 1e-9)

    def compute_wall_seconds(self, num_runs: int) -> float:
        """Wall-clock of one run: those made together share it."""
        return self.resumed_seconds + (time.perf_counter() - self.start_time) / num_runs


def build_curves(
    metrics: RoundMetrics,
    dataset: Dataset,
    partition: Partition,
    client_tests: Partition | None = None,
    requested_metrics: Sequence[Metric] = (),
) -> Curves:
    """Metrics by name, `[R]` each; a domain's apart, and their unweighted mean; of clients
    `[R, K]`, their mean, and apart where they have names; what else the method records as it is.

    The mean is over the clients with `tests` (default: those that were measured in any round): NaN
    where one of them was not measured, or has no finite logits.
    """
    curves = {name: getattr(metrics, name) for name in RoundMetrics._fields[:4]}
    if metrics.domain_accuracy is not None:
        domains = metrics.domain_accuracy
        names = (*dataset.domain_names, "domains")
        columns = [*domains.T, domains.mean(1)]
        curves |= {f"test_accuracy_{n}": a for n, a in zip(names, columns, strict=True)}
    if metrics.client_accuracy is not None:
        client_accuracy = metrics.client_accuracy
        curves["client_accuracy"] = client_accuracy
        means = mean_accuracies(np.asarray(client_accuracy)).astype(np.float32)
        if client_tests is not None:
            means[np.isnan(client_accuracy[:, client_tests.sizes > 0]).any(1)] = np.nan
        curves["mean_client_accuracy"] = means
        names = partition.client_names
        curves |= {f"client_accuracy_{n}": client_accuracy[:, k] for k, n in enumerate(names)}
        for metric in requested_metrics:
            if metric.from_client_accuracy is not None:
                client_curves = metric.from_client_accuracy(np.asarray(client_accuracy))
                curves |= {name: np.float32(values) for name, values in client_curves.items()}
    return curves | metrics.records | metrics.metrics


def record_rounds(
    curves: Curves, new_curves: Curves, is_finite: AnyArray, rounds_done: int, count: int
) -> int | None:
    """Write `count` rounds to the curves, from round `done` on, up to the one in which the run
    diverged, which is returned (from 1); None if it did not. sound: see `RoundMetrics`."""
    nonfinite_rounds = np.flatnonzero(np.asarray(is_finite[:count]) != 1)
    num_recorded = int(nonfinite_rounds[0]) + 1 if len(nonfinite_rounds) else count
    for name, values in new_curves.items():
        curves[name][rounds_done : rounds_done + num_recorded] = values[:num_recorded]
    return rounds_done + num_recorded if len(nonfinite_rounds) else None


def is_evaluation_curve(curve: str, evaluation: EvaluationOptions) -> bool:
    """Whether a curve is of what evaluations measure: NaN in rounds without one."""
    has_evaluation_name = curve.startswith(("test_", "client_accuracy", "mean_client_accuracy"))
    return has_evaluation_name or (
        curve in list_metric_names(evaluation) and curve not in evaluation.update_metric_names
    )


def list_metric_names(evaluation: EvaluationOptions) -> list[str]:
    """The curves that a run has by its `measures`."""
    names = [*evaluation.metric_shapes, *evaluation.update_metric_names]
    no_clients = np.zeros((0, 1))
    for metric in evaluation.metrics:
        if metric.from_client_accuracy is not None:
            names += metric.from_client_accuracy(no_clients)
    return names


def get_accuracy_name(algorithm: Algorithm) -> str:
    """Of the curve that says how good a run is: the global model's, else the clients' mean."""
    return "test_accuracy" if algorithm.global_model else "mean_client_accuracy"


def get_latest_accuracy(algorithm: Algorithm, curves: Sequence[Curves], done: int) -> float:
    """The latest measured, mean over the runs; NaN before the first."""
    accuracies = [curve[get_accuracy_name(algorithm)][:done] for curve in curves]
    latest = [a[np.isfinite(a)][-1] for a in accuracies if np.isfinite(a).any()]
    return float(np.mean(latest)) if latest else np.nan


def build_traffic_curves(
    work: WorkCounts, traffic: Traffic, initial_traffic: InitialTraffic, num_rounds: int
) -> Curves:
    """Bytes and samples of each round, of which the first `ran` took place.

    Args:
      traffic: of each client that takes part.
      once: of all clients together, with the first model.
    """
    rounds = np.arange(len(work.participants))
    has_taken_place, is_first_round = rounds < num_rounds, np.where(rounds == 0, 1.0, 0.0)
    bytes_up = work.participants * traffic.up + work.pairs * traffic.up_per_class
    return {
        "bytes_down": work.participants * traffic.down * has_taken_place
        + is_first_round * initial_traffic.down,
        "bytes_up": bytes_up * has_taken_place + is_first_round * initial_traffic.up,
        "client_samples": work.samples * has_taken_place,
    }
