"""Curves, traffic and time of runs, and the rules that end a run before its last round.

The number of rounds per call has no influence on the last round of a run. A call ends at the first
round in which a rule may stop a run (`count_rounds_until_rule`), so that state, curves and result
are of one round.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedjax_het.algorithms.base import InitialTraffic, Traffic
from fedjax_het.attacks import ATTACK_SETTING
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.round_evaluation import RoundMetrics
from fedjax_het.core.round_inputs import EvaluationOptions
from fedjax_het.core.schedule import Scheduler, WorkCounts
from fedjax_het.data import Partition
from fedjax_het.metrics.declarations import NOT_EVALUATED
from fedjax_het.metrics.personal import mean_accuracies
from fedjax_het.metrics.registry import Metric, get_metric_info
from fedjax_het.runtime.data_assignment import DataAssignment
from fedjax_het.runtime.result_display import TEST_SPLIT_ADVICE
from fedjax_het.utils.arrays import AnyArray

log = logging.getLogger("fedjax_het")

Curves = dict[str, np.ndarray]
TARGET, PLATEAU, CALLBACK = "target", "plateau", "callback"  # causes of an early stop
VALIDATION_MEAN = "mean_client_validation_accuracy"
HONEST_MEAN = "honest_client_accuracy"
_MAX_NAMED_CURVES = 100  # thousands of users would be thousands of columns in every table


@dataclass
class Timing:
    """Seconds of all runs in lockstep, and the rounds that were timed.

    Attributes:
      start_time: start of the runs in this process, of `time.perf_counter`.
      compile_seconds: seconds of tracing and compilation, of the first state, of checks of memory
        and numbers, and of measurements that choose the lanes.
      resumed_seconds: seconds of each run before it was resumed.
      round_seconds: seconds of rounds.
      server_seconds: seconds of the server's work between rounds.
      timed_rounds: number of rounds of each run in `round_seconds`.
      timed_samples: number of client samples of all runs in `round_seconds`.
    """

    start_time: float = field(default_factory=time.perf_counter)
    compile_seconds: float = 0.0
    resumed_seconds: float = 0.0
    round_seconds: float = 0.0
    server_seconds: float = 0.0
    timed_rounds: int = 0
    timed_samples: int = 0

    @property
    def samples_per_second(self) -> float:
        """Client samples of all runs per second."""
        return self.timed_samples / max(self.round_seconds, 1e-9)

    @contextlib.contextmanager
    def record_compilation(self) -> Iterator[None]:
        """Add the seconds of the `with` block to `compile_seconds`."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self.compile_seconds += time.perf_counter() - start_time

    def compute_wall_seconds(self, num_runs: int) -> float:
        """Return the wall-clock time of one run: runs in lockstep share it equally."""
        return self.resumed_seconds + (time.perf_counter() - self.start_time) / num_runs


def build_curves(
    metrics: RoundMetrics, run: DataAssignment, requested_metrics: Sequence[Metric] = ()
) -> Curves:
    """Return the curves of a run by name, `[R]` each.

    Domains have a curve each and their unweighted mean. Clients have one array `[R, K]`, its mean,
    and a curve each where they have names. The mean is over the clients that have a test (without
    `client_tests`: that were measured in any round); it is NaN where one of them was not measured.
    The mean of clients' validation accuracies is over the clients that have validation examples,
    and NaN where one of these clients was not measured. With an attack, the mean over honest
    clients is a curve of its own.

    Args:
      metrics: the metrics of rounds, on the host.
      run: the data of the run, for the names of domains and clients.
      requested_metrics: the further metrics that the run's settings name.

    Returns:
      Arrays by the name of the curve.
    """
    curves = {name: getattr(metrics, name) for name in RoundMetrics._fields[:4]}
    if metrics.domain_accuracy is not None:
        domains = metrics.domain_accuracy
        names = (*run.dataset.domain_names, "domains")
        columns = [*domains.T, domains.mean(1)]
        curves |= {f"test_accuracy_{n}": a for n, a in zip(names, columns, strict=True)}
    if metrics.client_accuracy is not None:
        client_accuracy = metrics.client_accuracy
        curves["client_accuracy"] = client_accuracy
        sizes = None if run.client_tests is None else run.client_tests.sizes
        curves["mean_client_accuracy"] = _average_clients(client_accuracy, sizes)
        if (is_honest := _find_honest_clients(run)) is not None:
            tests = None if run.client_tests is None else run.client_tests.sizes[is_honest]
            honest_accuracy = _average_clients(np.asarray(client_accuracy)[:, is_honest], tests)
            curves[HONEST_MEAN] = honest_accuracy
        names = list_curve_names(run.partition)
        curves |= {f"client_accuracy_{n}": client_accuracy[:, k] for k, n in enumerate(names)}
        for metric in requested_metrics:
            if metric.from_client_accuracy is not None:
                assert run.client_tests is not None
                sizes = run.client_tests.sizes
                client_curves = metric.from_client_accuracy(np.asarray(client_accuracy), sizes)
                curves |= {name: np.float32(values) for name, values in client_curves.items()}
    curves |= metrics.validation
    if "client_validation_accuracy" in metrics.validation:
        client_accuracy = metrics.validation["client_validation_accuracy"]
        sizes = None if run.validation is None else run.validation.sizes
        curves[VALIDATION_MEAN] = _average_clients(client_accuracy, sizes)
    return curves | metrics.records | metrics.metrics


