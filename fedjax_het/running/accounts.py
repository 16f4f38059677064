"""What runs measured and cost: curves, traffic, time."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedjax_het.algorithms.contract import Algorithm, OnceTraffic, Traffic
from fedjax_het.common.arrays import AnyArray
from fedjax_het.data import Dataset, Partition
from fedjax_het.engine.measured import Measure
from fedjax_het.engine.rounds import Measuring, RoundMetrics
from fedjax_het.engine.schedule import Work
from fedjax_het.measures.personal import mean_accuracies

log = logging.getLogger("fedjax_het")

Curves = dict[str, np.ndarray]


@dataclass
class Spent:
    """Seconds of runs that go in step, together; and the rounds that were timed."""

    started: float = field(default_factory=time.perf_counter)
    before: float = 0.0  # of each run, before it was resumed
    compiling: float = 0.0
    rounds: float = 0.0
    host_work: float = 0.0  # work between rounds
    timed_rounds: int = 0  # of each run, in `rounds`
    timed_samples: int = 0  # of the clients of all runs

    @property
    def rounds_per_second(self) -> float:
        return self.timed_rounds / max(self.rounds, 1e-9)

    @property
    def samples_per_second(self) -> float:
        return self.timed_samples / max(self.rounds, 1e-9)

    def wall(self, num_runs: int) -> float:
        """Wall-clock of one run: those made together share it."""
        return self.before + (time.perf_counter() - self.started) / num_runs


def curves_of(
    metrics: RoundMetrics,
    dataset: Dataset,
    partition: Partition,
    tests: Partition | None = None,
    measures: Sequence[Measure] = (),
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
        clients = metrics.client_accuracy
        curves["client_accuracy"] = clients
        means = mean_accuracies(np.asarray(clients)).astype(np.float32)
        if tests is not None:
            means[np.isnan(clients[:, tests.sizes > 0]).any(1)] = np.nan
        curves["mean_client_accuracy"] = means
        names = partition.client_names
        curves |= {f"client_accuracy_{n}": clients[:, k] for k, n in enumerate(names)}
        for measure in measures:
            if measure.of_clients is not None:
                found = measure.of_clients(np.asarray(clients))
                curves |= {name: np.float32(values) for name, values in found.items()}
    return curves | metrics.records | metrics.measured


def recorded(curves: Curves, new: Curves, sound: AnyArray, done: int, count: int) -> int | None:
    """Write `count` rounds to the curves, from round `done` on, up to the one in which the run
    diverged, which is returned (from 1); None if it did not. sound: see `RoundMetrics`."""
    bad = np.flatnonzero(np.asarray(sound[:count]) != 1)
    kept = int(bad[0]) + 1 if len(bad) else count
    for name, values in new.items():
        curves[name][done : done + kept] = values[:kept]
    return done + kept if len(bad) else None


def is_evaluated(curve: str, measuring: Measuring) -> bool:
    """Whether a curve is of what evaluations measure: NaN in rounds without one."""
    named = curve.startswith(("test_", "client_accuracy", "mean_client_accuracy"))
    return named or (curve in measured_names(measuring) and curve not in measuring.of_uploads)


def measured_names(measuring: Measuring) -> list[str]:
    """The curves that a run has by its `measures`."""
    names = [*measuring.shapes, *measuring.of_uploads]
    nobody = np.zeros((0, 1))
    for measure in measuring.measures:
        if measure.of_clients is not None:
            names += measure.of_clients(nobody)
    return names


def accuracy_name(algorithm: Algorithm) -> str:
    """Of the curve that says how good a run is: the global model's, else the clients' mean."""
    return "test_accuracy" if algorithm.global_model else "mean_client_accuracy"


def latest_accuracy(algorithm: Algorithm, curves: Sequence[Curves], done: int) -> float:
    """The latest measured, mean over the runs; NaN before the first."""
    seen = [curve[accuracy_name(algorithm)][:done] for curve in curves]
    latest = [a[np.isfinite(a)][-1] for a in seen if np.isfinite(a).any()]
    return float(np.mean(latest)) if latest else np.nan


def traffic_curves(work: Work, traffic: Traffic, once: OnceTraffic, ran: int) -> Curves:
    """Bytes and samples of each round, of which the first `ran` took place.

    Args:
      traffic: of each client that takes part.
      once: of all clients together, with the first model.
    """
    rounds = np.arange(len(work.participants))
    took_place, first = rounds < ran, np.where(rounds == 0, 1.0, 0.0)
    up = work.participants * traffic.up + work.pairs * traffic.up_per_pair
    return {
        "bytes_down": work.participants * traffic.down * took_place + first * once.down,
        "bytes_up": up * took_place + first * once.up,
        "client_samples": work.samples * took_place,
    }