def list_curve_names(partition: Partition) -> tuple[str, ...]:
    """Return the names of the clients that have a curve each; none for more than 100 clients."""
    has_curves = partition.num_clients <= _MAX_NAMED_CURVES
    return partition.client_names if has_curves else ()


def _find_honest_clients(run: DataAssignment) -> np.ndarray | None:
    """Return which clients are honest, bool `[K]`; None without an attack or an honest client."""
    num_clients, seed = run.partition.num_clients, run.spec.partition_seed
    attacks = ATTACK_SETTING.parse(run.spec.attack)
    is_honest = np.ones(num_clients, bool)
    for attack in attacks:
        is_honest &= ~attack.choose_clients(num_clients, seed)
    return is_honest if attacks and is_honest.any() else None


def _average_clients(client_accuracy: AnyArray, sizes: np.ndarray | None) -> np.ndarray:
    """Return the mean over clients of accuracies `[R, K]`, see `build_curves`."""
    client_accuracy = np.asarray(client_accuracy)
    means = mean_accuracies(client_accuracy).astype(np.float32)
    if sizes is not None:
        means[np.isnan(client_accuracy[:, sizes > 0]).any(1)] = np.nan
    return means


def record_rounds(
    curves: Curves, new_curves: Curves, is_finite: AnyArray, rounds_done: int, count: int
) -> int | None:
    """Write the next `count` rounds to the curves, up to the round in which the run diverged.

    Args:
      curves: the curves of all rounds of the run.
      new_curves: the curves of these rounds.
      is_finite: 1 for each round that is finite, see `RoundMetrics`.
      rounds_done: number of rounds that were done before.
      count: number of these rounds.

    Returns:
      The round in which the run diverged, from 1; None if it did not.
    """
    nonfinite_rounds = np.flatnonzero(np.asarray(is_finite[:count]) != 1)
    num_recorded = int(nonfinite_rounds[0]) + 1 if len(nonfinite_rounds) else count
    for name, values in new_curves.items():
        curves[name][rounds_done : rounds_done + num_recorded] = values[:num_recorded]
    return rounds_done + num_recorded if len(nonfinite_rounds) else None


def is_evaluation_curve(curve: str, evaluation: EvaluationOptions) -> bool:
    """Return whether a curve has values only in rounds that are evaluated.

    Args:
      curve: name of the curve.
      evaluation: the evaluation of the run.

    Returns:
      Whether other rounds are NaN.
    """
    if curve in list_metric_names(evaluation):
        return curve not in evaluation.update_metric_names
    return get_metric_info(curve).missing == NOT_EVALUATED


def list_metric_names(evaluation: EvaluationOptions) -> list[str]:
    """Return the names of the curves that the setting `metrics` adds."""
    names = [*evaluation.metric_shapes, *evaluation.update_metric_names]
    no_clients = np.zeros((0, 1)), np.zeros(1, np.int64)
    for metric in evaluation.metrics:
        if metric.from_client_accuracy is not None:
            names += metric.from_client_accuracy(*no_clients)
    return names


def get_latest_accuracy(accuracies: Sequence[np.ndarray]) -> float:
    """Return the latest measured accuracy, averaged over runs; NaN before the first."""
    measured = [curve[np.isfinite(curve)] for curve in accuracies]
    latest = [curve[-1] for curve in measured if len(curve)]
    return float(np.mean(latest)) if latest else np.nan


def build_traffic_curves(
    work: WorkCounts, traffic: Traffic, initial_traffic: InitialTraffic, num_rounds: int
) -> Curves:
    """Return the bytes, samples and simulated seconds of each round.

    Args:
      work: participants, samples and pairs of each round.
      traffic: bytes of each client that takes part in a round.
      initial_traffic: bytes of all clients together before the first round.
      num_rounds: number of rounds that took place; later rounds have 0.

    Returns:
      `bytes_down`, `bytes_up` and `client_samples`, `[R]` each, and `simulated_seconds` if there is
      simulated time.
    """
    rounds = np.arange(len(work.participants))
    has_taken_place, is_first_round = rounds < num_rounds, np.where(rounds == 0, 1.0, 0.0)
    bytes_up = work.participants * traffic.up + work.pairs * traffic.up_per_class
    curves = {
        "bytes_down": work.selected * traffic.down * has_taken_place
        + is_first_round * initial_traffic.down,
        "bytes_up": bytes_up * has_taken_place + is_first_round * initial_traffic.up,
        "client_samples": work.samples * has_taken_place,
    }
    if work.seconds is not None:
        curves["simulated_seconds"] = work.seconds * has_taken_place
    return curves


class EarlyStop(NamedTuple):
    """A run's end before its last round.

    Attributes:
      round: number of the last round that took place, from 1; 0 if none did.
      cause: "target", "plateau" or "callback".
      reason: the reason in words.
      split: "validation" or "test", the examples on which a rule measures the accuracy; empty if a
        callback or the caller ended the run.
    """

    round: int
    cause: str
    reason: str
    split: str = ""

    def to_summary(self) -> dict[str, str | int]:
        """Return the record for a result's summary."""
        split = {"split": self.split} if self.split else {}
        return {"why": self.cause, "round": self.round, "reason": self.reason, **split}


class StoppingState(NamedTuple):
    """The state of a run's stopping rules after some rounds.

    Attributes:
      rounds_without_gain: number of measured rounds since the last gain.
      early_stop: the end of the run, if a rule is met.
    """

    rounds_without_gain: int
    early_stop: EarlyStop | None


def evaluate_rules(spec: RunSpec, accuracies: np.ndarray) -> StoppingState:
    """Apply the stopping rules of a run; the first round that meets one ends it.

    Args:
      spec: the settings of the run.
      accuracies: float32 fractions `[rounds]`, NaN where nothing was measured; validation
        accuracies if the run has validation examples, else test accuracies.

    Returns:
      The state of the rules; a target has precedence over a plateau in the same round.

    Example:
      >>> import numpy as np
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.history import evaluate_rules
      >>> evaluate_rules(RunSpec(target_accuracy=0.5), np.float32([0.1, 0.6, 0.9])).early_stop.round
      2
    """
    best, without_gain, min_delta = np.float32(-np.inf), 0, np.float32(spec.min_delta or 0)
    split = "test" if spec.validation is None else "validation"
    advice = f"; {TEST_SPLIT_ADVICE}" if spec.validation is None else ""
    for r in np.flatnonzero(np.isfinite(accuracies)):
        accuracy, without_gain = np.float32(accuracies[r]), without_gain + 1
        if accuracy > best + min_delta:  # in single precision, as accuracies are
            best, without_gain = accuracy, 0
        if spec.target_accuracy is not None and accuracy >= np.float32(spec.target_accuracy):
            target = f"target_accuracy = {spec.target_accuracy:g}"
            reason = f"{split} accuracy {accuracy:.4f} is at least {target}{advice}"
            return StoppingState(without_gain, EarlyStop(int(r) + 1, TARGET, reason, split))
        if spec.patience is not None and without_gain >= spec.patience:
            rounds = f"{without_gain} measured rounds"
            reason = f"{rounds} without a gain over {split} accuracy {best:.4f}{advice}"
            return StoppingState(without_gain, EarlyStop(int(r) + 1, PLATEAU, reason, split))
    return StoppingState(without_gain, None)


def count_rounds_until_rule(
    spec: ResolvedRunSpec, scheduler: Scheduler, accuracies: np.ndarray
) -> int:
    """Return the number of rounds up to and including the next in which a rule may end the run.

    Args:
      spec: the settings of the run.
      scheduler: the schedule, for the rounds that are evaluated.
      accuracies: float32 fractions of the rounds that are done, NaN where nothing was measured.

    Returns:
      The number of rounds; without a rule, the number of remaining rounds.
    """
    done, remaining = len(accuracies), 1  # measured rounds
    if not spec.has_early_stopping:
        return spec.rounds - done
    if spec.target_accuracy is None and spec.patience is not None:
        remaining = spec.patience - evaluate_rules(spec, accuracies).rounds_without_gain
    for count, r in enumerate(range(done, spec.rounds), 1):
        remaining -= scheduler.is_eval_round(r)
        if remaining <= 0:
            return count
    return spec.rounds - done
